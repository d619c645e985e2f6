"""What a machine forces, against trying every byte; and its compressed graph, against the machine itself."""

import random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.engine.pattern_strategies import mutated, patterns, walked

from agentflow.engine.grammar.compressed_fsm import CompressedFsm, Edge, ForcedRuns, compress
from agentflow.engine.grammar.dfa import DEAD, START, Fsm, build_fsm
from agentflow.engine.grammar.regex import parse_regex
from agentflow.errors import BadArgument

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


def read(compressed: CompressedFsm, text: str) -> bool:
    """Whether the graph's edges, and no others, lead through a text to a place where it may end."""
    places = {(START, 0)}
    waiting = [(START, 0)]
    for state, at in waiting:
        if at == len(text) and state in compressed.accepting:
            return True
        for edge in compressed.edges:
            if edge.source != state or at == len(text):
                continue
            fits = any(first <= ord(text[at]) <= last for first, last in edge.one_of)
            place = (edge.target, at + (len(edge.text) or 1))
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
@given(patterns(look_arounds=True))
def test_forced_runs_are_those_that_trying_every_byte_finds(pattern):
    fsm = fsm_of(pattern)
    runs = ForcedRuns(fsm)
    for state in range(1, min(len(fsm.transitions), 40)):
        assert runs.run(state) == forced_by_trying(fsm, state)


@settings(max_examples=100, deadline=None)
@given(patterns(look_arounds=True), dice)
def test_the_compressed_graph_has_the_machine_s_language(pattern, rolls):
    fsm = fsm_of(pattern)
    compressed = compress(fsm)
    for _ in range(4):
        text = walked(fsm, rolls, rolls.randint(0, 12)).decode()
        assert read(compressed, text)
        for other in (mutated(text, rolls), mutated(text, rolls), text[:-1]):
            assert read(compressed, other) == fsm.matches(other.encode())


@settings(max_examples=100, deadline=None)
@given(patterns(look_arounds=True))
def test_no_run_is_left_in_two_edges(pattern):
    """A state that only one edge leaves, by a text: the text may end there, or a choice leads there."""
    fsm = fsm_of(pattern)
    compressed = compress(fsm)
    entered_by_a_choice = {edge.target for edge in compressed.edges if edge.one_of}
    for state in {edge.source for edge in compressed.edges}:
        leaving = [edge for edge in compressed.edges if edge.source == state]
        if len(leaving) == 1 and leaving[0].text:
            assert state == START or state in compressed.accepting or state in entered_by_a_choice
    states = {START, *(edge.target for edge in compressed.edges)}
    assert {edge.source for edge in compressed.edges} <= states
    assert compressed.accepting == {state for state in states if fsm.accepting[state]}


def test_a_record_shrinks_to_its_choices():
    compressed = compress(build_fsm(parse_regex(RECORD)))
    leaving: dict[int, list[str]] = {}
    for edge in compressed.edges:
        leaving.setdefault(edge.source, []).append(edge.label)
    assert list(leaving.values()) == [
        ['{"name": "'],
        ["[a-z]"],
        ['", "age": ', "[a-z]"],
        ['0, "city": "', "[1-9]"],
        ['", "age": '],
        ['London", "ok": ', 'New York", "ok": ', 'Paris", "ok": '],
        [', "city": "', "[0-9]"],
        ["false}", "true}"],
        [', "city": "'],
    ]


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


def test_it_prints():
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


@pytest.mark.parametrize(
    ("edge", "label"),
    [
        (Edge(1, 2, "é\n\\", ()), "é\\n\\\\"),
        (Edge(1, 2, "", ((0x20, 0x21), (0x5B, 0x5D), (0x80, 0x80))), r"[ -![-\]\x80]"),
        (Edge(1, 2, "", ((0, 0x21), (0x23, 0x5B), (0x5D, 0x10FFFF))), r'[^"\\]'),
        (Edge(1, 2, "", ((0, 0x10FFFF),)), "any character"),
    ],
)
def test_labels_are_readable(edge, label):
    assert edge.label == label
