"""The JSON body of a request: decoded into a type, with errors that contain the field.

The messages of msgspec contain the path of a fault. They become the errors of the APIs here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec
import msgspec.inspect

from agentflow.protocol.bounds.json_bounds import JsonScan, TooMuchJson
from agentflow.protocol.unreadable import HALF_PAIR, UNREADABLE, json_fault
from agentflow.server.errors import MAX_PARAM_CHARS, ApiError, truncated
from agentflow.server.http.normalized_json import normalized, options, type_info

T = TypeVar("T")
# Smaller bodies are not charged to the memory budget, so they are served even when large ones fill it. They
# are decoded without a thread.
SMALL_BODY_BYTES = 32_768
_UNKNOWN = "Object contains unknown field `"
_MISSING = "Object missing required field `"
_GOT_FLOAT = "got `float`"
# Beginnings of msgspec's messages.
_BAD_CHOICES = ("Invalid value '", "Invalid enum value '")
ALLOWED = "; allowed: "
"""Separates a message from the allowed values."""


def decoded(data: bytes | bytearray | msgspec.Raw, kind: type[T], param: str = "") -> T:
    """Decodes the body of a request, or its field ``param``. ``ApiError`` if it does not have this
    type. A member that is null is a member that was left out, also if its name is unknown."""
    try:
        try:
            return msgspec.json.decode(data, type=kind)
        except msgspec.ValidationError as error:
            if _GOT_FLOAT not in str(error) and not str(error).startswith(_UNKNOWN):
                raise
            return msgspec.json.decode(normalized(bytes(data), kind), type=kind)
    except msgspec.ValidationError as error:
        message, field = shown_fault(error, kind, param)
        raise ApiError(400, "invalid_request", message, param=field) from None
    except UNREADABLE as error:
        fault = json_fault(bytes(data), error)
        raise not_json(fault, _half_pair_param(data, param) if fault == HALF_PAIR else None) from None


def not_json(fault: object, param: str | None = None) -> ApiError:
    """The error for a body that is not valid JSON. ``param``: the field of the fault."""
    at = f" in {param}" if param else ""
    return ApiError(400, "invalid_json", f"the body is not valid JSON: {fault}{at}", param=param)


def _half_pair_param(data: bytes | bytearray | msgspec.Raw, param: str) -> str | None:
    """The field of the first string with half a surrogate pair."""
    try:
        inside = [iter([(param, json.loads(bytes(data)))])]  # accepts halves
    except (ValueError, RecursionError):
        return None
    steps: list[str] = []  # to a value; joined only at the end, since each may be as long as the body
    while inside:
        for step, value in inside[-1]:
            steps[len(inside) - 1 :] = [step]
            match value:
                case str() if not _is_unicode(value):
                    return "".join(steps).lstrip(".") or None
                case list():
                    inside.append(iter((f"[{i}]", item) for i, item in enumerate(value)))
                    break
                case dict():
                    if not all(map(_is_unicode, value)):
                        return "".join(steps).lstrip(".") or None
                    inside.append(iter((f".{name}", item) for name, item in value.items()))
                    break
                case _:
                    pass
        else:
            inside.pop()
    return None


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def too_large(limit: int) -> ApiError:
    """The error for a body of more than ``limit`` bytes."""
    return ApiError(413, "request_too_large", f"the body has more than {limit:,} bytes, which is the limit")


def count_values(scan: JsonScan, piece: bytes) -> None:
    """Counts the values in the next piece of a body. ``ApiError`` if there are too many."""
    try:
        scan.push(piece)
    except TooMuchJson as error:
        text = f"the body has {error}, which is the limit"
        raise ApiError(413, "request_too_large", text) from None


def shown_fault(error: msgspec.ValidationError, kind: Any, within: str) -> tuple[str, str | None]:
    """The message and the field of an error. msgspec appends the path, such as `$.a[0]`, or `key` in `$.a`
    for a name within a field. ``within``: the prefix of all paths. The client's names and values are
    truncated, since they can be as long as the body."""
    text, has_path, path = str(error).rpartition(" - at `")
    if not has_path:
        text, path = str(error), ""
    path = truncated(path, MAX_PARAM_CHARS)
    is_key = path.startswith("key` in `")
    at = path.removeprefix("key` in `").rstrip("`").lstrip("$")
    at = f"{within}{at}".lstrip(".")
    if text.startswith(_UNKNOWN):
        field = _field(at, text.removeprefix(_UNKNOWN))
        return f"the parameter {field!r} is unknown", field
    if text.startswith(_MISSING):
        field = _field(at, text.removeprefix(_MISSING))
        return f"the required parameter {field!r} is missing", field
    is_choice = text.startswith(_BAD_CHOICES)
    text = truncated(text, MAX_PARAM_CHARS)
    if is_choice and (allowed := _allowed(kind, path)):
        text += ALLOWED + ", ".join(map(repr, allowed))
    of_key = "a key: " if is_key else ""
    return (f"{at}: {of_key}{text}" if at else text), at or None


def _allowed(kind: Any, path: str) -> list[str]:
    """The names that are allowed at this path of a msgspec error."""
    found: list[Any] = [type_info(kind)]
    for step in _STEPS.findall(path.removeprefix("$")):
        found = [inner for one in found for inner in _inside(one, step)]
    values = [value for one in found for type_ in options(one) for value in getattr(type_, "values", ())]
    return sorted({value for value in values if isinstance(value, str)})


_STEPS = re.compile(r"\[[^]]*\]|[^.[\]`]+")


def _inside(type_: Any, step: str) -> Iterator[Any]:
    """The types of a member, or of a list's items. A tag field has its struct's tag as the only value."""
    for one in options(type_):
        if isinstance(one, msgspec.inspect.ListType) and step.startswith("["):
            yield one.item_type
        elif isinstance(one, msgspec.inspect.StructType):
            yield from [field.type for field in one.fields if field.encode_name == step]
            if one.tag_field == step:
                yield msgspec.inspect.LiteralType((one.tag,))


def _field(at: str, name: str) -> str:
    return truncated(f"{at}.{name.removesuffix('`')}".lstrip("."), MAX_PARAM_CHARS)
