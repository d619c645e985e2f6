"""The connections of a session: an HTTP/1.1 transport for httpx2 over anyio's streams.

httpx2's own pool examines all of its connections whenever a request begins or ends, which takes quadratic
time for thousands of concurrent streams, and its parser is written in Python, which is slow for chunks of one
token. This pool takes constant time for a request, and httptools parses the answers. ``PooledClient`` makes
the head of similar requests once. There are no proxies: behind one, httpx2's pool is used.

There is no HTTP/2. httpx2 has one connection to a server, with at most 100 streams: the others wait until one
ends. When that connection is lost, or one read times out, all streams end. A chunk of one token costs as much
processor time as here.
"""

from __future__ import annotations

import logging
import re
import select
import ssl
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from socket import SocketType
from typing import Any, NamedTuple

import anyio
import httptools
import httpx2
from anyio.abc import ByteStream, SocketAttribute

logger = logging.getLogger(__name__)

MAX_HEAD_BYTES = 100 * 1024
"""The most bytes of a response's head, and of its framing between two parts of its body."""
SMALL_BYTES = 64 * 1024
"""A request of this size fits into the buffers of the network, so that its sending does not wait."""
_Origin = tuple[str, str, int]
_FIELDS = re.compile(rb"(?:[!#$%&'*+.^_`|~0-9A-Za-z-]+: [^\r\n\0]*\r\n)*")
_LOST = (anyio.BrokenResourceError, anyio.ClosedResourceError, ssl.SSLError, OSError)


