"""Reads HTTP as uvicorn does, and does not wait for ever: who connects has to ask for something.

Uvicorn bounds how long a connection may be idle between two requests, but neither before the first one nor
within its headers; clients that open connections and let them stand would in the end use up all there may be.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEADERS_TIMEOUT_S = 20.0


class TimedHttpProtocol(HttpToolsProtocol):
    """Closes a connection whose request line and headers have not come within ``HEADERS_TIMEOUT_S``."""

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
            self._timer = self.loop.call_later(HEADERS_TIMEOUT_S, self._hang_up)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _hang_up(self) -> None:
        self._timer = None
        self.transport.close()
