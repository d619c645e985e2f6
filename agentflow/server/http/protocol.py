"""Uvicorn's HTTP and websocket protocols, with limits on the size of headers and on how long clients take.

Uvicorn itself limits only the idle time between two requests. Without these limits a client could keep a
connection by sending headers without end, stopping in the middle of them, or never reading an answer.

::

    connected ──▶ headers ──▶ request ──▶ answered ─┐      idle_timeout_s: before the first byte of a request
        ▲            │           │                  │      header_timeout_s: the same on a new connection, and
        │            │           │                  │                        until the headers are complete
        │            ▼           ▼                  │      WRITE_WATCH_S: without progress in reading
        │           408, 414, 431, 400              │
        └───────────────────────────────────────────┘

Bytes after a request that is not answered wait unparsed. So a connection has at most one open request, which
is told of a disconnect, and a client that sends requests without end costs little memory.
"""

from __future__ import annotations

import asyncio
import math
import weakref
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import Any, ClassVar

import httptools
from uvicorn._types import ASGIReceiveEvent, ASGISendEvent
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import CloseCode, Frame
from websockets.http11 import Request
from websockets.protocol import State

from agentflow.server.http.request_ends import RequestEnds

# The limits of a request's headers, including names and the trailers of a chunked body, and of its URL.
MAX_HEADER_BYTES = 65_536
MAX_HEADERS = 256
MAX_URL_BYTES = 16_384
# Data are parsed in pieces of this size. The unfinished header line in the parser is counted by pieces.
PIECE_BYTES = 16_384
# While more bytes than this wait for the answer to the request before them, nothing is read.
MAX_WAITING_BYTES = 65_536
# A disconnect is not noticed while nothing is read. If the answer takes longer than this, the waiting bytes
# and all later ones are dropped, and the connection closes after the answer.
UNREAD_S = 10.0
# A client that reads nothing is disconnected after this time, or at most twice as long.
WRITE_WATCH_S = 10.0
# A websocket's data are parsed in pieces of this size: 200 frames without data take a millisecond, and larger
# frames take less.
WEBSOCKET_PIECE_BYTES = 1_024
# A connection parses for this time before it is another one's turn.
TURN_S = 0.003
# The limit of frames in a message. Clients divide a message into few frames, or send it as they generate it.
MAX_FRAGMENTS = 16_384
# After a rejection, data are read and dropped for this time: closing with unread data resets the connection,
# and the client may then not receive the answer.
LINGER_S = 2.0
# The same after the answer to a request whose body is still arriving, unless no data come for ``LINGER_S``.
# Many clients read the answer only when they have sent everything.
MAX_LINGER_S = 30.0
BODY_HEADERS = (b"content-length", b"transfer-encoding")


class _Unreadable(Exception):
    """A request that is rejected with ``status`` before it reaches the application."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class _WriteWatch:
    """Checks regularly whether the client reads, while ``is_waiting()`` (there is data to read, and no more
    is being added), and aborts the transport if it does not."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, transport: asyncio.Transport, is_waiting: Callable[[], bool]
    ) -> None:
        self._loop = loop
        self._transport = transport
        self._is_waiting = is_waiting
        self._unread_bytes = math.inf
        self._start()

    def reset(self) -> None:
        """Records that the client has read."""
        self._unread_bytes = math.inf

    def stop(self) -> None:
        self._timer.cancel()

    def _start(self) -> None:
        self._timer = self._loop.call_later(WRITE_WATCH_S, self._check)

    def _check(self) -> None:
        before, self._unread_bytes = self._unread_bytes, math.inf
        if self._is_waiting():
            self._unread_bytes = self._transport.get_write_buffer_size()
            if self._unread_bytes >= before:
                self._transport.abort()
                return
        self._start()


class _Flow(FlowControl):
    """Keeps reading paused from ``hold`` to ``release``. Otherwise an application that waits for a disconnect
    would resume it."""

    _is_held = False

    @property
    def is_held(self) -> bool:
        return self._is_held

    def hold(self) -> None:
        self._is_held = True
        self.pause_reading()

    def release(self) -> None:
        self._is_held = False
        self.resume_reading()

    def resume_reading(self) -> None:
        if not self._is_held:
            super().resume_reading()


