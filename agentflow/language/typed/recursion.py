"""Bounds the depth of recursive types, which a model may nest until its tokens are used up."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

from agentflow.protocol.schemas.walk import HOLD_A_LIST, HOLD_A_SCHEMA, HOLD_NAMED

JsonSchema: TypeAlias = dict[str, Any]

DEFAULT_DEPTH: Final = 8
"""The nesting of the values of a recursive type."""

_MOST_CHARS: Final = 100_000
_PREFIX: Final = "#/$defs/"


def with_bounded_depth(schema: JsonSchema, depth: int = DEFAULT_DEPTH) -> JsonSchema:
    """The schema of a type, with a copy of its recursive definitions for each level. The last level contains
    no further values of the type: lists are empty there, options and optional members are left out. The
    schema itself if it is not recursive, has no value of that depth, or would be too large."""
    definitions = schema.get("$defs", {})
    # In the order of the definitions: equal types have equal schemas in each process.
    recursive = [name for name in definitions if _reaches(name, name, definitions)]
    others = [name for name in definitions if name not in recursive]
    if not recursive:
        return schema
    found: JsonSchema = {}
    for level in range(depth, 0, -1):
        for name in recursive:
            found[f"{name}.{level}"] = None
        deeper = {name: level + 1 for name in recursive if found.get(f"{name}.{level + 1}") is not None}
        for name in recursive:
            found[f"{name}.{level}"] = _leveled(definitions[name], recursive, deeper)
    first = {name: 1 for name in recursive if found[f"{name}.1"] is not None}
    for name in others:
        found[name] = _leveled(definitions[name], recursive, first)
    root = {key: value for key, value in schema.items() if key != "$defs"}
    bounded = _leveled(root, recursive, first)
    if not isinstance(bounded, dict) or any(found[name] is None for name in others):
        return schema
    bounded["$defs"] = {name: one for name, one in found.items() if one is not None}
    return bounded if len(json.dumps(bounded)) <= _MOST_CHARS else schema


def _reaches(start: str, wanted: str, definitions: JsonSchema) -> bool:
    seen: set[str] = set()
    pending = [start]
    while pending:
        for name in _references(definitions.get(pending.pop())):
            if name == wanted:
                return True
            if name not in seen:
                seen.add(name)
                pending.append(name)
    return False


def _references(schema: Any) -> list[str]:
    """The names of the definitions that the schema refers to."""
    if isinstance(schema, list):
        return [name for one in schema for name in _references(one)]
    if not isinstance(schema, dict):
        return []
    own = schema.get("$ref")
    found = [own.removeprefix(_PREFIX)] if isinstance(own, str) else []
    for key in (*HOLD_A_SCHEMA, *HOLD_A_LIST):
        found += _references(schema.get(key))
    for key in HOLD_NAMED:
        found += _references([*schema[key].values()] if isinstance(schema.get(key), dict) else None)
    return found


def _leveled(schema: Any, recursive: Sequence[str], levels: dict[str, int]) -> Any:
    """The schema with references to these levels of the recursive definitions. None if it has no value,
    because it requires a definition that has no level."""
    if not isinstance(schema, dict):
        return copy.deepcopy(schema)
    found = dict(schema)
    name = str(found.get("$ref", "")).removeprefix(_PREFIX)
    if name in recursive:
        if name not in levels:
            return None
        found["$ref"] = f"{_PREFIX}{name}.{levels[name]}"
    for key in ("anyOf", "oneOf"):
        if key in found:
            found[key] = [
                one for one in (_leveled(one, recursive, levels) for one in found[key]) if one is not None
            ]
            if not found[key]:
                return None
    for key in ("allOf", "prefixItems"):
        if key in found:
            found[key] = [_leveled(one, recursive, levels) for one in found[key]]
            if None in found[key]:
                return None
    if "properties" in found:
        members = {key: _leveled(one, recursive, levels) for key, one in found["properties"].items()}
        if any(members.get(key, True) is None for key in found.get("required", [])):
            return None
        if None in members.values():
            found.setdefault("additionalProperties", False)
        found["properties"] = {key: one for key, one in members.items() if one is not None}
    if isinstance(found.get("additionalProperties"), dict):
        others = _leveled(found["additionalProperties"], recursive, levels)
        found["additionalProperties"] = False if others is None else others
    if isinstance(found.get("items"), dict):
        found["items"] = _leveled(found["items"], recursive, levels)
        if found["items"] is None:
            if found.get("minItems", 0) > len(found.get("prefixItems", [])):
                return None
            found |= {"items": False, "maxItems": len(found.get("prefixItems", []))}
    return found
