"""Bounds for JSON from clients, checked before it is decoded.

Decoding holds the GIL for the whole text, and a megabyte of empty lists takes up to a hundred times as long
as a megabyte of prose, so a limit of bytes does not bound the time. ``JsonScan`` counts the values of a text
first, piece by piece, so that the event loop can run in between. It only reads quotes, backslashes and
brackets; for text that is not JSON the count is arbitrary, and the decoder rejects it.

``object_text``, ``decode_object`` and ``schema_constraint`` read objects that are undecoded in a request's
body: schemas, parameters of tools, arguments of calls. ``check_schemas`` bounds the schemas of a constraint,
and ``nests_deeper`` the nesting of decoded values, because other code recurses through them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec
import numpy as np

from agentflow.errors import BadArgument
from agentflow.protocol.constraint import MAX_SOURCE_CHARS, Constraint
from agentflow.protocol.unreadable import UNREADABLE

MOST_NESTING: Final = 200


def nests_deeper(value: Any, most: int) -> bool:
    """Whether objects and lists nest more than ``most`` levels deep.

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
"""A piece of this size is counted in about half a millisecond."""
_NOT_BRACKETS: Final = bytes(byte for byte in range(256) if byte not in b"[]{}")


@dataclass(frozen=True, slots=True)
class JsonBounds:
    """Limits of a JSON text. None: unlimited."""

    values: int  # of any kind
    parts: int  # objects, lists and strings, with names of members; each becomes a Python object
    depth: int | None = None  # levels of nesting
    escapes: int | None = None  # backslash escapes in strings
    wide_bytes: int | None = None  # of characters beyond ASCII
    bytes: int | None = None  # the length of the text


BODY_BOUNDS: Final = JsonBounds(values=500_000, parts=100_000, escapes=4_000_000, wide_bytes=8_000_000)
"""For a request's body: decoding takes 30 ms at most, during which no other thread runs."""


class TooMuchJson(Exception):
    """The text exceeds a bound. The message contains the bound."""


class JsonScan:
    """Counts the values of one text, piece by piece.

    >>> scan = JsonScan(JsonBounds(values=100, parts=3))
    >>> scan.push(b'{"a": [1, 2, ')
    >>> scan.push(b'"b"]}')
    Traceback (most recent call last):
    agentflow.protocol.bounds.json_bounds.TooMuchJson: more than 3 objects, lists and strings
    """

    def __init__(self, bounds: JsonBounds) -> None:
        self._bounds = bounds
        self._is_in_string = False
        self._carry = b""
        self._num_values = 0
        self._num_parts = 0
        self._num_escapes = 0
        self._num_wide_bytes = 0
        self._num_bytes = 0
        self._depth = 0

    def push(self, piece: bytes) -> None:
        """Counts the next piece of the text. Raises ``TooMuchJson`` as soon as a bound is exceeded."""
        self._num_bytes += len(piece)
        if self._bounds.bytes is not None and self._num_bytes > self._bounds.bytes:
            raise TooMuchJson(f"more than {self._bounds.bytes:,} bytes")
        if self._bounds.wide_bytes is not None and not piece.isascii():
            self._num_wide_bytes += int(np.count_nonzero(np.frombuffer(piece, dtype=np.int8) < 0))
            if self._num_wide_bytes > self._bounds.wide_bytes:
                raise TooMuchJson(f"more than {self._bounds.wide_bytes:,} bytes of characters beyond ASCII")
        data = self._carry + piece
        # The last of an odd number of backslashes at the end escapes the next character.
        is_split = (len(data) - len(data.rstrip(b"\\"))) % 2
        self._carry, data = (b"\\", data[:-1]) if is_split else (b"", data)
        if b"\\" in data:
            num_bytes = len(data)
            data = data.replace(b"\\\\", b"")
            self._num_escapes += (num_bytes - len(data)) // 2 + data.count(b"\\")
            data = data.replace(b'\\"', b"")
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
        if self._bounds.escapes is not None and self._num_escapes > self._bounds.escapes:
            raise TooMuchJson(f"more than {self._bounds.escapes:,} escapes in strings")
        if self._bounds.depth is not None:
            self._count_depth(outside, num_opened, self._bounds.depth)

    def _count_depth(self, outside: bytes, num_opened: int, most: int) -> None:
        num_closed = outside.count(b"]") + outside.count(b"}")
        if self._depth + num_opened > most:
            brackets = np.frombuffer(outside.translate(None, _NOT_BRACKETS), dtype=np.uint8)
            # Of the four brackets, only the opening ones have this bit.
            steps = np.where(brackets & 2, 1, -1).cumsum()
            if self._depth + int(steps.max()) > most:
                raise TooMuchJson(f"more than {most} objects and lists inside each other")
        self._depth += num_opened - num_closed


