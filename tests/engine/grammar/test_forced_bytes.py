"""The bytes that a DFA forces, compared with trying every byte."""

from hypothesis import assume, given
from support.engine.pattern_strategies import patterns
from support.examples import examples

from agentflow.engine.grammar.dfa import DEAD, START, Dfa, build_dfa
from agentflow.engine.grammar.regex import parse_regex
from agentflow.engine.grammar.token_dfa import ForcedRuns
from agentflow.errors import BadArgument

RECORD = (
    r'\{"name": "[a-z]{1,2}", "age": (0|[1-9][0-9]?), "city": "(Paris|London|New York)", "ok": (true|false)\}'
)


def dfa_of(pattern: str) -> Dfa:
    try:
        return build_dfa(parse_regex(pattern))
    except BadArgument as error:
        assume("no text matches" not in str(error))
        raise


def forced_by_trying(dfa: Dfa, state: int) -> tuple[bytes, int]:
    """Every byte is tried, again and again."""
    text = b""
    while not dfa.accepting[state]:
        allowed = [byte for byte in range(256) if dfa.read(state, bytes([byte])) != DEAD]
        if len(allowed) != 1:
            break
        text += bytes(allowed)
        state = dfa.read(state, bytes(allowed))
    return text, state


@examples(100)
@given(patterns(look_arounds=True))
def test_forced_runs_are_those_that_trying_every_byte_finds(pattern):
    dfa = dfa_of(pattern)
    runs = ForcedRuns(dfa)
    for state in range(1, min(len(dfa.transitions), 40)):
        assert runs.run(state) == forced_by_trying(dfa, state)


def test_where_the_text_may_end_nothing_is_forced():
    dfa = build_dfa(parse_regex("(yes|yesterday)"))
    runs = ForcedRuns(dfa)
    forced, after = runs.run(START)
    assert forced == b"yes"
    assert dfa.accepting[after]
    assert runs.run(after) == (b"", after)
    assert runs.run(dfa.read(after, b"t"))[0] == b"erday"
    assert runs.run(DEAD) == (b"", DEAD)


def test_half_a_character_can_be_forced():
    runs = ForcedRuns(build_dfa(parse_regex("x[é-ê]")))
    assert runs.run(START)[0] == b"x\xc3"


def test_a_record_forces_all_but_its_choices():
    dfa = build_dfa(parse_regex(RECORD))
    runs = ForcedRuns(dfa)
    forced = []
    state = START
    for choice in (b"a", b'"', b"0", b"N", b"t", b""):
        text, state = runs.run(state)
        forced.append(text)
        state = dfa.read(state, choice)
    assert forced == [b'{"name": "', b"", b', "age": ', b', "city": "', b'ew York", "ok": ', b"rue}"]
    assert dfa.accepting[state]