class Connections(httpx2.AsyncBaseTransport):
    """A pool of connections, each of which has one request at a time.

    Args:
        ssl_context: The context of connections to ``https`` addresses; None: one as httpx2 makes it.
        keepalive_s: How long a connection may be idle, in seconds.
    """

    def __init__(self, ssl_context: ssl.SSLContext | None, keepalive_s: float) -> None:
        self._ssl_context = ssl_context
        self._keepalive_s = keepalive_s
        self._idle: dict[_Origin, deque[_Connection]] = {}  # the last one used at the end
        self._in_use: set[_Connection] = set()

    @property
    def num_in_use(self) -> int:
        """The connections whose response is not read to its end."""
        return len(self._in_use)

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Sends a request, and returns when the head of its response has arrived."""
        is_whole = isinstance(request.stream, httpx2.ByteStream)
        body = await request.aread() if is_whole else _pieces(request)
        return await self.exchange(_make_head(request), b"", body, has_body=request.method != "HEAD")

    async def exchange(
        self, head: _Head, last_field: bytes, body: bytes | AsyncIterator[bytes], *, has_body: bool = True
    ) -> httpx2.Response:
        """Sends a request, and returns when the head of its response has arrived.

        Args:
            head: The head of the request.
            last_field: One more field, as a line.
            body: The body of the request.
            has_body: Whether the response has one, unlike the answer to ``HEAD``.
        """
        connection = await self._idle_connection(head.origin)
        if connection is None:
            connection = await self._connect(head.origin, head.connect_timeout_s)
        self._in_use.add(connection)
        try:
            await connection.exchange(b"%b%b\r\n" % (head.text, last_field), body, has_body=has_body)
        except BaseException:
            await self._release(connection)
            raise
        extensions = {"http_version": connection.http_version, "reason_phrase": connection.reason}
        return httpx2.Response(
            connection.status,
            headers=connection.headers,
            stream=_Body(self, connection),
            extensions=extensions,
        )

    async def aclose(self) -> None:
        """Closes all connections."""
        for connection in [*self._in_use, *[one for idle in self._idle.values() for one in idle]]:
            await connection.close()
        self._idle.clear()
        self._in_use.clear()

    async def _idle_connection(self, origin: _Origin) -> _Connection | None:
        idle = self._idle.get(origin)
        while idle:
            connection = idle.pop()
            if connection.is_usable:
                return connection
            await connection.close()
        return None

    async def _connect(self, origin: _Origin, timeout_s: float | None) -> _Connection:
        scheme, host, port = origin
        if scheme not in ("http", "https"):
            raise httpx2.UnsupportedProtocol(f"the scheme {scheme!r} is not supported")
        stream: ByteStream
        try:
            with anyio.fail_after(timeout_s):
                if scheme == "http":
                    stream = await anyio.connect_tcp(host, port)
                else:
                    stream = await anyio.connect_tcp(
                        host, port, ssl_context=self._tls(), tls_standard_compatible=False
                    )
        except TimeoutError as error:
            raise httpx2.ConnectTimeout("no connection in time") from error
        except (anyio.EndOfStream, *_LOST) as error:
            raise httpx2.ConnectError(str(error)) from error
        return _Connection(stream, origin)

    def _tls(self) -> ssl.SSLContext:
        if self._ssl_context is None:
            self._ssl_context = httpx2.create_ssl_context()
        self._ssl_context.set_alpn_protocols(["http/1.1"])
        return self._ssl_context

    async def _release(self, connection: _Connection) -> None:
        """The response is read, or left."""
        if connection not in self._in_use:
            return
        self._in_use.remove(connection)
        if not connection.may_be_kept:
            await connection.close()
            return
        idle = self._idle.setdefault(connection.origin, deque())
        connection.keep(self._keepalive_s)
        idle.append(connection)
        if idle[0].is_expired:
            await idle.popleft().close()


class PooledClient(httpx2.AsyncClient):
    """A client on ``Connections``.

    Args:
        connections: The pool.
        options: As for httpx2's client.
    """

    def __init__(self, connections: Connections, **options: Any) -> None:
        super().__init__(transport=connections, **options)
        self._connections = connections
        self._heads: dict[str, tuple[httpx2.Request, _Head]] = {}  # of ``post_whole``, by path

    async def post_whole(self, path: str, body: bytes, headers: Mapping[str, str]) -> httpx2.Response:
        """The response to a ``POST``, whose body is to be read from its ``stream``. The headers must be the
        same for all requests to one path.

        httpx2 merges the address and the headers of each request again, and looks for redirects, hooks, flows
        of authentication and cookies, which takes longer than to send a request and to read a short answer.
        """
        known = self._heads.get(path)
        if known is None:
            request = self.build_request("POST", path, headers=headers)  # with the cookies
            del request.headers["content-length"]
            known = self._heads[path] = request, _make_head(request)
        request, head = known
        response = await self._connections.exchange(head, b"content-length: %d\r\n" % len(body), body)
        logger.info("POST %s: status %d", request.url, response.status_code)  # as httpx2 does
        if "set-cookie" in response.headers:
            response.request = request
            self.cookies.extract_cookies(response)
            self._heads.clear()
        return response


class _Body(httpx2.AsyncByteStream):
    """The body of a response, whose end releases the connection."""

    def __init__(self, pool: Connections, connection: _Connection) -> None:
        self._pool = pool
        self._connection = connection

    @property
    def is_read(self) -> bool:
        """Whether nothing follows. False also if that is not known yet."""
        return self._connection.is_read

    async def __aiter__(self) -> AsyncIterator[bytes]:
        receive = self._connection.receive_body
        while part := await receive():
            yield part

    async def aclose(self) -> None:
        await self._pool._release(self._connection)


class _Connection:
    """A connection, with the response that it receives. The methods ``on_…`` are the parser's."""

    def __init__(self, stream: ByteStream, origin: _Origin) -> None:
        self.origin = origin
        self._stream = stream
        self._socket = stream.extra(SocketAttribute.raw_socket)
        self._idle_until_s = 0.0
        self._begin()

    def _begin(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self.status = 0
        self.reason = b""
        self.http_version = b""
        self.headers: list[tuple[bytes, bytes]] = []
        self._keeps_alive = False
        self._is_sent = False
        self._parts: list[bytes] = []  # of the body, that were not read yet
        self._num_framing_bytes = 0
        self._has_head = self._is_complete = False
        self._has_body = True

    # The pool

    @property
    def may_be_kept(self) -> bool:
        """Whether the connection can become idle: the request was sent, and its response received, whole."""
        return self._keeps_alive and self._is_sent

    @property
    def is_expired(self) -> bool:
        """Whether the connection was idle for too long."""
        return time.monotonic() > self._idle_until_s

    @property
    def is_usable(self) -> bool:
        """Whether the idle connection can have another request. A server sends nothing between two, so a
        socket that can be read was closed."""
        return not self.is_expired and not _is_readable(self._socket)

    def keep(self, seconds: float) -> None:
        """The connection becomes idle."""
        self._idle_until_s = time.monotonic() + seconds

    async def close(self) -> None:
        """Closes the connection, without a farewell."""
        with anyio.CancelScope(shield=True):
            await anyio.aclose_forcefully(self._stream)

    # One request

    async def exchange(
        self, head: bytes, body: bytes | AsyncIterator[bytes], *, has_body: bool = True
    ) -> None:
        """Sends a request, and receives the head of the response. ``has_body``: of the response; the answer
        to HEAD has none, whatever its length says."""
        self._begin()
        self._has_body = has_body
        if isinstance(body, bytes) and len(body) <= SMALL_BYTES:
            await self._send(head + body)
            await self._receive_head()
            return
        # A server may refuse a request before it has read everything, and read no more.
        failure: httpx2.TransportError | None = None
        async with anyio.create_task_group() as group:
            group.start_soon(self._send, head, body)
            try:
                await self._receive_head()
            except httpx2.TransportError as error:
                failure = error
            if failure is not None or self.status >= 400:
                group.cancel_scope.cancel()
        if failure is not None:
            raise failure

    async def _send(self, head: bytes, body: bytes | AsyncIterator[bytes] = b"") -> None:
        with suppress(*_LOST):  # the server may have answered before
            if isinstance(body, bytes):
                await self._stream.send(head + body)
            else:
                await self._stream.send(head)
                async for piece in body:
                    await self._stream.send(piece)
            self._is_sent = True

    async def _receive_head(self) -> None:
        while not self._has_head:
            await self._receive()

    @property
    def is_read(self) -> bool:
        """Whether all parts of the body were received and read."""
        return self._is_complete and not self._parts

    async def receive_body(self) -> bytes:
        """The next part of the body, empty at its end."""
        while not self._parts:
            if self._is_complete:
                return b""
            await self._receive()
        parts, self._parts = self._parts, []
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def _receive(self) -> None:
        try:
            data = await self._stream.receive()
        except anyio.EndOfStream:
            self._end()
            return
        except _LOST as error:
            raise httpx2.ReadError(str(error)) from error
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as error:
            raise httpx2.RemoteProtocolError("the server changes the protocol") from error
        except httptools.HttpParserError as error:
            self._keeps_alive = False
            if not self._is_complete:
                raise httpx2.RemoteProtocolError(f"the answer is no HTTP ({error})") from error
        if self._parts or self._is_complete:
            self._num_framing_bytes = 0
            return
        self._num_framing_bytes += len(data)
        if self._num_framing_bytes > MAX_HEAD_BYTES:
            raise httpx2.RemoteProtocolError(f"the head of the answer has more than {MAX_HEAD_BYTES:,} bytes")

    def _end(self) -> None:
        """The server has closed the connection, which is the end of a body without a length."""
        self._keeps_alive = False
        names = {name.lower() for name, _ in self.headers}
        if not self._has_head:
            raise httpx2.RemoteProtocolError("the server closed the connection without an answer")
        if names & {b"content-length", b"transfer-encoding"}:
            raise httpx2.RemoteProtocolError("the server closed the connection within the answer")
        self._is_complete = True

    # The parser

    def on_message_begin(self) -> None:
        self._keeps_alive = False  # also if the server sends a second response

    def on_status(self, reason: bytes) -> None:
        self.reason += reason

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._has_head:  # others are trailers
            self.headers.append((name, value.strip()))

    def on_headers_complete(self) -> None:
        if self._is_complete:
            return
        self.status = self._parser.get_status_code()
        self._has_head = self.status >= 200
        self.http_version = f"HTTP/{self._parser.get_http_version()}".encode()
        if self._has_head and not self._has_body:
            self._is_complete = True  # the parser would wait for the body: the connection is not kept

    def on_body(self, part: bytes) -> None:
        if not self._is_complete:
            self._parts.append(part)

    def on_message_complete(self) -> None:
        if not self._has_head:  # an informational response, before the real one
            self.headers, self.reason = [], b""
            return
        self._keeps_alive = not self._is_complete and self._parser.should_keep_alive()
        self._is_complete = True


def _is_readable(socket: SocketType) -> bool:
    if sys.platform == "win32":
        return bool(select.select([socket], [], [], 0)[0])
    poll = select.poll()  # also for descriptors beyond 1,023
    poll.register(socket, select.POLLIN)
    return bool(poll.poll(0))


async def _pieces(request: httpx2.Request) -> AsyncIterator[bytes]:
    """A body that is made while it is sent, in chunks if its length is not known."""
    assert isinstance(request.stream, httpx2.AsyncByteStream)
    is_chunked = "transfer-encoding" in request.headers
    async for piece in request.stream:
        if not is_chunked:
            yield piece
        elif piece:
            yield b"%x\r\n%b\r\n" % (len(piece), piece)
    if is_chunked:
        yield b"0\r\n\r\n"


class _Head(NamedTuple):
    """The head of a request, except for the empty line at its end."""

    origin: _Origin
    text: bytes
    connect_timeout_s: float | None


def _make_head(request: httpx2.Request) -> _Head:
    url = request.url
    origin = (url.scheme, url.raw_host.decode(), url.port or (443 if url.scheme == "https" else 80))
    return _Head(origin, _request_head(request), request.extensions.get("timeout", {}).get("connect"))


def _request_head(request: httpx2.Request) -> bytes:
    raw = request.headers.raw
    fields = b"".join([b"%b: %b\r\n" % field for field in raw])
    if _FIELDS.fullmatch(fields) is None or fields.count(b"\n") != len(raw):
        raise httpx2.LocalProtocolError("a header of the request has characters that HTTP does not allow")
    return b"%b %b HTTP/1.1\r\n%b" % (request.method.encode(), request.url.raw_path, fields)
