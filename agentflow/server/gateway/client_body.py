"""The body of a client's request. A small body is kept, so that it can be parsed and sent again."""

from __future__ import annotations

from collections.abc import AsyncIterator

import anyio
import httpx2
from starlette.types import Message, Receive

from agentflow.errors import Overloaded
from agentflow.runtime.limits import MemoryBudget
from agentflow.server.errors import ApiError, ClientGone
from agentflow.server.gateway.defaults import GatewayLimits


class ClientBody:
    """The body of a client's request.

    Args:
        receive: Receives messages from the client.
        budget: The memory of the bodies of all requests.
        limits: The gateway's limits.
    """

    def __init__(self, receive: Receive, budget: MemoryBudget, limits: GatewayLimits) -> None:
        self._receive = receive
        self._limits = limits
        # Small bodies are kept even when large ones fill the budget: without its body, a request can neither
        # be sent to the target that has its model nor be retried.
        self._budget = MemoryBudget(limits.body_bytes, within=budget, free_bytes=limits.small_body_bytes)
        self._is_read = anyio.Event()  # all of it was received
        self._is_passed_on = False
        self.data = bytearray()

    @property
    def is_read(self) -> bool:
        """Whether all of the body was received."""
        return self._is_read.is_set()

    @property
    def is_whole(self) -> bool:
        """Whether all of the body is in ``data``."""
        return self.is_read and not self._is_passed_on

    @property
    def can_be_sent(self) -> bool:
        """Whether an attempt can send the body from its beginning."""
        return not self._is_passed_on

    async def buffer(self) -> None:
        """Reads the body into ``data``, as far as the limits allow. ``ClientGone``; ``ApiError`` if nothing
        arrives in time."""
        while not self.is_read:
            piece = await self._next()
            self.data += piece
            try:
                self._budget.reserve(len(piece))
            except Overloaded:
                return

    def charge(self, num_bytes: int) -> None:
        """Counts further memory of the request until ``close``."""
        self._budget.count(num_bytes)

    def stream(self) -> httpx2.AsyncByteStream | httpx2.SyncByteStream:
        """The body for a target: ``data``, and the rest as it arrives."""
        if self.is_whole:
            return httpx2.ByteStream(bytes(self.data))
        return _Rest(self)

    def close(self) -> None:
        """Releases the memory."""
        self.data = bytearray()
        self._budget.close()

    async def until_gone(self) -> None:
        """Waits until the client closes the connection after it has sent the body."""
        await self._is_read.wait()
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yields the body once, for ``stream``. Its beginning is not kept."""
        self._is_passed_on = True
        data = bytes(self.data)
        self.close()
        yield data
        while not self.is_read:
            yield await self._next()

    async def _next(self) -> bytes:
        message: Message | None = None
        with anyio.move_on_after(self._limits.body_timeout_s):
            message = await self._receive()
        if message is None:
            seconds = self._limits.body_timeout_s
            raise ApiError(408, "request_timeout", f"no part of the body arrived within {seconds:g} s")
        if message["type"] == "http.disconnect":
            raise ClientGone
        if not message.get("more_body", False):
            self._is_read.set()
        piece: bytes = message.get("body", b"")
        return piece


class _Rest(httpx2.AsyncByteStream):
    def __init__(self, body: ClientBody) -> None:
        self._body = body

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for piece in self._body.pieces():
            yield piece
