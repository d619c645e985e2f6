"""An HTTP server in the test's event loop that plays scripted answers byte for byte, also malformed ones. It
records the requests."""

from __future__ import annotations

import json
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import anyio
from anyio.abc import ByteStream, SocketAttribute
from anyio.streams.tls import TLSListener

from agentflow.runtime.task_group import open_task_group


class Hold:
    """A step that waits until the test calls ``go_on``."""

    def __init__(self) -> None:
        self.reached = anyio.Event()
        self.is_over = anyio.Event()

    def go_on(self) -> None:
        self.is_over.set()


@dataclass(frozen=True)
class Forever:
    """A step that sends the same bytes until the client is gone."""

    data: bytes


class Reset:
    """A last step: the connection breaks with a TCP reset."""


class Close:
    """A last step: the connection ends, whether the body is complete or not."""


Step: TypeAlias = bytes | Hold | Forever | Reset | Close


@dataclass(frozen=True)
class Received:
    """One request. Header names are in lower case."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    connection: int  # the number of the connection that it came over, from 1

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True)
class Answer:
    """An answer with a status and a body. A body of ``bytes`` has a length; each step is a chunk."""

    body: bytes | Sequence[Step] = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    content_type: str | None = "application/json"

    def steps(self) -> Iterable[Step]:
        """The bytes for the connection."""
        is_whole = isinstance(self.body, bytes)
        framing = f"content-length: {len(self.body)}" if is_whole else "transfer-encoding: chunked"
        lines = [f"HTTP/1.1 {self.status} Fake", framing]
        if self.content_type is not None:
            lines.append(f"content-type: {self.content_type}")
        lines += [f"{name}: {value}" for name, value in self.headers.items()]
        yield "\r\n".join([*lines, "", ""]).encode()
        if isinstance(self.body, bytes):
            yield self.body
            return
        for step in self.body:
            yield _framed(step)
            if isinstance(step, Reset | Close):
                return
        yield b"0\r\n\r\n"


@dataclass(frozen=True)
class RawAnswer:
    """Bytes instead of an HTTP answer, after which the connection closes."""

    raw: Sequence[Step]

    def steps(self) -> Iterable[Step]:
        """The bytes for the connection."""
        yield from self.raw
        yield Close()


AnyAnswer: TypeAlias = Answer | RawAnswer
Script: TypeAlias = Sequence[AnyAnswer] | Callable[[Received], AnyAnswer]


def _framed(step: Step) -> Step:
    """A step as a chunk."""
    match step:
        case bytes():
            return b"%x\r\n%s\r\n" % (len(step), step) if step else b""
        case Forever(data):
            return Forever(b"%x\r\n%s\r\n" % (len(data), data))
        case _:
            return step


class _GoneError(Exception):
    """The client closed the connection."""


class FakeServer:
    """The server, as tests look at it.

    Attributes:
        url: Such as ``http://127.0.0.1:4000``.
        received: The requests, in the order of their arrival.
        num_connections: The connections that clients have opened.
        num_closed: The connections that the server has closed after an answer.
        num_gone: The clients that closed a connection before the answer was complete.
    """

    def __init__(self, script: Script) -> None:
        self.url = ""
        self.received: list[Received] = []
        self.num_connections = 0
        self.num_closed = 0
        self.num_gone = 0
        self._script = script
        self._changed = anyio.Event()

    @property
    def last(self) -> Received:
        """The latest request."""
        return self.received[-1]

    async def wait_until(self, holds: Callable[[], bool], within_s: float = 20) -> None:
        """Waits until a condition on the attributes holds. ``TimeoutError`` after ``within_s`` seconds."""
        with anyio.fail_after(within_s):
            while not holds():
                await self._changed.wait()

    async def wait_for_requests(self, count: int) -> None:
        """Waits until this many requests have arrived."""
        await self.wait_until(lambda: len(self.received) >= count)

    async def wait_until_gone(self, count: int = 1) -> None:
        """Waits until this many clients have closed a connection before the answer was complete."""
        await self.wait_until(lambda: self.num_gone >= count)

    def _has_changed(self) -> None:
        changed, self._changed = self._changed, anyio.Event()
        changed.set()

    async def serve(self, stream: ByteStream) -> None:
        """Serves one connection."""
        self.num_connections += 1
        number = self.num_connections
        self._has_changed()
        reader = _Reader(stream)
        try:
            async with stream:
                while (request := await reader.request(number)) is not None:
                    self.received.append(request)
                    self._has_changed()
                    if not await self._play(self._answer(request).steps(), stream, reader):
                        break
            self.num_closed += 1
            self._has_changed()
        except (_GoneError, anyio.BrokenResourceError, anyio.ClosedResourceError):
            self.num_gone += 1
            self._has_changed()

    def _answer(self, request: Received) -> AnyAnswer:
        if callable(self._script):
            return self._script(request)
        if len(self.received) > len(self._script):
            return Answer(b'{"error": {"message": "the script of the fake server has ended"}}', status=500)
        return self._script[len(self.received) - 1]

    async def _play(self, steps: Iterable[Step], stream: ByteStream, reader: _Reader) -> bool:
        """Writes an answer; whether the connection goes on."""
        for step in steps:
            match step:
                case bytes():
                    await stream.send(step)
                case Hold():
                    step.reached.set()
                    await reader.wait(step.is_over)
                case Forever(data):
                    while True:
                        await stream.send(data)
                case Reset():
                    raw = stream.extra(SocketAttribute.raw_socket)
                    with suppress(OSError):  # the client may have closed it
                        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    return False
                case Close():
                    return False
        return True


class _Reader:
    """Reads requests from a connection."""

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream
        self._rest = b""

    async def request(self, connection: int) -> Received | None:
        """The next request; None if the client closed the connection."""
        while b"\r\n\r\n" not in self._rest:
            if not await self._receive():
                return None
        head, _, self._rest = self._rest.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        method, path, _ = first.split(" ")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        if headers.get("transfer-encoding") == "chunked":
            body = b""
            while chunk := (await self._take(int(await self._line(), 16) + 2))[:-2]:
                body += chunk
        else:
            body = await self._take(int(headers.get("content-length", "0")))
        return Received(method, path, headers, body, connection)

    async def _line(self) -> bytes:
        while b"\r\n" not in self._rest:
            await self._receive_more()
        line, _, self._rest = self._rest.partition(b"\r\n")
        return line

    async def _take(self, length: int) -> bytes:
        while len(self._rest) < length:
            await self._receive_more()
        taken, self._rest = self._rest[:length], self._rest[length:]
        return taken

    async def _receive_more(self) -> None:
        if not await self._receive():
            raise _GoneError

    async def _receive(self) -> bool:
        try:
            self._rest += await self._stream.receive()
        except anyio.EndOfStream:
            return False
        return True

    async def wait(self, event: anyio.Event) -> None:
        """Waits for an event; raises if the client closes the connection before."""
        is_gone = False

        async def watch() -> None:
            nonlocal is_gone
            try:
                while await self._receive():
                    continue
            except (anyio.BrokenResourceError, anyio.ClosedResourceError):
                pass
            is_gone = True
            group.cancel_scope.cancel()

        async with anyio.create_task_group() as group:
            group.start_soon(watch)
            await event.wait()
            group.cancel_scope.cancel()
        if is_gone:
            raise _GoneError


@asynccontextmanager
async def fake_server(script: Script, tls: ssl.SSLContext | None = None) -> AsyncIterator[FakeServer]:
    """A server on a free port of the loopback address.

    Args:
        script: The answers in the order of the requests, or a function of the request.
        tls: The server's side of TLS.
    """
    server = FakeServer(script)
    async with (
        await anyio.create_tcp_listener(local_host="127.0.0.1") as listener,
        open_task_group() as group,
    ):
        scheme = "http" if tls is None else "https"
        server.url = f"{scheme}://127.0.0.1:{listener.extra(SocketAttribute.local_port)}"
        serving = listener if tls is None else TLSListener(listener, tls, standard_compatible=False)
        group.start_soon(serving.serve, server.serve)
        try:
            yield server
        finally:
            group.cancel_scope.cancel()
