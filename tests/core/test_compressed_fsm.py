"""What a machine forces, against trying every byte; and its compressed graph, against the machine itself."""

import random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pattern_strategies import mutated, patterns, walked

from agentflow.errors import BadArgument
from agentflow.server.core.compressed_fsm import CompressedFsm, Edge, ForcedRuns, compress
from agentflow.server.core.fsm import DEAD, START, Fsm
from agentflow.server.core.fsm_builder import build_fsm
from agentflow.server.core.regex_syntax import parse_regex

dice = st.integers(0, 2**32).map(random.Random)
RECORD = (
    r'\{"name": "[a-z]{1,2}", "age": (0|[1-9][0-9]?), "city": "(Paris|London|New York)", "ok": (true|false)\}'
)


def fsm_of(pattern: str) -> Fsm:
    try:
        return build_fsm(parse_regex(pattern))
    except BadArgument as error:
        assume("no text at all" not in str(error))
        raise


def read(compressed: CompressedFsm, text: bytes) -> bool:
    """Whether the graph's edges, and no others, lead through a text to a place where it may end."""
    places = {(START, 0)}
    waiting = [(START, 0)]
    for state, at in waiting:
        if at == len(text) and state in compressed.accepting:
            return True
        for edge in compressed.edges:
            if edge.source != state:
                continue
            reads = edge.text or text[at : at + 1]
            fits = not edge.text and any(
                first <= byte <= last for byte in reads for first, last in edge.one_of
            )
            place = (edge.target, at + len(reads))
            if place not in places and (fits or (edge.text and text.startswith(edge.text, at))):
                places.add(place)
                waiting.append(place)
    return False


def forced_by_trying(fsm: Fsm, state: int) -> tuple[bytes, int]:
    """Every byte is tried, again and again."""
    text = b""
    while not fsm.accepting[state]:
        allowed = [byte for byte in range(256) if fsm.read(state, bytes([byte])) != DEAD]
        if len(allowed) != 1:
            break
        text += bytes(allowed)
        state = fsm.read(state, bytes(allowed))
    return text, state


@settings(max_examples=100, deadline=None)
@given(patterns(look_aheads=True))
def test_forced_runs_are_those_that_trying_every_byte_finds(pattern):
    fsm = fsm_of(pattern)
    runs = ForcedRuns(fsm)
    for state in range(1, min(len(fsm.transitions), 40)):
        assert runs.run(state) == forced_by_trying(fsm, state)


@settings(max_examples=100, deadline=None)
@given(patterns(look_aheads=True), dice)
def test_the_compressed_graph_has_the_machine_s_language(pattern, rolls):
    fsm = fsm_of(pattern)
    compressed = compress(fsm)
    for _ in range(4):
        text = walked(fsm, rolls, rolls.randint(0, 12)).decode()
        assert read(compressed, text.encode())
        for other in (mutated(text, rolls), mutated(text, rolls), text[:-1]):
            assert read(compressed, other.encode()) == fsm.matches(other.encode())


@settings(max_examples=100, deadline=None)
@given(patterns(look_aheads=True))
def test_no_run_of_forced_bytes_is_left_in_two_edges(pattern):
    """But where a choice leads into it: such a state begins an edge of its own."""
    fsm = fsm_of(pattern)
    compressed = compress(fsm)
    runs = ForcedRuns(fsm)
    for edge in compressed.edges:
        if edge.text:
            assert runs.run(edge.target) == (b"", edge.target)
    states = {START, *(edge.target for edge in compressed.edges)}
    assert {edge.source for edge in compressed.edges} <= states
    assert compressed.accepting == {state for state in states if fsm.accepting[state]}


def test_a_record_shrinks_to_its_choices():
    fsm = build_fsm(parse_regex(RECORD))
    compressed = compress(fsm)
    texts = {edge.text for edge in compressed.edges}
    assert {b'", "age": ', b'London", "ok": ', b"false}"} <= texts
    assert ForcedRuns(fsm).run(START)[0] == b'{"name": "'
    choices = [state for state in range(1, len(fsm.transitions)) if not ForcedRuns(fsm).run(state)[0]]
    states = {edge.target for edge in compressed.edges} | {START}
    entered_by_a_choice = {edge.target for edge in compressed.edges if edge.one_of}
    assert states == {START, *choices, *entered_by_a_choice}


def test_where_the_text_may_end_nothing_is_forced():
    fsm = build_fsm(parse_regex("(yes|yesterday)"))
    runs = ForcedRuns(fsm)
    forced, after = runs.run(START)
    assert forced == b"yes"
    assert fsm.accepting[after]
    assert runs.run(after) == (b"", after)
    assert runs.run(fsm.read(after, b"t"))[0] == b"erday"
    assert runs.run(DEAD) == (b"", DEAD)


def test_half_a_character_can_be_forced():
    runs = ForcedRuns(build_fsm(parse_regex("x[é-ê]")))
    assert runs.run(START)[0] == b"x\xc3"


def test_it_prints_and_draws():
    fsm = build_fsm(parse_regex('"(true|false)"|[0-9a#<]+'))
    quoted, number = fsm.read(START, b'"'), fsm.read(START, b"7")
    end = fsm.read(START, b'"true"')
    compressed = compress(fsm)
    assert str(compressed).splitlines() == [
        f'1 --"--> {quoted}',
        f"1 --[#0-9<a]--> {number}*",
        f'{quoted} --false"--> {end}*',
        f'{quoted} --true"--> {end}*',
        f"{number}* --[#0-9<a]--> {number}*",
    ]
    assert compressed.draw().splitlines() == [
        "flowchart LR",
        "    s1((1))",
        f"    s{quoted}(({quoted}))",
        f"    s{number}((({number})))",
        f"    s{end}((({end})))",
        f'    s1 -->|"#quot;"| s{quoted}',
        f'    s1 -->|"[#35;0-9#lt;a]"| s{number}',
        f'    s{quoted} -->|"false#quot;"| s{end}',
        f'    s{quoted} -->|"true#quot;"| s{end}',
        f'    s{number} -->|"[#35;0-9#lt;a]"| s{number}',
    ]


@pytest.mark.parametrize(
    ("edge", "label"),
    [
        (Edge(1, 2, "é\n\\".encode(), ()), "é\\n\\\\"),
        (Edge(1, 2, b"a\xc3", ()), "a\\xc3"),
        (Edge(1, 2, b"", ((0x20, 0x21), (0x5B, 0x5D), (0x80, 0xBF))), "[\\x20-!\\[-\\]\\x80-\\xbf]"),
    ],
)
def test_labels_are_readable(edge, label):
    assert edge.label == label