class _AnswerTransport:
    """The transport for the answer to one request, which ``TimedHttpProtocol`` closes."""

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self._transport = transport
        self.is_closing = transport.is_closing
        self.close = close

    def write(self, data: bytes) -> None:
        self._transport.write(data)


class _UnchunkedTransport(_AnswerTransport):
    """For HTTP/1.0, which has no chunks: the connection ends with the answer. uvicorn writes chunks anyway,
    the headers and each chunk in one call."""

    _is_chunked: bool | None = None  # None: before the headers

    def write(self, data: bytes) -> None:
        if self._is_chunked is None:
            head, header, rest = data.partition(b"transfer-encoding: chunked\r\n")
            self._is_chunked = bool(header)
            data = head + rest
        elif self._is_chunked and data:
            size, _, rest = data.partition(b"\r\n")
            data = rest[: int(size, 16)]
        super().write(data)


class TimedHttpProtocol(HttpToolsProtocol):
    """Rejects a request whose URL or headers exceed the limits above (414, 431), or whose headers are not
    complete after ``header_timeout_s`` (408), and closes the connection. Closes a new connection on which no
    request begins within ``header_timeout_s``, and a used one after ``idle_timeout_s``. ``on_lost`` is called
    once, when the connection has closed, also if it has become a websocket.

    Parses a pipelined request only after the answer to the request before it. Parses data in turns: a chunked
    body may have a chunk in each 6 bytes."""

    header_timeout_s: ClassVar[float] = 20.0
    idle_timeout_s: ClassVar[float] = 75.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.on_lost: Callable[[], None] = _ignore
        self._timer: asyncio.TimerHandle | None = None
        self._watch: _WriteWatch | None = None
        self._is_rejected = False
        self._lingers_until_s = 0.0
        self._has_dropped = False  # data, since the last look
        self._is_in_headers = False
        self._is_awaiting_headers = False  # the timer belongs to a request that has begun
        self._has_progressed = False  # the parser made a callback for the current piece
        self._num_headers = 0
        self._num_header_bytes = 0
        self._num_hosts = 0
        self._num_pending_bytes = 0  # parsed since the last callback
        self._is_complete = False  # the last request, with its body
        self._ends = RequestEnds()
        self._waiting = bytearray()  # for the answer to the last request, or for a turn
        self._has_turn = False  # to come
        self._turns = _TURNS.setdefault(self.loop, _Turns(self.loop))

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = self._flow = _Flow(transport)
        self._start_timer(min(self.header_timeout_s, self.idle_timeout_s))
        self._watch = _WriteWatch(
            self.loop, transport, lambda: self.flow.write_paused or transport.is_closing()
        )

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._stop_watch()
        self._waiting.clear()
        super().connection_lost(exc)
        self.on_lost()

    def data_received(self, data: bytes) -> None:
        if self._is_rejected:
            self._has_dropped = True
            return
        if self._has_turn:
            self._waiting += data
            return
        pieces = memoryview(data)
        start = 0
        end_s = self.loop.time() + TURN_S
        while start < len(data) and not self._is_rejected and self.transport.get_protocol() is self:
            if self._is_answering():
                self._wait(pieces[start:])
                return
            if start and self.loop.time() > end_s:
                self._waiting += pieces[start:]
                self._has_turn = True
                self._flow.hold()
                self._turns.add(self)
                return
            end = self._ends.find(data, start, min(start + PIECE_BYTES, len(data)))
            self._parse(pieces[start:end])
            start = end

    def _is_answering(self) -> bool:
        """Whether a request has come completely and its answer has not ended."""
        return self._is_complete and self.cycle is not None and not self.cycle.response_complete

    def _wait(self, data: memoryview) -> None:
        """Keeps the data until the open request is answered, unless the connection closes then."""
        if not self.cycle.keep_alive:
            return
        self._waiting += data
        if len(self._waiting) > MAX_WAITING_BYTES and not self._flow.is_held:
            self._flow.hold()
            self._start_timer(UNREAD_S)

    def parse_turn(self) -> None:
        """Parses the data that wait for a turn."""
        self._has_turn = False
        if not self.transport.is_closing():
            self._parse_waiting()

    def _parse_waiting(self) -> None:
        self._flow.release()
        waiting = bytes(self._waiting)
        self._waiting.clear()
        self.data_received(waiting)

    def _drop_waiting(self) -> None:
        self.cycle.keep_alive = False
        self._waiting.clear()
        self._flow.release()

    def _parse(self, piece: bytes | memoryview) -> None:
        self._has_progressed = False
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade:
            if self._should_upgrade():
                self.handle_websocket_upgrade()
            elif self._has_body():
                self.cycle.keep_alive = False  # the parser takes the body for the next request
        except httptools.HttpParserError as error:
            cause = error.__context__
            if isinstance(cause, _Unreadable):
                self._reject(cause.status, str(cause))
            else:
                self._reject(400, "Invalid HTTP request received.")
        else:
            self._num_pending_bytes = 0 if self._has_progressed else self._num_pending_bytes + len(piece)
            if self._num_header_bytes + self._num_pending_bytes > MAX_HEADER_BYTES:
                self._reject(431, f"The headers have more than {MAX_HEADER_BYTES} bytes.")
            elif self._is_in_headers and not self._is_awaiting_headers:
                self._start_timer(self.header_timeout_s)
                self._is_awaiting_headers = True

    def on_message_begin(self) -> None:
        self._has_progressed = self._is_in_headers = True
        self._num_headers = self._num_header_bytes = self._num_hosts = 0
        if self._is_answering():  # ``RequestEnds`` and the parser disagree
            raise _Unreadable(400, "Invalid HTTP request received.")
        self._is_complete = False
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._has_progressed = True
        if len(self.url) + len(url) > MAX_URL_BYTES:
            raise _Unreadable(414, f"The URL has more than {MAX_URL_BYTES} bytes.")
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._has_progressed = True
        self._num_headers += 1
        self._num_header_bytes += len(name) + len(value) + len(": \r\n")
        if self._num_headers > MAX_HEADERS:
            raise _Unreadable(431, f"There are more than {MAX_HEADERS} headers.")
        if self._num_header_bytes > MAX_HEADER_BYTES:
            raise _Unreadable(431, f"The headers have more than {MAX_HEADER_BYTES} bytes.")
        self._num_hosts += self._is_in_headers and name.lower() == b"host"
        if self._num_hosts > 1:  # a proxy and the server could use different ones (RFC 9112, section 3.2)
            raise _Unreadable(400, "There is more than one Host header.")
        if self._is_in_headers:  # trailers come while the application has the request, and are dropped
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._has_progressed, self._is_in_headers = True, False
        if not self._num_hosts and self.parser.get_http_version() == "1.1":
            raise _Unreadable(400, "The Host header is missing.")
        headers = dict(self.headers)
        is_chunked = b"transfer-encoding" in headers
        self._ends.begin_body(None if is_chunked else int(headers.get(b"content-length", 0)))
        cycle = self.cycle
        super().on_headers_complete()
        if self.cycle is not cycle:  # a websocket has no cycle
            is_old = self.parser.get_http_version() == "1.0"
            kind = _UnchunkedTransport if is_old else _AnswerTransport
            self.cycle.transport = kind(self.transport, self._close_answered)  # type: ignore[assignment]
            self.cycle.waiting_for_100_continue &= not is_old
            self._stop_timer()

    def on_chunk_header(self) -> None:
        self._has_progressed = True

    def on_body(self, body: bytes) -> None:
        self._has_progressed = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._has_progressed = self._is_complete = True
        self._ends.end_body()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Replaces uvicorn's, whose idle timer stops at any byte, even if that begins no request."""
        self.server_state.total_requests += 1
        if self.transport.is_closing() or self._is_rejected:
            return
        self._start_timer(self.idle_timeout_s)
        if not self._has_turn:
            self._parse_waiting()

    def resume_writing(self) -> None:
        if self._watch is not None:
            self._watch.reset()
        super().resume_writing()

    def handle_websocket_upgrade(self) -> None:
        self._stop_timer()
        if self._has_body():
            # The websocket protocol would wait for the body forever.
            self._reject(400, "The request for a websocket must not have a body.")
            return
        self._stop_watch()
        self.ws_protocol_class = partial(  # type: ignore[assignment]
            TimedWebSocketProtocol, on_lost=self.on_lost, handshake_timeout_s=self.header_timeout_s
        )
        super().handle_websocket_upgrade()

    def _has_body(self) -> bool:
        return any(name in BODY_HEADERS and value != b"0" for name, value in self.headers)

    def _reject(self, status: int, reason: str) -> None:
        """Answers with an error and closes the connection. Nothing more is parsed."""
        if self.cycle is not None and not self.cycle.response_complete:
            if self._is_complete or self.cycle.response_started:
                self._is_rejected = True
                self._stop_timer()
                self.transport.close()  # the answer to the previous request, or to this one, is incomplete
                return
            self.cycle.disconnected = True  # the application has the request, and its body is invalid
            self.cycle.waiting_for_100_continue = False  # nothing may follow the answer
            self.cycle.message_event.set()
        self.transport.write(_answer(status, reason))
        self._linger(LINGER_S)

    def _close_answered(self) -> None:
        """Closes the connection after the answer to a request."""
        if self._is_complete or self._is_rejected:
            self.transport.close()
        else:
            self._linger(MAX_LINGER_S)

    def _linger(self, longest_s: float) -> None:
        """Drops data until none comes for ``LINGER_S``, or for ``longest_s``, and closes the connection."""
        self._is_rejected = True
        self._stop_timer()
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._lingers_until_s = self.loop.time() + longest_s
        self._drop_more()

    def _drop_more(self) -> None:
        self._has_dropped = False
        seconds = min(LINGER_S, max(0.0, self._lingers_until_s - self.loop.time()))
        self._timer = self.loop.call_later(seconds, self._end_linger)

    def _end_linger(self) -> None:
        if self._has_dropped and self.loop.time() < self._lingers_until_s:
            self._drop_more()
        elif self.transport.get_write_buffer_size():
            self.transport.close()  # as soon as the client has read the answer
        else:
            self.transport.abort()

    def _start_timer(self, seconds: float) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(seconds, self._on_timeout)

    def _stop_timer(self) -> None:
        self._is_awaiting_headers = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _stop_watch(self) -> None:
        if self._watch is not None:
            self._watch.stop()
            self._watch = None

    def _on_timeout(self) -> None:
        self._timer = None
        if self._is_in_headers:
            self._reject(408, f"The headers are not complete after {self.header_timeout_s:g} s.")
        elif self._is_answering():
            self._drop_waiting()
        else:
            self.transport.close()


