"""The HTTP client of a backend: one request whose answer is a stream of events, with retries.

A request is repeated only while nothing of its answer is visible. Connections are pooled: after the end of a
stream its connection returns to the pool; a stream that is left early loses its connection, which tells the
server to stop.
"""

from __future__ import annotations

import logging
import math
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any, TypeVar
from urllib.request import getproxies

import anyio
import httpx2
import msgspec

from agentflow.backends.apis.http.api_errors import ErrorMapping, is_endpoint_fault, is_transient
from agentflow.backends.apis.http.connections import Connections, PooledClient
from agentflow.backends.apis.http.event_stream import MAX_EVENT_BYTES, EventReader, EventSink
from agentflow.backends.apis.http.file_slots import FilledBody, has_slots
from agentflow.backends.apis.http.pacing import PacedRequest, RequestPacer
from agentflow.backends.apis.http.rate_limits import Demand
from agentflow.errors import (
    AgentflowError,
    BadArgument,
    Overloaded,
    ProtocolError,
    RateLimited,
    ServerLost,
    ServerUnreachable,
    causes,
    untrusted_certificate,
)
from agentflow.protocol.unreadable import UNREADABLE
from agentflow.runtime.backoff import doubled_s, spread
from agentflow.runtime.circuit import Attempt, Circuit, HasAlternative, no_alternative
from agentflow.runtime.loop_turns import Starts

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 10.0
FIRST_PAUSE_S = 0.5
MAX_PAUSE_S = 8.0
MAX_RETRY_AFTER_S = 60.0
"""A server that asks for a longer pause gets no second attempt: the program decides."""
LIMITED_ATTEMPTS = 5
"""The refusals because of a rate that count as one failure."""
SHORT_WAIT_S = 2.0
"""The longest wait for a rate while another endpoint could answer."""
MAX_ANSWER_BYTES = 64 * 1024 * 1024
MAX_WHOLE_BYTES = 32 * 1024 * 1024
MAX_ERROR_BYTES = 64 * 1024
"""An error is cut there."""
DRAIN_S = 0.1
"""How long a stream whose last event was read may take to end, before its connection is dropped."""
KEEPALIVE_S = 60.0
_OF_STREAMS: Mapping[str, str] = {"content-type": "application/json", "accept": "text/event-stream"}
"""The headers of a request whose answer is a stream."""
_UNTYPED = ("", "text/plain", "application/octet-stream")
"""The content types that servers send for bodies of any type."""
_OF_EVENTS = (b"data:", b"event:", b":", b"id:")
"""The beginnings of a stream of events."""


SinkT = TypeVar("SinkT", bound=EventSink)
ResultT = TypeVar("ResultT")
ExchangeT = TypeVar("ExchangeT", bound="_Exchange")


@asynccontextmanager
async def open_http(
    base_url: str,
    headers: Mapping[str, str],
    *,
    ssl_context: ssl.SSLContext | None = None,
    proxy: str | None = None,
) -> AsyncIterator[httpx2.AsyncClient]:
    """The pooled client of a session. Proxies and certificates of the environment apply as in httpx2."""
    # The attempt has its own deadlines, which events extend; ``connect`` is shorter, to try again soon.
    timeout = httpx2.Timeout(None, connect=CONNECT_TIMEOUT_S)
    is_direct = proxy is None and not {"http", "https", "all"} & getproxies().keys()
    # Compressed events would wait in a buffer, and could be bombs.
    options: dict[str, Any] = {
        "base_url": base_url,
        "headers": {"accept-encoding": "identity", **headers},
        "timeout": timeout,
    }
    try:
        httpx2.URL(base_url)
    except httpx2.InvalidURL as error:
        raise BadArgument(f"{base_url!r:.200} is no address: {error}", param="url") from error
    client = (
        PooledClient(Connections(ssl_context, KEEPALIVE_S), **options)
        if is_direct
        else _proxied(proxy, ssl_context, options)
    )
    async with client:
        yield client


