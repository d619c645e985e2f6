"""Requests that a client sends before it has the answer to the one before them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import tracemalloc
from collections.abc import AsyncIterator
from typing import Any
from unittest.mock import patch

import anyio
import anyio.lowlevel
import httptools
import pytest
from anyio.abc import SocketStream
from hypothesis import given
from hypothesis import strategies as st
from support.server.http_clients import only_asyncio
from support.wire_server import open_generator
from uvicorn.server import ServerState

from agentflow.server.config.limits import ServerLimits
from agentflow.server.http import protocol as http_protocol
from agentflow.server.http.protocol import MAX_WAITING_BYTES, PIECE_BYTES
from agentflow.server.models.models import one_model
from agentflow.server.serve import http_config, running_server

pytestmark = pytest.mark.timeout(60)
anyio_backend = pytest.fixture(only_asyncio)


class App:
    """Answers with the path and the body, once it is allowed to."""

    def __init__(self) -> None:
        self.is_allowed = asyncio.Event()
        self.has_begun = asyncio.Event()
        self.is_gone = asyncio.Event()
        self.num_open = self.max_open = self.num_received = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.num_open += 1
        self.max_open = max(self.max_open, self.num_open)
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        self.num_received += len(body)
        self.has_begun.set()
        async with anyio.create_task_group() as group:
            group.start_soon(self._watch, receive)
            await self.is_allowed.wait()
            group.cancel_scope.cancel()
        answer = scope["path"].encode() + b" " + body
        headers = [(b"content-length", b"%d" % len(answer))]
        self.num_open -= 1
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": answer})

    async def _watch(self, receive: Any) -> None:
        assert (await receive())["type"] == "http.disconnect"
        self.is_gone.set()
        self.is_allowed.set()


class Answers:
    """Parses the bodies of answers."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.parser = httptools.HttpResponseParser(self)

    def on_message_begin(self) -> None:
        self.bodies.append(b"")

    def on_body(self, part: bytes) -> None:
        self.bodies[-1] += part


@contextlib.asynccontextmanager
async def served(app: App, sent: bytes = b"", **limits: Any) -> AsyncIterator[SocketStream]:
    """A connection to a server that has no other application, over which these bytes were sent."""
    async with running_server(one_model(open_generator), limits=ServerLimits(**limits)) as server:
        server.app.router.app = server.app.middleware_stack = app  # type: ignore[assignment, attr-defined]
        async with await anyio.connect_tcp("127.0.0.1", int(server.url.rpartition(":")[2])) as stream:
            await stream.send(sent)
            yield stream


async def all_answers(app: App, stream: SocketStream) -> bytes:
    """All bytes until the end of the connection, after the first request is allowed to be answered."""
    await app.has_begun.wait()
    app.is_allowed.set()
    return b"".join([part async for part in stream])


@pytest.mark.anyio
async def test_f37_thousands_of_requests_at_once_cost_no_more_than_their_bytes() -> None:
    num_requests = 1_200
    headers = (b"", b"Connection: Upgrade\r\nUpgrade: h2c\r\n")
    app = App()
    sent = b"".join(
        [
            b"GET /%d HTTP/1.1\r\nHost:\r\nX-Padding: 0123456789abcdef\r\n%b\r\n"
            % (number, headers[number % 2])
            for number in range(num_requests)
        ]
    )
    assert len(sent) > MAX_WAITING_BYTES
    async with served(app) as stream, anyio.create_task_group() as group:
        tracemalloc.start()
        try:
            group.start_soon(stream.send, sent)
            await app.has_begun.wait()
            app.is_allowed.set()
            answers = Answers()
            while len(answers.bodies) < num_requests or answers.bodies[-1] != b"/1199 ":
                answers.parser.feed_data(await stream.receive())
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert answers.bodies == [b"/%d " % number for number in range(num_requests)]
    assert app.max_open == 1
    assert peak_bytes < 800_000


@pytest.mark.anyio
@pytest.mark.parametrize(
    "second",
    [
        b"GET /second HTTP/1.1\r\nHost: here\r\n\r\n",
        b"GET /second HTTP/1.1\r\nHo",
        b"GET /v1/session HTTP/1.1\r\nHost: here\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
        b"\r\n",
        b"no request\r\n\r\n",
        b"GET /second HTTP/1.1\r\nHost: here\r\n\r\n" * 20_000,
    ],
    ids=["request", "begun", "websocket", "empty line", "garbage", "more than is kept"],
)
async def test_f37_a_client_that_goes_is_noticed_whatever_it_has_sent(
    second: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "UNREAD_S", 0.05)
    app = App()
    async with served(app, b"GET /first HTTP/1.1\r\nHost: here\r\n\r\n" + second) as stream:
        await app.has_begun.wait()
        await stream.aclose()
        with anyio.fail_after(20):
            await app.is_gone.wait()
        assert app.max_open == 1


