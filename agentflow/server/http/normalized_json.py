"""Accepts spellings of a request that the decoder refuses: whole numbers written as floats in integer fields,
such as ``8192.0``, and null for unknown members.

Some languages have one type of number, and write it with a decimal point. JSON does not distinguish ``8`` and
``8.0``, but the decoder does. Some serializers write null for each option that is not set, also for options
of other servers. Such a text is rewritten before it is decoded again.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec
import msgspec.inspect
from msgspec.inspect import DictType, FloatType, IntType, ListType, LiteralType, StructType

_MAX_INTEGER = 2.0**64  # the decoder's limit
_NUMBER = re.compile(rb"[-+.0-9eE]+")

type_info = cache(msgspec.inspect.type_info)


def options(type_: Any) -> list[Any]:
    """The types of a union, without their descriptions."""
    while isinstance(type_, msgspec.inspect.Metadata):
        type_ = type_.type
    types = type_.types if isinstance(type_, msgspec.inspect.UnionType) else [type_]
    return [one.type if isinstance(one, msgspec.inspect.Metadata) else one for one in types]


def normalized(data: bytes, kind: Any) -> bytes:
    """Rewrites whole numbers of integer fields as integers, and drops unknown members that are null. Parts
    that the type leaves undecoded stay unchanged.

    Args:
        data: the JSON.
        kind: the type that it should have.

    Returns:
        Equivalent JSON.

    Raises:
        msgspec.DecodeError: it is not valid JSON.

    >>> normalized(b'{"a": [1.0, 2.5, 3]}', dict[str, list[int]])
    b'{"a":[1, 2.5, 3]}'
    """
    shape = _find_shape(kind)
    return data if shape is None else _rewritten(data.strip(), shape)


@dataclass(frozen=True, slots=True)
class _Shape:
    """The parts of a value that are rewritten. ``structs``: by tag; without a ``tag_field`` there is at most
    one, under None. ``values``: of any member of an object. ``only_numbers``: the items of a list are
    numbers, or lists of them."""

    is_integer: bool
    structs: dict[Any, _Fields]
    tag_field: str | None
    values: _Shape | None
    items: _Shape | None
    only_numbers: bool


@dataclass(frozen=True, slots=True)
class _Fields:
    """The fields of a struct, and whether it forbids others."""

    shapes: dict[str, _Shape | None]
    is_closed: bool


@cache
def _find_shape(kind: Any) -> _Shape | None:
    return _shape(options(type_info(kind)))


def _shape(types: Sequence[Any]) -> _Shape | None:
    """The shape of a union; None if nothing in it is rewritten."""
    structs: dict[Any, _Fields] = {}
    tag_field = None
    values: list[Any] = []
    items: list[Any] = []
    for one in types:
        match one:
            case StructType():
                shapes = {field.encode_name: _shape(options(field.type)) for field in one.fields}
                structs[one.tag] = _Fields(shapes, one.forbid_unknown_fields)
                tag_field = one.tag_field
            case DictType():
                values += options(one.value_type)
            case ListType():
                items += options(one.item_type)
            case _:
                pass
    found = _Shape(
        is_integer=any(map(_is_integer, types)) and not any(isinstance(one, FloatType) for one in types),
        structs=structs,
        tag_field=tag_field,
        values=_shape(values) if values else None,
        items=_shape(items) if items else None,
        only_numbers=not any(isinstance(one, StructType | DictType) for one in items),
    )
    return found if found.is_integer or found.structs or found.values or found.items else None


def _is_integer(type_: Any) -> bool:
    return isinstance(type_, IntType) or (
        isinstance(type_, LiteralType) and any(isinstance(value, int) for value in type_.values)
    )


def _rewritten(data: bytes, shape: _Shape) -> bytes:
    match data[:1]:
        case b"{" if shape.structs or shape.values:
            return _object(data, shape)
        case b"[" if shape.items is not None:
            return _list(data, shape.items, shape.only_numbers)
        case b"{" | b"[" | b'"':
            return data
        case _:
            return _NUMBER.sub(_whole, data) if shape.is_integer else data


def _object(data: bytes, shape: _Shape) -> bytes:
    members = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    fields = _fields(members, shape)
    known = {} if fields is None else fields.shapes
    if fields is not None and fields.is_closed:
        known = known if shape.tag_field is None else known | {shape.tag_field: None}
        members = {name: it for name, it in members.items() if name in known or bytes(it) != b"null"}
    for name, value in members.items():
        inner = known.get(name, shape.values)
        if inner is not None:
            members[name] = msgspec.Raw(_rewritten(bytes(value), inner))
    return msgspec.json.encode(members)


def _fields(members: dict[str, msgspec.Raw], shape: _Shape) -> _Fields | None:
    """The fields of the struct that an object is. None if it is none, or its tag is unknown."""
    if shape.tag_field is None or shape.tag_field not in members:
        # The decoder needs a tag only where several structs are possible.
        return next(iter(shape.structs.values())) if len(shape.structs) == 1 else None
    try:
        return shape.structs.get(msgspec.json.decode(members[shape.tag_field], type=str | int))
    except msgspec.DecodeError:
        return None


def _list(data: bytes, items: _Shape, only_numbers: bool) -> bytes:
    if only_numbers and b'"' not in data:  # faster, since such a list may be long
        return _NUMBER.sub(_whole, data)
    parts = msgspec.json.decode(data, type=list[msgspec.Raw])
    return msgspec.json.encode([msgspec.Raw(_rewritten(bytes(part), items)) for part in parts])


def _whole(number: re.Match[bytes]) -> bytes:
    text = number[0]
    if text.lstrip(b"-").isdigit():
        return text
    try:
        value = float(text)
    except ValueError:  # part of a literal, such as the e of true
        return text
    return b"%d" % int(value) if value.is_integer() and abs(value) < _MAX_INTEGER else text
