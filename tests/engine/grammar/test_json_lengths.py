"""Parts of JSON end where a matcher with lengths ends them; required parts are never left out."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.engine.bounded_matchers import BYTES, PAIRS, TOKENS, bounded_matcher

from agentflow.engine.grammar.compiler.compile import compile_constraint
from agentflow.engine.grammar.compiler.messages import Lengths
from agentflow.engine.grammar.grammar import Matcher, is_allowed
from agentflow.engine.grammar.json_lengths import Position, after
from agentflow.protocol.constraint import Constraint, Whitespace

LENGTHS = Lengths(string_chars=5, list_items=3)

json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(0, 1).map(lambda x: round(x, 9)) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=8,
)
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)


@given(json_values, st.data())
def test_positions_are_those_of_a_plain_reading(value: Any, data: st.DataObject) -> None:
    """The reference takes whole strings out with a regular expression and then brackets from inside out."""
    text = json.dumps(value, ensure_ascii=False)
    text = text[: data.draw(st.integers(0, len(text)))]
    pieces = re.split("(?s)(?<=.)", text)
    position = Position()
    for piece in pieces:
        position = after(position, piece.encode())
    assert position == after(Position(), text.encode())
    outside = _STRING.sub("S", text)
    plain, quote, inside = outside.partition('"')
    assert position.is_in_string == bool(quote)
    if quote:
        assert position.num_chars == len(re.sub(r"\\(?s:.)", "e", inside))
        return
    fraction = re.search(r"\.([0-9]*)$", plain)
    assert position.num_digits == (len(fraction[1]) if fraction else None)
    while (smaller := re.sub(r"\[[^\[\]{}]*\]|\{[^\[\]{}]*\}", "V", plain)) != plain:
        plain = smaller
    commas = [part.count(",") for part in re.split(r"[\[{]", plain)[1:]]
    found = []
    container = position.container
    while container is not None:
        found.append(container.num_commas)
        container = container.outer
    assert found == commas[::-1]


def endless_text(matcher: Matcher, dice: random.Random, tokens: list[int], most: int = 2000) -> str:
    """A model that ends nothing as long as it may go on, and prefers some of ``tokens``. It opens no list
    without need, because depth has no bound."""
    data = b""
    for _ in range(most):
        bits = np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits).tolist()
        if not allowed:
            assert matcher.must_end()
            return data.decode()
        going_on = [token for token in allowed if not set(TOKENS[token]) & set(b'"]}[')]
        liked = [token for token in tokens if token in allowed]
        token = dice.choice(liked if liked and dice.random() < 0.7 else going_on or allowed)
        if dice.random() < 0.05:  # rolling back restores the state
            matcher.accept(token)
            matcher.roll_back(1)
            assert np.array_equal(np.unpackbits(matcher.mask().view(np.uint8), bitorder="little"), bits)
        matcher.accept(token)
        data += TOKENS[token]
    raise AssertionError(f"does not end: {data[:300]!r}")


OPEN: dict[str, Any] = {
    "string": {"type": "string"},
    "list": {"type": "array", "items": {"type": "string"}},
    "numbers": {"type": "array", "items": {"type": "number"}},
    "tree": {
        "$ref": "#/$defs/Tree",
        "$defs": {
            "Tree": {"type": "array", "items": {"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/Tree"}]}}
        },
    },
    "records": {
        "type": "array",
        "items": {
            "type": "object",
            "properties": {"a": {"type": "string"}, "b": {"type": "array", "items": {"type": "string"}}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
    "dict": {"type": "object", "additionalProperties": {"type": "number"}},
    "number": {"type": "number", "multipleOf": 0.5},
    "exact": {"type": "string", "pattern": "^(ab){6,}$"},
}


@pytest.mark.parametrize("name", OPEN)
@pytest.mark.parametrize("seed", range(6))
def test_a_model_that_does_not_stop_is_ended_with_a_valid_value(name: str, seed: int) -> None:
    compiled = compile_constraint(Constraint("schema", json.dumps(OPEN[name])))
    dice = random.Random(seed)
    liked = [len(BYTES) + PAIRS.index(b'", "'), len(BYTES) + PAIRS.index(b"}, {")] if seed % 2 else [ord(",")]
    value = json.loads(endless_text(bounded_matcher(compiled, LENGTHS), dice, liked))
    jsonschema.validate(value, OPEN[name])
    check_lengths(value, least_string=12 if name == "exact" else 0)


def check_lengths(value: Any, least_string: int) -> None:
    if isinstance(value, str):
        # One token may exceed the bound: the longest has four bytes.
        assert len(value) <= max(LENGTHS.string_chars or 0, least_string) + 5
    if isinstance(value, list | dict):
        assert len(value) <= (LENGTHS.list_items or 0)
        for part in value.values() if isinstance(value, dict) else value:
            check_lengths(part, least_string)


FIVE: dict[str, Any] = {
    "object": {
        "type": "object",
        "properties": {name: {"type": "number"} for name in "abcde"},
        "required": [*"abcde"],
        "additionalProperties": False,
    },
    "list": {"type": "array", "items": {"type": "integer"}, "minItems": 5, "maxItems": 8},
    "mixed": {"type": "array", "items": {"anyOf": [{"type": "integer"}, {"$ref": "#"}]}, "minItems": 5},
    "enum": {"enum": [[1, 1, 1, 1, 5], [1, 1, 12, 4, 5]]},
}


@pytest.mark.parametrize("whitespace", ["compact", "free"])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("object", '{"a": 1, "b": 2.5, "c": 3.5, "d": 4, "e": 5}'),
        ("object", '{"a": 1, "b": -2, "c": 30, "d": 40.25, "e": 0}'),
        ("list", "[1, 2, 3, 4, 5]"),
        ("mixed", "[1, 2, 3, [1, 2, 3, 4, 5], 5]"),
        ("mixed", "[1, 2, [1, 2, 3, 4, 50], 4, 5]"),
        ("enum", "[1, 1, 1, 1, 5]"),
        ("enum", "[1, 1, 12, 4, 5]"),
    ],
)
def test_f37_required_members_beyond_the_bound_leave_numbers_unchanged(
    whitespace: Whitespace, name: str, text: str
) -> None:
    compiled = compile_constraint(Constraint("schema", json.dumps(FIVE[name]), whitespace=whitespace))
    assert compiled.form == ("llguidance" if name == "mixed" else "dfa")
    for pattern in (".", ", |."):
        tokens = [token.encode() for token in re.findall(pattern, text)]
        matcher = bounded_matcher(compiled, LENGTHS)
        for number, token in enumerate(tokens):
            token_id = TOKENS.index(token)
            assert is_allowed(matcher.mask(), token_id), b"".join(tokens[: number + 1])
            matcher.accept(token_id)
        assert matcher.may_end()


@pytest.mark.parametrize("whitespace", ["compact", "free"])
def test_f37_a_comma_that_is_not_required_is_forbidden_at_the_bound(whitespace: Whitespace) -> None:
    compiled = compile_constraint(Constraint("schema", json.dumps(FIVE["list"]), whitespace=whitespace))
    matcher = bounded_matcher(compiled, LENGTHS)
    for byte in b"[1, 2, 3, 4, 5":
        matcher.accept(byte)
    assert is_allowed(matcher.mask(), ord("6"))
    assert is_allowed(matcher.mask(), ord("]"))
    assert not is_allowed(matcher.mask(), ord(","))
    assert not is_allowed(matcher.mask(), TOKENS.index(b", "))


@pytest.mark.parametrize("form", ["dfa", "llguidance"])
def test_f37_an_escape_at_the_bound_stays_the_same(form: str) -> None:
    schema: dict[str, Any] = {"type": "string"}
    if form == "llguidance":
        schema = {"anyOf": [schema, {"type": "array", "items": {"$ref": "#"}}]}
    compiled = compile_constraint(Constraint("schema", json.dumps(schema)))
    assert compiled.form == form
    matcher = bounded_matcher(compiled, LENGTHS)
    for byte in b'"abcd\\':
        matcher.accept(byte)
    assert is_allowed(matcher.mask(), ord("n"))
    matcher.accept(ord("n"))
    assert not is_allowed(matcher.mask(), ord("e"))
    assert is_allowed(matcher.mask(), ord('"'))


@pytest.mark.parametrize("lengths", [Lengths(), LENGTHS])
def test_fractions_have_at_most_17_digits(lengths: Lengths) -> None:
    # A parser enforces it, because it is recursive.
    schema = {"anyOf": [{"type": "number"}, {"type": "array", "items": {"$ref": "#"}, "maxItems": 1}]}
    compiled = compile_constraint(Constraint("schema", json.dumps(schema)))
    assert compiled.form == "llguidance"
    digits = [*map(ord, "0123456789"), TOKENS.index(b"12"), TOKENS.index(b"345")]
    for seed in range(10):
        matcher = bounded_matcher(compiled, lengths)
        matcher.accept(ord("0"))
        matcher.accept(ord("."))
        text = endless_text(matcher, random.Random(seed), digits)
        assert 15 <= len(text) <= 17
        assert json.loads("0." + text) < 1


def test_a_dfa_without_lengths_keeps_its_matcher() -> None:
    plain = Constraint("schema", '{"type": "string"}')
    compiled = compile_constraint(plain)
    assert compiled.limited(plain) is compiled
    long = Constraint("schema", '{"type": "string"}', string_chars=9)
    assert compiled.limited(long).lengths == Lengths(9)
    pattern = Constraint("regex", "a")
    compiled = compile_constraint(pattern)
    assert compiled.limited(pattern) is compiled
