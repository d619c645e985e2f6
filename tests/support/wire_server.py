"""A real server in a separate thread: uvicorn needs asyncio, and the clients under test run on trio too."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import anyio
from anyio.from_thread import BlockingPortal, start_blocking_portal
from support.session_peer import HangingGenerator

from agentflow.runtime.generator import Generator
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
