"""Patterns of JSON schemas, which a library of Rust reads, against Python's ``re``."""

from __future__ import annotations

import json
import re
import warnings

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from agentflow.engine.grammar.compiler.compile import compile_constraint
from agentflow.errors import BadArgument
from agentflow.protocol.constraint import Constraint
from benchmarks.constrained.text_walks import takes

PIECES = [
    "[",
    "[^",
    "]",
    "-",
    "--",
    "&&",
    "~~",
    "||",
    r"\]",
    r"\-",
    r"\[",
    r"\<",
    r"\x41",
    "a",
    "c",
    "z",
    "{",
    "}",
]
TEXTS = [
    "a",
    "b",
    "c",
    "z",
    "A",
    "[",
    "]",
    "-",
    "&",
    "~",
    "|",
    "<",
    "^",
    "a]",
    "a[]",
    "{a}",
    "<{a}>",
    "[a]",
    ":]",
]


def written(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def matches(pattern: str) -> dict[str, bool]:
    schema = {"type": "string", "pattern": pattern}
    constraint = compile_constraint(Constraint("schema", json.dumps(schema)))
    return {text: takes(constraint, json.dumps(text)) for text in TEXTS}


@given(st.lists(st.sampled_from(PIECES), min_size=1, max_size=8).map("".join))
@example("[^a&&c]")
@example("[a[c]]")
@example("[a-z--c]")
@example("[[:alpha:]]")
@example(r"[!@#$%^&*()_+\-=[\]{};':\"\\|,.<>/?]")
@example(r"\<{a}\>")
@example("[a~~z]")
@example("[]-a]")
@example("[^]-z]")
def test_f37_sets_and_escapes_have_the_meaning_of_python(inner: str) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            wanted = {text: re.search(f"^(?:{inner})$", text) is not None for text in TEXTS}
    except re.error:
        assume(False)
    assert matches(f"^(?:{inner})$") == wanted


def test_f37_a_set_with_a_bracket_is_accepted() -> None:
    assert matches(r"^[[\]{}]$")["["]


def test_f37_patterns_of_names_have_the_meaning_of_python() -> None:
    schema = {"patternProperties": {"^[^a&&c]$": {"type": "null"}}, "additionalProperties": False}
    constraint = compile_constraint(Constraint("schema", json.dumps({"type": "object", **schema})))
    takes_name = {name: takes(constraint, json.dumps({name: None})) for name in "abc&"}
    assert takes_name == {"a": False, "b": True, "c": False, "&": False}


@pytest.mark.parametrize("pattern", ["^[]$", "^[^]*$"])
def test_f37_an_empty_set_is_refused(pattern: str) -> None:
    """In ECMAScript it has no character, or all; in Python it goes on."""
    with pytest.raises(BadArgument):
        matches(pattern)


@pytest.mark.parametrize(
    ("name", "pattern", "text"),
    [("date-time", "^2", "2021-02-28T10:00:60Z"), ("time", "Z$", "10:00:60Z"), ("duration", "^P", "P1W")],
)
def test_f37_a_format_is_as_narrow_next_to_a_pattern(name: str, pattern: str, text: str) -> None:
    for schema in ({"format": name}, {"format": name, "pattern": pattern}):
        constraint = compile_constraint(Constraint("schema", json.dumps({"type": "string", **schema})))
        assert not takes(constraint, json.dumps(text))


WORD = "0-9A-Za-z_"
SPACE = "\t-\r \xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"
CHARS = [*map(chr, range(0x20, 0x180)), *"\b\t\n\f\r\u0301\u0660\u0e33\u1680\u180e\u2000\u200b\u200d"]
CHARS += [*"\u2028\u2029\u202f\u203f\u205f\u2165\u3000\u4e00\ufeff\U0001d7ce"]


CLASSES = [
    (r"\d", "[0-9]"),
    (r"\D", "[^0-9]"),
    (r"\w", f"[{WORD}]"),
    (r"\W", f"[^{WORD}]"),
    (r"\s", f"[{SPACE}]"),
    (r"\S", f"[^{SPACE}]"),
    (".", "[^\n\r\u2028\u2029]"),
    (r"[\w ]", f"[{WORD} ]"),
    (r"[\D5]", "[^0-46-9]"),
    (r"[^\d]", "[^0-9]"),
    (r"[^\w.]", f"[^{WORD}.]"),
    (r"[^\s]", f"[^{SPACE}]"),
    (r"[^\W\d]", "[A-Za-z_]"),
    (r"[^\Sa]", f"[{SPACE}]"),
    (r"[^\D5]", "[0-46-9]"),
    (r"[\s\S]", r"[\s\S]"),
    (r"(?s:.)", r"[\s\S]"),
    (r"(?:\(?s)?.", "[^\n\r\u2028\u2029]"),
]
"""Patterns of one character, and ECMAScript's reading of each."""


@pytest.mark.parametrize(("pattern", "in_ecmascript"), CLASSES)
def test_f37_classes_have_the_characters_of_python_and_ecmascript(pattern: str, in_ecmascript: str) -> None:
    schema = {"type": "string", "pattern": f"^{pattern}$"}
    constraint = compile_constraint(Constraint("schema", json.dumps(schema)))
    any_string = compile_constraint(Constraint("schema", '{"type": "string", "pattern": ""}'))
    every = [char for char in CHARS if takes(any_string, written(char))]
    wanted = {char for char in every if re.fullmatch(pattern, char) and re.fullmatch(in_ecmascript, char)}
    found = {char for char in every if takes(constraint, written(char))}
    if pattern in (r"[\s\S]", r"(?s:.)"):
        assert "\r" in found
        assert found <= wanted
    else:
        assert found == wanted


@pytest.mark.parametrize(("pattern", "in_ecmascript"), CLASSES)
def test_f37_patterns_of_names_have_the_meaning_of_ecmascript_if_there_are_others(
    pattern: str, in_ecmascript: str
) -> None:
    """Narrower patterns would free the names that they no longer match."""
    schema = {
        "type": "object",
        "patternProperties": {f"^{pattern}$": {"type": "null"}},
        "additionalProperties": {"type": "boolean"},
    }
    constraint = compile_constraint(Constraint("schema", json.dumps(schema)))
    for char in CHARS:
        value = None if re.fullmatch(in_ecmascript, char) else True
        found = [takes(constraint, f"{{{written(char)}: {one}}}") for one in ("null", "true")]
        assert found in ([value is None, value is True], [False, False]), char
        assert any(found) or not char.isprintable(), char


def test_f37_a_class_is_no_end_of_a_range() -> None:
    """Python refuses it, and the hyphen is a character in ECMAScript, where most such patterns come from."""
    assert matches(r"^[\w-.]$") == matches("^[0-9A-Za-z_.-]$")


@pytest.mark.parametrize("others", [False, {"type": "string"}])
def test_f37_patterns_of_names_that_become_equal_are_both_kept(others: object) -> None:
    schema = {
        "type": "object",
        "patternProperties": {r"^a\<$": {"type": "integer"}, "^a<$": {"maximum": 5}},
        "additionalProperties": others,
    }
    constraint = compile_constraint(Constraint("schema", json.dumps(schema)))
    assert [takes(constraint, json.dumps({"a<": value})) for value in (3, 7, "x")] == [True, False, False]


def test_f37_an_open_limit_is_no_value_where_two_patterns_of_names_become_equal() -> None:
    schema = {
        "type": "object",
        "patternProperties": {
            r"^a\<$": {"type": "number", "exclusiveMinimum": 0},
            "^a<$": {"maximum": 0.5},
        },
        "additionalProperties": False,
    }
    constraint = compile_constraint(Constraint("schema", json.dumps(schema)))
    assert [takes(constraint, json.dumps({"a<": value})) for value in (0, 0.25, 0.75)] == [False, True, False]
