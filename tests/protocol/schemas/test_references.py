"""References in JSON schemas become pointers, with the targets that ``jsonschema`` finds."""

from __future__ import annotations

import copy
import json
from typing import Any
from urllib.parse import quote

import jsonschema
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.counted_lines import counted_lines

from agentflow.engine.grammar.compiler.compile import compile_constraint
from agentflow.errors import BadArgument
from agentflow.protocol.constraint import Constraint
from agentflow.protocol.schemas.hoisting import hoisted
from agentflow.protocol.schemas.references import point_references
from agentflow.protocol.schemas.walk import resolved
from benchmarks.constrained.text_walks import takes

OPTION = {"type": "object", "required": ["kind"], "additionalProperties": False}
ONE_NULL = {"b": {"type": "null"}}
ONE_STRING = {"b": {"type": "string"}}


@given(name=st.text(st.characters(exclude_categories=("Cs",)), max_size=5), is_quoted=st.booleans())
@example(name="Größe", is_quoted=False)
@example(name="Map<string,number>", is_quoted=False)
@example(name="a/~1 %", is_quoted=True)
def test_f37_a_definition_may_have_any_name(name: str, is_quoted: bool) -> None:
    step = name.replace("~", "~0").replace("/", "~1")
    step = quote(step) if is_quoted or "%" in step else step
    node = {"type": "object", "properties": {"next": {"$ref": f"#/$defs/{step}"}}, "required": ["next"]}
    node["properties"]["next"] = {"anyOf": [node["properties"]["next"], {"type": "null"}]}
    schema = {"$ref": f"#/$defs/{step}", "$defs": {name: node}}
    constraint = compile_constraint(Constraint("schema", json.dumps(schema)))
    assert takes(constraint, '{"next": {"next": null}}')
    assert not takes(constraint, '{"next": 1}')


@pytest.mark.parametrize(
    ("schema", "values"),
    [
        pytest.param(
            {"properties": {"a": {"$id": "x", "$ref": "#/$defs/b", "$defs": ONE_STRING}}, "$defs": ONE_NULL},
            [{"a": None}, {"a": "s"}],
            id="a base that a DFA overlooked",
        ),
        pytest.param(
            {
                "properties": {"a": {"$id": "x", "$ref": "#/$defs/b", "definitions": ONE_STRING}},
                "$defs": ONE_NULL,
                "$schema": "http://json-schema.org/draft-07/schema#",
            },
            [{"a": None}, {"a": "s"}],
            id="no base next to a reference in older drafts",
        ),
        pytest.param(
            {"properties": {"a": {"$ref": "r#/$defs/b"}}, "$defs": ONE_STRING, "$id": "http://e/r"},
            [{"a": None}, {"a": "s"}],
            id="of the root's id",
        ),
        pytest.param(
            {"properties": {"a": {"$ref": "#/components/b"}}, "components": ONE_STRING},
            [{"a": None}, {"a": "s"}],
            id="OpenAPI",
        ),
        pytest.param(
            {"properties": {"a": {"$ref": "#/$defs"}}, "$defs": ONE_STRING},
            [{"a": {"b": "s"}}],
            id="not a schema",
        ),
        pytest.param(
            {
                "properties": {"a": {"oneOf": [{"$ref": "#/$defs/x~1"}, {"$ref": "#/$defs/y%20"}]}},
                "$defs": {
                    "x/": OPTION | {"properties": {"kind": {"const": "x"}}},
                    "y ": OPTION | {"properties": {"kind": {"const": "y"}}},
                },
            },
            [{"a": {"kind": "x"}}, {"a": {"kind": "y"}}, {"a": {"kind": "z"}}],
            id="options that exclude each other",
        ),
        pytest.param(
            {
                "properties": {
                    "a": {
                        "type": "array",
                        "items": {"$ref": "#/$defs/e"},
                        "uniqueItems": True,
                        "maxItems": 1,
                    }
                },
                "$defs": {"e": {"$ref": "#/$defs/f", "minLength": 2}, "f": {"enum": ["a", "bb"]}},
            },
            [{"a": ["a"]}],
            id="values that a sibling excludes",
        ),
    ],
)
def test_f37_references_lead_where_a_validator_finds_them(schema: dict[str, Any], values: list[Any]) -> None:
    """In the schema itself, and in a tool's."""
    schema = {"type": "object", "additionalProperties": False, **schema}
    definitions: dict[str, Any] = {}
    call = hoisted("f", schema, definitions)
    validator = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)(schema)
    for source in (schema, {**call, "$defs": definitions}):
        try:
            constraint = compile_constraint(Constraint("schema", json.dumps(source)))
        except BadArgument:
            continue
        for value in values:
            assert takes(constraint, json.dumps(value)) <= validator.is_valid(value), value
            if "uniqueItems" not in json.dumps(schema):
                assert takes(constraint, json.dumps(value)) == validator.is_valid(value), value


@pytest.mark.parametrize(
    ("reference", "schema"),
    [
        ("#/properties/x", {"properties": {"x": None}}),
        ("#/$defs/a%20b", {"$defs": {"a b": None}}),
        ("#/$defs/a~1b", {"$defs": {"a/b": None}}),
        ("#here", {"$defs": {"x": None}}),
        ("#/components/x", {"components": {"x": None}}),
    ],
)
def test_f37_endless_values_are_found_by_any_reference(reference: str, schema: dict[str, Any]) -> None:
    node = {
        "$anchor": "here",
        "type": "object",
        "properties": {"next": {"$ref": reference}},
        "required": ["next"],
    }
    ((holder, named),) = schema.items()
    whole = {"type": "object", "properties": {"x": {"$ref": reference}}, "required": ["x"]}
    whole[holder] = {**whole.get(holder, {}), **dict.fromkeys(named, node)}
    with pytest.raises(BadArgument, match="finite"):
        compile_constraint(Constraint("schema", json.dumps(whole)))


def test_pointers_stay_when_they_are_made_again() -> None:
    schema = {"$ref": "#/x/y", "x": {"y": {"$ref": "#/x/y/z", "z": {"$ref": "other#a"}}}}
    point_references(schema)
    again = copy.deepcopy(schema)
    point_references(again)
    assert again == schema
    assert schema["$defs"]["x/y/z"] == {"$ref": "other#a"}


def test_f37_a_part_that_many_references_share_is_walked_once() -> None:
    num_lines = {}
    for size in (10, 40):
        inner: Any = {"properties": {f"p{number}": {"type": "null"} for number in range(40 * size)}}
        for _ in range(size):
            inner = {"properties": {"a": inner}}
        # Each reference leads to a part of the others' targets.
        parts = [f"#/components/S{'/properties/a' * number}" for number in range(size)]
        schema = {"components": {"S": inner}, "anyOf": [{"$ref": reference} for reference in parts]}
        with counted_lines() as lines:
            point_references(schema)
        assert len(schema["$defs"]) == 1
        num_lines[size] = lines.num
    assert num_lines[40] < 8 * num_lines[10]


def test_f37_an_index_of_many_digits_leads_nowhere() -> None:
    assert resolved({"$ref": f"#/anyOf/{'1' * 5_000}"}, {"anyOf": [{"type": "null"}]}) == {}
    assert resolved({"$ref": "#/anyOf/00"}, {"anyOf": [{"type": "null"}]}) == {}
