"""Sets of characters as ranges of code points."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Final, TypeAlias

Ranges: TypeAlias = "tuple[tuple[int, int], ...]"
"""Ranges of code points, both ends inclusive: sorted, disjoint, not adjacent."""

MAX_CODE_POINT: Final = 0x10FFFF


def merge_ranges(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Sorts the ranges and merges overlapping and adjacent ones, so that equal sets have equal ranges.

    >>> merge_ranges([(0x61, 0x66), (0x30, 0x39), (0x67, 0x7A)])
    ((48, 57), (97, 122))
    """
    kept: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if kept and first <= kept[-1][1] + 1:
            kept[-1] = (kept[-1][0], max(last, kept[-1][1]))
        else:
            kept.append((first, last))
    return tuple(kept)


def all_but(ranges: Ranges) -> Ranges:
    """Returns the code points that are not in the ranges.

    >>> all_but(((0, 0x1F), (0x22, 0x22), (0x5C, 0x5C)))
    ((32, 33), (35, 91), (93, 1114111))
    """
    edges = [-1, *itertools.chain.from_iterable(ranges), MAX_CODE_POINT + 1]
    gaps = [(edges[at] + 1, edges[at + 1] - 1) for at in range(0, len(edges), 2)]
    return tuple([(first, last) for first, last in gaps if first <= last])


def without_surrogates(ranges: Ranges) -> Ranges:
    """Returns the ranges without surrogates, which UTF-8 text cannot contain.

    >>> without_surrogates(((0xD000, 0xE000),))
    ((53248, 55295), (57344, 57344))
    """
    kept: list[tuple[int, int]] = []
    for first, last in ranges:
        if last < 0xD800 or first > 0xDFFF:
            kept.append((first, last))
            continue
        below, above = (first, min(last, 0xD7FF)), (max(first, 0xE000), last)
        kept += [part for part in (below, above) if part[0] <= part[1]]
    return tuple(kept)
