"""JSON schemas: keywords, nested schemas, references, formats, and the types and equality of values."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, TypeAlias
from urllib.parse import unquote

SchemaPath: TypeAlias = tuple[str, ...]
"""The keys that lead to a part of a schema."""

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
        "nullable",
    ]
)
"""Keywords that constrain nothing, with OpenAPI's."""

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
    | {*HOLD_A_SCHEMA, *HOLD_A_LIST, *HOLD_NAMED, "$recursiveRef"}
)
"""All keywords that readers may not ignore, from draft 4 to 2020-12, and ``ANNOTATIONS``."""

_LEAP_YEAR: Final = (
    "(?:[1-9][0-9](?:0[48]|[2468][048]|[13579][26])"  # every fourth year except centuries
    "|(?:1[26]|[2468][048]|[3579][26])00)"  # and every fourth century
)
_DAY_OF_MONTH: Final = (
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_DATE: Final = f"(?:[1-9][0-9]{{3}}-{_DAY_OF_MONTH}|{_LEAP_YEAR}-02-29)"
_CLOCK: Final = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?"
_OFFSET: Final = "(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_SECONDS: Final = "[0-9]{1,4}S"
_MINUTES: Final = f"[0-9]{{1,4}}M(?:{_SECONDS})?"
_HOURS: Final = f"[0-9]{{1,4}}H(?:{_MINUTES}|{_SECONDS})?"
_CLOCK_TIME: Final = f"T(?:{_HOURS}|{_MINUTES}|{_SECONDS})"


def _uuid(version: str = "[0-9a-f]", variant: str = "[89ab]") -> str:
    return f"[0-9a-f]{{8}}-[0-9a-f]{{4}}-{version}[0-9a-f]{{3}}-{variant}[0-9a-f]{{3}}-[0-9a-f]{{12}}"


PATTERN_OF_FORMAT: Final = {
    "date": _DATE,
    "time": _CLOCK + _OFFSET,
    "date-time": f"{_DATE}T{_CLOCK}{_OFFSET}",
    "duration": f"P(?:[0-9]{{1,4}}D(?:{_CLOCK_TIME})?|{_CLOCK_TIME})",
    "uuid": _uuid(variant="[0-9a-f]"),
    **{f"uuid{version}": _uuid(version) for version in "1345678"},
}
"""The patterns that strings of a ``format`` match as a whole. Narrower than the format if parsers differ:
years are 1000 to 9999, days exist in their month, seconds are below 60, durations have no weeks."""

NAIVE_PATTERN_OF_FORMAT: Final = {"time": f"^{_CLOCK}$", "date-time": f"^{_DATE}T{_CLOCK}$"}
"""The patterns of times without an offset, for which JSON schema has no format."""

FORMATS: Final = frozenset([*PATTERN_OF_FORMAT, "email", "hostname", "ipv4", "ipv6", "uri"])
"""All formats. For formats without a pattern here, llguidance has grammars."""

_MOST_REFERENCES: Final = 8
_INDEX: Final = re.compile("0|[1-9][0-9]{0,8}")
_ALONE: Final = ANNOTATIONS | {"$ref"}


_HOLD_SCHEMAS: Final = frozenset([*HOLD_A_SCHEMA, *HOLD_A_LIST, *HOLD_NAMED])
"""Most schemas have none of these keywords."""


def inner_schemas(schema: Mapping[str, Any]) -> list[Any]:
    """The members of ``schema`` that may be schemas, one level down. Some of them are not.

    >>> inner_schemas({"type": "array", "items": {"type": "null"}, "anyOf": [True]})
    [{'type': 'null'}, True]
    """
    return [one for _, one in inner_with_paths(schema)]


def inner_with_paths(schema: Mapping[str, Any]) -> list[tuple[SchemaPath, Any]]:
    """The same, each with the keys that lead to it.

    >>> inner_with_paths({"type": "array", "items": {"type": "null"}, "anyOf": [True]})
    [(('items',), {'type': 'null'}), (('anyOf', '0'), True)]
    """
    if _HOLD_SCHEMAS.isdisjoint(schema):
        return []
    inner: list[tuple[SchemaPath, Any]] = [((key,), schema[key]) for key in HOLD_A_SCHEMA if key in schema]
    for key in HOLD_A_LIST:
        if isinstance(listed := schema.get(key), list):
            inner += [((key, str(number)), one) for number, one in enumerate(listed)]
    for key in HOLD_NAMED:
        if isinstance(named := schema.get(key), dict):
            inner += [((key, name), one) for name, one in named.items()]
    return inner


def subschemas(schema: Any) -> Iterator[dict[str, Any]]:
    """The schema and all schemas in it."""
    pending = [schema]
    while pending:
        part = pending.pop()
        if isinstance(part, dict):
            yield part
            pending += inner_schemas(part)


def pointer_steps(reference: object) -> SchemaPath | None:
    """The keys to which a reference leads from the root of its schema. None if it is not a JSON pointer.

    >>> pointer_steps("#/$defs/a~1b"), pointer_steps("#"), pointer_steps("other.json")
    (('$defs', 'a/b'), (), None)
    """
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return None
    steps = unquote(reference[1:]).split("/")[1:]
    return tuple([step.replace("~1", "/").replace("~0", "~") for step in steps])


def find_part(path: SchemaPath, root: Any) -> Any:
    """The part of ``root`` to which the keys lead; None if there is none."""
    part = root
    for step in path:
        if isinstance(part, list) and _INDEX.fullmatch(step) and int(step) < len(part):
            part = part[int(step)]
        elif isinstance(part, dict) and step in part:
            part = part[step]
        else:
            return None
    return part


def resolved(schema: Any, root: Any) -> dict[str, Any]:
    """The schema, or the part of ``root`` that it refers to, if need be by references that say nothing else.
    Empty if it is not an object, refers to something else, or is at the end of a long chain of references."""
    for number in range(_MOST_REFERENCES):
        if not isinstance(schema, dict):
            return {}
        if not isinstance(reference := schema.get("$ref"), str) or (number and schema.keys() - _ALONE):
            return schema
        path = pointer_steps(reference)
        schema = None if path is None else find_part(path, root)
    return {}


def has_type(value: object, types: object) -> bool:
    """Whether a literal value is of one of the types."""
    names = types if isinstance(types, list) else [types]
    if value is None or isinstance(value, bool):
        return ("null" if value is None else "boolean") in names
    if isinstance(value, int):
        return "integer" in names or "number" in names
    of_type = {"string": str, "number": float, "object": dict, "array": list}
    return any(isinstance(value, kind) for name, kind in of_type.items() if name in names)


def canonical_text(value: Any) -> str:
    """The JSON text that equal values share: 1 and 1.0 are equal, and 1 and true are not."""
    return json.dumps(_plain(value), sort_keys=True)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return {key: _plain(item) for key, item in value.items()} if isinstance(value, dict) else value
