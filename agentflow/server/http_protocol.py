"""Reads HTTP as uvicorn does, and does not wait for ever: who connects has to ask for something.

Uvicorn bounds how long a connection may be idle between two requests, but neither before the first one nor
within its headers; clients that open connections and let them stand would in the end use up all there may be.
"""

from __future__ import annotations

import asyncio
from typing import ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class TimedHttpProtocol(HttpToolsProtocol):
    """Closes a connection whose request line and headers have not come within ``headers_timeout_s``."""

    headers_timeout_s: ClassVar[float] = 20.0
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._begin_to_wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        self._begin_to_wait()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._stop_waiting()
        super().on_headers_complete()

    def _begin_to_wait(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self.headers_timeout_s, self._hang_up)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _hang_up(self) -> None:
        self._timer = None
        self.transport.close()


def timed_http_protocol(headers_timeout_s: float) -> type[TimedHttpProtocol]:
    """The class with another time-out: uvicorn makes the objects itself."""
    return type("TimedHttpProtocol", (TimedHttpProtocol,), {"headers_timeout_s": headers_timeout_s})
