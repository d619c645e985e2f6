"""Reads HTTP as uvicorn does, and does not wait for ever: who connects has to ask for something, and to read
what it is answered.

Uvicorn bounds how long a connection may be idle between two requests, but neither before the first one nor
within its headers, and not once anything has come after an answer, be it what was left of a body. Nor does
it bound how long an answer may wait to be read. Clients that open connections and let them stand would in
the end use up all there may be.
"""

from __future__ import annotations

import asyncio
import math
from typing import ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

# A client that reads nothing is cut off after so long, or twice as long.
WRITE_WATCH_S = 10.0
BODY_HEADERS = (b"content-length", b"transfer-encoding")


class TimedHttpProtocol(HttpToolsProtocol):
    """Closes a connection whose request line and headers have not come within ``headers_timeout_s`` of its
    beginning, or of the answer before. Cuts one off whose client has read nothing of what waits for it since
    the last look, ``WRITE_WATCH_S`` before."""

    headers_timeout_s: ClassVar[float] = 20.0
    _timer: asyncio.TimerHandle | None = None
    _write_watch: asyncio.TimerHandle | None = None
    _unread_bytes: float = math.inf

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._begin_to_wait()
        self._watch_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._stop_watching()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        self._begin_to_wait()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        cycle = self.cycle
        super().on_headers_complete()
        if self.cycle is not cycle:  # a websocket has none
            self._stop_waiting()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # Unless another request has come already. What is left of this one's body ends no wait.
        if self.cycle.response_complete and not self.transport.is_closing():
            self._begin_to_wait()

    def resume_writing(self) -> None:
        self._unread_bytes = math.inf
        super().resume_writing()

    def handle_websocket_upgrade(self) -> None:
        self._stop_waiting()
        if any(name in BODY_HEADERS and value != b"0" for name, value in self.headers):
            # Whoever reads it from here on would wait for that body for ever.
            self.send_400_response("A websocket is asked for without a body.")
            return
        self._stop_watching()
        super().handle_websocket_upgrade()

    def _begin_to_wait(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self.headers_timeout_s, self._hang_up)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _watch_writing(self) -> None:
        self._write_watch = self.loop.call_later(WRITE_WATCH_S, self._look_at_writing)

    def _look_at_writing(self) -> None:
        # Else nothing waits to be read, or more is still being added to it.
        is_stuck = self.flow.write_paused or self.transport.is_closing()
        before, self._unread_bytes = self._unread_bytes, math.inf
        if is_stuck:
            self._unread_bytes = self.transport.get_write_buffer_size()
            if self._unread_bytes >= before:
                self.transport.abort()
                return
        self._watch_writing()

    def _stop_watching(self) -> None:
        if self._write_watch is not None:
            self._write_watch.cancel()
            self._write_watch = None

    def _hang_up(self) -> None:
        self._timer = None
        self.transport.close()


def timed_http_protocol(headers_timeout_s: float) -> type[TimedHttpProtocol]:
    """The class with another time-out: uvicorn makes the objects itself."""
    return type("TimedHttpProtocol", (TimedHttpProtocol,), {"headers_timeout_s": headers_timeout_s})
