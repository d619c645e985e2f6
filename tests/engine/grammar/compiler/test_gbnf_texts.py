"""A grammar in GBNF has the texts that its rules derive, as in llama.cpp, although llguidance has a lexer."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples

from agentflow.engine.grammar.compiler.compile import compile_constraint
from agentflow.engine.grammar.compiler.ebnf import lark_of_gbnf, regex_of_gbnf
from agentflow.engine.grammar.dfa import build_dfa
from agentflow.engine.grammar.llguidance import ALL_TOKENS_ALLOWED, LlguidanceGrammar
from agentflow.errors import BadArgument, RequestRefused
from agentflow.protocol.constraint import Constraint
from benchmarks.constrained.text_walks import BYTE_VOCABULARY, MatcherText, takes

ARITHMETIC = r"""
root  ::= (expr "=" ws term "\n")+
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \t\n]*
"""
JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws
array  ::=
  "[" ws (
            value
    ("," ws value)*
  )? "]" ws
string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
# Optional space
ws ::= | " " | "\n" [ \t]{0,20}
"""


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        ('root ::= word "s"\nword ::= [a-z]+', ["cats", "ss"], ["s", "cat", "cats."]),
        ('root ::= "<b>" text "</b>"\ntext ::= [^\\n]*', ["<b>x</b>", "<b></b></b>"], ["<b>x", "<b>\n</b>"]),
        ('root ::= num "\\n"\nnum ::= [0-9]+ ws\nws ::= [ \\t\\n]*', ["1\n", "1\n \n"], ["1", "\n"]),
        ('root ::= name " is " name\nname ::= [A-Za-z ]+', ["Ann is Bob", "a is  is b"], ["Ann is ", " is"]),
        ('root ::= item ("," item)*\nitem ::= "true" | [a-z]+ "!"', ["true,tr!", "true!"], ["tr", "true,"]),
        ('root ::= a | b "x"\na ::= "one two"\nb ::= "one"', ["one two", "onex"], ["one", "one twox"]),
        # The first bytes of é and è are alike.
        ('root ::= word "è"\nword ::= ("a" "é"?)+', ["aè", "aéaè"], ["aé", "a"]),
        ('root ::= x "-b"\nx ::= [a-z]{2,4} ("-" [0-9])?', ["ab-b", "ab-1-b"], ["a-b", "ab-1"]),
        (ARITHMETIC, ["1+2=3\n", "1+2=3\n1+1=2\n", "(1-x)*2=y \n\n"], ["1+2=3", "1+2=3\n1"]),
        (JSON, ['{"a": [1, "x\\n", true]}', "{}", '{"a": {"b": -1.5e3}}\n  '], ["[]", '{"a"}']),
    ],
)
def test_f37_no_terminal_takes_the_beginning_of_the_next_part(
    grammar: str, good: list[str], bad: list[str]
) -> None:
    constraint = compile_constraint(Constraint("grammar", grammar).check())
    for text in good:
        assert takes(constraint, text), text
    for text in bad:
        assert not takes(constraint, text), text
    assert [takes_lark(lark_of_gbnf(grammar), text) for text in good] == [True] * len(good)


def takes_lark(lark: str, text: str) -> bool:
    growing = MatcherText(LlguidanceGrammar(f"{lark}\n{ALL_TOKENS_ALLOWED}", BYTE_VOCABULARY).matcher())
    try:
        for byte in text.encode():
            if byte not in growing.allowed():
                return False
            growing.accept(byte)
        return growing.may_end()
    except RequestRefused:  # no text matches the rest
        return False


def test_f37_a_grammar_without_recursion_is_no_work_for_a_parser() -> None:
    """llguidance's parser refused masks of large vocabularies: each token that a rule reads counts."""
    words = """root ::= (word "s" | word "ed") (" " word)*\nword ::= [a-z]+"""
    lines = 'root ::= line\nline ::= [a-z]+ "\\n" line?'
    forms = [compile_constraint(Constraint("grammar", source)).form for source in (words, lines)]
    assert forms == ["dfa", "llguidance"]
    # Too large for a DFA.
    pairs = compile_constraint(Constraint("grammar", 'root ::= [a-z]{1,2000} "x" [a-z]{1,2000}'))
    assert pairs.form == "llguidance"
    assert takes(pairs, "axb")
    assert not takes(pairs, "ax")


