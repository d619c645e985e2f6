"""Accepts whole numbers that are written as floats, such as ``8192.0``, in integer fields of a request.

Some languages have one type of number, and write it with a decimal point. JSON does not distinguish ``8`` and
``8.0``, but the decoder does, so the text of integer fields is rewritten before it is decoded again.
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


def with_whole_numbers(data: bytes, kind: Any) -> bytes:
    """Rewrites whole numbers of integer fields as integers. Parts that the type leaves undecoded stay
    unchanged.

    Args:
        data: the JSON.
        kind: the type that it should have.

    Returns:
        Equivalent JSON.

    Raises:
        msgspec.DecodeError: it is not valid JSON.

    >>> with_whole_numbers(b'{"a": [1.0, 2.5, 3]}', dict[str, list[int]])
    b'{"a":[1, 2.5, 3]}'
    """
    integers = _find_integers(kind)
    return data if integers is None else _rewritten(data.strip(), integers)


@dataclass(frozen=True, slots=True)
class _Integers:
    """Where a value has integers: itself, members of an object by name, any of its members, items of a list.
    ``only_numbers``: the items are numbers, or lists of them."""

    is_integer: bool
    members: dict[str, _Integers]
    values: _Integers | None
    items: _Integers | None
    only_numbers: bool


@cache
def _find_integers(kind: Any) -> _Integers | None:
    return _integers(options(type_info(kind)))


def _integers(types: Sequence[Any]) -> _Integers | None:
    """Where a union has integers; None if it has none."""
    if not types:
        return None
    fields: dict[str, list[Any]] = {}
    values, items = [], []
    for one in types:
        match one:
            case StructType():
                for field in one.fields:
                    fields.setdefault(field.encode_name, []).extend(options(field.type))
            case DictType():
                values += options(one.value_type)
            case ListType():
                items += options(one.item_type)
            case _:
                pass
    found = _Integers(
        is_integer=any(map(_is_integer, types)) and not any(isinstance(one, FloatType) for one in types),
        members={name: inner for name, given in fields.items() if (inner := _integers(given))},
        values=_integers(values),
        items=_integers(items),
        only_numbers=not any(isinstance(one, StructType | DictType) for one in items),
    )
    return found if found.is_integer or found.members or found.values or found.items else None


def _is_integer(type_: Any) -> bool:
    return isinstance(type_, IntType) or (
        isinstance(type_, LiteralType) and any(isinstance(value, int) for value in type_.values)
    )


def _rewritten(data: bytes, integers: _Integers) -> bytes:
    match data[:1]:
        case b"{" if integers.members or integers.values:
            return _object(data, integers)
        case b"[" if integers.items is not None:
            return _list(data, integers.items, integers.only_numbers)
        case b"{" | b"[" | b'"':
            return data
        case _:
            return _NUMBER.sub(_whole, data) if integers.is_integer else data


def _object(data: bytes, integers: _Integers) -> bytes:
    members = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    for name, value in members.items():
        inner = integers.members.get(name, integers.values)
        if inner is not None:
            members[name] = msgspec.Raw(_rewritten(bytes(value), inner))
    return msgspec.json.encode(members)


def _list(data: bytes, integers: _Integers, only_numbers: bool) -> bytes:
    if only_numbers and b'"' not in data:  # faster, since such a list may be long
        return _NUMBER.sub(_whole, data)
    items = msgspec.json.decode(data, type=list[msgspec.Raw])
    return msgspec.json.encode([msgspec.Raw(_rewritten(bytes(item), integers)) for item in items])


def _whole(number: re.Match[bytes]) -> bytes:
    text = number[0]
    if text.lstrip(b"-").isdigit():
        return text
    try:
        value = float(text)
    except ValueError:  # part of a literal, such as the e of true
        return text
    return b"%d" % int(value) if value.is_integer() and abs(value) < _MAX_INTEGER else text
