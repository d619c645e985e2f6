"""The reader of server-sent events, which turns the bytes of a stream into events.

It follows the format of the HTML standard (section 9.2.6) as far as APIs use it: ``event`` and ``data``, with
``id`` and ``retry`` ignored, as are comments and unknown fields. Data stays bytes, because it is decoded as
JSON anyway, which rejects invalid UTF-8.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from agentflow.errors import ProtocolError

MAX_EVENT_BYTES = 32 * 1024 * 1024
"""The size of one event. A whole answer may be in one, with log-probabilities: about 1.5 kB a token with 20
alternatives."""
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class ServerEvent(NamedTuple):
    """One event. ``name`` is empty if the server gives none."""

    name: str
    data: bytes


class EventSink(Protocol):
    """Receives the events of one attempt."""

    @property
    def is_visible(self) -> bool:
        """Whether something was delivered that cannot be taken back."""

    @property
    def has_begun(self) -> bool:
        """Whether the model has written something. Before, it may reason for minutes without an event."""

    @property
    def is_over(self) -> bool:
        """Whether the stream's last event was received."""

    @property
    def is_left(self) -> bool:
        """Whether the rest of the stream is not wanted."""

    def event(self, event: ServerEvent) -> None:
        """Receives an event."""

    def close(self) -> None:
        """The stream ended. Raises the error of an answer that is not complete."""


class EventReader:
    """Reads events from the bytes of a stream, which may be split anywhere.

    Args:
        max_event_bytes: The largest event that is accepted.

    >>> reader = EventReader()
    >>> reader.push(b'data: {"a"')
    []
    >>> reader.push(b': 1}\\n\\n: a comment\\n\\n')
    [ServerEvent(name='', data=b'{"a": 1}')]
    """

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max_event_bytes = max_event_bytes
        self._parts: list[bytes] = []  # of the line that is not complete
        self._size = 0  # of the event so far, with that line
        self._name = b""
        self._data: list[bytes] = []
        self._is_at_start = True
        self._ends_with_cr = False

    def push(self, chunk: bytes) -> list[ServerEvent]:
        """The events that ``chunk`` completes. ``ProtocolError`` for an event that is too large."""
        if not chunk:
            return []
        if not self._size and (data := _only_data(chunk)) is not None and not self._ends_with_cr:
            self._is_at_start = False
            self._count(chunk)
            self._size = 0
            return [ServerEvent(self._name.decode("utf-8", "replace"), data)]
        if self._ends_with_cr and chunk.startswith(b"\n"):
            chunk, self._ends_with_cr = chunk[1:], False
        if b"\r" in chunk:
            self._ends_with_cr = chunk.endswith(b"\r")
            chunk = chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        elif chunk:
            self._ends_with_cr = False
        first, *others = chunk.split(b"\n")
        self._count(first)
        self._parts.append(first)
        if not others:
            return []
        lines = [b"".join(self._parts), *others]
        self._parts = [lines.pop()]
        events: list[ServerEvent] = []
        for number, line in enumerate(lines):
            if number:
                self._count(line)
            self._read(line, events)
        self._count(self._parts[0])
        return events

    def _count(self, part: bytes) -> None:
        self._size += len(part)
        if self._size > self._max_event_bytes:
            raise ProtocolError(f"an event of the stream has more than {self._max_event_bytes:,} bytes")

    def _read(self, line: bytes, events: list[ServerEvent]) -> None:
        if self._is_at_start:
            self._is_at_start = False
            line = line.removeprefix(_BYTE_ORDER_MARK)
        if not line:
            if self._data:
                events.append(ServerEvent(self._name.decode("utf-8", "replace"), b"\n".join(self._data)))
                self._data = []
            self._name, self._size = b"", 0
            return
        field, _, value = line.partition(b":")
        if field == b"data":
            self._data.append(value.removeprefix(b" "))
        elif field == b"event":
            self._name = value.removeprefix(b" ")
        elif not field:
            self._size -= len(line)  # a comment, which keeps the connection alive


def _only_data(chunk: bytes) -> bytes | None:
    """The data of a chunk that is one whole event without a name, as most are; None for any other."""
    if not (chunk.startswith(b"data: ") and chunk.endswith(b"\n\n")):
        return None
    data = chunk[6:-2]
    return None if b"\n" in data or b"\r" in data else data