@pytest.mark.parametrize("end", ["", "</tool_call>"])
def test_f37_harmless_grammars_keep_their_terminals(end: str) -> None:
    lark = lark_of_gbnf(JSON, end)
    assert 'value: object | array | STRING | NUMBER | ("true" | "false" | "null") WS' in lark.splitlines()
    assert lark_of_gbnf('root ::= item+\nitem ::= "- " [^\\n]+ "\\n"').startswith("start: ITEM+\nITEM: ")


def test_f37_the_rest_of_a_literal_is_forced() -> None:
    lark = lark_of_gbnf('root ::= word "; the end"\nword ::= [a-z;]+')
    matcher = LlguidanceGrammar(f"{lark}\n{ALL_TOKENS_ALLOWED}", BYTE_VOCABULARY).matcher()
    for byte in b"a; ":
        matcher.accept(byte)
    assert matcher.forced() == b"the end"


@pytest.mark.parametrize(
    "grammar",
    [
        "root ::= r0\n" + "".join([f'r{n} ::= r{n + 1} "a"\n' for n in range(900)]) + 'r900 ::= root | "b"',
        "root ::= r0\n" + "".join([f"r{n} ::= r{n + 1} r{n + 1}\n" for n in range(700)]) + 'r700 ::= "b"',
        "root ::= x*\nx ::= " + " | ".join([f'[a-k] "{n}" [a-z]*' for n in range(900)]),
        f'root ::= x "{"ab" * 9_000}"\nx ::= [a-z]*',
        'root ::= x "a"\nx ::= ((([a-z]{0,9} "b"){0,9} "c"){0,9} "d"){0,9}',
    ],
)
def test_f37_a_large_grammar_is_translated(grammar: str) -> None:
    assert lark_of_gbnf(grammar).startswith("start: ")


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ("root ::= " + "(" * 9_000, "nests too deeply"),
        ('root ::= "a"' + "*" * 9_000, "nests too deeply"),
        ('root ::= "a', "Expected a character"),
        (r'root ::= "\q"', "Expected a character or an escape"),
        ("root ::= [z-a]", "The range is empty"),
        ("root ::= []", "The class has no characters"),
        (r'root ::= "\ud800"', "No such character"),
        ('root ::= "a"{3,2}', "Expected {least,most}"),
        ('root ::= "a" )', "Expected the end of the line at line 1"),
        ('root ::= "a"\nx = "b"', "Expected ::= at line 2"),
        ('x ::= "a"', "No 'root' rule found"),
    ],
)
def test_f37_an_invalid_grammar_is_refused_with_the_place(grammar: str, words: str) -> None:
    with pytest.raises(BadArgument) as caught:
        lark_of_gbnf(grammar)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        (r"root ::= [\]\-a]+", "-]a"),
        (r"root ::= [a&&b-]+", "a&-b"),
        (r'root ::= "\x41\u00e9ab\U0001F600" [\u00e0-\u00ff]', "Aéab😀ü"),
        ("root ::= . .", "\nx"),
        ('root ::= ("a" | ) "b" ()', "b"),
        ('root ::= "a" |\n  "b" # a comment', "b"),
        (
            'root ::= Foo-bar foo_bar start 1a\nFoo-bar ::= "x"\nfoo_bar ::= "y"\nstart ::= "z"\n1a ::= "!"',
            "xyz!",
        ),
        ('root ::= "/" [/] "a"{2,3}\r\nx ::= "b"', "//aaa"),
    ],
)
def test_f37_the_notation_is_read_as_llama_cpp_reads_it(grammar: str, text: str) -> None:
    assert takes(compile_constraint(Constraint("grammar", grammar).check()), text)


