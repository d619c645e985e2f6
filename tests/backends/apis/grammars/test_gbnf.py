"""Patterns and grammars in GBNF: the same texts as under Python's ``re`` and on the engine."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.apis.gbnf_reference import Gbnf
from support.apis.grammar_strategies import TEXTS, engine_texts, grammars, patterns, recursive_grammars
from support.examples import examples

from agentflow.backends.apis.grammars.gbnf import MAX_REPEATS, gbnf_of_pattern, may_be_empty, read_pattern
from agentflow.backends.apis.grammars.lark_grammar import MAX_STEPS, gbnf_of_grammar, read_grammar
from agentflow.errors import BadArgument, NotSupported
from agentflow.protocol.grammars.gbnf import read_gbnf
from agentflow.protocol.grammars.lexemes import Lexer
from agentflow.protocol.grammars.parts import Chars, GrammarPart, Named, OneOf, Repeated, Series
from agentflow.protocol.grammars.recognition import Recognizer


@given(patterns)
def test_a_pattern_has_the_same_texts(pattern: str) -> None:
    try:
        grammar = Gbnf(gbnf_of_pattern(pattern))
    except NotSupported:
        assert "^" in pattern or "$" in pattern  # elsewhere than at the ends
        return
    for text in TEXTS:
        assert grammar.matches(text) == bool(re.fullmatch(pattern, text)), text


@pytest.mark.parametrize(
    "pattern",
    [
        r"\S",
        r"\W",
        r"\D",
        r"(?a:\W)",
        r"[\s\S]",
        r"[\S ]",
        r"[^\S\n]",
        r"[^\W_]",
        r"[\Da-z5]",
        r"[\0-\ud000]",
    ],
)
def test_classes_that_contain_nul_have_the_same_characters(pattern: str) -> None:
    grammar = Gbnf(gbnf_of_pattern(pattern))
    for char in "\0\x01\t\n az_59-é\xa0\u0665\ucfff\ud000\ud001\ue000\ufffd😀\U0010ffff":
        assert grammar.matches(char) == bool(re.fullmatch(pattern, char)), char


@pytest.mark.parametrize("category", [r"\d", r"\s", r"\w", r"(?a)\w"])
def test_categories_have_the_same_characters(category: str) -> None:
    after_surrogates = 0xE000
    text = "".join(map(chr, range(after_surrogates))) + "".join(map(chr, range(after_surrogates, 0x110000)))
    runs = [run.span() for run in re.finditer(f"{category}+", text)]
    assert read_pattern(category) == Chars(tuple([(first, end - 1) for first, end in runs]))


@pytest.mark.parametrize(
    ("translate", "source"), [(gbnf_of_pattern, "a(?=b)"), (gbnf_of_grammar, "start: missing")]
)
def test_a_refusal_is_raised_again(translate: Callable[[str], str], source: str) -> None:
    errors: list[NotSupported] = []
    for _ in range(2):
        with pytest.raises(NotSupported) as caught:
            translate(source)
        errors.append(caught.value)
    assert str(errors[0]) == str(errors[1])
    assert errors[0] is not errors[1]


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=8))
def test_every_character_is_written_so_that_it_is_read(text: str) -> None:
    assert Gbnf(gbnf_of_pattern(re.escape(text))).matches(text)
    members = "".join(map(re.escape, text))
    for pattern in (f"[{members}]", f"[^{members}]"):
        grammar = Gbnf(gbnf_of_pattern(pattern))
        for char in f"{text}az-]^\\":
            assert grammar.matches(char) == bool(re.fullmatch(pattern, char))


@pytest.mark.parametrize(
    "pattern",
    [
        r"a(?=b)b",
        r"a\bb",
        r"(a)\1",
        "(?i)a",
        "(?i:a)b",
        "a^b",
        "a++b",
        "\0",
        r"[^\s\S]",
        f"a{{{MAX_REPEATS + 1}}}",
        "(",
        "[a",
        r"\w" * 51,
        "a" * 20_001,
    ],
)
def test_other_patterns_are_refused(pattern: str) -> None:
    with pytest.raises(NotSupported):
        gbnf_of_pattern(pattern)


@examples(100)
@given(grammars)
def test_a_grammar_has_the_same_texts_as_on_the_engine(source: str) -> None:
    try:
        written = gbnf_of_grammar(source)
        expected = engine_texts(source, TEXTS)
    except (NotSupported, BadArgument):
        return
    assert not begin_with_themselves(read_gbnf(written))
    grammar = Gbnf(written)
    assert {text for text in TEXTS if grammar.matches(text)} == expected


TREE = r"""
# Lark's notation as its users write it: aliases, and signs that shape the tree.
?start: sum
?sum: product
    | sum "+" product   -> add
    | sum "-" product   -> sub
