"""One HTTP request to an API: its tenant, its body, and its answer, whole or as a stream of events.

``ApiEndpoint`` authenticates a request, reads its body and calls a handler, which uses ``ApiCall`` to read
and answer it. If the client disconnects, the handler is cancelled immediately.
"""

from __future__ import annotations

import codecs
import logging
import re
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, Protocol, TypeVar, TypeVarTuple, Unpack

import anyio
import anyio.to_thread
import msgspec
from starlette.datastructures import Headers, QueryParams
from starlette.types import Message, Receive, Scope, Send

from agentflow.engine.generator.generator import EngineGenerator
from agentflow.engine.tenant import ANONYMOUS, Tenant
from agentflow.errors import AgentflowError, drop_tracebacks
from agentflow.protocol.bounds.json_bounds import BODY_BOUNDS, JsonScan
from agentflow.protocol.ops import MAX_TRACE_CHARS
from agentflow.runtime.limits import MemoryBudget
from agentflow.runtime.task_group import open_task_group
from agentflow.server import event_stream
from agentflow.server.errors import ApiError, ClientGone, make_api_error, not_ready, unsupported
from agentflow.server.event_stream import ServerSentEvents
from agentflow.server.http.caller import Caller
from agentflow.server.http.json_body import (
    SMALL_BODY_BYTES,
    count_values,
    decoded,
    not_json,
    shown_fault,
    too_large,
)
from agentflow.server.log import LoggedBody, RequestRecord, log_request, logged_path
from agentflow.server.models.api_model import TenantGenerator
from agentflow.server.models.models import TextGenerator
from agentflow.server.service import Service
from agentflow.server.stores.fronts import ForwardedAnswer, ForwardedRequest
from agentflow.server.tenants.keys import key_of_headers
from agentflow.server.tenants.rate_limit import BYTES_PER_TOKEN, LimitState

logger = logging.getLogger(__name__)

T = TypeVar("T")
ArgTs = TypeVarTuple("ArgTs")
JSON = b"application/json"
FORWARDED = "agentflow.forwarded"
"""The key of an ASGI scope for the tenant's name, if another server with the same store sent the request."""
CREDENTIALS = frozenset((b"authorization", b"x-api-key", b"cookie"))
"""The headers that are not sent to other servers."""
# A client's request id is used if it has this form.
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class ErrorFormat(Protocol):
    """How an API writes its errors and streams, and the headers of its answers."""

    request_id_header: bytes
    processing_header: bytes  # the header of the milliseconds until the answer began; empty: none
    stream_type: str  # the Content-Type of streams
    keepalive: bytes  # bytes in a stream that clients ignore
    body_type: type[msgspec.Struct]  # the type that ``body`` encodes

    def status(self, error: ApiError) -> int:
        """The status, which may differ from the error's."""

    def body(self, error: ApiError, request_id: str) -> bytes:
        """The body of the error."""

    def in_stream(self, body: bytes) -> bytes:
        """The last event of a stream that fails. ``body``: the body of the error."""

    def limit_headers(self, limits: LimitState) -> dict[bytes, bytes]:
        """The headers with the remaining limits of the tenant."""


