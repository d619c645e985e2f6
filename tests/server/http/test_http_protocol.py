"""Bytes before a request, and how long a connection may stay without one, or unread."""

from __future__ import annotations

import contextlib
import json
import socket
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from anyio.abc import SocketStream
from support.api_server import api_server
from support.server.http_clients import only_asyncio
from support.wire_server import open_generator

from agentflow.server import serve as serve_module
from agentflow.server.config.limits import HttpLimits, ServerLimits
from agentflow.server.http import protocol as http_protocol
from agentflow.server.http.protocol import TimedHttpProtocol
from agentflow.server.models.models import one_model
from agentflow.server.serve import RunningServer, listen, running_server

anyio_backend = pytest.fixture(only_asyncio)


LIVE = b"GET /health/live HTTP/1.1\r\nHost: here\r\n"
UPGRADE = b"Connection: Upgrade\r\nUpgrade: websocket\r\n"
HANDSHAKE = (
    b"GET /v1/session HTTP/1.1\r\nHost: here\r\n" + UPGRADE + b"Sec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
)
POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: here\r\n"
CHUNKED = LIVE + b"Transfer-Encoding: chunked\r\n\r\n"


def _port(server: RunningServer) -> int:
    return int(server.url.rpartition(":")[2])


@asynccontextmanager
async def connected(http_limits: HttpLimits | None = None, **limits: Any) -> AsyncIterator[SocketStream]:
    """A connection to a server with these limits."""
    made = {"limits": ServerLimits(**limits), "http_limits": http_limits or HttpLimits()}
    async with (
        running_server(one_model(open_generator), **made) as server,
        await anyio.connect_tcp("127.0.0.1", _port(server)) as stream,
    ):
        yield stream


async def _until_end(stream: SocketStream) -> bytes:
    """All that comes until the server closes."""
    return b"".join([part async for part in stream])


async def _ask(stream: SocketStream, request: bytes) -> None:
    """Sends it, and waits for the answer that the server lives."""
    await stream.send(request)
    answer = b""
    while b"live" not in answer:
        answer += await stream.receive()
    assert answer.startswith(b"HTTP/1.1 200")


@pytest.mark.anyio
async def test_f40b_only_a_new_connection_is_held_to_the_time_for_headers() -> None:
    """Proxies keep connections for 60 s, and a server that closes them first costs a 502."""
    assert ServerLimits().idle_timeout_s > 60
    async with (
        running_server(one_model(open_generator), limits=ServerLimits(header_timeout_s=1.0)) as server,
        await anyio.connect_tcp("127.0.0.1", _port(server)) as used,
    ):
        await _ask(used, LIVE + b"\r\n")
        async with await anyio.connect_tcp("127.0.0.1", _port(server)) as new:
            assert await _until_end(new) == b""
        await _ask(used, LIVE + b"\r\n")  # it has been idle for longer than the new one


LONG_URL = HANDSHAKE.replace(b"session ", b"session?" + b"a" * 9_000 + b" ")
MANY_HEADERS = b"".join(b"x%d: 1\r\n" % number for number in range(130))
LATE, IDLE = {"header_timeout_s": 0.05}, {"idle_timeout_s": 0.05}


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("sent", "status", "limits"),
    [
        (b"", None, IDLE),
        (b"\r\n", None, IDLE),
        *[(sent, 408, LATE) for sent in (LIVE[:30], LIVE, HANDSHAKE[:30], HANDSHAKE)],
        (HANDSHAKE + MANY_HEADERS + b"\r\n", 431, {}),
        (HANDSHAKE + b"x: " + b"1" * 9_000 + b"\r\n\r\n", 431, {}),
        (HANDSHAKE + b"x: " + b"1" * 70_000 + b"\r\n\r\n", 431, {}),
        (HANDSHAKE + b"Sec-WebSocket-Key: 1\r\n\r\n", 400, {}),
        (HANDSHAKE + b"Content-Length: 9\r\n\r\n", 400, {}),
        (LIVE + UPGRADE + b"Content-Length: 9\r\n\r\n", 400, {}),
        (LONG_URL + b"\r\n", 414, {}),
        (HANDSHAKE.replace(b"/v1/session", b"/nowhere") + b"\r\n", 404, {}),
        # A request has one host, or in HTTP 1.0 none.
        (LIVE + b"Host: there\r\n\r\n", 400, {}),
        (LIVE + b"host: here\r\n\r\n", 400, {}),
        (LIVE.replace(b"Host: here", b"Accept: */*") + b"\r\n", 400, {}),
        (HANDSHAKE + b"Host: there\r\n\r\n", 400, {}),
        (b"GET /health/live HTTP/1.0\r\n\r\n", 200, {}),
    ],
)
async def test_the_answer_before_the_connection_is_closed(
    sent: bytes, status: int | None, limits: dict[str, float], caplog: pytest.LogCaptureFixture
) -> None:
    async with connected(**limits) as stream:
        if sent:
            await stream.send(sent)
        answer = await _until_end(stream)
    assert answer[9:12] == (b"" if status is None else b"%d" % status)
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


