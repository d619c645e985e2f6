"""A real server in a thread of its own (uvicorn needs asyncio; the clients under test run on trio too),
and a TCP proxy before it that breaks connections on request of a test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import anyio
from anyio.abc import SocketStream
from anyio.from_thread import BlockingPortal, start_blocking_portal
from support.session_peer import HangingGenerator

from agentflow.runtime.generator import Generator
from agentflow.runtime.task_group import open_task_group
from agentflow.server.config.limits import ServerLimits
from agentflow.server.models.models import one_model
from agentflow.server.serve import RunningServer, running_server

ResultT = TypeVar("ResultT")


@dataclass
class ThreadServer:
    """A server in another thread. Look at it through ``call`` and ``wait_until_empty`` only."""

    url: str
    generator: HangingGenerator
    _server: RunningServer
    _portal: BlockingPortal

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def call(self, function: Callable[[], ResultT]) -> ResultT:
        """Calls a function in the server's loop."""
        return self._portal.call(function)

    def num_sessions(self) -> int:
        """Sessions open now."""
        return self.call(lambda: len(self._server.sessions))

    async def wait_until_idle(self) -> None:
        """Waits until the server has no session left, and checks that they left nothing behind."""
        sessions = self._server.sessions
        await anyio.to_thread.run_sync(self._portal.call, sessions.wait_until_empty)
        assert (self.generator.num_open, self.generator.num_running) == (0, 0)


@asynccontextmanager
async def open_generator() -> AsyncIterator[Generator[Any]]:
    """A new generator, for ``one_model``."""
    yield HangingGenerator()


@contextmanager
def thread_server(limits: ServerLimits | None = None) -> Iterator[ThreadServer]:
    """A server on a free port."""
    with start_blocking_portal("asyncio") as portal:
        generator = portal.call(HangingGenerator)

        @asynccontextmanager
        async def open_this() -> AsyncIterator[Generator[Any]]:
            yield generator

        running = portal.call(lambda: running_server(one_model(open_this), limits=limits))
        with portal.wrap_async_context_manager(running) as server:
            yield ThreadServer(server.url, generator, server, portal)


@dataclass
class Budget:
    """Bytes that a connection may still carry before it breaks; None: any number."""

    up: int | None = None
    down: int | None = None
    freezes: bool = False  # it falls silent instead of breaking


@dataclass
class Proxy:
    """``budgets``: of the connections to come, then unlimited. ``current``: of the latest one. ``answers``:
    what the next connections get in place of the server; each is closed after its answer."""

    port: int
    target_port: int
    budgets: list[Budget] = field(default_factory=list)
    current: Budget = field(default_factory=Budget)
    num_connections: int = 0
    refuses: bool = False
    answers: list[bytes] = field(default_factory=list)
    last_down: bytes = b""  # the latest that came from the server
    carried: anyio.Event = field(default_factory=anyio.Event)  # set, and made anew, when something is carried

    @property
    def url(self) -> str:
        return f"ws://127.0.0.1:{self.port}"

    async def serve(self, client: SocketStream) -> None:
        """Carries one connection."""
        self.num_connections += 1
        if self.refuses:
            await client.aclose()
            return
        if self.answers:
            async with client:
                await client.receive()
                await client.send(self.answers.pop(0))
            return
        self.current = budget = self.budgets.pop(0) if self.budgets else Budget()
        server = await anyio.connect_tcp("127.0.0.1", self.target_port)
        async with client, server, open_task_group() as group:
            group.start_soon(self._carry, client, server, budget, "up", group.cancel_scope)
            group.start_soon(self._carry, server, client, budget, "down", group.cancel_scope)

    async def _carry(
        self, source: SocketStream, sink: SocketStream, budget: Budget, side: str, scope: anyio.CancelScope
    ) -> None:
        try:
            async for chunk in source:
                room: int | None = getattr(budget, side)
                if room is not None:
                    chunk = chunk[:room]
                    setattr(budget, side, room - len(chunk))
                if chunk:
                    await sink.send(chunk)
                if side == "down":
                    self.last_down = chunk
                self.carried.set()
                self.carried = anyio.Event()
                if room is not None and room - len(chunk) == 0:
                    if budget.freezes:
                        await anyio.sleep_forever()
                    break
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            pass
        scope.cancel()


@asynccontextmanager
async def proxied(target_port: int) -> AsyncIterator[Proxy]:
    """A proxy before ``target_port``."""
    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener:
        port = listener.extra(anyio.abc.SocketAttribute.local_port)
        proxy = Proxy(port, target_port)
        async with open_task_group() as group:
            group.start_soon(listener.serve, proxy.serve)
            try:
                yield proxy
            finally:
                group.cancel_scope.cancel()