def _proxied(
    proxy: str | None, ssl_context: ssl.SSLContext | None, options: dict[str, Any]
) -> httpx2.AsyncClient:
    """A client behind a proxy. ``BadArgument`` if httpx2 cannot use that."""
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=KEEPALIVE_S)
    verify = True if ssl_context is None else ssl_context
    try:
        return httpx2.AsyncClient(**options, limits=limits, verify=verify, proxy=proxy)
    except (ValueError, httpx2.InvalidURL, ImportError) as error:
        source = "proxy=" if proxy is not None else "the environment (such as ALL_PROXY)"
        remedy = "give an http:// address"
        if isinstance(error, ImportError):
            remedy = f"pip install {error.name or 'socksio'}, or {remedy}"
        raise BadArgument(f"the proxy in {source} cannot be used: {remedy}", param="proxy") from error


class ApiTransport:
    """Sends the requests of one backend.

    Args:
        http: The client, whose base URL and headers are the backend's.
        errors: Makes the errors.
        max_retries: The most further attempts of one request.
        timeout_s: The time limit until the first event, in seconds.
        stall_timeout_s: The time limit between two events, in seconds.
        max_event_bytes: The largest event.
        circuit: Learns from the failures. It stops only requests that another endpoint can answer.
    """

    def __init__(
        self,
        http: httpx2.AsyncClient,
        errors: ErrorMapping,
        *,
        max_retries: int = 2,
        timeout_s: float = 600.0,
        stall_timeout_s: float = 60.0,
        max_event_bytes: int = MAX_EVENT_BYTES,
        circuit: Circuit | None = None,
    ) -> None:
        self._http = http
        self.errors = errors
        self._max_retries = max_retries
        self._timeout_s = timeout_s
        self._stall_timeout_s = stall_timeout_s
        self._max_event_bytes = max_event_bytes
        self.pace = RequestPacer()
        self._starts = Starts()
        self.circuit = circuit or Circuit()

    @property
    def endpoint(self) -> str:
        """The model and its server, for messages."""
        return f"{self.errors.model} at {self.errors.server}"

    def sharing(self, errors: ErrorMapping) -> ApiTransport:
        """A transport for another model on the same connections, with a separate pace."""
        return ApiTransport(
            self._http,
            errors,
            max_retries=self._max_retries,
            timeout_s=self._timeout_s,
            stall_timeout_s=self._stall_timeout_s,
            max_event_bytes=self._max_event_bytes,
        )

    async def stream(
        self,
        path: str,
        body: bytes,
        make_sink: Callable[[], SinkT],
        headers: Mapping[str, str] | None = None,
        has_alternative: HasAlternative = no_alternative,
        demand: Demand | None = None,
    ) -> SinkT:
        """Sends ``body`` and reads the stream of its answer.

        Args:
            path: Below the base URL.
            body: A JSON object, perhaps with slots for files.
            make_sink: Makes the sink of an attempt, when that is sent.
            headers: Further headers.
            has_alternative: Whether another endpoint can answer the request now. Then only a short wait for a
                rate is kept, and nothing else is repeated.
            demand: The request's use of the provider's limits; None: its bytes.

        Returns:
            The sink that has received the whole stream.

        Raises:
            AgentflowError: The error of the last attempt.
        """
        sent = {**_OF_STREAMS, **headers} if headers else _OF_STREAMS
        demand = Demand(len(body)) if demand is None else demand
        num_failed, num_limited = 0, 0

        def check_wait(wait_s: float) -> None:
            if wait_s > SHORT_WAIT_S and has_alternative():
                error = RateLimited(f"the rate limit for {self.endpoint} is reached")
                error.retry_after_s = wait_s
                raise error

        while True:
            turn: PacedRequest | None = None
            attempt: Attempt | None = None
            await self._starts.pause()
            try:
                async with self.pace.turn(demand, check_wait) as turn:
                    if has_alternative() and not self.circuit.is_ready:
                        raise self.circuit_open()
                    sink = make_sink()
                    exchange = _Exchange(self._stall_timeout_s, sink, EventReader(self._max_event_bytes))
                    attempt = self.circuit.attempt()
                    exchange.on_begin, exchange.turn = attempt.begun, turn
                    await self._attempt(exchange, path, body, sink, sent)
                attempt.succeeded()
                self.pace.widen()
                return sink
            except AgentflowError as error:
                if turn is None or attempt is None:
                    raise  # nothing was sent
                if isinstance(error, RateLimited):
                    num_limited += 1
                else:
                    num_failed += 1
                pause_s = self._pause_s(error, num_failed + num_limited)
                is_short = (
                    isinstance(error, RateLimited)
                    and pause_s <= SHORT_WAIT_S
                    and num_limited < LIMITED_ATTEMPTS
                )
                if not is_short:
                    self._note(attempt, error)
                if exchange.status in (429, 503, 529):
                    self.pace.narrow(turn, pause_s)
                    pause_s = 0.0  # the pace keeps it, for all requests
                is_final = sink.is_visible or exchange.headers.get("x-should-retry") == "false"
                # A rate is waited for, while the pace finds one that the provider accepts.
                num_counted = num_failed + num_limited // LIMITED_ATTEMPTS
                if is_final or not self._may_repeat(error, max(1, num_counted)):
                    raise
                if has_alternative() and not is_short:
                    raise
            finally:
                if attempt is not None:
                    attempt.left()
            await _pause(pause_s)

    def circuit_open(self) -> Overloaded:
        """The error of a request that is not sent, because the circuit of the endpoint is open."""
        left_s = self.circuit.left_s
        when = f"it is tried again in {math.ceil(left_s)} s" if left_s else "another request tries it"
        error = Overloaded(f"{self.endpoint} has failed and is not asked now: {when}")
        error.retry_after_s = left_s
        return error

    def _note(self, attempt: Attempt, error: AgentflowError) -> None:
        """Tells the circuit how an attempt failed. An endpoint that refuses a request works."""
        if not is_endpoint_fault(error):
            attempt.succeeded()
            return
        asked_s = error.retry_after_s if isinstance(error, Overloaded) else None
        was = self.circuit.status
        attempt.failed(asked_s if asked_s is not None and asked_s > SHORT_WAIT_S else None)
        if was != "open" and self.circuit.status == "open":
            left_s = self.circuit.left_s
            logger.warning("the circuit of %s opens for %.0f s: %s", self.endpoint, left_s, error)

    async def get(self, path: str) -> Any:
        """The decoded JSON answer to a ``GET``. Raises the errors of ``stream``."""
        return await self._repeated(self._new_exchange, partial(self._fetch, method="GET", path=path))

    async def post(
        self,
        path: str,
        body: bytes,
        content_type: str = "application/json",
        demand: Demand | None = None,
    ) -> Any:
        """The decoded JSON answer to a ``POST`` that is safe to repeat. Raises the errors of ``stream``.

        Args:
            path: Below the base URL.
            body: The body of the request.
            content_type: The type of the body.
            demand: The request's use of the provider's limits; None: nothing.
        """
        fetch = partial(self._fetch, method="POST", path=path, body=body, content_type=content_type)
        return await self._repeated(self._new_exchange, fetch, demand)

    async def post_once(self, path: str, body: bytes) -> Any:
        """The decoded JSON answer to a ``POST`` of a JSON object, which is not repeated. Raises the errors of
        ``stream``."""
        async with self.pace.turn():
            return await self._fetch(self._new_exchange(), "POST", path, body)

    async def read_lines(self, path: str, receive: Callable[[bytes], None]) -> None:
        """Calls ``receive`` with each line of the answer to a ``GET``, of any size. Lines come again after
        the connection was lost. Raises the errors of ``stream``."""

        async def read(exchange: _LineExchange) -> None:
            await self._exchange(exchange, "GET", path, None, {})
            if exchange.status != 200:
                raise self.errors.of_response(exchange.status, exchange.headers, exchange.body)
            exchange.finish()

        await self._repeated(lambda: _LineExchange(self._stall_timeout_s, receive), read)

    def _new_exchange(self) -> _Exchange:
        return _Exchange(self._stall_timeout_s)

    async def _repeated(
        self,
        new_exchange: Callable[[], ExchangeT],
        attempt: Callable[[ExchangeT], Awaitable[ResultT]],
        demand: Demand | None = None,
    ) -> ResultT:
        """The result of the first attempt that succeeds. Raises the error of the last one."""
        num_failed = 0
        while True:
            exchange = new_exchange()
            await self._starts.pause()
            try:
                async with self.pace.turn(demand) as turn:
                    exchange.turn = turn
                    found = await attempt(exchange)
                self.pace.widen()
                return found
            except AgentflowError as error:
                num_failed += 1
                pause_s = self._pause_s(error, num_failed)
                if exchange.status in (429, 503, 529) and exchange.turn is not None:
                    self.pace.narrow(exchange.turn, pause_s)
                    pause_s = 0.0
                if not self._may_repeat(error, num_failed):
                    raise
            await _pause(pause_s)

    def _may_repeat(self, error: AgentflowError, num_failed: int) -> bool:
        after_s = error.retry_after_s if isinstance(error, Overloaded) else None
        is_soon = after_s is None or after_s <= MAX_RETRY_AFTER_S
        return num_failed <= self._max_retries and is_transient(error) and is_soon

    def _pause_s(self, error: AgentflowError, num_failed: int) -> float:
        pause_s = doubled_s(FIRST_PAUSE_S, MAX_PAUSE_S, num_failed) * spread(0.5, 1.0)
        asked_s = error.retry_after_s if isinstance(error, Overloaded) else None
        # Spreads the clients that received the same time. After no time at all, the next refusal would follow
        # immediately.
        return asked_s * spread(1.0, 1.1) if asked_s else pause_s

    async def _attempt(
        self, exchange: _Exchange, path: str, body: bytes, sink: EventSink, headers: Mapping[str, str]
    ) -> None:
        await self._exchange(exchange, "POST", path, body, headers)
        if exchange.is_stream:
            if not (sink.is_over or sink.is_left):
                sink.close()
            return
        if exchange.status != 200:
            raise self.errors.of_response(exchange.status, exchange.headers, exchange.body)
        if (detail := _error_in(exchange.body)) is not None:  # some servers report errors with the status 200
            raise self.errors.of_event(detail)
        where = "is it the address of an API (it usually ends in /v1)?"
        if exchange.encoding:
            where = f"its compression ({exchange.encoding!r:.50}) was not asked for: does a proxy add it?"
        elif exchange.content_type == "application/json":
            where = "does a proxy wait for the whole answer, or does the model not stream?"
        raise ProtocolError(
            f"{self.errors.server} answered with {exchange.content_type or 'no content type'!r:.100} and not "
            f"with a stream of events: {where}"
        )

    async def _fetch(
        self,
        exchange: _Exchange,
        method: str,
        path: str,
        body: bytes | None = None,
        content_type: str = "application/json",
    ) -> Any:
        headers = {} if body is None else {"content-type": content_type}
        await self._exchange(exchange, method, path, body, headers)
        if exchange.status != 200:
            raise self.errors.of_response(exchange.status, exchange.headers, exchange.body)
        try:
            return msgspec.json.decode(exchange.body)
        except UNREADABLE as error:
            raise ProtocolError(f"{self.errors.server} answered {path} without JSON") from error

    async def _exchange(
        self, exchange: _Exchange, method: str, path: str, body: bytes | None, headers: Mapping[str, str]
    ) -> None:
        """Sends a request and reads the response. Raises an error if the response is not complete."""
        exchange.scope.deadline = anyio.current_time() + self._timeout_s
        try:
            with exchange.scope, _http_errors(self.errors):
                response = await self._response(method, path, body, headers)
                try:
                    exchange.begin(response)
                    assert isinstance(response.stream, httpx2.AsyncByteStream)
                    async for chunk in response.stream:
                        exchange.receive(chunk)
                finally:
                    await response.aclose()
        except ServerLost:
            if not exchange.is_complete:  # otherwise the connection broke after the answer
                raise
        if exchange.error is not None:
            raise exchange.error
        if exchange.scope.cancelled_caught and not exchange.is_complete:
            raise self.errors.lost("no event arrived in time", "run it again, or give a longer timeout")

    async def _response(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]
    ) -> httpx2.Response:
        """The response to a request, whose slots are filled while it is sent."""
        http = self._http
        if body is not None and has_slots(body):
            empty, stream = http.build_request(method, path, headers=headers), FilledBody(body)
            empty.headers["content-length"] = str(stream.size)
            request = httpx2.Request(
                method, empty.url, headers=empty.headers, stream=stream, extensions=empty.extensions
            )
        elif body is not None and headers is _OF_STREAMS and isinstance(http, PooledClient):
            return await http.post_whole(path, body, headers)
        else:
            request = http.build_request(method, path, content=body, headers=headers)
        return await http.send(request, stream=True)