@pytest.mark.anyio
async def test_a_handshake_that_the_application_does_not_answer_is_closed() -> None:
    is_closed = anyio.Event()

    async def never(_: Any, __: Any, ___: Any) -> None:
        await is_closed.wait()

    async with running_server(one_model(open_generator), limits=ServerLimits(**LATE)) as server:
        server.app.router.app = server.app.middleware_stack = never  # type: ignore[assignment, attr-defined]
        async with await anyio.connect_tcp("127.0.0.1", _port(server)) as stream:
            await stream.send(HANDSHAKE + b"\r\n")
            assert (await _until_end(stream)).startswith(b"HTTP/1.1 500 ")
        is_closed.set()


FLOOD_BYTES, PIECE = 100_000_000, 65_536


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("begin", "flood", "status"),
    [
        (b"GET / HTTP/1.1\r\n", b"a:\r\n", 431),
        (b"GET / HTTP/1.1\r\n", b"a: " + b"1" * 997 + b"\r\n", 431),
        (b"GET / HTTP/1.1\r\na: ", b"1", 431),
        (b"GET / HTTP/1.1\r\n", b"a", 431),
        (b"GET /", b"a", 414),
        (b"", b"\r\n", 431),
        (HANDSHAKE, b"a:\r\n", 431),
        (LIVE + b"Connection: keep-alive\r\n\r\nGET / HTTP/1.1\r\n", b"a:\r\n", None),
        (CHUNKED + b"0\r\n", b"a:\r\n", None),
        (CHUNKED + b"0\r\na: ", b"1", None),
        (CHUNKED + b"1;", b"a", None),
    ],
)
async def test_a_flood_around_a_request_is_refused_at_64_kb(
    begin: bytes, flood: bytes, status: int | None
) -> None:
    """``status`` None: an answer to the request before may be under way, and the connection just ends."""
    answer = bytearray()
    num_sent = 0
    piece = flood * (PIECE // len(flood))
    async with connected() as stream, anyio.create_task_group() as group:

        async def send() -> None:
            nonlocal num_sent
            with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
                await stream.send(begin)
                while num_sent < FLOOD_BYTES:
                    await stream.send(piece)
                    num_sent += len(piece)

        tracemalloc.start()
        try:
            group.start_soon(send)
            with contextlib.suppress(anyio.BrokenResourceError):  # reset, after the answer
                async for part in stream:
                    answer += part
            group.cancel_scope.cancel()
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert status is None or answer.startswith(b"HTTP/1.1 %d " % status)
    assert num_sent < FLOOD_BYTES
    assert peak_bytes < 3_000_000


@pytest.mark.anyio
@pytest.mark.parametrize(("num_bytes", "status"), [(60_000, 200), (66_000, 431)])
@pytest.mark.parametrize("step", [1_000, 100_000])
async def test_headers_of_nearly_64_kb_are_read(num_bytes: int, status: int, step: int) -> None:
    request = LIVE + b"x: " + b"1" * (num_bytes - 50) + b"\r\n\r\n"
    async with connected() as stream:
        for start in range(0, len(request), step):
            await stream.send(request[start : start + step])
        assert (await stream.receive()).startswith(b"HTTP/1.1 %d " % status)


@pytest.mark.anyio
async def test_trailers_are_no_headers() -> None:
    async with connected() as stream:
        await _ask(stream, CHUNKED + b"0\r\nx-more: 1\r\n\r\n")
        await _ask(stream, LIVE + b"\r\n")


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("request_begun", "sent"),
    [
        (LIVE + b"Content-Length: 9\r\n\r\n", b"1"),  # a body that is not read to its end
        (LIVE + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n1\r\n"),
        (LIVE + b"\r\n", b"\r\n"),
    ],
)
async def test_bytes_after_a_response_that_are_no_request_keep_no_connection(
    request_begun: bytes, sent: bytes
) -> None:
    async with connected(idle_timeout_s=0.5) as stream:
        await _ask(stream, request_begun)
        await stream.send(sent)
        # Bytes that arrive as the server closes reset the connection.
        with pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
            await stream.receive()


def called(monkeypatch: pytest.MonkeyPatch, name: str) -> anyio.Event:
    """Is set when this method of a connection was called."""
    event, method = anyio.Event(), getattr(TimedHttpProtocol, name)

    def call(protocol: TimedHttpProtocol, *arguments: Any) -> None:
        method(protocol, *arguments)
        event.set()

    monkeypatch.setattr(TimedHttpProtocol, name, call)
    return event


@asynccontextmanager
async def connected_with_little_room(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[socket.socket]:
    """A connection with small buffers on both sides, on which the client reads nothing."""

    def listen_with_little_room(host: str, port: int) -> socket.socket:
        listener = listen(host, port)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        return listener

    monkeypatch.setattr(serve_module, "listen", listen_with_little_room)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        async with running_server(one_model(open_generator)) as server:
            client.connect(("127.0.0.1", _port(server)))
            yield client


@pytest.mark.anyio
@pytest.mark.parametrize("version", ["1.0", "1.1"])  # after an answer to 1.0 the server closes the connection
async def test_a_client_that_does_not_read_the_answer_is_cut_off(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    is_lost = called(monkeypatch, "connection_lost")
    monkeypatch.setattr(http_protocol, "WRITE_WATCH_S", 0.05)
    async with connected_with_little_room(monkeypatch) as client:
        request = f"GET /openapi.json HTTP/{version}\r\nHost: here\r\n\r\n"
        client.sendall(request.encode() * (10 if version == "1.1" else 1))
        with anyio.fail_after(20):
            await is_lost.wait()


@pytest.mark.anyio
@pytest.mark.parametrize("expect", [b"", b"Expect: 100-continue\r\n"])
@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"z\r\n", 400),
        (b"-5\r\n", 400),
        (b"fffffffffffffffff\r\n", 400),
        (b"1\r\n{}\r\n", 400),
        (b"1;" + b"e" * 100_000, 431),
        (b"1\r\n{\r\n0\r\nx: " + b"t" * 100_000, 431),
    ],
    ids=["size", "sign", "large", "end", "extension", "trailers"],
)
async def test_f37_an_invalid_body_is_refused_like_invalid_headers(
    body: bytes, status: int, expect: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with connected() as stream:
        await stream.send(POST + expect + b"Transfer-Encoding: chunked\r\n\r\n" + body)
        answer = await _until_end(stream)
        if expect:  # before the fault arrived
            answer = answer.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 %d " % status)
        assert answer.count(b"HTTP/1.1") == 1
    assert [record for record in caplog.records if record.exc_info] == []


def exchanged(url: str, request: bytes) -> tuple[bytes, bytes]:
    """The headers and the body of an answer, which ends with the connection."""
    host, _, port = url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=20) as client:
        client.sendall(request)
        answer = b"".join(iter(lambda: client.recv(65_536), b""))
    head, _, body = answer.partition(b"\r\n\r\n")
    return head.lower(), body