class _Turns:
    """Divides the event loop among the connections with data to parse: one connection in each iteration."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: dict[TimedHttpProtocol | TimedWebSocketProtocol, None] = {}  # an ordered set

    def add(self, protocol: TimedHttpProtocol | TimedWebSocketProtocol) -> None:
        """Gives the connection a turn, after all that wait already."""
        if not self._waiting:
            self._loop.call_soon(self._run)
        self._waiting[protocol] = None

    def _run(self) -> None:
        protocol = next(iter(self._waiting))
        del self._waiting[protocol]
        if self._waiting:
            self._loop.call_soon(self._run)
        protocol.parse_turn()


_TURNS: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Turns] = weakref.WeakKeyDictionary()


class TimedWebSocketProtocol(WebSocketsSansIOProtocol):
    """Answers every handshake, also one that the ``websockets`` library rejects without an answer (more than
    128 headers, a line of more than 8 KB, an invalid request). Closes the connection if the application does
    not answer the handshake within ``handshake_timeout_s``.

    Parses a client's data in turns, and pauses while the client does not read or the application has unread
    messages: pings are answered while parsing, and frames without data take long.
    """

    def __init__(
        self, *args: Any, on_lost: Callable[[], None], handshake_timeout_s: float, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._on_lost = on_lost
        self._handshake_timeout_s = handshake_timeout_s
        self._unparsed = bytearray()
        self._turns = _TURNS.setdefault(self.loop, _Turns(self.loop))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._deadline = self.loop.call_later(self._handshake_timeout_s, self._end_handshake)
        # While the websocket is open, pings detect a client that is gone.
        self._watch = _WriteWatch(self.loop, self.transport, self.transport.is_closing)

    def connection_lost(self, exc: Exception | None) -> None:
        self._deadline.cancel()
        self._watch.stop()
        self._unparsed.clear()
        super().connection_lost(exc)
        self._on_lost()

    def data_received(self, data: bytes) -> None:
        if not self.handshake_initiated or (len(data) <= WEBSOCKET_PIECE_BYTES and not self._unparsed):
            self._parse(data)
            return
        self._unparsed += data
        self._wait_for_turn()

    def parse_turn(self) -> None:
        """Parses waiting data for about ``TURN_S``, while the client and the application read."""
        end = self.loop.time() + TURN_S
        while self._unparsed and not self.read_paused and self.writable.is_set():
            piece = bytes(self._unparsed[:WEBSOCKET_PIECE_BYTES])
            del self._unparsed[:WEBSOCKET_PIECE_BYTES]
            self._parse(piece)
            if self.transport.is_closing():
                self._unparsed.clear()
                return
            if self._unparsed and self.loop.time() > end:
                self._turns.add(self)
                return
        # Otherwise ``receive`` or ``resume_writing`` continues.
        if not self._unparsed and not self.read_paused:
            self.transport.resume_reading()

    async def receive(self) -> ASGIReceiveEvent:
        message = await super().receive()
        if self._unparsed and not self.read_paused:  # it has resumed reading
            self._wait_for_turn()
        return message

    def _wait_for_turn(self) -> None:
        if not self.transport.is_closing():
            self.transport.pause_reading()
            self._turns.add(self)

    def shutdown(self) -> None:
        if self.handshake_complete and self.conn.state is not State.OPEN:  # it is closing already
            self.close_sent = True
        super().shutdown()

    def handle_connect(self, event: Request) -> None:
        super().handle_connect(event)
        event.headers.clear()  # the scope has the headers, and the parser would keep another 2 KB

    def handle_cont(self, event: Frame) -> None:
        if len(self.frames) < MAX_FRAGMENTS:
            super().handle_cont(event)
            return
        self._fail(CloseCode.MESSAGE_TOO_BIG, "a message has too many frames")

    def send_receive_event_to_app(self) -> None:
        """Closes the connection if the text is not UTF-8; uvicorn would log a traceback."""
        data = self.frames[0] if len(self.frames) == 1 else b"".join(self.frames)
        self.frames = [data]
        if self.curr_msg_data_type == "text" and not self.close_sent and not _is_utf8(data):
            self._fail(CloseCode.INVALID_DATA, "a text is not UTF-8")
        else:
            super().send_receive_event_to_app()

    def _fail(self, code: CloseCode, reason: str) -> None:
        """Closes the connection after a violation of the websocket protocol."""
        self.frames.clear()
        self.conn.fail(code, reason)
        self.handle_parser_exception()

    def _parse(self, data: bytes) -> None:
        super().data_received(data)
        # The first data are the complete headers, so a handshake that has not begun now is invalid.
        if not self.handshake_initiated and not self.transport.is_closing():
            answer = b"".join(self.conn.data_to_send())
            self.transport.write(answer or _answer(400, "Invalid websocket handshake."))
            self.transport.close()

    def resume_writing(self) -> None:
        self._watch.reset()
        super().resume_writing()
        if self._unparsed:
            self._turns.add(self)

    async def send(self, message: ASGISendEvent) -> None:
        await super().send(message)
        if self.initial_response is not None and self.close_sent:
            # Rejected with a response of the application: uvicorn would log that as an error.
            self.handshake_complete = True

    def _end_handshake(self) -> None:
        if not self.handshake_complete:
            self.send_500_response()
            self.transport.close()


def timed_http_protocol(header_timeout_s: float, idle_timeout_s: float = 75.0) -> type[TimedHttpProtocol]:
    """The class with these timeouts, for uvicorn, which creates the objects itself."""
    timeouts = {"header_timeout_s": header_timeout_s, "idle_timeout_s": idle_timeout_s}
    return type("TimedHttpProtocol", (TimedHttpProtocol,), timeouts)


def _answer(status: int, reason: str) -> bytes:
    body = reason.encode()
    return (
        b"%bcontent-type: text/plain; charset=utf-8\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b"
        % (
            STATUS_LINE[HTTPStatus(status)],
            len(body),
            body,
        )
    )


def _is_utf8(data: bytes) -> bool:
    try:
        if not data.isascii():  # otherwise nothing is copied
            data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _ignore() -> None:
    pass