Part = tuple[Any, ...]
CHARS = "abéè"
NAMES = ["root", "x", "y", "z"]
leaves: st.SearchStrategy[Part] = st.one_of(
    st.tuples(st.just("text"), st.text(CHARS, max_size=3)),
    st.tuples(st.just("chars"), st.sampled_from(["a", "ab", "abéè", "^a", "^éa", "."])),
    st.tuples(st.just("name"), st.sampled_from(NAMES[1:])),
)
parts: st.SearchStrategy[Part] = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.tuples(st.just("row"), st.lists(inner, min_size=1, max_size=3)),
        st.tuples(st.just("choice"), st.lists(inner, min_size=2, max_size=3)),
        st.tuples(st.just("times"), inner, st.sampled_from(["*", "+", "?", "{2}", "{1,2}", "{0,3}", "{2,}"])),
    ),
    max_leaves=6,
)
TIMES = {
    "*": (0, 9),
    "+": (1, 9),
    "?": (0, 1),
    "{2}": (2, 2),
    "{1,2}": (1, 2),
    "{0,3}": (0, 3),
    "{2,}": (2, 9),
}
Spans = dict[str, dict[int, set[int]]]


def written(part: Part) -> str:
    kind, value, *more = part
    if kind == "text":
        return f'"{value}"'
    if kind == "chars":
        return "." if value == "." else f"[{value}]"
    if kind == "name":
        return str(value)
    if kind == "times":
        return f"({written(value)}){more[0]}"
    return f"({(' ' if kind == 'row' else ' | ').join(map(written, value))})"


def ends(part: Part, text: str, start: int, known: Spans) -> set[int]:
    """The places where texts of the part may end that begin at ``start``."""
    kind, value, *more = part
    if kind == "text":
        return {start + len(value)} if text.startswith(value, start) else set()
    if kind == "chars":
        is_in = start < len(text) and (
            value == "." or (text[start] in value.lstrip("^")) is not value.startswith("^")
        )
        return {start + 1} if is_in else set()
    if kind == "name":
        return known[value][start]
    if kind == "choice":
        return {end for one in value for end in ends(one, text, start, known)}
    least, most = (0, 0) if kind == "row" else TIMES[more[0]]
    copies = value if kind == "row" else [value] * most
    here, found = {start}, {start} if kind == "times" and least == 0 else set()
    for number, one in enumerate(copies, 1):
        here = {end for place in here for end in ends(one, text, place, known)}
        found |= here if kind == "times" and number >= least else set()
    return here if kind == "row" else found


def derives(rules: dict[str, Part], text: str) -> bool:
    """Whether the rules derive the text: by the spans of all rules, which grow until nothing is new."""
    known: Spans = {name: {place: set() for place in range(len(text) + 1)} for name in rules}
    has_changed = True
    while has_changed:
        has_changed = False
        for name, part in rules.items():
            for start, before in known[name].items():
                found = ends(part, text, start, known)
                has_changed |= found != before
                known[name][start] = found
    return len(text) in known["root"][0]


TEXTS = ["".join(chars) for length in range(5) for chars in itertools.product("abé", repeat=length)]


@examples(60)
@given(st.fixed_dictionaries(dict.fromkeys(NAMES, parts)), st.lists(st.text(CHARS, max_size=7), max_size=10))
def test_f37_a_grammar_has_the_texts_that_its_rules_derive(rules: dict[str, Part], more: list[str]) -> None:
    """Under the parser and, if no rule contains itself, under a DFA."""
    source = "\n".join([f"{name} ::= {written(part)}" for name, part in rules.items()])
    if (regex := regex_of_gbnf(source)) is not None:
        dfa = build_dfa(regex)
        for text in [*TEXTS, *more]:
            assert dfa.matches(text.encode()) == derives(rules, text), (text, source)
    lark = lark_of_gbnf(source)
    try:
        grammar = LlguidanceGrammar(f"{lark}\n{ALL_TOKENS_ALLOWED}", BYTE_VOCABULARY)
    except RequestRefused:
        assert not any(derives(rules, text) for text in TEXTS if text), lark
        return
    for text in [*TEXTS, *more]:
        assert takes_text(grammar, text) == derives(rules, text), (text, lark)