class ApiCall:
    """The request and its answer, for a handler. ``record``: the entry for the log. ``reply_headers``:
    additional headers of the answer. ``is_over``: the answer is complete. ``is_gone``: the client has closed
    the connection."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, error_format: ErrorFormat) -> None:
        self.headers = Headers(scope=scope)
        self.address = client_address(scope)
        self.id = read_request_id(self.headers)
        self.tenant: Tenant = ANONYMOUS
        self.forwarded_for: str | None = scope.get(FORWARDED)
        self.record = RequestRecord(self.id, scope["method"], logged_path(scope["path"]))
        self.reply_headers: dict[str, str] = {}
        self.path_params: Mapping[str, str] = scope.get("path_params", {})
        self.is_over = False
        self.is_gone = False
        self.is_body_read = False
        self._scope = scope
        self._receive = receive
        self._send = send
        self._error_format = error_format
        self._stream: ServerSentEvents | None = None
        self._body = bytearray()
        self._held: MemoryBudget | None = None
        self._num_charged_tokens = 0
        self._is_prompt_charged = False
        self._began_s = time.perf_counter()

    @property
    def trace(self) -> str:
        """The client's ``traceparent``, or an empty string."""
        return self.headers.get("traceparent", "")[:MAX_TRACE_CHARS]

    @property
    def caller(self) -> Caller:
        """The program that the request belongs to. ``ApiError`` for an unknown objective."""
        return Caller.of(self.headers, self.trace)

    def has_valid_key(self) -> bool:
        """Whether the API key of the request still identifies its tenant."""
        return self.service.tenants.still_names(key_of_headers(self.headers), self.tenant)

    @property
    def query(self) -> QueryParams:
        """The query parameters."""
        return QueryParams(self._scope.get("query_string", b""))

    @property
    def relaxed(self) -> Counter[str]:
        """The counters of relaxed schemas, for the metrics."""
        counted: Counter[str] = self._scope["app"].state.relaxed
        return counted

    @property
    def service(self) -> Service:
        """The server. ``ApiError`` while it is starting or shutting down."""
        service: Service | None = self._scope["app"].state.service
        if service is None:
            raise not_ready()
        return service

    def read(self, kind: type[T]) -> T:
        """Decodes the body. ``ApiError`` if it does not have this type."""
        return decoded(self._body, kind)

    def read_query(self, kind: type[T]) -> T:
        """Decodes the query parameters. ``ApiError`` if a parameter does not have its type, or is unknown and
        ``kind`` forbids unknown ones."""
        try:
            return msgspec.convert(dict(self.query), kind, strict=False)
        except msgspec.ValidationError as error:
            message, param = shown_fault(error, kind, "")
            raise ApiError(400, "invalid_request", message, param=param) from None

    @property
    def num_body_bytes(self) -> int:
        """The size of the body."""
        return len(self._body)

    async def process(self, function: Callable[[Unpack[ArgTs]], T], *arguments: *ArgTs) -> T:
        """Calls a function that processes the whole body. If the body is large, this happens in a thread of
        the tenant, so that the event loop continues."""
        if len(self._body) <= SMALL_BODY_BYTES:
            return function(*arguments)
        limiter = self.service.body_threads(self.tenant)
        return await anyio.to_thread.run_sync(function, *arguments, limiter=limiter)

    def generator(
        self, model: str | None, *, to_generate: bool = True, priority: int | None = None
    ) -> EngineGenerator:
        """The tenant's generator on the model. ``UnknownModel``; ``NotSupported``, or an ``ApiError`` with
        its code, if the model is for the other task; ``Overloaded`` if a request with this ``priority`` would
        wait too long."""
        generator = self._find(model, to_generate, False, priority)
        if isinstance(generator, TenantGenerator):
            text = f"{generator.capabilities.model} is behind an API: this route needs a model of this server"
            raise ApiError(400, "unsupported", text, "model")
        return generator

    def text_generator(
        self, model: str | None, body: object, *, to_generate: bool = True, priority: int | None = None
    ) -> TextGenerator:
        """Like ``generator``, also for a model behind an API. ``ApiError`` if such a model is given a field
        of ``body`` that needs an engine."""
        generator = self._find(model, to_generate, False, priority)
        if isinstance(generator, TenantGenerator):
            _check_engine_fields(body, generator.capabilities.model)
        return generator

    def embedder(self, model: str | None, *, priority: int | None = None) -> TextGenerator:
        """Like ``generator``, to make embeddings, also with a model behind an API."""
        return self._find(model, True, True, priority)

    def _find(
        self, model: str | None, to_generate: bool, embeds: bool, priority: int | None
    ) -> TextGenerator:
        found = self.service.models.find(model, self.tenant)
        self._is_prompt_charged = to_generate
        if to_generate:
            found.check_admission(self.tenant, priority or 0)
        generator = found.generator(self.tenant)
        if not isinstance(generator, TenantGenerator | EngineGenerator):
            raise ApiError(400, "unsupported", f"{model!r} has no engine and is available in sessions only")
        if embeds and not found.makes_embeddings:
            why = "makes no embeddings: serve it, or an embedding model, with --task embed"
            raise ApiError(400, "unsupported", f"{found.name} {why}", "model")
        if to_generate and not embeds:
            generator.capabilities.require_generation()
        self.record.model = generator.capabilities.model
        return generator

    async def asked_elsewhere(self, front: str, query: bytes | None = None) -> ForwardedAnswer:
        """Sends the request to another server with the same store, and returns the answer. ``query``:
        replaces the query string. ``EngineDown`` if that server is gone; ``Overloaded`` if it is too busy, or
        the store does not answer."""
        fronts = self.service.fronts
        assert fronts is not None
        return await fronts.ask(
            front,
            ForwardedRequest(
                method=self.record.method,
                path=self._scope["path"],
                query=self._scope.get("query_string", b"") if query is None else query,
                tenant=self.tenant.name,
                headers=tuple([(n, v) for n, v in self._scope["headers"] if n not in CREDENTIALS]),
                body=bytes(self._body),
            ),
        )

    async def relay(self, front: str) -> None:
        """Answers with the answer of another server with the same store."""
        answered = await self.asked_elsewhere(front)
        headers = {b"content-length": b"%d" % len(answered.body)}
        headers |= {name: value for name, value in answered.headers if name == b"retry-after"}
        await self._start(answered.status, JSON, headers)
        await self._write(answered.body, False)

    async def reply(self, payload: Any, *, status: int = 200) -> None:
        """Answers with JSON. ``payload``: a struct, or encoded JSON."""
        body = payload if isinstance(payload, bytes) else msgspec.json.encode(payload)
        await self._start(status, JSON, {b"content-length": b"%d" % len(body)})
        await self._write(body, False)

    @asynccontextmanager
    async def streaming(self) -> AsyncIterator[ServerSentEvents]:
        """The scope in which events are sent. Sends the status and the headers, then keep-alive events
        when nothing else is sent, so that no proxy closes the connection as idle."""
        self.record.is_streamed = True
        await self._start(200, self._error_format.stream_type.encode(), event_stream.HEADERS)
        self._stream = ServerSentEvents(self._write, self._error_format.keepalive)
        async with open_task_group() as group:
            group.start_soon(self._stream.keep_alive, self.service.http_limits.stream_keepalive_s)
            yield self._stream
            group.cancel_scope.cancel()

    async def fail(self, error: ApiError) -> None:
        """Ends the answer with an error."""
        error = error.shortened()
        self.record.error, self.record.param, self.record.message = error.code, error.param, error.message
        body = self._error_format.body(error, self.id)
        if self._stream is not None:
            await self._stream.end(self._error_format.in_stream(body))
            return
        headers = {b"content-length": b"%d" % len(body)}
        headers |= {name.encode(): value.encode() for name, value in error.headers.items()}
        if not self.is_body_read:
            headers[b"connection"] = b"close"  # the rest would be read as the next request
        await self._start(self._error_format.status(error), JSON, headers)
        await self._write(body, False)

    async def _start(self, status: int, media_type: bytes, headers: Mapping[bytes, bytes]) -> None:
        self.record.status = status
        shown = self._error_format
        own = [(b"content-type", media_type), (shown.request_id_header, self.id.encode())]
        if shown.processing_header:
            took_ms = 1_000 * (time.perf_counter() - self._began_s)
            own.append((shown.processing_header, b"%d" % took_ms))
        own += self._limit_headers().items()
        own += [(name.encode(), value.encode()) for name, value in self.reply_headers.items()]
        await self._send_message(
            {"type": "http.response.start", "status": status, "headers": [*own, *headers.items()]}
        )

    def _limit_headers(self) -> dict[bytes, bytes]:
        """The remaining limits when the answer begins: after the request was admitted, or after its end."""
        try:
            return self._error_format.limit_headers(self.service.models.gate.state(self.tenant))
        except (AgentflowError, ApiError):  # the key is unknown or revoked, or the server has stopped
            return {}

    async def _write(self, data: bytes, more: bool) -> None:
        if not more:
            self.is_over = True
        if self.record.asked is not None:
            self.record.answered = self.record.answered or LoggedBody()
            self.record.answered.add(data)
        await self._send_message({"type": "http.response.body", "body": data, "more_body": more})

    async def _send_message(self, message: Message) -> None:
        """``ClientGone`` if the connection fails. Any other ``OSError`` is a fault of the server."""
        try:
            await self._send(message)
        except OSError as error:
            raise ClientGone from error

    async def read_body(self) -> None:
        """Reads the body within the limits of size, content and time. ``RateLimited`` if the tenant may not
        send a large one now."""
        limits = self.service.http_limits
        encoding = self.headers.get("content-encoding", "identity")
        if encoding.lower() != "identity":
            text = f"the Content-Encoding {encoding[:100]!r} is not supported: send the body uncompressed"
            raise ApiError(415, "unsupported_encoding", text)
        length = self.headers.get("content-length", "")
        announced_bytes = int(length) if length.isdigit() else 0
        if announced_bytes > limits.body_bytes:
            raise too_large(limits.body_bytes)
        self._charge(announced_bytes)
        scan = JsonScan(BODY_BOUNDS)
        utf8 = codecs.getincrementaldecoder("utf-8")()  # msgspec does not check strings that it skips
        self._held = held = MemoryBudget(
            within=self.service.bodies.of(self.tenant.name), free_bytes=SMALL_BODY_BYTES
        )
        with anyio.move_on_after(limits.body_timeout_s) as scope:
            while not self.is_body_read:
                message: Message = await self._receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                piece: bytes = message.get("body", b"")
                if len(self._body) + len(piece) > limits.body_bytes:
                    raise too_large(limits.body_bytes)
                held.reserve(len(piece))
                self._body += piece
                self._charge(len(self._body))
                count_values(scan, piece)
                self.is_body_read = not message.get("more_body", False)
                try:
                    utf8.decode(piece, self.is_body_read)
                except UnicodeError as error:
                    raise not_json(error) from None
        if scope.cancelled_caught:
            seconds = limits.body_timeout_s
            raise ApiError(408, "request_timeout", f"the body did not arrive within {seconds:g} s")
        if self.service.logs_prompts:
            self.record.asked = LoggedBody(self._body)

    def _charge(self, num_bytes: int) -> None:
        """Charges the tenant for a body of at least ``num_bytes`` bytes, unless it is small, or another
        server has charged it."""
        more = num_bytes // BYTES_PER_TOKEN - self._num_charged_tokens
        if num_bytes <= SMALL_BODY_BYTES or more <= 0 or self.forwarded_for is not None:
            return
        gate = self.service.models.gate
        if not self._num_charged_tokens:
            gate.check_buckets(self.tenant)
        gate.charge(self.tenant, more)
        self._num_charged_tokens += more

    def release_body(self) -> None:
        """Releases the memory of the body. Of the tokens charged for the body, the tenant gets back the
        number that its prompt is charged, or all if the server could not serve the request."""
        self._body = bytearray()  # a decoded body may still refer to the old one
        if self._held is not None:
            self._held.close()
        if not self._num_charged_tokens:
            return
        given_back = self.record.prompt_tokens if self._is_prompt_charged else 0
        if self.record.status >= 429:
            given_back = self._num_charged_tokens
        with suppress(AgentflowError, ApiError):  # the key is revoked, or the server has stopped
            gate = self.service.models.gate
            gate.charge(self.tenant, -min(given_back, self._num_charged_tokens))

    async def until_gone(self) -> None:
        """Waits until the client closes the connection. Call it after the body was read."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.is_gone = True


_ENGINE_FIELDS: dict[str, object] = {
    "add_generation_prompt": True,
    "bad_words": [],
    "best_of": 1,
    "chat_template_kwargs": msgspec.Raw(b"null"),
    "echo": False,
    "logprobs": False,
    "prompt_logprobs": None,
    "return_token_ids": False,
    "top_logprobs": 0,
    "truncation": "disabled",
}
"""The fields that need an engine, with their neutral values."""


def _check_engine_fields(body: object, model: str) -> None:
    """``ApiError`` if the body has a field that a model behind an API cannot honour."""
    for name, neutral in _ENGINE_FIELDS.items():
        value = getattr(body, name, None)
        if value is None or (type(value) is type(neutral) and value == neutral):
            continue
        if name != "best_of" or value != getattr(body, "n", None):
            raise unsupported(name, f"{model} is behind an API")


def client_address(scope: Scope) -> str | None:
    """The client's IP address, if it is known."""
    client = scope.get("client")
    return client[0] if client else None


