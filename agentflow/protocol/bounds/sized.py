"""Measures the memory of objects that a server keeps for clients."""

from __future__ import annotations

import sys
from collections.abc import Generator, Sequence

import msgspec

_NUMBERS = frozenset({int, float})
_CONSTANTS = frozenset({bool, type(None)})
_NUMBER_BYTES = 32
_TEXTS = frozenset({str, bytes, bytearray})
_REST_OF_OBJECT = 16
"""Per object: the allocator's rounding, and the header of the garbage collector."""


def sized(*kept: object) -> int:
    """Measures the memory of objects and of everything that they refer to, in bytes. Each object is counted
    once, but a number each time that it occurs.

    Reads texts, numbers, the collections that JSON has, tuples, sets, structs of msgspec and objects with
    slots. Other objects count without their references. Does not recurse, so any depth can be measured.
    """
    steps = sizing(*kept)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return int(end.value)


def sizing(*kept: object) -> Generator[None, None, int]:
    """``sized`` in steps of a millisecond or less."""
    seen: set[int] = set()
    num_bytes = 0
    num_left = _STEP
    pending: list[object] = [*kept]
    while pending:
        num_left -= 1
        if not num_left:
            num_left = _STEP
            yield
        one = pending.pop()
        kind = type(one)
        if kind in _NUMBERS:
            num_bytes += _NUMBER_BYTES
            continue
        if kind in _CONSTANTS or id(one) in seen:
            continue
        seen.add(id(one))
        num_bytes += sys.getsizeof(one) + _REST_OF_OBJECT
        if kind is msgspec.Raw:
            num_bytes += len(memoryview(one))  # type: ignore[arg-type]
        elif kind not in _TEXTS:
            parts = _list_parts(one)
            if len(parts) <= _MANY:
                pending += parts
                continue
            for first in range(0, len(parts), _SLICE):
                some = parts[first : first + _SLICE]
                kinds = list(map(type, some))
                num_numbers = sum(map(kinds.count, _NUMBERS))
                num_bytes += _NUMBER_BYTES * num_numbers
                if not num_numbers:
                    pending += some
                elif num_numbers < len(some):
                    pending += [part for part in some if type(part) not in _NUMBERS]
                if len(some) == _SLICE:
                    yield
    return num_bytes


_STEP = 1_000
"""The number of objects in one step."""
_MANY = 64
"""Numbers in a collection of more parts are counted together."""
_SLICE = 16_384
"""The number of parts of a collection in which numbers are counted in one step."""


def _list_parts(one: object) -> Sequence[object]:
    if isinstance(one, list | tuple):
        return one
    if isinstance(one, dict):
        return (*one, *one.values())
    if isinstance(one, set | frozenset):
        return tuple(one)
    names = getattr(type(one), "__struct_fields__", None) or getattr(type(one), "__slots__", None) or ()
    return [getattr(one, name, None) for name in ((names,) if isinstance(names, str) else names)]
