"""Schemas are narrowed to the strict subset: each value of the narrowed schema is one of the given schema."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from agentflow.backends.apis.strict_schema import enum_schema, is_strict, strict_schema, unwrapped
from agentflow.errors import NotSupported
from agentflow.language.typed.json_types import json_type


class Point(BaseModel):
    """A point."""

    x: int
    y: int = 0
    label: str | None = None


class Tree(BaseModel):
    name: str
    children: list[Tree] = []


class Circle(BaseModel):
    kind: Literal["circle"] = "circle"
    radius: float


class Square(BaseModel):
    kind: Literal["square"] = "square"
    side: float


class Drawing(BaseModel):
    shapes: list[Annotated[Circle | Square, Field(discriminator="kind")]]
    origin: Point


@dataclass
class Plain:
    names: list[str]
    kind: Literal["a", "b"] = "a"


def schema_of(kind: Any) -> dict[str, Any]:
    schema: Any = json_type(kind)[0]
    return schema


def assert_strict(schema: Any) -> None:
    """Every object requires all its properties and allows no others."""
    if isinstance(schema, dict):
        if "properties" in schema:
            assert schema["required"] == list(schema["properties"])
            assert schema["additionalProperties"] is False
        assert not {"oneOf", "default"} & schema.keys()
        for part in schema.values():
            assert_strict(part)
    elif isinstance(schema, list):
        for part in schema:
            assert_strict(part)


VALUES = {
    Point: [{"x": 1, "y": 2, "label": None}, {"x": 1, "y": 2, "label": "a"}],
    Tree: [{"name": "a", "children": [{"name": "b", "children": []}]}],
    Drawing: [{"shapes": [{"kind": "square", "side": 1.5}], "origin": {"x": 0, "y": 0, "label": None}}],
    Plain: [{"names": [], "kind": "b"}],
}


@pytest.mark.parametrize("kind", VALUES)
def test_types_of_programs_are_narrowed(kind: type) -> None:
    given_schema = schema_of(kind)
    found = strict_schema(given_schema)
    assert found.unwrap is None
    assert found.schema["type"] == "object"
    assert_strict(found.schema)
    for value in VALUES[kind]:
        jsonschema.validate(value, found.schema)
        jsonschema.validate(value, given_schema)
    assert strict_schema(found.schema).schema == found.schema


@pytest.mark.parametrize(
    ("kind", "value"),
    [(int, 3), (list[Point], [{"x": 1, "y": 2, "label": None}]), (Point | None, None), (str, "a")],
)
def test_other_values_are_put_into_an_object(kind: Any, value: Any) -> None:
    found = strict_schema(schema_of(kind))
    assert found.unwrap is not None
    assert_strict(found.schema)
    jsonschema.validate({"value": value}, found.schema)
    for separators in ((",", ":"), (", ", ": "), (" , ", " : ")):
        assert json.loads(found.unwrap(json.dumps({"value": value}, separators=separators))) == value


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": "object"},
        {"type": "object", "additionalProperties": {"type": "integer"}},
        {"type": "object", "properties": {"a": {}}},
        {"type": "object", "properties": {"a": {"type": "array"}}},
        {"type": "object", "properties": {"a": {"type": "string", "minLength": 2}}},
        {
            "type": "object",
            "properties": {"a": {"type": "array", "items": {"enum": [1]}, "uniqueItems": True}},
        },
        {"type": "object", "properties": {}, "required": ["a"], "additionalProperties": False},
        {"type": "object", "properties": {"a": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}},
        {"allOf": [{"type": "integer"}]},
        {"not": {"type": "integer"}},
        {"type": "array", "items": {"$ref": "#"}},
    ],
)
def test_schemas_outside_of_the_subset_are_refused(schema: Any) -> None:
    with pytest.raises(NotSupported):
        strict_schema(schema)
    assert not is_strict(schema)


_LEAVES = st.sampled_from(
    [
        {"type": "integer", "minimum": 0},
        {"type": "string"},
        {"enum": ["a", 1]},
        {"const": None},
        {"type": ["null", "boolean"]},
    ]
)


def _objects(parts: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def built(members: dict[str, Any], num_required: int) -> dict[str, Any]:
        return {"type": "object", "properties": members, "required": list(members)[:num_required]}

    return st.builds(built, st.dictionaries(st.sampled_from("abc"), parts, min_size=1), st.integers(0, 3))


SCHEMAS = st.recursive(
    _LEAVES,
    lambda parts: st.one_of(
        _objects(parts),
        parts.map(lambda part: {"type": "array", "items": part}),
        st.lists(parts, min_size=1, max_size=2).map(lambda options: {"anyOf": options}),
    ),
    max_leaves=6,
)


def value_of(schema: Any) -> st.SearchStrategy[Any]:
    """Values of a schema that such a model may write."""
    if "anyOf" in schema:
        return st.one_of([value_of(option) for option in schema["anyOf"]])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    if "const" in schema:
        return st.just(schema["const"])
    match schema["type"]:
        case "object":
            return st.fixed_dictionaries(
                {name: value_of(part) for name, part in schema["properties"].items()}
            )
        case "array":
            return st.lists(value_of(schema["items"]), max_size=2)
        case "integer":
            return st.integers(0, 9)
        case "string":
            return st.text(max_size=3)
        case _:
            return st.sampled_from([None, True])


@given(st.data(), SCHEMAS | _objects(SCHEMAS))
def test_values_of_the_narrowed_schema_are_values_of_the_given_one(data: st.DataObject, schema: Any) -> None:
    found = strict_schema(schema)
    assert_strict(found.schema)
    value = data.draw(value_of(found.schema))
    jsonschema.validate(value, found.schema)
    text = json.dumps(value, ensure_ascii=False)
    jsonschema.validate(json.loads(found.unwrap(text) if found.unwrap else text), schema)


def test_a_choice_is_an_object_with_an_enum() -> None:
    schema = enum_schema(("yes", "no"))
    assert_strict(schema)
    jsonschema.validate({"value": "no"}, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"value": "maybe"}, schema)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"value":1}', "1"),
        (' { "value" : {"a": "}"} } ', '{"a": "}"}'),
        ('{"value": [1', "[1"),
        ('{"val', ""),
        ("", ""),
    ],
)
def test_the_value_is_taken_out_of_its_object(text: str, value: str) -> None:
    assert unwrapped(text) == value
