"""The pool of connections reads answers as httpx2's transport does, and uses a connection again only after a
whole answer."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest
from support.apis.fake_server import Answer, AnyAnswer, FakeServer, Forever, Hold, RawAnswer, fake_server

from agentflow.backends.apis.http.connections import MAX_HEAD_BYTES, Connections
from agentflow.backends.apis.http.transport import open_http
from agentflow.errors import BadArgument

pytestmark = pytest.mark.anyio

CERTIFICATE = Path(__file__).parents[3] / "support" / "localhost_for_tests.pem"
OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"transfer-encoding: chunked\r\n\r\n"


def pool(tls: ssl.SSLContext | None = None, keepalive_s: float = 60.0) -> Connections:
    return Connections(tls, keepalive_s)


async def answered(transport: httpx2.AsyncBaseTransport, url: str, body: bytes = b"{}") -> tuple[Any, ...]:
    """The status, the headers and the body of an answer, or the class of the error."""
    try:
        async with httpx2.AsyncClient(transport=transport) as client:
            got = await client.post(url, content=body)
        headers = [(name.lower(), value) for name, value in got.headers.raw]
        return got.status_code, headers, got.content
    except httpx2.TransportError as error:
        return (type(error),)


ANSWERS = {
    "with a length": OK + b"content-length: 5\r\n\r\nhello",
    "in chunks": CHUNKED + b"5\r\nhello\r\n6;x=y\r\n world\r\n0\r\n\r\n",
    "in chunks with a trailer": CHUNKED + b"5\r\nhello\r\n0\r\nx-sum: 7\r\n\r\n",
    "until the end": OK + b"content-type: text/plain\r\n\r\nhello",
    "of HTTP/1.0": b"HTTP/1.0 200 OK\r\n\r\nhello",
    "without a body": b"HTTP/1.1 204 No Content\r\nx-a: b\r\n\r\n",
    "without a reason": b"HTTP/1.1 200 \r\ncontent-length: 2\r\n\r\nok",
    "after an informational one": (
        b"HTTP/1.1 103 Early Hints\r\nlink: a\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n"
        + OK
        + b"content-length: 2\r\n\r\nok"
    ),
    "with equal headers": OK + b"X-A: 1\r\nx-a:  2 \r\ncontent-length: 0\r\n\r\n",
    "cut in the head": OK + b"content-le",
    "cut in the body": OK + b"content-length: 50\r\n\r\nhello",
    "cut in a chunk": CHUNKED + b"50\r\nhello",
    "cut after a chunk": CHUNKED + b"5\r\nhello\r\n",
    "of nothing": b"",
    "of no HTTP": b"SSH-2.0-OpenSSH_9.9\r\n",
    "with a bad chunk": CHUNKED + b"zz\r\nhello\r\n",
    "with a bad length": OK + b"content-length: many\r\n\r\nhello",
    "with a bad header": OK + b"no header\r\n\r\n",
}


@pytest.mark.parametrize("name", ANSWERS)
async def test_answers_are_read_as_httpx2_reads_them(name: str) -> None:
    raw = ANSWERS[name]
    for size in (1, 7, 10_000):
        pieces = [raw[at : at + size] for at in range(0, len(raw), size)]
        async with fake_server([RawAnswer(pieces), RawAnswer(pieces)]) as server:
            expected = await answered(httpx2.AsyncHTTPTransport(), server.url)
            assert await answered(pool(), server.url) == expected


async def asked(connections: Connections, server: FakeServer, body: bytes = b"{}") -> int:
    request = httpx2.Request("POST", server.url, content=body)
    response = await connections.handle_async_request(request)
    await response.aread()
    await response.aclose()
    return response.status_code


WHOLE = Answer(b"{}")


@pytest.mark.parametrize(
    ("first", "num_connections"),
    [
        (WHOLE, 1),
        (Answer([b"a", b"b"]), 1),
        (Answer(b"{}", 500), 1),
        (Answer(b"{}", headers={"connection": "close"}), 2),
        (RawAnswer([OK + b"content-length: 2\r\n\r\n{}"]), 2),  # then the server closes
        (RawAnswer([OK + b"\r\n{}"]), 2),
        (RawAnswer([OK + b"content-length: 2\r\n\r\n{}" + OK + b"\r\n"]), 2),  # two answers to one request
    ],
)
async def test_a_connection_is_used_again_after_a_whole_answer(
    first: AnyAnswer, num_connections: int
) -> None:
    async with fake_server([first, WHOLE]) as server:
        connections = pool()
        assert await asked(connections, server) in (200, 500)
        if isinstance(first, RawAnswer):
            await server.wait_until(lambda: server.num_closed > 0)
        assert await asked(connections, server) == 200
        assert server.num_connections == num_connections
        await connections.aclose()


async def test_an_idle_connection_expires() -> None:
    async with fake_server([WHOLE, WHOLE]) as server:
        connections = pool(keepalive_s=-1.0)
        await asked(connections, server)
        await asked(connections, server)
        assert server.num_connections == 2
        await connections.aclose()


@pytest.mark.on_trio
async def test_concurrent_requests_have_a_connection_each() -> None:
    holds = [Hold(), Hold()]
    async with fake_server([Answer([hold]) for hold in holds] + [WHOLE]) as server:
        connections = pool()
        async with anyio.create_task_group() as group:
            for _ in holds:
                group.start_soon(asked, connections, server)
            for hold in holds:
                await hold.reached.wait()
            assert (connections.num_in_use, server.num_connections) == (2, 2)
            for hold in holds:
                hold.go_on()
        assert connections.num_in_use == 0
        await asked(connections, server)
        assert server.num_connections == 2
        await connections.aclose()


@pytest.mark.on_trio
async def test_a_response_that_is_left_loses_its_connection() -> None:
    async with fake_server([Answer([b"a", Hold()])]) as server:
        connections = pool()
        response = await connections.handle_async_request(httpx2.Request("GET", server.url))
        await response.aclose()
        await server.wait_until_gone()
        assert connections.num_in_use == 0


@pytest.mark.on_trio
async def test_a_cancelled_request_loses_its_connection() -> None:
    hold = Hold()
    async with fake_server([RawAnswer([hold])]) as server:
        connections = pool()
        async with anyio.create_task_group() as group:
            group.start_soon(asked, connections, server)
            await hold.reached.wait()
            group.cancel_scope.cancel()
        await server.wait_until_gone()
        assert connections.num_in_use == 0


@pytest.mark.parametrize(
    "answer",
    [
        RawAnswer([OK + b"x-a: ", Forever(b"x" * 5_000)]),
        RawAnswer([Forever((OK.replace(b"200 OK", b"100 Continue") + b"\r\n") * 200)]),
        RawAnswer([CHUNKED + b"1;", Forever(b"x" * 5_000)]),
        RawAnswer([CHUNKED + b"0\r\n", Forever(b"x-a: b\r\n" * 500)]),
    ],
)
async def test_an_endless_head_is_an_error(answer: RawAnswer) -> None:
    async with fake_server([answer]) as server:
        connections = pool()
        with pytest.raises(httpx2.RemoteProtocolError, match=f"{MAX_HEAD_BYTES:,}"):
            await asked(connections, server)
        await connections.aclose()


@pytest.mark.parametrize("closes", [False, True])
async def test_an_answer_before_the_end_of_the_request_is_read(closes: bool) -> None:
    is_over = anyio.Event()

    async def refuse(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            await stream.receive(10)
            await stream.send(b"HTTP/1.1 413 Too Large\r\ncontent-length: 0\r\n\r\n")
            if not closes:  # and reads nothing
                await is_over.wait()

    async with (
        await anyio.create_tcp_listener(local_host="127.0.0.1") as listener,
        anyio.create_task_group() as group,
    ):
        group.start_soon(listener.serve, refuse)
        port = listener.extra(anyio.abc.SocketAttribute.local_port)
        connections = pool()
        for _ in range(3):  # with a new connection for each, because the request was not sent whole
            request = httpx2.Request("POST", f"http://127.0.0.1:{port}", content=b"x" * 25_000_000)
            with anyio.fail_after(30):
                response = await connections.handle_async_request(request)
            assert response.status_code == 413
            await response.aclose()
        is_over.set()
        await connections.aclose()
        group.cancel_scope.cancel()


async def test_a_connection_is_used_again_after_a_large_request() -> None:
    async with fake_server([WHOLE, WHOLE]) as server:
        connections = pool()
        for _ in range(2):
            assert await asked(connections, server, b"x" * 3_000_000) == 200
        assert server.num_connections == 1
        await connections.aclose()


@pytest.mark.parametrize("value", [b"a\r\nx-b: c", b"a\nb", b"a\0"])
async def test_a_header_cannot_begin_another_one(value: bytes) -> None:
    with pytest.raises(httpx2.LocalProtocolError):
        await pool().handle_async_request(
            httpx2.Request("GET", "http://127.0.0.1:1", headers={b"x-a": value})
        )


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://nowhere.invalid"])
async def test_no_server_is_an_error_of_the_connection(url: str) -> None:
    with pytest.raises(httpx2.ConnectError):
        await pool().handle_async_request(httpx2.Request("GET", url))


async def test_connections_over_tls() -> None:
    server_side = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_side.load_cert_chain(CERTIFICATE)
    trusting = ssl.create_default_context(cafile=str(CERTIFICATE))
    async with fake_server([WHOLE, Answer([b"a", b"b"])], server_side) as server:
        connections = pool(trusting)
        assert [await asked(connections, server), await asked(connections, server)] == [200, 200]
        assert server.num_connections == 1
        await connections.aclose()


async def test_an_unknown_certificate_is_an_error_of_the_connection() -> None:
    server_side = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_side.load_cert_chain(CERTIFICATE)
    async with fake_server([WHOLE], server_side) as server:
        with pytest.raises(httpx2.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            await asked(pool(), server)


@pytest.mark.parametrize("is_in_environment", [False, True])
async def test_a_proxy_is_asked(monkeypatch: pytest.MonkeyPatch, is_in_environment: bool) -> None:
    async with fake_server([WHOLE]) as server:
        if is_in_environment:
            monkeypatch.setenv("http_proxy", server.url)
        proxy = None if is_in_environment else server.url
        async with open_http("http://nowhere.invalid/v1", {}, proxy=proxy) as http:
            await http.get("models")
        assert server.last.path == "http://nowhere.invalid/v1/models"


@pytest.mark.parametrize("proxy", ["ftp://ann:secret@host", "socks9://host:1"])
@pytest.mark.parametrize("is_in_environment", [False, True])
async def test_a_proxy_that_cannot_be_used(
    monkeypatch: pytest.MonkeyPatch, proxy: str, is_in_environment: bool
) -> None:
    if is_in_environment:
        monkeypatch.setenv("all_proxy", proxy)
    with pytest.raises(BadArgument) as caught:
        async with open_http("http://host/v1", {}, proxy=None if is_in_environment else proxy):
            pass
    assert caught.value.param == "proxy"
    assert "secret" not in str(caught.value)


async def test_the_answer_to_head_has_a_length_and_no_body() -> None:
    head = RawAnswer([OK + b"content-length: 5\r\n\r\n", Hold()])
    async with fake_server([head]) as server:
        connections = pool()
        with anyio.fail_after(5):
            response = await connections.handle_async_request(httpx2.Request("HEAD", server.url))
            assert (response.headers["content-length"], await response.aread()) == ("5", b"")
            await response.aclose()
        assert connections.num_in_use == 0


@pytest.mark.parametrize("length", [None, "9"])
async def test_a_body_that_is_made_while_it_is_sent(length: str | None) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for piece in (b"{}", b"", b"  -  ", b"{}"):
            yield piece

    headers = {} if length is None else {"content-length": length}
    async with fake_server([Answer(b"{}")]) as server, httpx2.AsyncClient(transport=pool()) as client:
        got = await client.post(server.url, content=pieces(), headers=headers)
        assert (got.status_code, server.received[0].body) == (200, b"{}  -  {}")
