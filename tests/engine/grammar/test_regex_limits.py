"""Unsupported and too large regular expressions, which fail after bounded work."""

import cProfile
import gc
import itertools
import re
import tracemalloc

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from agentflow.engine.grammar.dfa import MAX_STEPS, build_dfa
from agentflow.engine.grammar.regex import (
    EMPTY,
    Alternation,
    CharSet,
    Concatenation,
    LookAhead,
    Regex,
    Repeat,
    TooLargeForDfa,
    literal,
    parse_regex,
)
from agentflow.errors import BadArgument

NOTHING = Alternation(())

REFUSED = {
    r"(?<=ab)c": "look-behind",
    r"(?<!ab)c": "look-behind",
    r"(?<=\b)a": "look-behind",
    r"(a)\1": "back-reference",
    r"(?P<x>a)(?P=x)": "back-reference",
    r"(a)?(?(1)b|c)": "conditional",
    r"(?>a)b": "atomic group",
    r"a*+b": "possessive repeat",
    r"a{1,2}+b": "possessive repeat",
    r"a\Z?b": "not a valid Python pattern",
    r"(a": "unterminated subpattern",
    r"a**": "multiple repeat",
    r"[b-a]": "bad character range",
    r"(?<x>a)": "unknown extension",
    "(" * 5000 + ")" * 5000: "nest deeper",
    "(" * 120 + "a" + ")" * 120: "nest deeper",
    r"(?a)(?u)a": "incompatible",
    f"a{{{'9' * 5000}}}": "limit",
    r"[^\s\S]": "no text matches",
    "a[\ud800]": "no text matches",
    r"(?!a)a": "no text matches",
    r"a(?=b)": "no text matches",
    r"(?=.*a$).*b": "no text matches",
    r"a^b": "no text matches",
    r"a$b": "no text matches",
    r"(?=a$b)a": "no text matches",
    r"c\Ad": "no text matches",
    r"a\B": "no text matches",
    r"a\b\w": "no text matches",
    r"(?<=a)b": "no text matches",
}

ANCHORED = {
    r"^abc$": "abc",
    r"\Aabc\Z": "abc",
    r"^a|b$": "a|b",
    r"(^a|^b)(c|d$)": "(a|b)(c|d)",
    r"^(?:^a)$$": "a",
    r"^$": "",
    r"^(?=a)^.$": "(?=a).",
    r"(?m)^a\n$": r"a\n",
    r"a|$": "a|",
}

TOO_MUCH = {
    "the other syntax": r"\p{L}+",
    "in a set": r"[a\P{Lu}]",
    "a huge repeat": "a{99999999999}",
    "nested repeats": "((a{1000}){1000}){1000}",
    "repeats of nothing": "(?:(?:){1000000}){1000000}",
    "exponential states": ".*a.{20}",
    "exponential states, forbidden": "(?!.*a.{20}).*",
    "many ways to be empty": "(?:a?b?){1400}",
    "nested optional repeats": "(?:.{0,20}a?){0,50}",
    "many stars": "(x|y)*" * 2_000,
    "many promises": "".join(f"(?=.*{char})" for char in "abcdefghijklmnop") + ".*",
    "many sets": "".join(rf"[\w{chr(0x2000 + at)}]" for at in range(8_000)),
    "large shapes": "".join(rf"[\w{chr(0x2000 + at)}]" for at in range(100)),
    "sets that overlap": "".join(f"[{chr(0x2000 + at)}-{chr(0x3000 + at)}]" for at in range(2_000)),
    "sets without case": "(?i)" + "".join(f"[\\x00-{chr(0x1000 + at)}]" for at in range(900)),
    "a long text": "x" * 50_001,
    "a long text of large sets": r"\w" * 400,
}

BYTES_AT_MOST = 100 << 20


@pytest.mark.parametrize("pattern", REFUSED, ids=lambda pattern: pattern[:20])
def test_unsupported_syntax_is_rejected_by_name(pattern):
    with pytest.raises(BadArgument, match=REFUSED[pattern]) as caught:
        build_dfa(parse_regex(pattern))
    assert str(caught.value).startswith(("regex: ", "constraint: no text matches"))


