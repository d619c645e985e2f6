"""JSON schema's keywords: which of them say something, about which values, and which hold other schemas."""

from __future__ import annotations

from typing import Final

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
"""They constrain nothing."""

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
"""They say something about values of a type, and nothing about others."""

ALL_TYPED: Final = frozenset().union(*KEYWORDS_OF_TYPE.values())

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

IN_PLACE: Final = frozenset(["anyOf", "allOf", "oneOf", "$ref", "if", "not", "dependentSchemas"])
"""They apply further schemas to the same value."""
