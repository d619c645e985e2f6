"""Connections are accepted up to the bounds, and no descriptor is needed for the others."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from anyio.abc import SocketStream
from support.commands import run_python
from support.holds import until
from support.server.http_clients import only_asyncio

from agentflow.runtime.task_group import open_task_group
from agentflow.server.config.limits import ServerLimits
from agentflow.server.http import acceptor as acceptor_module
from agentflow.server.http.acceptor import Acceptor, max_open_connections
from agentflow.server.serve import listen

anyio_backend = pytest.fixture(only_asyncio)


class Greeting(asyncio.Protocol):
    """Sends a byte to each client, and is over when the client leaves."""

    def __init__(self, on_lost: Callable[[], None]) -> None:
        self._on_lost = on_lost

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(b"!")

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_lost()


@asynccontextmanager
async def accepting(**options: Any) -> AsyncIterator[tuple[Acceptor, int]]:
    """An acceptor and its port. By default without bounds."""
    listener = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    one = Acceptor(listener, Greeting, **{"max_connections": 1_000, "max_per_address": 1_000, **options})
    async with open_task_group() as group:
        group.start_soon(one.run)
        yield one, port
        one.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


async def greeted(stream: SocketStream) -> bool:
    return await stream.receive() == b"!"


@pytest.mark.anyio
async def test_accepting_pauses_at_the_limit_and_goes_on_when_a_connection_ends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with accepting(max_connections=2) as (one, port), contextlib.AsyncExitStack() as stack:
        streams = [
            await stack.enter_async_context(await anyio.connect_tcp("127.0.0.1", port)) for _ in range(5)
        ]
        assert await greeted(streams[0])
        assert await greeted(streams[1])
        for _ in range(20):  # the others are in the backlog, however often the loop turns
            await anyio.lowlevel.checkpoint()
        assert one.num_connections == 2
        for ended in range(3):
            await streams[ended].aclose()
            assert await greeted(streams[ended + 2])
        assert one.num_connections == 2
        assert [record.levelname for record in caplog.records] == ["WARNING"]


@pytest.mark.anyio
async def test_one_address_has_so_many_connections(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clients = iter(["a", "a", "a", "a", "b", None, None, None, "a"])
    monkeypatch.setattr(acceptor_module, "client_network", lambda host: next(clients))
    async with accepting(max_per_address=2) as (one, port), contextlib.AsyncExitStack() as stack:

        async def connect() -> SocketStream:
            return await stack.enter_async_context(await anyio.connect_tcp("127.0.0.1", port))

        mine = [await connect(), await connect()]
        assert [await greeted(stream) for stream in mine] == [True, True]
        for _ in range(2):
            answer = b"".join([part async for part in await connect()])
            assert answer.startswith(b"HTTP/1.1 429 ")
        for _ in range(4):  # another address, and this machine
            assert await greeted(await connect())
        assert one.num_connections == 6
        assert len(caplog.records) == 1
        await mine[0].aclose()
        await until(lambda: one.num_connections <= 5)
        assert await greeted(await connect())


@pytest.mark.anyio
async def test_without_descriptors_accepting_pauses_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(acceptor_module, "RETRY_S", 0.001)
    num_tries, has_tried = 0, anyio.Event()

    class Counting(socket.socket):
        def accept(self) -> Any:
            nonlocal num_tries
            num_tries += 1
            if num_tries == 20:
                has_tried.set()
            return super().accept()

    listener = listen("127.0.0.1", 0)
    counting = Counting(fileno=listener.detach())
    counting.setblocking(False)
    one = Acceptor(counting, Greeting, max_connections=100, max_per_address=100)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(socket.socket()) for _ in range(3)]
        async with open_task_group() as group:
            group.start_soon(one.run)
            try:
                resource.setrlimit(resource.RLIMIT_NOFILE, (max(64, clients[-1].fileno() + 8), limits[1]))
                with contextlib.suppress(OSError):
                    while True:
                        taken.append(os.dup(0))
                for client in clients:
                    client.connect(counting.getsockname())
                await has_tried.wait()
                assert one.num_connections == 0
                assert [(record.levelno, record.exc_info) for record in caplog.records] == [
                    (logging.WARNING, None)
                ]
            finally:
                for number in taken:
                    os.close(number)
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            for client in clients:
                assert await anyio.to_thread.run_sync(client.recv, 1) == b"!"
            assert len(caplog.records) == 1
            one.close()


@pytest.mark.anyio
async def test_a_tls_handshake_that_does_not_come_counts_and_has_a_deadline() -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    async with accepting(tls=context, handshake_timeout_s=0.05, max_connections=1) as (one, port):
        for sent in (b"", b"GET / HTTP/1.1\r\n\r\n"):
            async with await anyio.connect_tcp("127.0.0.1", port) as stream:
                if sent:
                    await stream.send(sent)
                with contextlib.suppress(anyio.BrokenResourceError):
                    assert b"!" not in b"".join([part async for part in stream])
        await until(lambda: one.num_connections == 0)


RAISED = """
import ast, logging, resource, sys
from agentflow.server.http.acceptor import with_descriptors
from agentflow.server.config.limits import ServerLimits
logging.basicConfig()
for soft, hard, configured in ast.literal_eval(sys.argv[1]):
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    limits = with_descriptors(ServerLimits(max_connections=configured))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    print(soft, limits.max_connections, limits.max_connections_per_address)
"""
# From the soft and the hard limit and ``max_connections`` to the soft limit and the connections, of all and
# of one address. The hard limit can only be lowered.
RLIMITS = {
    (256, 1024, 100): (520, 100, 512),  # as far as needed
    (1024, 1024, 100): (1024, 100, 512),
    (256, 1024, 1000): (1024, 352, 352),
    (256, 512, 100): (512, 96, 512),
    (128, 128, 1000): (128, 1, 1),
}


def test_the_limit_of_open_files_is_raised_or_else_there_are_fewer_connections() -> None:
    done = run_python("-c", RAISED, repr([*RLIMITS]))
    assert [tuple(map(int, line.split())) for line in done.stdout.splitlines()] == [*RLIMITS.values()]
    assert len(done.stderr.splitlines()) == 3  # a warning where there are fewer
    assert max_open_connections(ServerLimits(max_connections=100)) == 264
