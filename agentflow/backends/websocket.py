"""A websocket client over anyio streams, which runs on asyncio and on trio.

The protocol is the sans-I/O one of the ``websockets`` library. ``handshake_error`` maps a failed handshake to
an error."""

from __future__ import annotations

import contextlib
import re
import socket
import ssl
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import anyio
import msgspec
from anyio.abc import ByteStream, SocketAttribute
from websockets.client import ClientProtocol
from websockets.exceptions import InvalidStatus
from websockets.frames import Frame, Opcode
from websockets.http11 import Response
from websockets.protocol import State
from websockets.uri import WebSocketURI

from agentflow.errors import (
    NotAuthorized,
    Overloaded,
    RateLimited,
    ServerError,
    ServerUnreachable,
    untrusted_certificate,
)
from agentflow.protocol.unreadable import UNREADABLE

MAX_REASON_CHARS = 500
# The fields that servers and proxies use, in a JSON body.
_REASON_FIELDS = ("reason", "error", "message", "detail")


def handshake_error(url: str, response: Response) -> ServerError:
    """The error for a handshake that the server answered with another status than 101: ``NotAuthorized`` for
    401 and 403, ``RateLimited`` for 429 and ``Overloaded`` for 503 (both with the seconds of
    ``Retry-After``), and ``ServerUnreachable`` for all others, and for a 403 without a reason, which is how
    servers answer a websocket at an unknown path. The message contains the server's reason."""
    status, reason = response.status_code, _reason(response)
    why = reason or "no reason given"
    if status == 401:
        remedy = "give api_key= to the session or --api-key to the command, or set AGENTFLOW_API_KEY"
        return NotAuthorized(f"{url} requires a valid API key (HTTP 401): {why}: {remedy}")
    if status == 403 and reason:
        return NotAuthorized(f"{url} denies access (HTTP 403): {why}")
    if status not in (429, 503):
        return _no_server(url, f"HTTP {status}")
    kind = RateLimited if status == 429 else Overloaded
    error = kind(f"{url} accepts no connections now (HTTP {status}): {why}")
    error.retry_after_s = _retry_after_s(response)
    return error


def _no_server(url: str, answer: str) -> ServerUnreachable:
    """The error for an address where another kind of server answers."""
    return ServerUnreachable(f"{url} is not an agentflow server ({answer}): check the address")


def _retry_after_s(response: Response) -> float | None:
    """The seconds of ``Retry-After``; None for a date, which would need synchronised clocks."""
    values = response.headers.get_all("Retry-After")
    if len(values) == 1 and re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", values[0].strip()):
        return float(values[0])
    return None


def _reason(response: Response) -> str:
    """The reason in a body of JSON or plain text, as one line of printable characters."""
    content_type = ",".join(response.headers.get_all("Content-Type")).lower()
    text = ""
    if "json" in content_type:
        text = _reason_in_json(response.body)
    elif content_type.startswith("text/plain"):
        text = bytes(response.body).decode(errors="replace")
    printable = "".join(char if char.isprintable() else " " for char in text[: 2 * MAX_REASON_CHARS])
    return " ".join(printable.split())[:MAX_REASON_CHARS]


def _reason_in_json(body: bytes | bytearray) -> str:
    try:
        text: Any = msgspec.json.decode(body)
    except UNREADABLE:
        return ""
    for _ in range(2):  # an error may be an object with a message
        if isinstance(text, dict):
            text = next((text[field] for field in _REASON_FIELDS if field in text), "")
    return text if isinstance(text, str) else ""


_CLOSE_TIMEOUT_S = 1.0
# The exceptions of anyio's streams after the peer has gone. A TLS stream raises the first also during its
# handshake and while it sends.
_LOST = anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError, OSError


class WebSocketEnded(Exception):
    """The connection has ended. ``code``: from the peer's close frame; None if there was none."""

    def __init__(self, reason: str, code: int | None = None) -> None:
        super().__init__(reason)
        self.code = code


