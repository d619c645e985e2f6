"""The subset of JSON schema that Anthropic's structured outputs enforce, compared with its client."""

from __future__ import annotations

from typing import Any, Literal

import jsonschema
import pytest
from anthropic.lib._parse._transform import transform_schema
from pydantic import BaseModel, Field

from agentflow.backends.apis.messages.anthropic_schema import is_enforced, output_schema
from agentflow.errors import NotSupported


class Street(BaseModel):
    name: str
    number: int | None = None


class Person(BaseModel):
    name: str = Field(description="The full name.")
    age: int
    mood: Literal["good", "bad"] = "good"
    streets: list[Street]


class Node(BaseModel):
    children: list[Node]


VALUES: list[Any] = [
    {"name": "Ann", "age": 3, "mood": "bad", "streets": [{"name": "High", "number": None}]},
    {"name": "Ann", "age": 3, "streets": []},
    {"name": "Ann", "age": "3", "mood": "bad", "streets": []},
    {"name": "Ann", "age": 3, "mood": "odd", "streets": []},
    {"name": "Ann", "age": 3, "mood": "bad", "streets": [], "more": 1},
]


def test_a_model_of_pydantic_is_narrowed() -> None:
    """Each value of the narrowed schema is one of the schema, and the client leaves it unchanged."""
    schema = Person.model_json_schema()
    found = output_schema(schema)
    assert found.unwrap is None
    assert transform_schema(found.schema) == _without_types_of_enums(found.schema)
    for value in VALUES:
        if jsonschema.Draft202012Validator(found.schema).is_valid(value):
            jsonschema.validate(value, schema)
    assert jsonschema.Draft202012Validator(found.schema).is_valid(VALUES[0])


def _without_types_of_enums(schema: Any) -> Any:
    """The client leaves them out, because the members have a type."""
    if isinstance(schema, dict):
        return {
            key: _without_types_of_enums(value)
            for key, value in schema.items()
            if key != "type" or "enum" not in schema
        }
    return [_without_types_of_enums(part) for part in schema] if isinstance(schema, list) else schema


def test_a_value_that_is_no_object_is_put_into_one() -> None:
    found = output_schema({"type": "array", "items": {"type": "string"}})
    assert found.schema["type"] == "object"
    assert found.unwrap is not None
    assert found.unwrap('{"value": ["a"]}') == '["a"]'


@pytest.mark.parametrize(
    "member",
    [
        {"type": "integer", "minimum": 1},
        {"type": "number", "multipleOf": 2},
        {"type": "string", "pattern": "a+"},
        {"type": "string", "format": "regex"},
        {"type": "string", "maxLength": 3},
        {"type": "array", "items": {"type": "string"}, "minItems": 2},
        {"type": "array", "items": {"type": "string"}, "maxItems": 2},
        {"enum": [{"a": 1}]},
        {"not": {"type": "string"}},
        {"type": "object", "additionalProperties": {"type": "string"}},
    ],
)
def test_a_rule_that_the_api_does_not_keep_is_refused(member: Any) -> None:
    schema = {"type": "object", "properties": {"a": member}}
    with pytest.raises(NotSupported):
        output_schema(schema)
    assert not is_enforced(schema)


@pytest.mark.parametrize("schema", [Node.model_json_schema(), {"$ref": "#"}, True, {}])
def test_types_that_contain_themselves_and_any_value_are_refused(schema: Any) -> None:
    with pytest.raises(NotSupported):
        output_schema(schema)


def test_too_many_members_with_several_types_are_refused() -> None:
    members = {f"a{number}": {"anyOf": [{"type": "string"}, {"type": "null"}]} for number in range(16)}
    assert is_enforced({"type": "object", "properties": members})
    members["a16"] = members["a0"]
    assert not is_enforced({"type": "object", "properties": members})


def test_definitions_that_refer_to_others_are_kept() -> None:
    schema = {
        "$defs": {
            "a": {"type": "object", "properties": {"b": {"$ref": "#/$defs/b"}}},
            "b": {"type": "string"},
        },
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/a"}},
    }
    assert is_enforced(schema)