class _Exchange:
    """One request and its response.

    A response is left by cancelling its scope. An asynchronous generator of httpx2 that is left in another
    way is closed by the garbage collector only.
    """

    def __init__(
        self, stall_timeout_s: float, sink: EventSink | None = None, events: EventReader | None = None
    ) -> None:
        self.scope = anyio.CancelScope()
        self.error: Exception | None = None
        self.is_complete = False
        self.is_stream = False
        self.status = 0
        self.headers: Mapping[str, str] = {}
        self.content_type = ""
        self.encoding = ""  # of the body; empty: none
        self._may_be_stream = False  # the body has no type, and its beginning tells
        self._stall_timeout_s = stall_timeout_s
        self._sink = sink
        self._events = events
        self.on_begin: Callable[[], None] = lambda: None  # called when the first event was read
        self.turn: PacedRequest | None = None  # learns from the headers
        self._has_begun = False
        self._is_postponed = False  # the deadline is for the next event, not for the first
        self._num_bytes = 0
        self._parts: list[bytes] = []  # of a body that is not a stream of events

    @property
    def body(self) -> bytes:
        """The body of a response that is not a stream of events."""
        return b"".join(self._parts)

    def begin(self, response: httpx2.Response) -> None:
        """The headers have arrived."""
        self.status, self.headers = response.status_code, response.headers
        if self.turn is not None:
            self.turn.answered(self.headers, is_refused=self.status >= 400)
        self.content_type = response.headers.get("content-type", "").partition(";")[0].strip().lower()
        encoding = response.headers.get("content-encoding", "").strip().lower()
        self.encoding = "" if encoding == "identity" else encoding
        is_read = self._sink is not None and self.status == 200 and not self.encoding
        self.is_stream = is_read and self.content_type == "text/event-stream"
        self._may_be_stream = is_read and self.content_type in _UNTYPED

    def receive(self, chunk: bytes) -> None:
        """A part of the body has arrived."""
        if self.scope.cancel_called:
            return
        self._num_bytes += len(chunk)
        if self._may_be_stream:
            self._may_be_stream = False
            self.is_stream = chunk.startswith(_OF_EVENTS)
        if not self.is_stream or self._sink is None or self._events is None:
            self._parts.append(chunk)
            if self._num_bytes > (MAX_WHOLE_BYTES if self._sink is None else MAX_ERROR_BYTES):
                self._leave()
            return
        try:
            self._read(chunk, self._sink, self._events)
        except Exception as error:
            self.error = error
            self._leave()

    def _read(self, chunk: bytes, sink: EventSink, reader: EventReader) -> None:
        if self._num_bytes > MAX_ANSWER_BYTES:
            raise ProtocolError(f"an answer has more than {MAX_ANSWER_BYTES:,} bytes")
        if sink.is_over:
            return
        events = reader.push(chunk)
        for event in events:
            if not event.data or event.data.isspace():
                continue  # it keeps the connection alive
            sink.event(event)
            if not self._has_begun:
                self._has_begun = True
                self.on_begin()
            if sink.is_left:
                self._leave()
                return
            if sink.is_over:
                self.is_complete = True
                self.scope.deadline = anyio.current_time() + DRAIN_S
                return
        if events:
            self._postpone()

    def _postpone(self) -> None:
        """Gives the next event its time. To move the deadline for each event would take longer than to read
        it, so the deadline is up to a quarter later than it must be."""
        now = anyio.current_time()
        if self._sink is not None and not self._sink.has_begun:
            self.scope.deadline = max(self.scope.deadline, now + self._stall_timeout_s)
        elif not self._is_postponed or self.scope.deadline - now < self._stall_timeout_s:
            self._is_postponed = True
            self.scope.deadline = now + 1.25 * self._stall_timeout_s

    def _leave(self) -> None:
        self.is_complete = True
        self.scope.cancel()


