"""Places in a schema where any value may stand: a definition of our own says what that is, so that the
numbers there, too, are such that readers take them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from agentflow.server.core.json_values import MOST_NUMBER
from agentflow.server.core.schema_keywords import ANNOTATIONS, HOLD_A_LIST, HOLD_A_SCHEMA, HOLD_NAMED

Schema = dict[str, Any]

NAME: Final = "any-value"
_REFERENCE: Final = f"#/$defs/{NAME}"


def define_any_value(root: Schema, subschemas: Iterable[Schema]) -> None:
    """Writes the definition into ``root``, and refers to it where a schema says nothing about a value.

    All is left as it is where such a reference would lead elsewhere (an ``$id`` inside of the schema).

    >>> define_any_value(schema := {"type": "array"}, [schema])
    >>> schema["items"]
    {'$ref': '#/$defs/any-value'}
    """
    inner = list(subschemas)
    if any("$id" in schema for schema in inner if schema is not root) or NAME in root.get("$defs", {}):
        return
    for schema in inner:
        _replace_true(schema)
        types = schema.get("type")
        names = types if isinstance(types, list) else [types]
        if not set(schema) - ANNOTATIONS:
            schema["$ref"] = _REFERENCE
        if "object" in names and "additionalProperties" not in schema:
            schema["additionalProperties"] = {"$ref": _REFERENCE}
        if "array" in names and "items" not in schema and "additionalItems" not in schema:
            schema["items"] = {"$ref": _REFERENCE}
    root.setdefault("$defs", {})[NAME] = _any_value()


def _replace_true(schema: Schema) -> None:
    for key in HOLD_A_SCHEMA:
        if schema.get(key) is True:
            schema[key] = {"$ref": _REFERENCE}
    for key in HOLD_A_LIST:
        if isinstance(listed := schema.get(key), list):
            schema[key] = [{"$ref": _REFERENCE} if one is True else one for one in listed]
    for key in HOLD_NAMED:
        if isinstance(named := schema.get(key), dict):
            schema[key] = {name: {"$ref": _REFERENCE} if one is True else one for name, one in named.items()}


def _any_value() -> Schema:
    again = {"$ref": _REFERENCE}
    plain = [{"type": name} for name in ("string", "boolean", "null")]
    number = {"type": "number", "minimum": -MOST_NUMBER, "maximum": MOST_NUMBER}
    nested = [{"type": "array", "items": again}, {"type": "object", "additionalProperties": again}]
    return {"anyOf": [*plain, number, *nested]}