@examples(30)
@given(
    st.fixed_dictionaries(dict.fromkeys(NAMES, parts)),
    st.text("ab", min_size=1, max_size=3),
    st.lists(st.text("ab<", max_size=9), max_size=20),
)
def test_f37_a_tag_in_gbnf_ends_at_the_first_end_after_a_whole_text(
    rules: dict[str, Part], end: str, more: list[str]
) -> None:
    """If a rule contains itself, a tag may also end later where the text after the first end is not free."""
    source = "\n".join([f"{name} ::= {written(part)}" for name, part in rules.items()])
    tag = {"begin": "<", "kind": "grammar", "source": source, "end": end}
    try:
        compiled = compile_constraint(Constraint("tags", json.dumps([tag])))
    except BadArgument as error:
        is_ambiguous = "exceeds the limits" in str(error)
        compiled = None
    if compiled is None:
        assert is_ambiguous or not any(derives(rules, text) for text in TEXTS)
        return
    grammar = LlguidanceGrammar(compiled.payload.decode(), BYTE_VOCABULARY)
    is_regular = regex_of_gbnf(source) is not None
    for text in [*TEXTS, *more]:
        taken = takes_text(grammar, f"<{text}")
        assert is_tagged(rules, end, f"<{text}", most_ends=1) <= taken, (text, rules, end)
        assert taken <= is_tagged(rules, end, f"<{text}", most_ends=1 if is_regular else None), (
            text,
            rules,
            end,
        )


@examples(30)
@given(
    st.fixed_dictionaries(dict.fromkeys(NAMES, parts)),
    st.text("ab", min_size=1, max_size=3),
    st.lists(st.text("ab<", max_size=9), max_size=20),
)
def test_f37_a_row_of_tags_in_gbnf_needs_no_parser(rules: dict[str, Part], end: str, more: list[str]) -> None:
    """Unless a rule contains itself. The body ends wherever it may end, as under the parser."""
    source = "\n".join([f"{name} ::= {written(part)}" for name, part in rules.items()])
    tag = {"begin": "<", "kind": "grammar", "source": source, "end": end}
    try:
        row = compile_constraint(Constraint("tags", json.dumps([tag]), between="", max_tags=2))
    except BadArgument:  # it has no texts, or is ambiguous
        return
    assert (row.form == "dfa") == (regex_of_gbnf(source) is not None)
    for text in [*TEXTS, *more]:
        expected = is_row(rules, end, f"<{text}", 2)
        assert takes(row, f"<{text}") == expected, (text, rules, end)


def is_row(rules: dict[str, Part], end: str, text: str, most: int) -> bool:
    """Whether a text is one to ``most`` tags."""
    if not most or text[:1] != "<":
        return False
    ends = [at for at in range(1, len(text)) if text.startswith(end, at)]
    return any(
        derives(rules, text[1:at])
        and (at + len(end) == len(text) or is_row(rules, end, text[at + len(end) :], most - 1))
        for at in ends
    )


def is_tagged(rules: dict[str, Part], end: str, text: str, most_ends: int | None) -> bool:
    """Whether each ``<`` in free text begins a text of the rules and ``end``: one of the first ``most_ends``
    after a whole text."""
    _, begin, inside = text.partition("<")
    ends = [at for at in range(len(inside)) if inside.startswith(end, at) and derives(rules, inside[:at])]
    return not begin or any(
        is_tagged(rules, end, inside[at + len(end) :], most_ends) for at in ends[:most_ends]
    )


def takes_text(grammar: LlguidanceGrammar, text: str) -> bool:
    matcher = grammar.matcher()
    try:
        for byte in text.encode():
            if matcher.must_end():
                return False
            matcher.accept(byte)
        return matcher.may_end()
    except (RequestRefused, ValueError):
        return False
