"""Checks of JSON texts: they agree with a plain validator, and end soon for any schema."""

import json
import time
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.engine.schema_strategies import LITERALS, schemas, valid_value

from agentflow.protocol.bounds.client_pattern import CannotCheck
from agentflow.protocol.bounds.schema_check import MOST_VIOLATIONS, SchemaCheck, SchemaPath

EXTRA: list[dict[str, Any]] = [
    {},
    {"uniqueItems": True},
    {"not": {"const": 0}},
    {"pattern": "^[a-z]*$"},
    {"contains": {"type": "string"}},
    {"patternProperties": {"^a": {"type": "null"}}, "additionalProperties": {"type": "integer"}},
    {"allOf": [{"$ref": "#/$defs/few"}], "unevaluatedProperties": False},
]
DEFINITIONS = {"few": {"properties": {"a": {}}, "maxItems": 1}}
VALUES = [*LITERALS, {"a": 1}, {"a": None, "b": 2}, [1, 1.0], [True, 1], [[1], [1.0]], ["x", "x"], {"b": "x"}]


def violations(schema: Any, text: str) -> list[SchemaPath] | None:
    """The violated places; None if the check was given up."""
    try:
        return SchemaCheck(schema).violations(text).paths
    except CannotCheck:
        return None


@given(schemas, st.sampled_from(EXTRA), st.sampled_from([6, 7, None]), st.randoms(use_true_random=False))
def test_the_same_is_valid_as_for_a_plain_validator(schema: Any, extra: Any, draft: Any, dice: Any) -> None:
    whole = {**schema, **extra, "$defs": DEFINITIONS}
    if draft is not None:
        whole["$schema"] = f"http://json-schema.org/draft-0{draft}/schema#"
    plain = jsonschema.validators.validator_for(whole, default=jsonschema.Draft202012Validator)(whole)
    for value in [valid_value(schema, dice), *VALUES]:
        found = violations(whole, json.dumps(value))
        assert found is not None
        assert (found == []) == plain.is_valid(value), value


def doubled(levels: int) -> dict[str, Any]:
    """A schema that refers to itself twice at each level."""
    named: dict[str, Any] = {"a0": {"type": "string"}}
    for level in range(1, levels):
        named[f"a{level}"] = {"allOf": [{"$ref": f"#/$defs/a{level - 1}"}] * 2}
    return {"$ref": f"#/$defs/a{levels - 1}", "$defs": named}


ANCHORS = [{"$anchor": f"a{number}"} for number in range(5000)]
HOSTILE: dict[str, tuple[Any, Any]] = {
    "exponential": (doubled(60), "x"),
    "endless": ({"$ref": "#"}, None),
    "a pattern": ({"pattern": "^(a|a)*$"}, "a" * 500 + "!"),
    "a pattern of names": ({"patternProperties": {"^(a|a)*$": {}}}, {"a" * 500 + "!": 1}),
    "a pattern of other names": (
        {"patternProperties": {"^(a|a)*$": {}}, "additionalProperties": False},
        {"a" * 500 + "!": 1},
    ),
    "long errors": ({"anyOf": [{"type": "null"}] * 3000}, "x" * 500_000),
    "another draft inside": (
        {
            **doubled(60),
            "$defs": {**doubled(60)["$defs"], "x": {}},
            "$schema": "http://json-schema.org/schema",
        },
        "x",
    ),
    "elsewhere": ({"$ref": "http://127.0.0.1:1/a.json"}, 1),
    "no schema": ({"type": "thing"}, 1),
    "names that the library searches": (
        {"patternProperties": {"(a|a)*$": {}}, "unevaluatedProperties": False},
        {"a" * 500: 1},
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_check_that_costs_too_much_is_given_up(name: str) -> None:
    schema, value = HOSTILE[name]
    began_s = time.process_time()
    assert violations(schema, json.dumps(value)) is None
    assert time.process_time() - began_s < 20  # it would be hours


def test_many_references_are_not_looked_up_anew() -> None:
    last = {"$anchor": "last", "type": "integer"}
    schema = {"items": {"$ref": "#last"}, "$defs": {"all": {"allOf": [*ANCHORS, last]}}}
    assert violations(schema, json.dumps([1] * 300)) == []


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a": '])
def test_text_that_is_no_json_is_not_valid(text: str) -> None:
    assert violations({}, text) in ([()], None)


def test_an_inner_draft_does_not_escape_the_count() -> None:
    inner = {"$schema": "http://json-schema.org/draft-07/schema#", **doubled(60)["$defs"]["a59"]}
    schema = {"properties": {"a": inner}, "$defs": doubled(60)["$defs"]}
    assert violations(schema, '{"a": "x"}') is None


def test_as_many_violations_are_reported_as_are_shown() -> None:
    found = violations({"items": {"type": "null"}}, json.dumps([1] * 100))
    assert found == [("items", "type")] * MOST_VIOLATIONS


@pytest.mark.parametrize(("value", "is_valid"), [("0.3", True), ("1e-1", True), ("0.35", False), ("7", True)])
def test_multiples_are_those_of_decimals(value: str, is_valid: bool) -> None:
    assert (violations({"multipleOf": 0.1}, value) == []) == is_valid


@pytest.mark.parametrize("text", ["NaN", "[Infinity]", '{"a": -Infinity}'])
def test_numbers_that_json_lacks_are_not_valid(text: str) -> None:
    assert violations({}, text) == [()]


def test_a_message_has_the_place_in_the_value() -> None:
    found = SchemaCheck({"items": {"pattern": "^[a-z]+$"}}).violations('["ab", "A"]')
    assert found.paths == [("items", "pattern")]
    assert found.message.startswith("$[1]: ")
