"""Events as frames that keep to the frame limit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from agentflow.errors import FrameTooLarge
from agentflow.protocol.events import Delta, ErrorInfo, Event, StateFailed, Value, VarFailed
from agentflow.protocol.wire import Events, encode

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