def split_pieces(data: bytes | memoryview) -> Iterator[bytes]:
    """The pieces of a complete text."""
    for start in range(0, len(data), PIECE_BYTES):
        yield bytes(data[start : start + PIECE_BYTES])


OBJECT_BOUNDS: Final = JsonBounds(values=40_000, parts=20_000, depth=MOST_NESTING, bytes=4_000_000)
"""For all tools of a request together, for all arguments of its tool calls, and for its schema: chat
templates and grammar compilers walk through them. Decoding this many bytes takes 15 ms."""
_SCHEMA_BOUNDS: Final = JsonBounds(values=MAX_SOURCE_CHARS, parts=MAX_SOURCE_CHARS, depth=MOST_NESTING)
VARIABLE_BOUNDS: Final = replace(OBJECT_BOUNDS, bytes=65_536)
"""For the variables of a chat template: switches and short texts."""
_MOST_BYTES: Final = 4  # of a character in UTF-8


def object_text(given: msgspec.Raw, param: str, scan: JsonScan) -> str:
    """The object as JSON on one line. ``scan`` counts it together with the others that share its bounds.
    Raises ``BadArgument`` for the field ``param`` if they are exceeded or it is not an object."""
    data = memoryview(given)
    if bytes(data[:1]) != b"{":
        raise BadArgument(f"{param}: Expected `object`", param=param)
    return _on_one_line(bytes(data), param, scan)


def _on_one_line(data: bytes, param: str, scan: JsonScan) -> str:
    try:
        for piece in split_pieces(data):
            scan.push(piece)
        return msgspec.json.format(data, indent=-1).decode()
    except TooMuchJson as error:
        raise BadArgument(f"{param}: with it there are {error}, which is the limit", param=param) from None
    except UNREADABLE as error:
        raise BadArgument(f"{param}: invalid JSON: {error}", param=param) from None


def decode_object(given: msgspec.Raw, param: str, scan: JsonScan) -> dict[str, Any]:
    """The decoded object. ``BadArgument`` as in ``object_text``."""
    found: dict[str, Any] = msgspec.json.decode(object_text(given, param, scan))
    return found


def schema_constraint(given: msgspec.Raw, param: str) -> Constraint:
    """The constraint for a JSON schema. ``BadArgument`` as in ``object_text``, and if it is too long."""
    num_bytes = len(memoryview(given))
    if num_bytes > _MOST_BYTES * MAX_SOURCE_CHARS:
        raise BadArgument(
            f"{param}: the schema has {num_bytes:,} bytes; at most {MAX_SOURCE_CHARS:,} characters fit",
            param=param,
        )
    return Constraint("schema", object_text(given, param, JsonScan(OBJECT_BOUNDS)))


def check_schemas(constraint: Constraint) -> None:
    """Raises ``BadArgument`` if a JSON schema in the constraint is no JSON, or nests too deeply."""
    sources = [constraint.source] if constraint.kind == "schema" else []
    if constraint.kind == "tags":
        sources += [tag.source for tag in constraint.tags() if tag.kind == "schema"]
    if constraint.instead is not None:
        check_schemas(constraint.instead)
    for source in sources:
        _on_one_line(source.encode(), "schema", JsonScan(_SCHEMA_BOUNDS))