@pytest.mark.parametrize("headers", [b"", b"Expect: 100-continue\r\n"])
def test_f37_a_stream_to_a_client_of_http_1_0_has_no_chunks(headers: bytes) -> None:
    fields = {"model": "fake", "prompt": "hi", "max_tokens": 20, "seed": 1, "stream": True}
    body = json.dumps(fields).encode()
    headers += b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    with api_server() as server:
        head, got = exchanged(server.url, b"POST /v1/completions HTTP/1.0\r\n" + headers + body)
    assert head.startswith(b"http/1.1 200 ")
    assert b"transfer-encoding" not in head
    *events, last = got.removesuffix(b"\n\n").split(b"\n\n")
    assert last == b"data: [DONE]"
    assert all(json.loads(event.removeprefix(b"data: "))["choices"] for event in events)


def test_f37_an_answer_of_known_length_to_a_client_of_http_1_0_is_unchanged() -> None:
    with api_server() as server:
        head, got = exchanged(server.url, b"GET /v1/models HTTP/1.0\r\n\r\n")
    assert b"content-length: %d" % len(got) in head
    assert json.loads(got)["data"]


NUM_PIECES = 26_214_400 // PIECE


@pytest.mark.anyio
@pytest.mark.parametrize(
    "framing", [b"Content-Length: %d" % (NUM_PIECES * PIECE), b"Transfer-Encoding: chunked"]
)
async def test_f37_a_client_that_reads_when_it_has_sent_all_gets_the_early_answer(framing: bytes) -> None:
    """To close the connection while the body is arriving would reset it, and the answer would be lost."""
    async with connected(HttpLimits(body_bytes=1_000)) as stream:
        await stream.send(POST + framing + b"\r\n\r\n")
        for _ in range(NUM_PIECES):
            piece = b"1" * PIECE
            await stream.send(b"%x\r\n%b\r\n" % (PIECE, piece) if b"chunked" in framing else piece)
        assert (await _until_end(stream)).startswith(b"HTTP/1.1 413 ")


