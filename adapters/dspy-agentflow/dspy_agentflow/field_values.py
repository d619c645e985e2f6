"""What the value of an output field looks like, in the text that an adapter reads it from."""

from __future__ import annotations

import enum
import inspect
import json
import re
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, Final, Literal, Union, get_args, get_origin

import dspy
import pydantic

# Free text in an answer with headers: ``[[ ##`` begins a header, and nothing else. What follows a bracket is
# read up to where it can be none, which may be after others that began one.
_BRACKETS: Final = r"(?:\[\[+ #?)*\[(?:[^\[]|\[+(?:[^\[ ]| (?:[^\[#]|#[^\[#])))"
_PROSE: Final = rf"(?:[^\s\[]|{_BRACKETS})(?:[^\[]|{_BRACKETS})*"
_SHORT_PROSE: Final = r"[^\s\[](?:[^\[]){0,80}"
_STRING_CHAR: Final = r'(?:[^"\\\x00-\x1f\x7f]|\\["\\/bfnrt])'
_NUMBERS: Final = {
    int: r"-?(?:0|[1-9][0-9]{0,17})",
    float: r"-?(?:0|[1-9][0-9]{0,14})(?:\.[0-9]{1,9})?",
}
_SHORT_STRING: Final = 30
_TEXT_TYPES: Final = ("Reasoning", "Code")


@dataclass(frozen=True)
class FieldValue:
    """``schema`` of JSON, or a ``regex``. ``is_text``: free text, which may end anywhere; ``short`` is the
    regular expression of one that has to end soon."""

    schema: dict[str, Any] | None = None
    regex: str = ""
    short: str = ""
    is_text: bool = False


def chat_value(annotation: Any) -> FieldValue:
    """As ``dspy.ChatAdapter`` reads it: text as it is, and JSON of what is more than a word or number."""
    if _is_text(annotation) or _may_be_text(annotation):
        return FieldValue(regex=_PROSE, short=_SHORT_PROSE, is_text=True)
    words = _words(annotation)
    if words is not None:
        return FieldValue(regex="(?:" + "|".join([re.escape(word) for word in words]) + ")")
    if annotation in _NUMBERS:
        return FieldValue(regex=_NUMBERS[annotation])
    return FieldValue(schema=schema_of(annotation))


def json_value(annotation: Any) -> FieldValue:
    """As ``dspy.JSONAdapter`` reads it."""
    if _is_text(annotation):
        return FieldValue(regex=f'"{_STRING_CHAR}*"', short=f'"{_STRING_CHAR}{{0,80}}"', is_text=True)
    return FieldValue(schema=schema_of(annotation))


def schema_of(annotation: Any) -> dict[str, Any]:
    """The JSON schema of a field's values. pydantic's errors where it has none."""
    if _is_text(annotation):
        return {"type": "string"}
    if inspect.isclass(annotation) and issubclass(annotation, enum.Enum):
        return {"enum": _words(annotation)}
    return dict(_closed(pydantic.TypeAdapter(annotation).json_schema()))


def _closed(schema: Any) -> Any:
    """With no members that nobody has declared: a model might go on inventing them."""
    if isinstance(schema, list):
        return [_closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: _closed(part) for key, part in schema.items()}
    if schema.get("type") == "object" and isinstance(schema.get("properties"), dict):
        found.setdefault("additionalProperties", False)
    return found


def short_schema(schema: Any) -> Any:
    """One whose values end soon: short texts, short lists, no members that nobody has declared."""
    if not isinstance(schema, dict) or not schema:
        return {"type": "string", "maxLength": _SHORT_STRING} if schema in (True, {}) else schema
    if schema.keys() & {"enum", "const"}:
        return schema
    found = dict(schema)
    for key in ("properties", "$defs"):
        if key in schema:
            found[key] = {name: short_schema(part) for name, part in schema[key].items()}
    for key in ("anyOf", "oneOf", "allOf", "prefixItems"):
        if key in schema:
            found[key] = [short_schema(part) for part in schema[key]]
    if "items" in schema:
        found["items"] = short_schema(schema["items"])
    match schema.get("type"):
        case "string" if not schema.keys() & {"pattern", "format", "minLength"}:
            found.setdefault("maxLength", _SHORT_STRING)
        case "array":
            found.setdefault("maxItems", max(2, schema.get("minItems", 0)))
        case "object" if "properties" not in schema:
            found |= {"properties": {}, "additionalProperties": False}
    return found


def _is_text(annotation: Any) -> bool:
    if annotation is str:
        return True
    named = [getattr(dspy, name, None) for name in _TEXT_TYPES]
    return inspect.isclass(annotation) and annotation in named


def _may_be_text(annotation: Any) -> bool:
    """``str | None`` and the like: what stands there is taken as it is."""
    return get_origin(annotation) in (Union, UnionType) and {str, NoneType} <= set(get_args(annotation))


def _words(annotation: Any) -> list[str] | None:
    """Of a type that has few values: what they are called."""
    if annotation is bool:
        return ["True", "False"]
    if inspect.isclass(annotation) and issubclass(annotation, enum.Enum):
        return [member.value if isinstance(member.value, str) else member.name for member in annotation]
    if get_origin(annotation) is Literal:
        values = get_args(annotation)
        return [str(value) for value in values] if all(isinstance(value, str) for value in values) else None
    return None


def escaped(literal: str) -> str:
    """As part of a regular expression."""
    return "".join(
        [r"\n" if char == "\n" else char if char in '" #' else re.escape(char) for char in literal]
    )


def quoted(text: str) -> str:
    """As JSON."""
    return json.dumps(text, ensure_ascii=False)
