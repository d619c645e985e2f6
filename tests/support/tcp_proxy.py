"""A TCP proxy that breaks, silences or splits connections on request of a test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Literal

import anyio
from anyio.abc import SocketStream

from agentflow.runtime.task_group import open_task_group

Side = Literal["up", "down"]
"""A direction: from clients, or to them."""


@dataclass
class Budget:
    """Bytes that a connection may still carry before it breaks; None: any number."""

    up: int | None = None
    down: int | None = None
    freezes: bool = False  # it falls silent instead of breaking


@dataclass
class Proxy:
    """``budgets``: of the connections to come, then unlimited. ``current``: the latest one's. ``answers``:
    sent to the next connections in place of the server's; each is closed after its answer.

    ``split`` drops later data, as a network does that splits: nothing arrives, none closes.
    ``heal`` ends it for new connections; one of which bytes are missing carries no others.
    """

    port: int
    target_port: int
    host: str = "127.0.0.1"  # of the target
    dropped: frozenset[Side] = frozenset()
    num_dropped: int = 0  # bytes
    budgets: list[Budget] = field(default_factory=list)
    current: Budget = field(default_factory=Budget)
    num_connections: int = 0
    refuses: bool = False
    answers: list[bytes] = field(default_factory=list)
    last_down: bytes = b""  # the latest that came from the server
    _latest: anyio.CancelScope = field(default_factory=anyio.CancelScope)  # the connection that is carried
    # Set, and replaced by a new one, when something is carried or dropped, or the split ends.
    carried: anyio.Event = field(default_factory=anyio.Event)

    @property
    def url(self) -> str:
        return f"ws://127.0.0.1:{self.port}"

    def sever(self) -> None:
        """Closes the latest connection."""
        self._latest.cancel()

    def split(self, *sides: Side) -> None:
        """Drops data in these directions; by default in both."""
        self.dropped = frozenset(sides or ("up", "down"))

    def heal(self) -> None:
        """New connections are carried again."""
        self.dropped = frozenset()
        self._notify()

    def _notify(self) -> None:
        self.carried.set()
        self.carried = anyio.Event()

    async def serve(self, client: SocketStream) -> None:
        """Carries one connection."""
        self.num_connections += 1
        if self.refuses:
            await client.aclose()
            return
        if self.answers:
            async with client:
                with suppress(anyio.EndOfStream, anyio.BrokenResourceError):  # the client is gone
                    await client.receive()
                    await client.send(self.answers.pop(0))
            return
        self.current = budget = self.budgets.pop(0) if self.budgets else Budget()
        with anyio.CancelScope() as self._latest:
            await self._connect(client, budget)

    async def _connect(self, client: SocketStream, budget: Budget) -> None:
        async with client:
            while self.dropped:  # a connection that is opened now gets no answer
                await self.carried.wait()
            try:
                server = await anyio.connect_tcp(self.host, self.target_port)
            except OSError:
                return
            await self._join(client, server, budget)

    async def _join(self, client: SocketStream, server: SocketStream, budget: Budget) -> None:
        async with server, open_task_group() as group:
            group.start_soon(self._carry, client, server, budget, "up", group.cancel_scope)
            group.start_soon(self._carry, server, client, budget, "down", group.cancel_scope)

    async def _carry(
        self, source: SocketStream, sink: SocketStream, budget: Budget, side: Side, scope: anyio.CancelScope
    ) -> None:
        is_broken = False
        try:
            async for chunk in source:
                is_broken = is_broken or side in self.dropped
                if is_broken:
                    self.num_dropped += len(chunk)
                    self._notify()
                    continue
                room: int | None = getattr(budget, side)
                if room is not None:
                    chunk = chunk[:room]
                    setattr(budget, side, room - len(chunk))
                if chunk:
                    await sink.send(chunk)
                if side == "down":
                    self.last_down = chunk
                self._notify()
                if room is not None and room - len(chunk) == 0:
                    if budget.freezes:
                        await anyio.sleep_forever()
                    break
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            pass
        scope.cancel()


@asynccontextmanager
async def proxied(target_port: int, host: str = "127.0.0.1") -> AsyncIterator[Proxy]:
    """A proxy before a port of ``host``."""
    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener:
        port = listener.extra(anyio.abc.SocketAttribute.local_port)
        proxy = Proxy(port, target_port, host)
        async with open_task_group() as group:
            group.start_soon(listener.serve, proxy.serve)
            try:
                yield proxy
            finally:
                group.cancel_scope.cancel()
