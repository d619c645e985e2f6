"""Streams of events: how the APIs write them, keep them alive and end them.

``event`` formats a server-sent event. Where thousands are written per second, their constant parts are
prepared with ``event_head`` and ``EVENT_END``. A handler sends its events, in the format of its API, through
a ``ServerSentEvents``.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

import anyio

CONTENT_TYPE = "text/event-stream; charset=utf-8"
EVENT_END = b"\n\n"
# Ask browsers and proxies to pass events on immediately.
HEADERS = {b"cache-control": b"no-cache", b"x-accel-buffering": b"no"}


def event_head(name: bytes = b"") -> bytes:
    """The bytes before the data of an event. Without a name it is a ``message`` event."""
    return b"event: %b\ndata: " % name if name else b"data: "


def event(data: bytes, name: bytes = b"") -> bytes:
    """One event. ``data``: one line, such as JSON.

    >>> event(b"{}", b"ping")
    b'event: ping\\ndata: {}\\n\\n'
    """
    return event_head(name) + data + EVENT_END


def comment(text: bytes) -> bytes:
    """A comment, which every client ignores."""
    return b": " + text + EVENT_END


class ServerSentEvents:
    """The events of one answer.

    Args:
        write: sends bytes; the flag is whether more follow. It waits for a slow client.
        keepalive: an event that clients ignore.
    """

    def __init__(self, write: Callable[[bytes, bool], Awaitable[None]], keepalive: bytes) -> None:
        self._write = write
        self._keepalive = keepalive
        self._is_writing = False
        self._is_over = False
        self._written_s = time.monotonic()

    async def send(self, events: bytes) -> None:
        """Sends whole events; nothing if there are none."""
        if events:
            await self._send(events)

    async def end(self, events: bytes = b"") -> None:
        """Sends the last events, and ends the stream."""
        self._is_over = True
        await self._send(events)

    async def keep_alive(self, interval_s: float) -> None:
        """Sends the keep-alive event whenever ``interval_s`` pass without an event, until the stream ends."""
        while not self._is_over:
            # A write that waits for a slow client does not count as silence.
            silent_s = 0.0 if self._is_writing else time.monotonic() - self._written_s
            if silent_s >= interval_s:
                await self._send(self._keepalive)
            else:
                await anyio.sleep(interval_s - silent_s)  # noqa: TID251 - the interval is the purpose

    async def _send(self, events: bytes) -> None:
        self._is_writing = True
        await self._write(events, not self._is_over)
        self._is_writing, self._written_s = False, time.monotonic()
