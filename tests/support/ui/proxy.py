"""A TCP proxy in a separate thread, between a browser and a server: it breaks and pauses connections when a
test says so."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

import anyio
from anyio.abc import ByteStream, SocketAttribute, SocketStream
from anyio.from_thread import BlockingPortal, start_blocking_portal

from agentflow.runtime.task_group import open_task_group


@dataclass
class _Carrier:
    """The proxy's state, in its own loop."""

    target_port: int
    refuses: bool = False
    scopes: set[anyio.CancelScope] = field(default_factory=set)
    is_flowing: anyio.Event = field(default_factory=anyio.Event)

    async def serve(self, client: SocketStream) -> None:
        """Carries one connection, until an end closes it or it is cut."""
        async with client:
            if self.refuses:
                return
            try:
                server = await anyio.connect_tcp("127.0.0.1", self.target_port)
            except OSError:
                return
            async with server, open_task_group() as group:
                self.scopes.add(group.cancel_scope)
                try:
                    group.start_soon(self._carry, client, server, group.cancel_scope)
                    await self._carry(server, client, group.cancel_scope, is_down=True)
                finally:
                    self.scopes.discard(group.cancel_scope)

    async def _carry(
        self, source: ByteStream, sink: ByteStream, scope: anyio.CancelScope, *, is_down: bool = False
    ) -> None:
        try:
            async for chunk in source:
                if is_down:
                    await self.is_flowing.wait()
                await sink.send(chunk)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            pass
        scope.cancel()


@dataclass
class BreakingProxy:
    """``port``: where it listens."""

    port: int
    _carrier: _Carrier
    _portal: BlockingPortal

    @property
    def url(self) -> str:
        """The address for a browser."""
        return f"http://127.0.0.1:{self.port}"

    def cut(self) -> None:
        """Breaks all open connections."""
        self._portal.call(lambda: [scope.cancel() for scope in list(self._carrier.scopes)])

    def refuse(self, refuses: bool = True) -> None:
        """Closes new connections immediately, or carries them again."""
        self._portal.call(setattr, self._carrier, "refuses", refuses)

    def pause(self) -> None:
        """Keeps back the server's data, until ``go_on``."""
        self._portal.call(lambda: setattr(self._carrier, "is_flowing", anyio.Event()))

    def go_on(self) -> None:
        """Carries the delayed data, and all later data."""
        self._portal.call(lambda: self._carrier.is_flowing.set())


@contextmanager
def breaking_proxy(target_port: int) -> Iterator[BreakingProxy]:
    """A proxy before ``target_port``."""
    carrier = _Carrier(target_port)

    @asynccontextmanager
    async def run() -> AsyncIterator[int]:
        carrier.is_flowing.set()
        async with (
            await anyio.create_tcp_listener(local_host="127.0.0.1") as listener,
            open_task_group() as group,
        ):
            group.start_soon(listener.serve, carrier.serve)
            yield listener.extra(SocketAttribute.local_port)
            group.cancel_scope.cancel()

    with (
        start_blocking_portal("asyncio") as portal,
        portal.wrap_async_context_manager(run()) as port,
    ):
        yield BreakingProxy(port, carrier, portal)