?product: atom | product "*" atom -> mul
!atom: NUM-BER{,2} "x"  // "#" begins a comment
    | "(" sum ")" | "#"
NUM-BER: /[0-9]/
"""
SUM = r"""
start: term (("+" | "-") term)*
term: NUMBER | "(" start ")"
NUMBER: /[0-9]+/ ["." DIGIT~1..3]
DIGIT: "0".."9"
"""


@pytest.mark.parametrize(
    ("source", "texts"),
    [
        ('start: "' + "ab" * 900 + '" | /a{1,1500}/', ["ab" * 900, "a" * 1_500, "ab", "a" * 1_501]),
        ('start: A\nunused: B\nA: "a"\nB: /b?/', ["a", "b", ""]),
        (TREE, ["12x", "x+1x", "(x-#)*2x", "x*x+x", "+x", "123x", "x-", "12"]),
        (SUM, ["1+2", "(1-23)+4.5", "1.234", "1.2345", "1+", "()", "12", "((1))", "1..2"]),
        ("start: " + " | ".join([f'"{number}"' for number in range(400)]), ["7", "89", "399", "400", "1 "]),
        ("start: /a*/", ["", "a", "aa", "b"]),
        (
            'start: SIGN /[0-9]+/ [FRACTION]\nSIGN: "-"?\nFRACTION: /([.][0-9]+)?/',
            ["-1", "1.5", "1.", "-", ""],
        ),
        ('start: r ("," r)*\nr: "(" r ")" | WORD\nWORD: /[a-z]*/', ["", "a,,b", "(),x", "((a))", "(a"]),
        ("start: pair pair\npair: WS /[ab]/ WS\nWS: /-*/", ["ab", "-a--b", "a-b-", "a-", "--"]),
        ('start: A A "-" A\nA: ("ab")*', ["-", "abab-", "ab-ab", "aba-"]),
        ('start: "yes" | "no"', ["yes", "no", "yesno", "y"]),
        ('start: "yes" MORE~2\nMORE: /[ab]/', ["yesab", "yesa", "yesabb"]),
        ('start: "é" /[à-ü]/ "\\u20ac"', ["éê€", "éé", "éa€"]),
        (r"start: /\[[a{]+\]|a{1,2}\{b{2,}/ /[}]/", ["[{a]}", "a{bb}", "aa{bbb}", "a{b}", "[]}", "aaa{bb}"]),
        (
            'start: list\nlist: "[" [item ("," item)*] "]"\nitem: /[a-z]+/ | list',
            ["[]", "[a,[b]]", "[a,]", "[[]]"],
        ),
    ],
)
def test_grammars_that_programs_have(source: str, texts: list[str]) -> None:
    grammar = Gbnf(gbnf_of_grammar(source))
    found = {text for text in texts if grammar.matches(text)}
    assert found == engine_texts(source, texts)
    assert found


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("start: A\nA: /a/ B\nB: A | /b/", "the terminal A contains itself"),
        (f'start: "{"ab" * 1_001}"', f'the terminal "{"ab" * 29}… is too large'),
        ("start: A\nA: B B\nB: /b{2000}/", "the terminal A is too large"),
        ("start: A\nA: ", "the terminal A is empty"),
    ],
)
def test_f37_the_reason_of_a_refused_terminal_is_exact(source: str, words: str) -> None:
    with pytest.raises(NotSupported) as caught:
        gbnf_of_grammar(source)
    assert str(caught.value).endswith(words)


@pytest.mark.parametrize(
    "rules",
    [
        pytest.param([f"{name}: /[a-z]{{1,900}}/" for name in "ABCDEFGH"], id="counted"),
        pytest.param([f"{name}: /(a?){{900}}/" for name in "ABCDEFGH"], id="optional-copies"),
        pytest.param([f"{name}: /{'a?' * 900}/" for name in "ABCDEFGH"], id="optional"),
        pytest.param(["A: /[a-z]{900}/", *[f"r{number}: A" for number in range(900)]], id="names"),
    ],
)
def test_f37_the_work_on_terminals_is_bounded_by_the_steps(rules: list[str]) -> None:
    grammar = read_grammar("\n".join(["start: A", *rules]))
    lexer = Lexer(grammar, "start", max_steps=MAX_STEPS, max_copied=MAX_REPEATS)
    followers = [bits.bit_count() for name in lexer.regular for bits in lexer.placed(Named(name)).after]
    assert sum(followers) < 16 * MAX_STEPS


@pytest.mark.parametrize(
    ("pattern", "written"),
    [
        ("(a*)*", '"a"*'),
        ("(a?b?)*", '("a" | "b")*'),
        ("(a|b?)+", '("a" | "b")*'),
        ("((a*|b){2,})*", '("a" | "b")*'),
        ("(a{0,2}){3,}", '"a"*'),
        ("(|)*", '""'),
        ("((aa)?c)*", '(("aa")? "c")*'),
    ],
)
def test_f37_no_part_that_may_be_empty_is_repeated_without_limit(pattern: str, written: str) -> None:
    """llama.cpp writes such a repeat as a rule that begins with itself, and refuses it."""
    assert gbnf_of_pattern(pattern) == f"root ::= {written}"
    assert gbnf_of_grammar(f"start: A\nA: /{pattern}d/") == f'root ::= rule1\nrule1 ::= {written} "d"'


def test_f37_a_rule_that_may_be_empty_is_not_repeated_without_limit() -> None:
    written = gbnf_of_grammar('start: r*\nr: ["a"]')
    assert not begin_with_themselves(read_gbnf(written))
    assert [Gbnf(written).matches(text) for text in ("", "a", "aaa", "b")] == [True] * 3 + [False]
    grammar = Gbnf(gbnf_of_grammar('start: (A "x"?)* r~0..2\nr: ["b"]\nA: /a?/'))
    assert [grammar.matches(text) for text in ("", "axxaabb", "b", "bbb", "ba")] == [True] * 3 + [False] * 2


@pytest.mark.parametrize(
    "source",
    [
        'start: start "a" | "a"',
        'start: r "a" | "a"\nr: ["b"] start',
        'start: start start | "a" | "b"',
        'start: start start "-" | ["a"]',
        'start: [start "-"] "a" | start~2',
        'start: r "a" | "b"\nr: s "-" | start "b"\ns: start | r "a" | "-"',
        'start: r\nr: r "a" | start "b" | "-"',
        'start: (r "a")*\nr: ["b"] | r "-" | start "-"',
        'start: A* start "b" | "a"\nA: "-"',
        'start: A s\ns: A? s "b" | "a"\nA: "-"',
        'start: r | ["a"]\nr: start | "b"',
        'start: [r "a"]\nr: start "-" | ["b"] start | start',
    ],
)
def test_f37_left_recursion_is_written_as_repeats(source: str) -> None:
    """llama.cpp refuses it."""
    written = gbnf_of_grammar(source)
    assert not begin_with_themselves(read_gbnf(written))
    recognizer = Recognizer(read_grammar(source))
    expected = {text for text in TEXTS if recognizer.recognize(text, most_steps=10_000) == "whole"}
    assert {text for text in TEXTS if Gbnf(written).matches(text)} == expected
    assert expected


@examples(60)
@given(recursive_grammars)
def test_f37_no_rule_begins_with_itself(source: str) -> None:
    try:
        written = gbnf_of_grammar(source)
    except NotSupported:
        return
    assert not begin_with_themselves(read_gbnf(written))
    grammar, recognizer = Gbnf(written), Recognizer(read_grammar(source))
    for text in [text for text in TEXTS if len(text) < 4]:
        assert grammar.matches(text) == (recognizer.recognize(text, most_steps=100_000) == "whole"), text


@pytest.mark.parametrize(
    "source",
    [
        "start: " + "(" * 90 + 'start? "a"?' + ")~0..2" * 90,
        *[
            "start: r0\n"
            + "".join([f'r{n}: {" ".join([f"[r{m}]" for m in range(size)])} | "b"\n' for n in range(size)])
            for size in (4, 7)
        ],
    ],
)
def test_f37_rules_that_would_grow_without_bound_are_refused(source: str) -> None:
    """The parts that several places share are written at each of them."""
    with pytest.raises(NotSupported):
        gbnf_of_grammar(source)


def begin_with_themselves(rules: dict[str, GrammarPart]) -> set[str]:
    """The rules that may begin with themselves. For llama.cpp, a repeat without limit is a rule, so that its
    part may not be empty."""
    empty: set[str] = set()
    while more := {name for name in rules if may_be_empty(rules[name], empty)} - empty:
        empty |= more

    def firsts(part: GrammarPart) -> set[str]:
        match part:
            case Named(name):
                return {name}
            case OneOf(parts):
                return {name for one in parts for name in firsts(one)}
            case Repeated(inner, _, most):
                assert most is not None or not may_be_empty(inner, empty)
                return firsts(inner)
            case Series(parts):
                place = next((n for n, one in enumerate(parts, 1) if not may_be_empty(one, empty)), None)
                return {name for one in parts[:place] for name in firsts(one)}
        return set()

    reached = {name: firsts(part) for name, part in rules.items()}
    for _ in rules:
        reached = {name: found.union(*[reached[one] for one in found]) for name, found in reached.items()}
    return {name for name, found in reached.items() if name in found}


def test_a_grammar_in_gbnf_is_sent_unchanged() -> None:
    source = 'root ::= "a" | "b"'
    assert gbnf_of_grammar(source) == source


@pytest.mark.parametrize(
    "source",
    [
        'start: WORD "s"\nWORD: /[a-z]+/',  # the lexer reads the s as part of the word
        'start: "a" "b" | "ab" "c"',
        'start: start "a"',
        'start: "a" | r\nr: r "b" | r r',
        'start: ""',
        'start: "a"i',
        "start: /a/i",
        r"start: /\w/",
        'start: T "-" | B T "b"\nT: /[ab]*/\nB: "ab"',
        "start: /a*/ /a*b/",
        "start: /a+?/ /b/",
        'start: "a"\n%ignore " "',
        "%import common.INT\nstart: INT",
        'start: %json {"type": "null"}',
        "start: unknown",
        "start: A\nA: A",
        "start: A\nA: b\nb: /b/",
        'r: "a"',
        'start: "a"\nstart: "b"',
        'start: ("a"',
        'start: "a")',
        "start: " + "(" * 500 + '"a"' + ")" * 500,
        "start: /[ab]{1999}c{1999}/",
        "start: " + " ".join([f"/[ab]{{{number}}}/" for number in range(500, 700)]),
        "start: r0\n"
        + "".join([f"r{n}: [r{n + 1}] [r{n + 2}]\n" for n in range(900)])
        + 'r900: "a"\nr901: "b"',
        "start: " + '"a" ' * 6000,
        f'start: "a"{{{MAX_REPEATS + 1}}}',
        'start: "a"~' + "1" * 5_000,
        'start: "a"{1,' + "1" * 5_000 + "}",
        'start: "a"~5..3',
        'start: "a"{5,3}',
        'start: "ab".."c"',
        'start[capture]: "a"',
        "start: /^a/",
        "start: /a$/",
        "start: /[a[bc]]/",  # a class in a class on the engine
        "start: /[^a[b]/",
        r"start: /[\]a[b]/",
        "start: /a{b/",
        "start: /a{,3}b/",
        r"start: /\07/",
        r"start: /[\1]/",
        r"start: /\<a/",
        "\0",
    ],
)
def test_other_grammars_are_refused(source: str) -> None:
    with pytest.raises(NotSupported):
        gbnf_of_grammar(source)
