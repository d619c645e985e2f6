"""How much a JSON text holds, counted while it arrives: before any object is made of it.

Decoding holds the interpreter's lock for the whole of a text, and takes up to a hundred times as long for
a megabyte of empty lists as for a megabyte of prose. So a limit of bytes does not bound it: values are
counted first, in pieces, between which the event loop goes on. The count relies on nothing but quotes and
backslashes; a text that is no JSON gets some count, and is refused by its decoder.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

PIECE_BYTES: Final = 64 * 1024
"""So much is counted in about half a millisecond."""
_NOT_BRACKETS: Final = bytes(byte for byte in range(256) if byte not in b"[]{}")


@dataclass(frozen=True, slots=True)
class JsonBounds:
    """``values``: of any kind. ``parts``: objects, lists and strings, names of members among them, which
    become objects of their own. ``depth``: objects and lists inside each other."""

    values: int
    parts: int
    depth: int | None = None


BODY_BOUNDS: Final = JsonBounds(values=1_000_000, parts=100_000)
"""Of a request: decoding takes 50 ms at most."""


class TooMuchJson(Exception):
    """The text exceeds a bound; the message names it."""


class JsonScan:
    """Counts one text, piece by piece.

    >>> scan = JsonScan(JsonBounds(values=100, parts=3))
    >>> scan.push(b'{"a": [1, 2, ')
    >>> scan.push(b'"b"]}')
    Traceback (most recent call last):
    agentflow.protocol.json_bounds.TooMuchJson: more than 3 objects, lists and strings
    """

    def __init__(self, bounds: JsonBounds) -> None:
        self._bounds = bounds
        self._is_in_string = False
        self._carry = b""
        self._num_values = 0
        self._num_parts = 0
        self._depth = 0

    def push(self, piece: bytes) -> None:
        """Counts the next piece of the text. ``TooMuchJson`` as soon as a bound is exceeded."""
        data = self._carry + piece
        # Of an odd number of backslashes at the end, the last one belongs to what comes next.
        is_cut = (len(data) - len(data.rstrip(b"\\"))) % 2
        self._carry, data = (b"\\", data[:-1]) if is_cut else (b"", data)
        if b"\\" in data:
            data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
        stretches = data.split(b'"')
        outside = b"".join(stretches[1::2] if self._is_in_string else stretches[::2])
        num_quotes = len(stretches) - 1
        num_opened = outside.count(b"[") + outside.count(b"{")
        self._num_parts += num_opened + (num_quotes + (not self._is_in_string)) // 2
        self._num_values += num_opened + outside.count(b",")
        self._is_in_string ^= num_quotes % 2 == 1
        if self._num_parts > self._bounds.parts:
            raise TooMuchJson(f"more than {self._bounds.parts:,} objects, lists and strings")
        if self._num_values > self._bounds.values:
            raise TooMuchJson(f"more than {self._bounds.values:,} values")
        if self._bounds.depth is not None:
            self._count_depth(outside, num_opened, self._bounds.depth)

    def _count_depth(self, outside: bytes, num_opened: int, most: int) -> None:
        num_closed = outside.count(b"]") + outside.count(b"}")
        if self._depth + num_opened > most:
            brackets = np.frombuffer(outside.translate(None, _NOT_BRACKETS), dtype=np.uint8)
            # Of the four, only those that open have this bit.
            steps = np.where(brackets & 2, 1, -1).cumsum()
            if self._depth + int(steps.max()) > most:
                raise TooMuchJson(f"more than {most} objects and lists inside each other")
        self._depth += num_opened - num_closed


def pieces_of(data: bytes | memoryview) -> Iterator[bytes]:
    """Of a text that is there as a whole."""
    for start in range(0, len(data), PIECE_BYTES):
        yield bytes(data[start : start + PIECE_BYTES])