@pytest.mark.anyio
async def test_the_connection_closes_after_an_answer_that_too_much_has_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    is_dropped = asyncio.Event()
    kind = http_protocol.TimedHttpProtocol
    drop = kind._drop_waiting

    def drop_waiting(self: Any) -> None:
        drop(self)
        is_dropped.set()

    monkeypatch.setattr(http_protocol, "UNREAD_S", 0.05)
    monkeypatch.setattr(kind, "_drop_waiting", drop_waiting)
    app = App()
    request = b"GET /%b HTTP/1.1\r\nHost: here\r\n\r\n"
    sent = request % b"first" + request % b"second" * (MAX_WAITING_BYTES // 10)
    async with served(app, sent) as stream:
        await is_dropped.wait()
        answer = await all_answers(app, stream)
    assert answer.count(b"HTTP/1.1 200") == 1
    assert b"connection: close" in answer
    assert answer.endswith(b"/first ")


@pytest.mark.anyio
@pytest.mark.parametrize("second", [b"GET /second HTTP/1.1\r\nHo", b"no request\r\n\r\n"])
async def test_f37_an_answer_is_not_cut_off_for_a_bad_request_after_it(second: bytes) -> None:
    app = App()
    sent = b"GET /first HTTP/1.1\r\nHost: here\r\n\r\n" + second
    async with served(app, sent, header_timeout_s=0.05) as stream:
        answer = await all_answers(app, stream)
    first, last = answer.split(b"/first ")
    assert first.startswith(b"HTTP/1.1 200 ")
    assert last.startswith((b"HTTP/1.1 408 ", b"HTTP/1.1 400 "))


# The parser does not stop after a request, so its end must be found without it.
@pytest.mark.anyio
@pytest.mark.parametrize(
    "request_",
    [
        b"GET / HTTP/1.1\nHost: here\n\n",
        b"GET / HTTP/1.1\r\nHost: here\n\n",
        b"GET / HTTP/1.1\r\nHost: here\r\n\n",
        b"GET / HTTP/1.1\r\nHost: here\n\r\n",
        b"GET / HTTP/1.1\r\nHost: here\r\r",
    ],
)
async def test_lines_of_headers_end_with_cr_lf(request_: bytes) -> None:
    app = App()
    async with served(app, request_) as stream:
        assert (await stream.receive()).startswith(b"HTTP/1.1 400 ")
    assert app.max_open == 0


@pytest.mark.anyio
async def test_the_connection_closes_after_an_answer_to_an_unread_body() -> None:
    """The parser takes the body of a request that offers another protocol for the next request."""
    app = App()
    offer = b"Connection: upgrade\r\nUpgrade: h2c\r\nContent-Length: 5\r\n"
    async with served(app, b"POST /first HTTP/1.1\r\nHost: here\r\n" + offer + b"\r\nhello") as stream:
        answer = await all_answers(app, stream)
    assert b"connection: close" in answer
    assert answer.endswith(b"/first ")


@contextlib.asynccontextmanager
async def connected(app: App) -> AsyncIterator[tuple[Any, socket.socket]]:
    """The server's end of a connection, to which a test gives the data, and the client's."""
    config = http_config(app, ServerLimits(), None)
    kind: Any = config.http_protocol_class
    client, served = socket.socketpair()
    with client, served:
        client.setblocking(False)
        served.setblocking(False)
        transport, protocol = await asyncio.get_running_loop().connect_accepted_socket(
            lambda: kind(config=config, server_state=ServerState(), app_state={}), served
        )
        yield protocol, client
        transport.abort()
        app.is_allowed.set()
        while tasks := protocol.tasks:
            await asyncio.wait(tasks)


async def give(protocol: Any, data: bytes, cuts: list[int]) -> None:
    for start, end in itertools.pairwise([0, *sorted(cuts), len(data)]):
        if not protocol.transport.is_closing():
            protocol.data_received(data[start:end])
            await anyio.lowlevel.checkpoint()  # the application may run between two parts, or not


async def answers_to(data: bytes, cuts: list[int], num_answers: int) -> list[bytes]:
    """The answers to data that arrive in the parts between ``cuts``."""
    app = App()
    app.is_allowed.set()
    loop = asyncio.get_running_loop()
    async with connected(app) as (protocol, client):
        await give(protocol, data, cuts)
        answers = Answers()
        while len(answers.bodies) < num_answers or not answers.bodies[-1].endswith(b"!"):
            answers.parser.feed_data(await loop.sock_recv(client, 65_536))
    assert app.max_open == 1
    return answers.bodies


BODIES = st.sampled_from(
    [b"", b"x", b"\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"\n" * 9, b"0\r\n\r\n", b"y\r\n\r" * PIECE_BYTES]
)
EXTENSIONS = st.sampled_from([b"", b";a=b", b";" + b"a" * 200])


@st.composite
def requests(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """A request, and the body that it has."""
    head = b"\r\n" * draw(st.integers(0, 2)) + b"POST /p HTTP/1.1\r\nHost: here\r\n"
    if draw(st.booleans()):
        body = draw(BODIES)
        return head + b"Content-Length: %d\r\n\r\n" % len(body) + body, body
    chunks = draw(st.lists(BODIES.filter(bool), max_size=3))
    sent = b"".join([b"0%x%b\r\n%b\r\n" % (len(chunk), draw(EXTENSIONS), chunk) for chunk in chunks])
    sent += b"00%b\r\n%b\r\n" % (draw(EXTENSIONS), draw(st.sampled_from([b"", b"a: b\r\n"])))
    return head + b"Transfer-Encoding: chunked\r\n\r\n" + sent, b"".join(chunks)


@given(st.lists(requests(), min_size=1, max_size=5), st.sampled_from([-1.0, 60.0]), st.data())
def test_requests_are_answered_in_order_however_their_bytes_arrive(
    pairs: list[tuple[bytes, bytes]], turn_s: float, data: st.DataObject
) -> None:
    last = b"POST /last HTTP/1.1\r\nHost: here\r\nContent-Length: 1\r\n\r\n!"
    sent = b"".join([one for one, _ in pairs]) + last
    cuts = data.draw(st.lists(st.integers(0, len(sent)), max_size=20))
    with patch.object(http_protocol, "TURN_S", turn_s):
        answers = asyncio.run(answers_to(sent, cuts, len(pairs) + 1))
    assert answers == [*[b"/p " + body for _, body in pairs], b"/last !"]


@pytest.mark.anyio
async def test_f37_small_chunks_are_parsed_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "TURN_S", -1.0)
    num_pieces = 7
    num_bytes = num_pieces * PIECE_BYTES // len(b"1\r\nx\r\n")
    app = App()
    async with connected(app) as (protocol, _):
        head = b"POST / HTTP/1.1\r\nHost: here\r\nTransfer-Encoding: chunked\r\n\r\n"
        protocol.data_received(head + b"1\r\nx\r\n" * num_bytes)
        protocol.data_received(b"0\r\n\r\n")  # of the same read, or of one that was under way
        num_turns = 0
        while protocol.cycle is None or protocol.cycle.more_body:
            await anyio.lowlevel.checkpoint()
            num_turns += 1
        await app.has_begun.wait()
        assert num_turns >= num_pieces
        assert app.num_received == num_bytes


TOKENS = [
    *(b"\r\n", b"\n", b"\r", b"0", b"5", b"0x5", b"+5", b"1_0", b" ", b";", b"f" * 70, b"0" * 70, b"hello"),
    b"GET / HTTP/1.1\r\nHost: a\r\n",
    b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
    b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
    b"GET /\r\n\r\n",
    b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n",
    b"Content-Length: 5\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"Connection: upgrade\r\nUpgrade: h2c\r\n",
    b"Connection: close\r\n",
]


async def most_open(data: bytes, cuts: list[int], begun: list[bool]) -> int:
    app = App()
    async with connected(app) as (protocol, _):
        begin = protocol.on_message_begin

        def on_message_begin() -> None:
            begun.append(protocol._is_answering())
            begin()

        protocol.on_message_begin = on_message_begin
        protocol.parser = httptools.HttpRequestParser(protocol)
        protocol.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        await give(protocol, data, cuts)
        return app.max_open


@given(st.lists(st.sampled_from(TOKENS), max_size=20), st.data())
def test_no_request_is_parsed_before_the_answer_to_the_one_before_it(
    tokens: list[bytes], data: st.DataObject
) -> None:
    sent = b"".join(tokens)
    cuts = data.draw(st.lists(st.integers(0, len(sent)), max_size=5))
    begun: list[bool] = []
    assert asyncio.run(most_open(sent, cuts, begun)) <= 1
    assert not any(begun)


@pytest.mark.anyio
async def test_requests_that_the_parser_gets_together_close_the_connection() -> None:
    """It would parse them all, if an end was not found."""
    async with connected(App()) as (protocol, _):
        protocol._parse(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n" * 3)
        assert protocol.transport.is_closing()
        assert len(protocol.tasks) == 1
        assert not protocol.pipeline