class WebSocket:
    """An open connection. One task reads (``receive``), one writes (``run_writer``). Other output (pongs, a
    close frame) waits in ``_output`` for the writer."""

    def __init__(
        self, stream: ByteStream, protocol: ClientProtocol, *, binary: bool, keepalive_s: float
    ) -> None:
        self.binary = binary
        self._stream = stream
        self._protocol = protocol
        self._keepalive_s = keepalive_s
        self._messages: deque[bytes | str] = deque()
        self._fragments: list[bytes] = []
        self._is_text = False
        self._output: deque[bytes] = deque()
        self._wake = anyio.Event()

    @property
    def is_open(self) -> bool:
        """Whether messages can be sent."""
        return self._protocol.state is State.OPEN

    async def shake_hands(self, headers: Mapping[str, str]) -> None:
        """Performs the HTTP upgrade. Raises the library's ``InvalidHandshake`` errors, and
        ``WebSocketEnded``."""
        request = self._protocol.connect()
        request.headers.update(headers)
        self._protocol.send_request(request)
        self._collect()
        await self._flush()
        while self._protocol.state is State.CONNECTING:
            self._feed(await self._chunk())
            if self._protocol.handshake_exc is not None:
                raise self._protocol.handshake_exc

    async def receive(self) -> bytes | str:
        """The next message: bytes of a binary one, str of a text one. ``WebSocketEnded`` at the end."""
        while not self._messages:
            if self._protocol.close_rcvd is not None:
                close = self._protocol.close_rcvd
                raise WebSocketEnded(f"closed with code {close.code} {close.reason}".rstrip(), close.code)
            if self._protocol.parser_exc is not None:
                raise WebSocketEnded(f"the websocket broke: {self._protocol.parser_exc}")
            self._feed(await self._chunk_or_ping())
        return self._messages.popleft()

    def send(self, message: bytes) -> None:
        """Queues a message for the writer."""
        if self.binary:
            self._protocol.send_binary(message)
        else:
            self._protocol.send_text(message)
        self._collect()

    async def send_now(self, message: bytes) -> None:
        """Sends a message immediately; only while no writer runs."""
        self.send(message)
        await self._flush()

    def close(self) -> None:
        """Queues a close frame for the writer, which ends after it."""
        if self.is_open:
            self._protocol.send_close(1000)
            self._collect()

    def wake(self) -> None:
        """Makes the writer ask for the next message."""
        self._wake.set()

    async def run_writer(self, next_message: Callable[[], bytes | None]) -> None:
        """Sends the messages of ``next_message``, which it calls before each one, until the close frame has
        been sent. ``WebSocketEnded`` if the connection breaks."""
        while self.is_open or self._output:
            self._wake = anyio.Event()
            message = next_message()
            if message is not None and self.is_open:
                self.send(message)
            if self._output:
                await self._flush()
            else:
                await self._wake.wait()

    async def aclose(self) -> None:
        """Closes the stream, and drops queued output."""
        with anyio.move_on_after(_CLOSE_TIMEOUT_S, shield=True):
            with contextlib.suppress(*_LOST):  # it has ended already
                await self._stream.aclose()

    def _collect(self) -> None:
        # An empty chunk means a half-close, which TLS does not have; the full close follows anyway.
        self._output += [chunk for chunk in self._protocol.data_to_send() if chunk]
        self._wake.set()

    async def _flush(self) -> None:
        try:
            while self._output:
                await self._stream.send(self._output.popleft())
        except _LOST as error:
            raise WebSocketEnded(f"the connection broke while sending: {error!r}") from error

    async def _chunk_or_ping(self) -> bytes:
        """The next bytes. Sends a ping after ``keepalive_s`` seconds of silence; after the same time again
        the connection counts as broken."""
        with anyio.move_on_after(self._keepalive_s):
            return await self._chunk()
        self._protocol.send_ping(b"")
        self._collect()
        with anyio.move_on_after(self._keepalive_s):
            return await self._chunk()
        raise WebSocketEnded(f"no answer to a ping within {self._keepalive_s} s")

    async def _chunk(self) -> bytes:
        try:
            return await self._stream.receive()
        except anyio.EndOfStream:
            return b""
        except _LOST as error:
            raise WebSocketEnded(f"the connection broke: {error!r}") from error

    def _feed(self, chunk: bytes) -> None:
        if chunk:
            self._protocol.receive_data(chunk)
        else:
            self._protocol.receive_eof()
        for event in self._protocol.events_received():
            if isinstance(event, Frame):
                self._take(event)
        self._collect()

    def _take(self, frame: Frame) -> None:
        if frame.opcode not in (Opcode.TEXT, Opcode.BINARY, Opcode.CONT):
            return
        if frame.opcode is not Opcode.CONT:
            self._is_text = frame.opcode is Opcode.TEXT
        self._fragments.append(bytes(frame.data))
        if frame.fin:
            message, self._fragments = b"".join(self._fragments), []
            try:
                self._messages.append(message.decode() if self._is_text else message)
            except UnicodeDecodeError as error:
                raise WebSocketEnded(f"the server sent text that is not UTF-8: {error}") from None


