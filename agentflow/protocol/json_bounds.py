"""How much a JSON text holds, counted while it arrives: before any object is made of it.

Decoding holds the interpreter's lock for the whole of a text, and takes up to a hundred times as long for
a megabyte of empty lists as for a megabyte of prose. So a limit of bytes does not bound it: values are
counted first, in pieces, between which the event loop goes on. The count relies on nothing but quotes and
backslashes; a text that is no JSON gets some count, and is refused by its decoder.

How deep a JSON value nests. What walks through one calls itself at each level, and must not be led so deep
that Python calls no further.

Objects in a request's body that are not decoded with it: schemas, parameters of tools, inputs of tool
calls. They are counted by themselves first (json_scan.py), and a schema and a call's input go on as text, so
that no object is made of them here at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np

from agentflow.errors import BadArgument
from agentflow.protocol.constraint import MAX_SOURCE_CHARS, Constraint

MOST_NESTING: Final = 200


def nests_deeper(value: Any, most: int) -> bool:
    """Whether more than ``most`` objects and lists stand inside each other.

    >>> nests_deeper({"a": [1, 2]}, 2), nests_deeper({"a": [1, 2]}, 1)
    (False, True)
    """
    level = [value]
    for _ in range(most + 1):
        level = [part for part in level if isinstance(part, dict | list)]
        if not level:
            return False
        level = [inner for part in level for inner in (part.values() if isinstance(part, dict) else part)]
    return True


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


OBJECT_BOUNDS: Final = JsonBounds(values=40_000, parts=20_000, depth=MOST_NESTING)
"""Of all tools of a request together, of all arguments of its tool calls, and of its schema: templates and
compilers walk through them."""
_MOST_BYTES: Final = 4  # of a character in UTF-8


def object_text(given: msgspec.Raw, param: str, scan: JsonScan) -> str:
    """The object as JSON in one line. ``scan`` counts it with others that it shares ``OBJECT_BOUNDS`` with.
    ``BadArgument``, of the field ``param``, where they are exceeded or this is no object."""
    data = memoryview(given)
    if bytes(data[:1]) != b"{":
        raise BadArgument(f"{param}: Expected `object`", param=param)
    try:
        for piece in pieces_of(data):
            scan.push(piece)
        return msgspec.json.format(bytes(data), indent=-1).decode()
    except TooMuchJson as error:
        raise BadArgument(f"{param}: with this, there are {error}, which is the limit", param=param) from None
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise BadArgument(f"{param}: it is no JSON: {error}", param=param) from None


def object_of(given: msgspec.Raw, param: str, scan: JsonScan) -> dict[str, Any]:
    """The object. ``BadArgument`` as above."""
    found: dict[str, Any] = msgspec.json.decode(object_text(given, param, scan))
    return found


def schema_constraint(given: msgspec.Raw, param: str) -> Constraint:
    """Of a JSON schema. ``BadArgument`` as above, and where it is too long for one."""
    num_bytes = len(memoryview(given))
    if num_bytes > _MOST_BYTES * MAX_SOURCE_CHARS:
        raise BadArgument(
            f"{param}: the schema has {num_bytes:,} bytes, and {MAX_SOURCE_CHARS:,} characters are the limit",
            param=param,
        )
    return Constraint("schema", object_text(given, param, JsonScan(OBJECT_BOUNDS)))
