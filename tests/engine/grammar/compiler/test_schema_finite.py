"""Recursive schemas without a value that ends, against a plain search for a small value."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentflow.engine.grammar.compiler.compile import compile_constraint
from agentflow.engine.grammar.compiler.explicit_schema import endless_references
from agentflow.errors import BadArgument
from agentflow.protocol.constraint import Constraint
from benchmarks.constrained.text_walks import text_under, walk

NAMES = "abc"
EMPTY = {"type": ["integer", "number"], "exclusiveMinimum": 2, "maximum": 1}
references = st.sampled_from([{"$ref": f"#/$defs/{name}"} for name in NAMES])
schemas = st.recursive(
    st.sampled_from([{"type": "null"}, {"const": {}}, EMPTY, {"enum": []}]) | references,
    lambda inner: st.one_of(
        st.builds(lambda one, two: {"anyOf": [one, two]}, inner, inner),
        st.builds(lambda one, two: {"allOf": [one, two]}, inner, inner),
        st.builds(
            lambda one, least: {"type": "array", "items": one, "minItems": least}, inner, st.integers(0, 2)
        ),
        st.builds(lambda one: {"type": "array", "prefixItems": [{}, one], "minItems": 2.0}, inner),
        st.builds(
            lambda one, required: {"type": "object", "properties": {"m": one}, "required": required},
            inner,
            st.sampled_from([[], ["m"], ["other"]]),
        ),
    ),
    max_leaves=4,
)


def height(schema: Any, definitions: dict[str, Any], most: int) -> bool:
    """Whether a value needs no more than ``most`` schemas within each other, where types never conflict."""
    if most == 0 or schema in (EMPTY, {"enum": []}):
        return False
    if "$ref" in schema:
        return height(definitions[schema["$ref"][-1]], definitions, most - 1)
    if "anyOf" in schema:
        return any(height(one, definitions, most - 1) for one in schema["anyOf"])
    if "allOf" in schema:
        return all(height(one, definitions, most - 1) for one in schema["allOf"])
    if schema.get("minItems"):
        item = schema["items"] if "items" in schema else schema["prefixItems"][1]
        return height(item, definitions, most - 1)
    if schema.get("required") == ["m"]:
        return height(schema["properties"]["m"], definitions, most - 1)
    return True


@given(schemas, st.fixed_dictionaries(dict.fromkeys(NAMES, schemas)))
def test_finite_schemas_are_those_that_a_search_finds(
    root: dict[str, Any], definitions: dict[str, Any]
) -> None:
    assert ("#" not in endless_references({**root, "$defs": definitions})) is height(root, definitions, 24)


LIST = {"type": "object", "properties": {"v": {"type": "integer"}, "next": {"$ref": "#"}}}


@pytest.mark.parametrize(
    "schema",
    [
        LIST | {"required": ["v", "next"]},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
    ],
)
def test_a_schema_without_a_value_is_refused_before_it_is_used(schema: dict[str, Any]) -> None:
    with pytest.raises(BadArgument, match="finite"):
        compile_constraint(Constraint("schema", json.dumps(schema)))


@pytest.mark.parametrize(
    "schema",
    [
        LIST | {"required": ["v"]},
        {"type": "array", "items": {"$ref": "#"}},
        {"type": ["object", "null"], **LIST},
    ],
)
def test_a_schema_with_a_finite_value_is_accepted(schema: dict[str, Any]) -> None:
    compile_constraint(Constraint("schema", json.dumps(schema)))


ENDLESS = {"type": "object", "properties": {"x": {"$ref": "#/$defs/d"}}, "required": ["x"]}


@pytest.mark.parametrize(
    ("schema", "values"),
    [
        (
            {"properties": {"a": {"$ref": "#/$defs/d"}, "b": {"const": 1}}, "additionalProperties": False},
            [{}, {"b": 1}],
        ),
        ({"additionalProperties": {"$ref": "#/$defs/d"}}, [{}]),
        ({"additionalProperties": {"$ref": "#/$defs/loop"}}, [{}]),
        ({"patternProperties": {"^a": {"$ref": "#/$defs/d"}}, "additionalProperties": False}, [{}]),
        ({"type": "array", "items": {"$ref": "#/$defs/d"}}, [[]]),
        ({"type": "array", "prefixItems": [{"const": 1}, ENDLESS], "items": False}, [[], [1]]),
        ({"type": ["object", "null"], "anyOf": [{"type": "null"}, {"$ref": "#/$defs/d"}]}, [None]),
    ],
)
def test_f37_no_value_begins_that_could_not_end(schema: dict[str, Any], values: list[Any]) -> None:
    definitions = {"d": ENDLESS, "loop": {"$ref": "#/$defs/loop"}}
    source = json.dumps({"type": "object", **schema, "$defs": definitions})
    constraint = compile_constraint(Constraint("schema", source))
    for seed in range(10):
        text = walk(text_under(constraint), random.Random(seed))
        assert text is not None
        assert json.loads(text) in values


def test_a_long_chain_of_references_takes_few_passes() -> None:
    chain = {str(n): {"$ref": f"#/$defs/{n + 1}"} for n in range(3000)} | {"3000": {"type": "null"}}
    assert not endless_references({"$ref": "#/$defs/0", "$defs": chain})


@pytest.mark.parametrize(
    "empty",
    [
        EMPTY,
        {"type": "string", "minLength": 2, "maxLength": 1},
        {"type": "array", "items": {"type": "null"}, "minItems": 2, "maxItems": 1},
        {"enum": []},
        {"type": "object", "properties": {"a": False}, "required": ["a"]},
    ],
)
def test_f37_a_recursion_whose_only_end_is_empty_is_not_begun(empty: dict[str, Any]) -> None:
    definitions = {
        "d": {
            "anyOf": [
                {"$ref": "#/$defs/d"},
                {"type": "array", "items": {"$ref": "#/$defs/d"}, "minItems": 1},
                empty,
            ]
        }
    }
    other = {"type": "object", "required": ["z"], "additionalProperties": {"$ref": "#/$defs/d"}}
    for schema in ({"$ref": "#/$defs/d"}, other, {"type": "array", "items": other, "minItems": 1}):
        with pytest.raises(BadArgument):
            compile_constraint(Constraint("schema", json.dumps({**schema, "$defs": definitions})))
    schema = {"anyOf": [{"$ref": "#/$defs/d"}, {"type": "null"}], "$defs": definitions}
    text = text_under(compile_constraint(Constraint("schema", json.dumps(schema))))
    assert text.allowed() == b"n"
