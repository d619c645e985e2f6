"""JSON schemas: their keywords, which of these hold further schemas, and what a reference refers to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

HOLD_A_SCHEMA: Final = (
    "additionalProperties",
    "additionalItems",
    "items",
    "contains",
    "not",
    "if",
    "then",
    "else",
    "propertyNames",
    "unevaluatedItems",
    "unevaluatedProperties",
)
HOLD_A_LIST: Final = ("anyOf", "allOf", "oneOf", "prefixItems", "items")
HOLD_NAMED: Final = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")

ANNOTATIONS: Final = frozenset(
    [
        "title",
        "description",
        "default",
        "examples",
        "$schema",
        "$id",
        "$comment",
        "deprecated",
        "readOnly",
        "writeOnly",
        "$defs",
        "definitions",
        "discriminator",
        "contentEncoding",
        "contentMediaType",
        "contentSchema",
    ]
)
"""Keywords that constrain nothing."""

_OF_NUMBERS: Final = frozenset(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"])

KEYWORDS_OF_TYPE: Final[dict[str, frozenset[str]]] = {
    "object": frozenset(
        [
            "properties",
            "required",
            "additionalProperties",
            "patternProperties",
            "propertyNames",
            "minProperties",
            "maxProperties",
            "dependentRequired",
            "dependentSchemas",
            "dependencies",
            "unevaluatedProperties",
        ]
    ),
    "array": frozenset(
        [
            "items",
            "prefixItems",
            "minItems",
            "maxItems",
            "uniqueItems",
            "contains",
            "minContains",
            "maxContains",
            "additionalItems",
            "unevaluatedItems",
        ]
    ),
    "string": frozenset(["minLength", "maxLength", "pattern", "format"]),
    "integer": _OF_NUMBERS,
    "number": _OF_NUMBERS,
    "boolean": frozenset(),
    "null": frozenset(),
}
"""Keywords that constrain values of one type and no others."""

ALL_TYPED: Final = frozenset().union(*KEYWORDS_OF_TYPE.values())

TYPES: Final = tuple(KEYWORDS_OF_TYPE)

KEYWORDS: Final = (
    ANNOTATIONS
    | ALL_TYPED
    | {"type", "enum", "const", "$ref", "$anchor", "$dynamicRef", "$dynamicAnchor", "$vocabulary", "id"}
    | {*HOLD_A_SCHEMA, *HOLD_A_LIST, *HOLD_NAMED, "nullable"}
)
"""All keywords, from draft 4 to 2020-12, and OpenAPI's."""

_MOST_REFERENCES: Final = 8


def inner_schemas(schema: Mapping[str, Any]) -> list[Any]:
    """What the keywords of ``schema`` hold, one level down. Members that are no schemas are included.

    >>> inner_schemas({"type": "array", "items": {"type": "null"}, "anyOf": [True]})
    [{'type': 'null'}, True]
    """
    inner = [schema[key] for key in HOLD_A_SCHEMA if key in schema]
    inner += [one for key in HOLD_A_LIST if isinstance(schema.get(key), list) for one in schema[key]]
    inner += [one for key in HOLD_NAMED if isinstance(schema.get(key), dict) for one in schema[key].values()]
    return inner


def subschemas(schema: Any) -> Iterator[dict[str, Any]]:
    """The schema and all schemas in it."""
    pending = [schema]
    while pending:
        part = pending.pop()
        if isinstance(part, dict):
            yield part
            pending += inner_schemas(part)


def resolved(schema: Any, root: Any) -> dict[str, Any]:
    """The schema, or the definition of ``root`` that it refers to. Empty if it is no object, refers to
    something else, or is at the end of a long chain of references."""
    for _ in range(_MOST_REFERENCES):
        if not isinstance(schema, dict):
            return {}
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not isinstance(root, dict):
            return schema
        holder, _, name = reference.removeprefix("#/").rpartition("/")
        schema = root.get(holder, {}).get(name) if holder in ("$defs", "definitions") else None
    return {}