COMMON = {
    r"^https?:\/\/(?:www\.)?[-a-zA-Z0-9@:%._\+~#=]{1,256}\.[a-zA-Z0-9()]{1,6}\b"
    r"(?:[-a-zA-Z0-9()@:%_\+.~#?&\/=]*)$": (
        "https://www.example.com/a?b=c",
        "https://www.example.c_",
    ),
    r"[-a-zA-Z0-9@:%_\+.~#?&//=]{2,256}\.[a-z]{2,4}\b(\/[-a-zA-Z0-9@:%_\+.~#?&//=]*)?": (
        "ab.org/b",
        "a.org",
    ),
    r"\b(https?|ftp|file)://[-A-Za-z0-9+&@#/%?=~_|!:,.;]*[-A-Za-z0-9+&@#/%=~_|]": ("ftp://a/b", "ftp://a."),
    r"""(?i)\b((?:https?://|www\d{0,3}[.]|[a-z0-9.\-]+[.][a-z]{2,4}/)(?:[^\s()<>]+|\(([^\s()<>]+|(\([^\s()<>]+\)))*\))+"""
    r"""(?:\(([^\s()<>]+|(\([^\s()<>]+\)))*\)|[^\s`!()\[\]{};:'".,<>?«»“”‘’]))""": (
        "WWW.x.org/(a)",
        "www.x.org.",
    ),
    r"\b(?:(?:25[0-5]|2[0-4]\d|1?\d?\d)(?:\.(?!$)|$)){4}\b": ("127.0.0.1", "127.0.0.1."),
    r"\b[A-Za-z0-9._%+-]+@[A-Za-z0-9.-]+\.[A-Z|a-z]{2,7}\b": ("a@b.org", "a@b.org|"),
    r"\b\d{4}-\d{2}-\d{2}\b": ("2024-02-30", "2024-02-300"),
    r"(?s).*\b(yes|no)\b.*": ("well, yes!", "yesterday"),
    r"(?!.*\bfoo\b)[a-z ]{3,50}": ("food is", "a foo"),
    r"(?m)(^- .{1,80}$\n?){1,5}": ("- a\n- b", "- a- b\n\n"),
}
"""Patterns as people copy them, with a text that matches and one that does not."""


@pytest.mark.parametrize("pattern", COMMON, ids=lambda pattern: pattern[:20])
def test_common_patterns_with_boundaries_and_inner_anchors_are_kept(pattern):
    dfa = build_dfa(parse_regex(pattern))
    right, wrong = COMMON[pattern]
    assert re.fullmatch(pattern, right)
    assert not re.fullmatch(pattern, wrong)
    assert dfa.matches(right.encode())
    assert not dfa.matches(wrong.encode())


@pytest.mark.parametrize("pattern", ANCHORED)
def test_anchors_at_the_ends_say_nothing(pattern):
    dfa, plain = build_dfa(parse_regex(pattern)), build_dfa(parse_regex(ANCHORED[pattern]))
    assert dfa.to_bytes() == plain.to_bytes()


@pytest.mark.parametrize("name", TOO_MUCH)
def test_too_large_a_pattern_fails_after_bounded_work(name):
    """Work is counted in calls of functions, Python's and C's, which do not depend on the machine."""
    steps = MAX_STEPS // 4
    with cProfile.Profile() as profile, pytest.raises(TooLargeForDfa) as caught:
        build_dfa(parse_regex(TOO_MUCH[name]), max_steps=steps)
    assert str(caught.value)
    num_calls = sum(entry.callcount for entry in profile.getstats())
    assert num_calls < 2 * steps + 10 * len(TOO_MUCH[name])


@pytest.mark.parametrize(
    "name",
    [
        "exponential states",
        *(
            pytest.param(name, marks=pytest.mark.full)
            for name in ("many promises", "many stars", "large shapes")
        ),
    ],
)
def test_too_large_a_pattern_fails_within_bounded_memory(name):
    gc.collect()
    tracemalloc.start()
    try:
        with pytest.raises(TooLargeForDfa):
            build_dfa(parse_regex(TOO_MUCH[name]))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < BYTES_AT_MOST


