"""Regular expressions as machines over bytes, against ``re.fullmatch`` and against interegular's machines."""

import random
import re

import interegular
import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from pattern_strategies import bytes_to_end, mutated, patterns, texts, walked

from agentflow.errors import BadArgument
from agentflow.server.core.fsm import DEAD, START, Fsm
from agentflow.server.core.fsm_builder import build_fsm
from agentflow.server.core.regex_syntax import parse_regex
from agentflow.server.core.regex_tree import ANY_CHAR, EMPTY, NOTHING, CharSet, Choice, LookAhead, Regex
from agentflow.server.core.regex_tree import Repeat, Sequence, all_but, literal, merged
from agentflow.server.core.utf8_rows import utf8_rows

dice = st.integers(0, 2**32).map(random.Random)
EVERY_CHAR = [chr(point) for point in range(0x110000) if not 0xD800 <= point <= 0xDFFF]


def fsm_of(pattern: str) -> Fsm:
    """Of a random pattern, which some text should match."""
    try:
        return build_fsm(parse_regex(pattern))
    except BadArgument as error:
        assume("no text at all" not in str(error))
        raise


def assert_same_language(pattern: str, others: list[str], rolls: random.Random) -> None:
    """Walks through the machine must match, and other texts match here as they match there."""
    fsm = fsm_of(pattern)
    matcher = re.compile(pattern)
    for _ in range(4):
        text = walked(fsm, rolls, rolls.randint(0, 12)).decode()
        assert matcher.fullmatch(text), text
        others = [*others, mutated(text, rolls), mutated(mutated(text, rolls), rolls)]
    for text in others:
        assert fsm.matches(text.encode()) == bool(matcher.fullmatch(text)), text


@settings(max_examples=300, deadline=None)
@given(patterns(), st.lists(texts, max_size=10), dice)
def test_what_matches_is_what_python_matches(pattern, others, rolls):
    assert_same_language(pattern, others, rolls)


@settings(max_examples=300, deadline=None)
@given(patterns(look_aheads=True), st.lists(texts, max_size=10), dice)
@example("(?!.*foo$)[a-z]{3,5}", ["foo", "afoo", "food", "bar"], random.Random(1))
@example("(?:(?!ab).)*", ["ba", "ab", "aab", "", "a"], random.Random(1))
@example("(?=a|b$)..?", ["b", "bc", "ac", "b\n", "a"], random.Random(1))
@example("(?m)(?=a$)[^b]*", ["a", "a\nx", "ax", "a\n"], random.Random(1))
@example(r"(?=a\Z)[^b]*", ["a", "a\nx", "ax", "a\n"], random.Random(1))
@example("a(?!b)", ["a", "ab"], random.Random(1))
@example("(?!(?!a))..", ["ab", "ba"], random.Random(1))
@example("(?!)|b", ["", "b"], random.Random(1))
def test_look_aheads_are_kept(pattern, others, rolls):
    assert_same_language(pattern, others, rolls)


@settings(max_examples=200, deadline=None)
@given(patterns(look_aheads=True), dice)
def test_from_every_state_the_text_can_end_and_every_state_is_reached(pattern, rolls):
    fsm = fsm_of(pattern)
    states = np.arange(1, len(fsm.transitions))
    assert (bytes_to_end(fsm)[states] < len(fsm.transitions)).all()
    reached = {START}
    waiting = [START]
    for state in waiting:
        new = set(fsm.transitions[state].tolist()) - reached - {DEAD}
        reached |= new
        waiting.extend(new)
    assert reached == set(states.tolist())
    assert not fsm.accepting[DEAD]
    assert not fsm.transitions[DEAD].any()
    assert set(fsm.class_of_byte.tolist()) == set(range(fsm.transitions.shape[1]))


@settings(max_examples=150, deadline=None)
@given(patterns(flags=()), st.lists(texts, max_size=10), dice)
def test_it_agrees_with_interegular(pattern, others, rolls):
    """Interegular's categories are ASCII's, so those are asked for here, and no case is ignored."""
    try:
        twin = interegular.parse_pattern(pattern).to_fsm()
    except (interegular.Unsupported, interegular.InvalidSyntax):
        assume(False)
    fsm = fsm_of(f"(?sa){pattern}")
    if r"\w" in pattern.lower() or "." in pattern:  # those mean more, or less, there
        assume(False)
    for text in [*others, *(walked(fsm, rolls, 8).decode() for _ in range(4))]:
        assert fsm.matches(text.encode()) == twin.accepts(text), text
