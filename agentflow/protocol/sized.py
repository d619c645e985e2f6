"""The measured size of what a server keeps for clients."""

from __future__ import annotations

import sys
from collections.abc import Iterable

import msgspec

_LEAVES = (str, bytes, bytearray, int, float, bool, type(None), msgspec.Raw)
_REST_OF_OBJECT = 16
"""Of each object: what the allocator rounds up, and the header of the garbage collector."""


def sized(*kept: object) -> int:
    """Measures the memory of objects and of all that they refer to, in bytes, each object once.

    Reads texts, numbers, the collections that JSON has, tuples, sets, structs of msgspec and objects with
    slots. Other objects count without what they refer to. Does not recurse, so any depth can be measured.
    """
    seen: set[int] = set()
    num_bytes = 0
    pending: list[object] = [*kept]
    while pending:
        one = pending.pop()
        if one is None or one is True or one is False or id(one) in seen:
            continue
        seen.add(id(one))
        num_bytes += sys.getsizeof(one) + _REST_OF_OBJECT
        if isinstance(one, msgspec.Raw):
            num_bytes += len(memoryview(one))
        elif not isinstance(one, _LEAVES):
            pending += _parts_of(one)
    return num_bytes


def _parts_of(one: object) -> Iterable[object]:
    if isinstance(one, dict):
        return (*one, *one.values())
    if isinstance(one, list | tuple | set | frozenset):
        return one
    names = getattr(type(one), "__struct_fields__", None) or getattr(type(one), "__slots__", None) or ()
    return [getattr(one, name, None) for name in ((names,) if isinstance(names, str) else names)]
