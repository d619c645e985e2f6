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