class _LineExchange(_Exchange):
    """An exchange whose answer is read line by line."""

    def __init__(self, stall_timeout_s: float, receive: Callable[[bytes], None]) -> None:
        super().__init__(stall_timeout_s)
        self._receive_line = receive
        self._rest: list[bytes] = []  # of the line that is not complete

    def receive(self, chunk: bytes) -> None:
        if self.status != 200 or self.scope.cancel_called:
            super().receive(chunk)
            return
        try:
            first, *others = chunk.split(b"\n")
            self._rest.append(first)
            for other in others:
                self.finish()
                self._rest = [other]
            if sum(map(len, self._rest)) > MAX_ANSWER_BYTES:
                raise ProtocolError(f"a line of an answer has more than {MAX_ANSWER_BYTES:,} bytes")
        except Exception as error:
            self.error = error
            self._leave()
            return
        self._postpone()

    def finish(self) -> None:
        """The line is complete."""
        if line := b"".join(self._rest).strip():
            self._receive_line(line)
        self._rest = []


async def _pause(pause_s: float) -> None:
    await anyio.sleep(pause_s)  # noqa: TID251  # the server asks for the time, or needs it to recover


def _error_in(body: bytes) -> Any:
    try:
        found = msgspec.json.decode(body)
    except UNREADABLE:
        return None
    return found.get("error") if isinstance(found, dict) else None


@contextmanager
def _http_errors(errors: ErrorMapping) -> Iterator[None]:
    """Turns the errors of httpx2 that leave the block into errors of agentflow."""
    try:
        yield
    except (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.ProxyError) as error:
        for cause in causes(error):
            if isinstance(cause, ssl.SSLCertVerificationError):
                raise ServerUnreachable(untrusted_certificate(errors.server, cause)) from error
        why = str(error) or "no answer in time"
        raise ServerUnreachable(
            f"no server answers for {errors.model} at {errors.server} ({why}): check the address and the "
            "network"
        ) from error
    except (httpx2.UnsupportedProtocol, httpx2.InvalidURL) as error:
        raise ServerUnreachable(
            f"{errors.server} is no http(s) address ({error}): give one for {errors.model}"
        ) from error
    except (httpx2.TransportError, httpx2.DecodingError) as error:
        raise errors.lost(f"the connection broke: {error or type(error).__name__}") from error
