"""Events as frames that keep to the frame limit.

How much a websocket frame holds, counted before any object is made of it, in pieces between which the
event loop goes on: json_scan.py for frames of JSON, and the same for msgpack.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import anyio.lowlevel
import msgspec

from agentflow.errors import FrameTooLarge
from agentflow.protocol.events import Delta, ErrorInfo, Event, StateFailed, Value, VarFailed
from agentflow.protocol.json_bounds import PIECE_BYTES, JsonBounds, JsonScan, TooMuchJson, pieces_of
from agentflow.protocol.wire import Events, encode

FRAME_BOUNDS: Final = JsonBounds(values=1_000_000, parts=70_000)
"""Of a frame: decoding takes 50 ms at most. The clients here send frames of at most 128 KB, unless an op is
larger, which cannot hold so much."""
SMALL_FRAME_BYTES: Final = PIECE_BYTES
VALUES_PER_PIECE: Final = 5_000

# Of msgpack values, by their first byte: how many bytes the length has that follows it.
_SIZED: Final = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}  # binary and text
_EXTENSIONS: Final = {0xC7: 1, 0xC8: 2, 0xC9: 4}
_LISTS: Final = {0xDC: 2, 0xDD: 4}
_MAPS: Final = {0xDE: 2, 0xDF: 4}
# How many bytes follow.
_PLAIN: Final = {0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8} | {
    0xD4: 2, 0xD5: 3, 0xD6: 5, 0xD7: 9, 0xD8: 17,
}  # fmt: skip


async def check_frame(data: bytes | str) -> None:
    """``FrameTooLarge`` for a frame that holds more than ``FRAME_BOUNDS``. A small one holds less anyway."""
    if len(data) <= SMALL_FRAME_BYTES:
        return
    try:
        for _ in _counting_json(data.encode()) if isinstance(data, str) else _counting_msgpack(data):
            await anyio.lowlevel.checkpoint()
    except TooMuchJson as error:
        raise FrameTooLarge(f"a frame holds {error}: send the ops in several frames") from None


def _counting_json(data: bytes) -> Iterator[None]:
    scan = JsonScan(FRAME_BOUNDS)
    for piece in pieces_of(data):
        scan.push(piece)
        yield


def _counting_msgpack(data: bytes) -> Iterator[None]:
    """Walks over the values one after the other; how they nest does not matter. What is no msgpack gets some
    count, and is refused by its decoder."""
    at, num_values, num_parts = 0, 0, 0
    while at < len(data):
        first = data[at]
        at += 1
        num_values += 1
        if first <= 0x7F or first >= 0xE0 or first in (0xC0, 0xC2, 0xC3):
            pass  # all there is
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


def event_frames(ack: int, events: Sequence[Event], *, frame_bytes: int, binary: bool) -> Iterator[bytes]:
    """One frame where it fits, else several, in order. A long text is cut into several deltas."""
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


def _halves(event: Event, frame_bytes: int) -> list[Sequence[Event]]:
    """An event that is larger than a frame, as smaller ones."""
    match event:
        case Delta() | Value() if len(event.text) > 1:
            middle = len(event.text) // 2
            front = Delta(event.var, event.at, event.text[:middle])
            rest = msgspec.structs.replace(event, at=event.at + middle, text=event.text[middle:])
            return [[front], [rest]]
        case Value():
            error = FrameTooLarge(
                f"what belongs to the value of variable {event.var} besides its text (log-probabilities or "
                f"choices) does not fit into a frame of {frame_bytes:,} bytes: ask for less at once"
            )
            return [[VarFailed(event.var, ErrorInfo.of(error))]]
        case VarFailed() | StateFailed():
            message = event.error.message[:MAX_SHOWN_CHARS] + "… (shortened)"
            return [[msgspec.structs.replace(event, error=ErrorInfo(event.error.code, message))]]
        case _:
            raise FrameTooLarge(f"{type(event).__name__.lower()}: the event does not fit into a frame")
