"""HTTP as bytes on a socket, for clients that stop midway."""

from __future__ import annotations

import http.client
import io
import json
import socket
import struct
from dataclasses import dataclass
from typing import Any

import anyio
from anyio.abc import SocketAttribute, SocketStream

HOST = "127.0.0.1"


class BadAnswer(Exception):
    """The server's answer is not HTTP, or ended too early."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request to the server."""

    method: str
    path: str
    payload: Any = None  # bytes, or a value that is sent as JSON

    @property
    def body(self) -> bytes:
        """The request as bytes."""
        if self.payload is None:
            return b""
        return self.payload if isinstance(self.payload, bytes) else json.dumps(self.payload).encode()

    @property
    def head(self) -> bytes:
        """The part before the body. The server closes the connection after its answer."""
        lines = [
            f"{self.method} {self.path} HTTP/1.1",
            f"Host: {HOST}",
            "Connection: close",
            "Content-Type: application/json",
            f"Content-Length: {len(self.body)}",
        ]
        return "\r\n".join([*lines, "", ""]).encode()


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer of the server."""

    status: int
    body: bytes

    def json(self) -> Any:
        """Returns the value of the body."""
        return json.loads(self.body)


async def connect(port: int) -> SocketStream:
    """Connects to the server on this machine."""
    return await anyio.connect_tcp(HOST, port)


async def exchange(port: int, request: Request, *, timeout_s: float) -> Answer:
    """Sends the request and reads the whole answer. Raises ``BadAnswer``, OSError or TimeoutError."""
    with anyio.fail_after(timeout_s):
        async with await connect(port) as stream:
            try:
                await stream.send(request.head + request.body)
                return parse(await read_all(stream))
            except (anyio.BrokenResourceError, anyio.EndOfStream) as error:
                raise BadAnswer(f"the connection broke: {error!r}") from error


async def read_all(stream: SocketStream) -> bytes:
    """Reads until the server closes the connection."""
    parts: list[bytes] = []
    try:
        async for part in stream:
            parts.append(part)
    except anyio.BrokenResourceError:
        if not parts:
            raise
    return b"".join(parts)


def parse(data: bytes) -> Answer:
    """Parses a whole answer, whose body may be chunked."""
    response = http.client.HTTPResponse(_Received(data))  # type: ignore[arg-type]
    try:
        if b"\r\n\r\n" not in data:
            raise http.client.IncompleteRead(data)
        response.begin()
        return Answer(response.status, response.read())
    except http.client.HTTPException as error:
        raise BadAnswer(f"no whole answer: {error!r}, {data[:80]!r}") from error


class _Received:
    """Looks like a socket from which the data can be read."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, _mode: str) -> io.BytesIO:
        return io.BytesIO(self._data)


def reset(stream: SocketStream) -> None:
    """Makes closing the socket reset the connection."""
    raw: socket.socket = stream.extra(SocketAttribute.raw_socket)
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