@pytest.mark.parametrize(
    ("limit", "most"), [("max_states", 8003), ("max_transitions", 8004 * 13), ("max_steps", 25_000)]
)
def test_each_limit_is_one_that_can_be_set(limit, most):
    regex = parse_regex(r'"[^"\\]{0,1000}"')
    build_dfa(regex, **{limit: most + 1})
    with pytest.raises(TooLargeForDfa):
        build_dfa(regex, **{limit: most // 2})


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3), st.booleans()), min_size=2, max_size=3))
@example([(1, 9, False)] * 3)
def test_repeats_of_repeats_match_as_often_as_python_says(counts):
    """Where they come to one repeat, and where they leave out some numbers of times."""
    pattern, lengths = "a", {1}
    for least, more, is_endless in counts:
        pattern = f"(?:{pattern}){{{least},{'' if is_endless else least + more}}}"
        most = _LONGEST if is_endless else min(least + more, _LONGEST)
        lengths = _repeated(lengths, least, most)
    dfa = build_dfa(parse_regex(pattern))
    assert {length for length in range(_LONGEST) if dfa.matches(b"a" * length)} == lengths


_LONGEST = 60


def _repeated(lengths: set[int], least: int, most: int) -> set[int]:
    """The lengths below ``_LONGEST`` of ``least`` to ``most`` concatenated texts."""
    reached, found = {0}, {0} if least == 0 else set()
    for times in range(1, most + 1):
        reached = {sum(pair) for pair in itertools.product(reached, lengths) if sum(pair) < _LONGEST}
        found |= reached if times >= least else set()
    return found


def test_a_repeat_of_repeats_is_small():
    assert build_dfa(parse_regex("(?:.{0,20}){0,50}")).num_states < 8100
    with pytest.raises(TooLargeForDfa):
        build_dfa(parse_regex("(?:a{2,20}){0,50}b?" * 60))


def test_a_tree_whose_parts_are_shared_is_counted_without_walking_all_of_it():
    """A billion texts in thirty choices."""
    regex: Regex = literal("a")
    for _ in range(60):
        regex = Concatenation((regex, regex))
    with pytest.raises(TooLargeForDfa, match="repeats and choices"):
        build_dfa(regex)


def test_a_deep_tree_is_too_much():
    regex: Regex = literal("a")
    for _ in range(5_000):
        regex = Alternation((regex, EMPTY))
    with pytest.raises(TooLargeForDfa, match="nests deeper"):
        build_dfa(regex)


@pytest.mark.parametrize(
    ("regex", "texts", "others"),
    [
        (EMPTY, [""], ["a"]),
        (literal("héé"), ["héé"], ["", "h", "hé", "hééé"]),
        (Alternation((literal("yes"), NOTHING, EMPTY)), ["yes", ""], ["no", "y"]),
        (Concatenation((Repeat(NOTHING, 0, None), literal("a"))), ["a"], ["", "aa"]),
        (Repeat(EMPTY, 3, None), [""], ["a"]),
        (Repeat(Alternation((EMPTY, literal("ab"))), 2, 3), ["", "ab", "ababab"], ["a", "abababab"]),
        (Repeat(literal("a"), 0, 0), [""], ["a"]),
        (Concatenation((LookAhead(NOTHING, False), literal("a"))), ["a"], [""]),
        (CharSet(((0x61, 0x62), (0x63, 0x63))), ["a", "b", "c"], ["d", "`", ""]),
    ],
)
def test_trees_that_no_pattern_gives(regex, texts, others):
    dfa = build_dfa(regex)
    assert [text for text in [*texts, *others] if dfa.matches(text.encode())] == texts


@pytest.mark.parametrize(
    "regex", [NOTHING, Repeat(NOTHING, 1, 2), Concatenation((literal("a"), CharSet(())))]
)
def test_a_tree_that_no_text_matches_is_refused(regex):
    with pytest.raises(BadArgument):
        build_dfa(regex)


@pytest.mark.parametrize(
    "ranges", [((2, 1),), ((5, 6), (1, 2)), ((1, 3), (3, 4)), ((0, 0x110000),), ((-1, 3),)]
)
def test_ranges_out_of_order_are_no_set(ranges):
    with pytest.raises(ValueError, match="sorted and disjoint"):
        CharSet(ranges)