@pytest.mark.anyio
@pytest.mark.parametrize("sends", [True, False])
async def test_f37_a_client_that_goes_on_after_an_early_answer_is_cut_off(
    monkeypatch: pytest.MonkeyPatch, sends: bool
) -> None:
    is_lost = called(monkeypatch, "connection_lost")
    monkeypatch.setattr(http_protocol, "LINGER_S", 0.05)
    monkeypatch.setattr(http_protocol, "MAX_LINGER_S", 0.2)
    async with connected(HttpLimits(body_bytes=1_000)) as stream:
        await stream.send(POST + b"Content-Length: 9000000000\r\n\r\n")
        assert (await stream.receive()).startswith(b"HTTP/1.1 413 ")
        with anyio.fail_after(20), contextlib.suppress(anyio.BrokenResourceError):
            while sends and not is_lost.is_set():
                await stream.send(b"1")
            await is_lost.wait()
        assert is_lost.is_set()


@pytest.mark.anyio
async def test_f37_a_client_that_sends_no_body_may_read_its_answer_slowly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The end of the connection waits for data of the client, but loses no data of the answer."""
    has_waited = called(monkeypatch, "_end_linger")
    monkeypatch.setattr(http_protocol, "LINGER_S", 0.01)
    async with connected_with_little_room(monkeypatch) as client:
        client.sendall(b"GET /openapi.json HTTP/1.0\r\nHost: here\r\nContent-Length: 1\r\n\r\n")
        with anyio.fail_after(20):
            await has_waited.wait()
            async with await SocketStream.from_socket(client) as stream:
                head, _, body = (await _until_end(stream)).partition(b"\r\n\r\n")
        assert b"content-length: %d\r\n" % len(body) in head + b"\r\n"


@pytest.mark.anyio
async def test_f37_a_websocket_begins_after_the_answer_to_the_request_before_it() -> None:
    async with connected() as stream:
        await stream.send(LIVE + b"\r\n" + HANDSHAKE + b"\r\n")
        answer = b""
        while b"HTTP/1.1 101 " not in answer:
            answer += await stream.receive()
    assert answer.startswith(b"HTTP/1.1 200 ")


@pytest.mark.anyio
async def test_a_connection_serves_one_request_after_the_other() -> None:
    async with connected() as stream:
        for _ in range(2):
            await _ask(stream, LIVE + b"\r\n")
        await _ask(stream, LIVE + b"Content-Length: 2\r\n\r\n")
        await _ask(stream, b"12" + LIVE + b"\r\n")  # the rest of the body is no request
