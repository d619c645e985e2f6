"""Places in a schema where any value may stand: a definition of our own says what that is, so that the
numbers there, too, are such that readers take them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from agentflow.engine.grammar.json_values import MOST_NUMBER
from agentflow.engine.grammar.schema_keywords import ANNOTATIONS, HOLD_A_LIST, HOLD_A_SCHEMA, HOLD_NAMED

Schema = dict[str, Any]

ANY_VALUE: Final = "agentflow:any-value"
"""The definition's name, and its absolute URI: no ``$id`` around a reference changes where that leads."""


def define_any_value(root: Schema, subschemas: Iterable[Schema]) -> None:
    """Writes the definition into ``root``, and refers to it where a schema says nothing about a value.

    >>> define_any_value(schema := {"type": "array"}, [schema])
    >>> schema["items"]
    {'$ref': 'agentflow:any-value'}
    """
    for schema in list(subschemas):
        _replace_true(schema)
        types = schema.get("type")
        names = types if isinstance(types, list) else [types]
        if not set(schema) - ANNOTATIONS:
            schema["anyOf"] = [{"$ref": ANY_VALUE}]  # beside a $ref, older drafts read no $id
        if "object" in names and "additionalProperties" not in schema:
            schema["additionalProperties"] = {"$ref": ANY_VALUE}
        if "array" in names and "items" not in schema and "additionalItems" not in schema:
            schema["items"] = {"$ref": ANY_VALUE}
    root.setdefault("definitions", {})[ANY_VALUE] = _any_value()


def _replace_true(schema: Schema) -> None:
    for key in HOLD_A_SCHEMA:
        if schema.get(key) is True:
            schema[key] = {"$ref": ANY_VALUE}
    for key in HOLD_A_LIST:
        if isinstance(listed := schema.get(key), list):
            schema[key] = [{"$ref": ANY_VALUE} if one is True else one for one in listed]
    for key in HOLD_NAMED:
        if isinstance(named := schema.get(key), dict):
            schema[key] = {name: {"$ref": ANY_VALUE} if one is True else one for name, one in named.items()}


def _any_value() -> Schema:
    again = {"$ref": ANY_VALUE}
    plain = [{"type": name} for name in ("string", "boolean", "null")]
    number = {"type": "number", "minimum": -MOST_NUMBER, "maximum": MOST_NUMBER}
    nested = [{"type": "array", "items": again}, {"type": "object", "additionalProperties": again}]
    # "id" is the older name of "$id" (draft 4), and means nothing in later drafts.
    return {"id": ANY_VALUE, "$id": ANY_VALUE, "anyOf": [*plain, number, *nested]}
