"""Sets of characters as rows over the bytes of UTF-8: which byte leads from where to where.

>>> utf8_rows(((0x61, 0x7A, 1), (0xE9, 0xE9, 2)))  # a to z, and é, which is C3 A9
(((97, 122, 1), (195, 195, 3)), ((169, 169, 2),))
"""

from __future__ import annotations

from functools import lru_cache
from typing import TypeAlias

Row: TypeAlias = "tuple[tuple[int, int, int], ...]"
"""First byte, last byte, where they lead to."""

_LEADS = ((0x80, 0x7FF, 0xC0, 1), (0x800, 0xFFFF, 0xE0, 2), (0x10000, 0x10FFFF, 0xF0, 3))
"""First and last code point of a length, what its first byte is counted from, how many bytes follow."""


@lru_cache(maxsize=4096)
def utf8_rows(labelled: Row) -> tuple[Row, ...]:
    """The rows that read one character. ``labelled``: code points from, to, and their label; sorted,
    disjoint, without surrogates, labels from 1 to their number. The first row reads the first byte. A byte
    leads to a label, where the character is over, or to the label number plus the index of the row that
    reads on. Equal rows are one."""
    builder = _RowBuilder(max([label for _, _, label in labelled]))
    first: list[tuple[int, int, int]] = []
    for low, high, label in labelled:
        if low < 0x80:
            first.append((low, min(high, 0x7F), label))
    for low, high, lead, num_bytes in _LEADS:
        inside = [
            (max(start, low), min(end, high), label)
            for start, end, label in labelled
            if start <= high and end >= low
        ]
        if inside:
            first.extend(builder.row(inside, 0, num_bytes, lead))
    return (_joined(first), *builder.rows)


class _RowBuilder:
    def __init__(self, num_labels: int) -> None:
        self.rows: list[Row] = []
        self._num_labels = num_labels
        self._index_of: dict[Row, int] = {}

    def row(self, labelled: list[tuple[int, int, int]], base: int, num_bytes: int, lead: int) -> Row:
        """The row for the code points from ``base`` on, of which each byte value has 64 ** ``num_bytes``."""
        if num_bytes == 0:
            return _joined([(lead + low - base, lead + high - base, label) for low, high, label in labelled])
        span = 64**num_bytes
        found: list[tuple[int, int, int]] = []
        split: dict[int, list[tuple[int, int, int]]] = {}  # those that share their byte with others
        for low, high, label in labelled:
            first, last = (low - base) // span, (high - base) // span
            if base + first * span < low:
                end = min(high, base + (first + 1) * span - 1)
                split.setdefault(first, []).append((low, end, label))
                first += 1
            if first <= last and high < base + (last + 1) * span - 1:
                split.setdefault(last, []).append((base + last * span, high, label))
                last -= 1
            if first <= last:
                found.append((lead + first, lead + last, self._whole(label, num_bytes)))
        for byte, inside in split.items():
            below = self.row(inside, base + byte * span, num_bytes - 1, 0x80)
            found.append((lead + byte, lead + byte, self._number(below)))
        return _joined(sorted(found))

    def _whole(self, label: int, num_bytes: int) -> int:
        """Where any such number of further bytes leads to the label."""
        target = label
        for _ in range(num_bytes):
            target = self._number(((0x80, 0xBF, target),))
        return target

    def _number(self, row: Row) -> int:
        index = self._index_of.get(row)
        if index is None:
            self.rows.append(row)
            index = self._index_of[row] = len(self.rows)
        return self._num_labels + index


def _joined(entries: list[tuple[int, int, int]]) -> Row:
    """With neighbours that lead to the same place made one."""
    joined: list[tuple[int, int, int]] = []
    for first, last, target in entries:
        if joined and joined[-1][1] + 1 == first and joined[-1][2] == target:
            joined[-1] = (joined[-1][0], last, target)
        else:
            joined.append((first, last, target))
    return tuple(joined)