def read_request_id(headers: Headers) -> str:
    """The id that the client chose for its request, or else a new one."""
    asked_id = headers.get("x-request-id", "")
    return asked_id if _REQUEST_ID.fullmatch(asked_id) else f"req_{secrets.token_hex(12)}"


Handler = Callable[[ApiCall], Awaitable[None]]


class ApiEndpoint:
    """The ASGI application of one path of an API. ``route``: the path, for the metrics."""

    def __init__(self, handler: Handler, error_format: ErrorFormat, *, route: str = "") -> None:
        self._handler = handler
        self._error_format = error_format
        self._route = route

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = ApiCall(scope, receive, send, self._error_format)
        began_s = time.perf_counter()
        try:
            try:
                await self._answer(call)
            except ClientGone:
                call.is_gone = True
                call.record.error = "client_gone"
            except Exception as error:
                await self._fail(call, error)
                # The frames refer to the body and its decoded values. An error from a thread forms a
                # reference cycle with them, which would keep both until a garbage collection.
                drop_tracebacks(error)
        finally:
            call.release_body()
            call.record.took_s = time.perf_counter() - began_s
            if not call.is_over:
                call.record.error = call.record.error or ("client_gone" if call.is_gone else "cut_off")
            self._count(scope, call)
            log_request(call.record)

    def _count(self, scope: Scope, call: ApiCall) -> None:
        answers: Counter[tuple[str, int]] = scope["app"].state.answers
        answers[self._route, call.record.status if call.is_over else 0] += 1

    async def _answer(self, call: ApiCall) -> None:
        service = call.service
        call.tenant = (
            service.tenants.of_request(call.headers, call.address)
            if call.forwarded_for is None
            else service.tenants.find(call.forwarded_for)
        )
        call.record.tenant = call.tenant.name
        service.check_open()
        with service.calls.running():
            await call.read_body()
            async with open_task_group() as group:
                group.start_soon(_cancel_when_gone, call, group.cancel_scope)
                await self._handler(call)
                group.cancel_scope.cancel()

    async def _fail(self, call: ApiCall, error: Exception) -> None:
        shown = make_api_error(error)
        if shown.status == 500:
            logger.error("request %s failed", call.id, exc_info=error)
        if call.is_over:
            return
        try:
            await call.fail(shown)
        except ClientGone:
            call.is_gone = True
            call.record.error = "client_gone"


async def _cancel_when_gone(call: ApiCall, scope: anyio.CancelScope) -> None:
    await call.until_gone()
    if not call.is_over:
        scope.cancel()
