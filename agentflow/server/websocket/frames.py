"""Websocket frames: received frames are checked before decoding, and events are split into frames.

``check_frame`` counts the values of a frame before objects are created from them, in pieces between which the
event loop runs. ``event_frames`` encodes events within the frame limit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import anyio.lowlevel
import msgspec

from agentflow.errors import FrameTooLarge
from agentflow.protocol.bounds.json_bounds import PIECE_BYTES, JsonBounds, JsonScan, TooMuchJson, split_pieces
from agentflow.protocol.events import Delta, ErrorInfo, Event, StateFailed, Value, VarFailed
from agentflow.protocol.wire import Events, encode

FRAME_BOUNDS: Final = JsonBounds(values=500_000, parts=70_000)
"""Decoding a frame within these bounds takes at most 25 ms. The package's clients send frames of at most
128 KB, unless a single op is larger."""
SMALL_FRAME_BYTES: Final = PIECE_BYTES
VALUES_PER_PIECE: Final = 5_000

# The size of the length after the first byte of a msgpack value.
_SIZED: Final = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}  # binary and text
_EXTENSIONS: Final = {0xC7: 1, 0xC8: 2, 0xC9: 4}
_LISTS: Final = {0xDC: 2, 0xDD: 4}
_MAPS: Final = {0xDE: 2, 0xDF: 4}
# The number of bytes after the first byte.
_PLAIN: Final = {0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8} | {
    0xD4: 2, 0xD5: 3, 0xD6: 5, 0xD7: 9, 0xD8: 17,
}  # fmt: skip


async def check_frame(data: bytes, *, binary: bool) -> None:
    """``FrameTooLarge`` for a frame over ``FRAME_BOUNDS``. A small frame is within them."""
    if len(data) <= SMALL_FRAME_BYTES:
        return
    try:
        for _ in _counting_msgpack(data) if binary else _counting_json(data):
            await anyio.lowlevel.checkpoint()
    except TooMuchJson as error:
        raise FrameTooLarge(f"a frame has {error}: send the ops in several frames") from None


def _counting_json(data: bytes) -> Iterator[None]:
    scan = JsonScan(FRAME_BOUNDS)
    for piece in split_pieces(data):
        scan.push(piece)
        yield


def _counting_msgpack(data: bytes) -> Iterator[None]:
    """Walks over the values regardless of their nesting. The decoder later rejects invalid msgpack."""
    at, num_values, num_parts = 0, 0, 0
    while at < len(data):
        first = data[at]
        at += 1
        num_values += 1
        if first <= 0x7F or first >= 0xE0 or first in (0xC0, 0xC2, 0xC3):
            pass  # no further bytes
        elif first in _PLAIN:
            at += _PLAIN[first]
        else:
            num_parts += 1
            if 0xA0 <= first <= 0xBF:
                at += first & 0x1F
            elif first <= 0x8F:
                num_parts += first & 0x0F
            elif (length := _SIZED.get(first) or _EXTENSIONS.get(first)) is not None:
                at += length + int.from_bytes(data[at : at + length]) + (first in _EXTENSIONS)
            elif (length := _LISTS.get(first)) is not None:
                at += length
            elif (length := _MAPS.get(first)) is not None:
                num_parts += int.from_bytes(data[at : at + length])
                at += length
        if num_parts > FRAME_BOUNDS.parts:
            raise TooMuchJson(f"more than {FRAME_BOUNDS.parts:,} objects, lists and strings")
        if num_values > FRAME_BOUNDS.values:
            raise TooMuchJson(f"more than {FRAME_BOUNDS.values:,} values")
        if num_values % VALUES_PER_PIECE == 0:
            yield


MAX_SHOWN_CHARS = 400
MAX_SENT_CHARS = 500_000
"""The limit of the text in one frame, which takes a few milliseconds to encode and send."""


def event_frames(ack: int, events: Sequence[Event], *, frame_bytes: int, binary: bool) -> Iterator[bytes]:
    """Encodes events as one frame if they fit, or as several in order. A long text is split into several
    deltas."""
    if sum(map(_num_chars, events)) <= MAX_SENT_CHARS:
        frame = encode(Events(ack, tuple(events)), binary=binary)
        if len(frame) <= frame_bytes:
            yield frame
            return
    if len(events) == 1:
        halves = _halves(events[0], frame_bytes)
    else:
        middle = len(events) // 2
        halves = [events[:middle], events[middle:]]
    for half in halves:
        yield from event_frames(ack, half, frame_bytes=frame_bytes, binary=binary)


def _num_chars(event: Event) -> int:
    match event:
        case Delta(text=text, reasoning=reasoning):
            return len(text) + len(reasoning)
        case Value(text=text):
            return len(text)
        case _:
            return 0


def _halves(event: Event, frame_bytes: int) -> list[Sequence[Event]]:
    """Splits an event that is larger than a frame."""
    match event:
        case Delta() if len(event.reasoning) > 1:
            middle = len(event.reasoning) // 2
            front = Delta(event.var, event.at, "", event.reasoning[:middle], event.reasoning_at)
            at = event.reasoning_at + middle
            later = msgspec.structs.replace(event, reasoning=event.reasoning[middle:], reasoning_at=at)
            return [[front], [later]]
        case Delta() | Value() if len(event.text) > 1:
            middle = len(event.text) // 2
            front = Delta(event.var, event.at, event.text[:middle])
            rest = msgspec.structs.replace(event, at=event.at + middle, text=event.text[middle:])
            return [[front], [rest]]
        case Value():
            error = FrameTooLarge(
                f"the log-probabilities or choices of variable {event.var} do not fit into a frame of "
                f"{frame_bytes:,} bytes: request fewer"
            )
            return [[VarFailed(event.var, ErrorInfo.of(error))]]
        case VarFailed() | StateFailed():
            message = event.error.message[:MAX_SHOWN_CHARS] + "… (shortened)"
            return [[msgspec.structs.replace(event, error=ErrorInfo(event.error.code, message))]]
        case _:
            raise FrameTooLarge(f"{type(event).__name__.lower()}: the event does not fit into a frame")
