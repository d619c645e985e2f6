"""Clients that connect and then neither ask nor read: no connection stands for ever."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from anyio.abc import SocketStream
from wire_peer import WireGenerator

from agentflow.generator import Generator
from agentflow.server import http_protocol
from agentflow.server import serve as serve_module
from agentflow.server.http_protocol import TimedHttpProtocol
from agentflow.server.limits import ServerLimits
from agentflow.server.models import one_model
from agentflow.server.serve import RunningServer, listen, running_server


@pytest.fixture
def anyio_backend() -> str:
    """uvicorn needs asyncio."""
    return "asyncio"


@asynccontextmanager
async def opened() -> AsyncIterator[Generator[Any]]:
    yield WireGenerator()


@pytest.mark.anyio
@pytest.mark.parametrize("sent", [b"", b"GET /health/live HTTP/1.1\r\nHost:", b"\r\n"])
async def test_who_connects_and_asks_for_nothing_is_cut_off(sent: bytes) -> None:
    async with (
        running_server(one_model(opened), limits=ServerLimits(header_timeout_s=0.05)) as server,
        await anyio.connect_tcp("127.0.0.1", _port(server)) as stream,
    ):
        if sent:
            await stream.send(sent)
        with pytest.raises(anyio.EndOfStream):
            await stream.receive()


LIVE = b"GET /health/live HTTP/1.1\r\nHost: here\r\n"
WEBSOCKET = b"Connection: Upgrade\r\nUpgrade: websocket\r\nContent-Length: 9\r\n\r\n"


async def _ask(stream: SocketStream, request: bytes) -> None:
    """Sends it, and waits for the answer that the server lives."""
    await stream.send(request)
    answer = b""
    while b"live" not in answer:
        answer += await stream.receive()
    assert answer.startswith(b"HTTP/1.1 200")


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("request_begun", "sent"),
    [
        (LIVE + b"Content-Length: 9\r\n\r\n", b"1"),  # a body that is not read to its end
        (LIVE + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n1\r\n"),
        (LIVE + b"\r\n", b"\r\n"),
    ],
)
async def test_what_comes_after_an_answer_and_asks_for_nothing_keeps_no_connection(
    request_begun: bytes, sent: bytes
) -> None:
    async with (
        running_server(one_model(opened), limits=ServerLimits(header_timeout_s=0.5)) as server,
        await anyio.connect_tcp("127.0.0.1", _port(server)) as stream,
    ):
        await _ask(stream, request_begun)
        await stream.send(sent)
        with pytest.raises(anyio.EndOfStream):
            await stream.receive()


@pytest.mark.anyio
async def test_a_websocket_that_is_asked_for_with_a_body_is_refused_at_once() -> None:
    async with (
        running_server(one_model(opened)) as server,
        await anyio.connect_tcp("127.0.0.1", _port(server)) as stream,
    ):
        await stream.send(LIVE + WEBSOCKET)
        assert b"".join([part async for part in stream]).startswith(b"HTTP/1.1 400")


@pytest.mark.anyio
@pytest.mark.parametrize("version", ["1.0", "1.1"])  # after an answer to 1.0 the server closes the connection
async def test_who_does_not_read_the_answer_is_cut_off(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    is_lost = anyio.Event()

    class Watched(TimedHttpProtocol):
        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            is_lost.set()

    def listen_with_little_room(host: str, port: int) -> socket.socket:
        listener = listen(host, port)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        return listener

    monkeypatch.setattr(http_protocol, "TimedHttpProtocol", Watched)
    monkeypatch.setattr(http_protocol, "WRITE_WATCH_S", 0.05)
    monkeypatch.setattr(serve_module, "listen", listen_with_little_room)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        async with running_server(one_model(opened)) as server:
            client.connect(("127.0.0.1", _port(server)))
            request = f"GET /openapi.json HTTP/{version}\r\nHost: here\r\n\r\n"
            client.sendall(request.encode() * (10 if version == "1.1" else 1))
            with anyio.fail_after(20):
                await is_lost.wait()


@pytest.mark.anyio
async def test_a_connection_serves_one_request_after_the_other() -> None:
    async with (
        running_server(one_model(opened)) as server,
        await anyio.connect_tcp("127.0.0.1", _port(server)) as stream,
    ):
        for _ in range(2):
            await _ask(stream, LIVE + b"\r\n")
        await _ask(stream, LIVE + b"Content-Length: 2\r\n\r\n")
        await _ask(stream, b"12" + LIVE + b"\r\n")  # what was left of the body is no request


def _port(server: RunningServer) -> int:
    return int(server.url.rpartition(":")[2])