async def open_websocket(
    uri: WebSocketURI,
    *,
    headers: Mapping[str, str],
    ssl_context: ssl.SSLContext | None,
    binary: bool,
    keepalive_s: float,
) -> WebSocket:
    """Connects and performs the handshake.

    Args:
        uri: The server's address.
        headers: Further headers of the handshake.
        ssl_context: For ``wss``; None for the default.
        binary: Whether messages are sent in binary frames.
        keepalive_s: The seconds of silence after which the client sends a ping.

    Raises:
        ServerUnreachable: There is no server, or it is not a websocket server.
        AgentflowError: The server rejects the client; see ``handshake_error``.
    """
    try:
        stream = await _connect(uri, ssl_context)
    except ssl.SSLCertVerificationError as error:
        raise ServerUnreachable(untrusted_certificate(shown_url(uri), error)) from error
    except _LOST as error:
        reason = str(error) or "it closed the connection during the TLS handshake"
        raise ServerUnreachable(
            f"no server answers at {shown_url(uri)} ({reason}): start one with `agentflow serve`, "
            "or check the address"
        ) from error
    # No limit on incoming messages: the server observes the frame limit that it announces.
    protocol = ClientProtocol(uri, max_size=None)
    websocket = WebSocket(stream, protocol, binary=binary, keepalive_s=keepalive_s)
    try:
        await websocket.shake_hands(headers)
    except BaseException as error:
        await websocket.aclose()
        if not isinstance(error, Exception):
            raise
        if isinstance(error, InvalidStatus):
            raise handshake_error(shown_url(uri), error.response) from error
        raise _no_server(shown_url(uri), str(error)) from error
    return websocket


async def _connect(uri: WebSocketURI, ssl_context: ssl.SSLContext | None) -> ByteStream:
    stream: ByteStream
    if not uri.secure:
        stream = await anyio.connect_tcp(uri.host, uri.port)
    else:
        # Websockets have a close frame, so a missing TLS close is not an error.
        stream = await anyio.connect_tcp(
            uri.host, uri.port, ssl_context=ssl_context, tls=True, tls_standard_compatible=False
        )
    # Frames are small, and latency matters.
    raw_socket = stream.extra(SocketAttribute.raw_socket)
    raw_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return stream


def shown_url(uri: WebSocketURI) -> str:
    """The address for messages: with the port, without a password."""
    host = f"[{uri.host}]" if ":" in uri.host else uri.host
    return f"{'wss' if uri.secure else 'ws'}://{host}:{uri.port}{uri.path}"
