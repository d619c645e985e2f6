"""The subset of JSON schema that OpenAI's strict structured outputs keep.

In the subset every object lists its properties, requires all of them and allows no others. A schema is
narrowed to that: each value of the narrowed schema is a value of the given one. A schema that cannot be
narrowed is rejected, because the provider would ignore a part of it or refuse the request.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec

from agentflow.errors import NotSupported
from agentflow.protocol.schemas.walk import resolved, subschemas

MEMBER = "value"
"""The member that holds a value which is not an object."""

_ENFORCED = (
    "pattern",
    "format",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "multipleOf",
    "minItems",
    "maxItems",
)
"""The bounds of values that the subset has."""
STRUCTURE = {
    "type",
    "properties",
    "required",
    "additionalProperties",
    "items",
    "enum",
    "const",
    "anyOf",
    "$ref",
    "$defs",
    "definitions",
    "title",
    "description",
}
"""The keywords of any subset that a provider enforces."""
_ANNOTATIONS = {
    "default",
    "examples",
    "example",
    "deprecated",
    "readOnly",
    "writeOnly",
    "discriminator",
    "$schema",
    "$id",
    "$comment",
}
_LENGTHS = ("minLength", "maxLength", "minProperties", "maxProperties", "uniqueItems")
_BOUNDS = (*_LENGTHS, *_ENFORCED)
_BEFORE_VALUE = re.compile(r"\s*\{\s*\"" + MEMBER + r"\"\s*:\s*")
_AFTER_VALUE = re.compile(r"\s*\}\s*\Z")

Unwrap = Callable[[str], str]


class StrictSchema(NamedTuple):
    """A schema in the subset. ``unwrap`` takes the value out of the answer's text if the schema was put into
    an object."""

    schema: dict[str, Any]
    unwrap: Unwrap | None


def strict_schema(schema: dict[str, Any]) -> StrictSchema:
    """The schema, narrowed to the subset. ``NotSupported`` if that is not possible.

    >>> found = strict_schema({"type": "object", "properties": {"a": {"type": "integer", "default": 1}}})
    >>> found.schema["properties"], found.schema["required"], found.schema["additionalProperties"]
    ({'a': {'type': 'integer'}}, ['a'], False)
    >>> found = strict_schema({"type": "integer"})
    >>> found.schema["properties"], found.unwrap('{"value": 12}')
    ({'value': {'type': 'integer'}}, '12')
    """
    root = copy.deepcopy(schema)
    if root.keys() <= {"$ref", "$defs", "definitions"} and (target := resolved(root, root)):
        root = {**target, **{key: part for key, part in root.items() if key != "$ref"}}
    if root.get("type") == "object" and "anyOf" not in root and "oneOf" not in root and "$ref" not in root:
        return StrictSchema(_narrowed(root, root), None)
    definitions: dict[str, Any] = {name: root.pop(name) for name in ("$defs", "definitions") if name in root}
    if _refers_to_root(root) or _refers_to_root(definitions):
        raise _unsupported("a reference to the root of a schema that is not an object")
    whole: dict[str, Any] = {"type": "object", "properties": {MEMBER: root}}
    whole.update(definitions)
    return StrictSchema(_narrowed(whole, whole), unwrapped)


def relaxations(source: str) -> Iterator[str]:
    """Schemas that each value of a schema satisfies too, and that APIs enforce more often: without the
    lengths of strings, then without any bounds.

    >>> list(relaxations('{"type":"integer","minimum":1}'))
    ['{"type":"integer"}']
    """
    given = schema = msgspec.json.decode(source)
    for keywords in (_LENGTHS, _BOUNDS):
        found = copy.deepcopy(given)
        for part in list(subschemas(found)):
            for keyword in keywords:
                part.pop(keyword, None)
        if found != schema:
            schema = found
            yield msgspec.json.encode(found).decode()


def is_strict(schema: dict[str, Any]) -> bool:
    """Whether the schema of a tool's parameters can be narrowed to the subset."""
    try:
        return strict_schema(schema).unwrap is None
    except NotSupported:
        return False


def enum_schema(choices: tuple[str, ...]) -> dict[str, Any]:
    """The schema of one of several texts, in the object from which ``unwrapped`` takes it."""
    member = {"type": "string", "enum": list(choices)}
    return {
        "type": "object",
        "properties": {MEMBER: member},
        "required": [MEMBER],
        "additionalProperties": False,
    }


def unwrapped(text: str) -> str:
    """The text of the member's value, also in an object that is not complete.

    >>> unwrapped('{"value": [1, 2]}'), unwrapped('{"value": [1,')
    ('[1, 2]', '[1,')
    """
    begin = _BEFORE_VALUE.match(text)
    inner = text[begin.end() :] if begin else ""
    return _AFTER_VALUE.sub("", inner, count=1)


def _narrowed(schema: Any, root: dict[str, Any]) -> Any:
    if schema is True or schema == {}:
        raise _unsupported("a value of any type")
    if not isinstance(schema, dict):
        raise _unsupported("a schema that no value satisfies")
    found = {key: value for key, value in schema.items() if key not in _ANNOTATIONS}
    if "oneOf" in found and "anyOf" not in found:
        if not _exclude_each_other(found["oneOf"], root):
            raise _unsupported("oneOf, unless its options differ in the constant of one member")
        found["anyOf"] = found.pop("oneOf")
    for key in found:
        if key not in STRUCTURE and key not in _ENFORCED:
            raise _unsupported(repr(key))
    if "$ref" in found:
        found = {key: found[key] for key in ("$ref", "$defs", "definitions") if key in found}
    for key in ("$defs", "definitions"):
        if key in found:
            found[key] = {name: _narrowed(part, root) for name, part in found[key].items()}
    if "anyOf" in found:
        found["anyOf"] = [_narrowed(part, root) for part in found["anyOf"]]
    if "items" in found:
        found["items"] = _narrowed(found["items"], root)
    kinds = found.get("type", ())
    if kinds == "array" and "items" not in found:
        raise _unsupported("a list of any values")
    if kinds == "object" or "object" in kinds or "properties" in found:
        members = found.get("properties", {})
        if isinstance(found.get("additionalProperties"), dict) or (
            not members and found.get("additionalProperties") is not False
        ):
            raise _unsupported("an object with free names")
        found["properties"] = {name: _narrowed(part, root) for name, part in members.items()}
        unknown = [name for name in found.get("required", ()) if name not in members]
        if unknown:
            raise _unsupported(f"the required member {unknown[0]!r} without a schema")
        found["required"] = list(members)
        found["additionalProperties"] = False
    return found


def _exclude_each_other(options: list[Any], root: dict[str, Any]) -> bool:
    """Whether one member has another constant in each option."""
    members = [resolved(option, root).get("properties", {}) for option in options]
    for name in members[0] if members else ():
        parts = [part.get(name) for part in members]
        if all(isinstance(part, dict) and "const" in part for part in parts):
            constants = [repr(part["const"]) for part in parts]
            return len(set(constants)) == len(constants)
    return False


def _refers_to_root(schema: Any) -> bool:
    if isinstance(schema, dict):
        reference = schema.get("$ref")
        if isinstance(reference, str) and not reference.startswith(("#/$defs/", "#/definitions/")):
            return True
        return any(_refers_to_root(part) for part in schema.values())
    return isinstance(schema, list) and any(_refers_to_root(part) for part in schema)


def _unsupported(what: str) -> NotSupported:
    return NotSupported(
        f"strict structured outputs do not support {what}: change the schema, or set "
        'on_unsupported="retry" to have answers checked and asked for again'
    )
