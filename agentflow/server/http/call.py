"""One HTTP request to an API: whose it is, its body, and its answer, whole or as a stream of events.

When the client is gone the work is cancelled, wherever it stands: nobody waits for it any more.
"""

from __future__ import annotations

import logging
import math
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
from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from agentflow.engine.generator import EngineGenerator
from agentflow.engine.tenant import ANONYMOUS, Tenant
from agentflow.errors import AgentflowError
from agentflow.protocol.json_bounds import BODY_BOUNDS, JsonScan, TooMuchJson
from agentflow.runtime.limits import MemoryBudget
from agentflow.runtime.task_group import open_task_group
from agentflow.server.http.errors import MAX_PARAM_CHARS, ApiError, api_error_of, cut, unready
from agentflow.server.log import LoggedBody, RequestRecord, log_request, logged_path
from agentflow.server.service import Service
from agentflow.server.tenants.rate_limit import BYTES_PER_TOKEN

logger = logging.getLogger(__name__)

T = TypeVar("T")
ArgTs = TypeVarTuple("ArgTs")
JSON = b"application/json"
EVENTS = b"text/event-stream; charset=utf-8"
# A body of so many counts nowhere: where large ones fill what there is, small ones are still answered. Nor is
# it worth a thread.
SMALL_BODY_BYTES = 32_768
_UNKNOWN = "Object contains unknown field `"
_MISSING = "Object missing required field `"
# A client's own request id is used where it looks like one.
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class ErrorFormat(Protocol):
    """How an API writes its errors. ``body_type``: what ``body`` is the JSON of. ``keepalive``: what its
    clients skip in a stream."""

    request_id_header: bytes
    keepalive: bytes
    body_type: type[msgspec.Struct]

    def status(self, refusal: ApiError) -> int:
        """Its status, where the API has one of its own."""

    def body(self, refusal: ApiError, request_id: str) -> bytes:
        """The body of an answer that is an error."""

    def event(self, refusal: ApiError, request_id: str) -> bytes:
        """The same, as the last event of a stream that has begun."""


class ApiCall:
    """What a handler is given. ``record`` is what the log will say of the call."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, error_format: ErrorFormat) -> None:
        self.headers = Headers(scope=scope)
        self.address = address_of(scope)
        self.id = request_id_of(self.headers)
        self.tenant: Tenant = ANONYMOUS
        self.record = RequestRecord(self.id, scope["method"], logged_path(scope["path"]))
        self.path_params: Mapping[str, str] = scope.get("path_params", {})
        self.has_begun = False
        self.is_over = False
        self.is_body_read = False
        self._scope = scope
        self._receive = receive
        self._send = send
        self._error_format = error_format
        self._is_writing = False
        self._written_s = time.monotonic()
        self._body = b""
        self._held: MemoryBudget | None = None
        self._num_charged_tokens = 0
        self._is_prompt_charged = False

    @property
    def service(self) -> Service:
        """The server. ``ApiError`` before it is ready and after its end."""
        service: Service | None = self._scope["app"].state.service
        if service is None:
            raise unready()
        return service

    def read(self, kind: type[T]) -> T:
        """The body. ``ApiError`` where it is none of that kind."""
        try:
            if not self._body.isascii():
                self._body.decode()  # msgspec does not look into the texts of what is not read
            return msgspec.json.decode(self._body, type=kind)
        except msgspec.ValidationError as error:
            message, param = _shown_fault(error)
            raise ApiError(400, "invalid_request", message, param=param) from None
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise ApiError(400, "invalid_json", f"the body is no valid JSON: {error}") from None

    async def beside(self, function: Callable[[Unpack[ArgTs]], T], *arguments: *ArgTs) -> T:
        """Calls the function, which does something with all of the body: where that is large, in a thread of
        the tenant's, so that the event loop goes on."""
        if len(self._body) <= SMALL_BODY_BYTES:
            return function(*arguments)
        limiter = self.service.body_threads(self.tenant)
        return await anyio.to_thread.run_sync(function, *arguments, limiter=limiter)

    def generator(
        self, model: str | None, *, to_generate: bool = True, priority: int | None = None
    ) -> EngineGenerator:
        """The tenant's generator on the model. ``UnknownModel``; ``Overloaded`` where what it generates, with
        this ``priority``, would come too late."""
        found = self.service.models.find(model, self.tenant)
        self._is_prompt_charged = to_generate
        if to_generate:
            found.check_admission(self.tenant, priority or 0)
        generator = found.generator(self.tenant)
        if not isinstance(generator, EngineGenerator):
            raise ApiError(400, "unsupported", f"{model!r} answers in sessions only: it has no engine")
        self.record.model = generator.capabilities.model
        return generator

    async def reply(self, payload: Any, *, status: int = 200) -> None:
        """Answers with JSON: a struct, or what is encoded already."""
        body = payload if isinstance(payload, bytes) else msgspec.json.encode(payload)
        await self._start(status, JSON, {b"content-length": b"%d" % len(body)})
        await self._write(body, more=False)

    @asynccontextmanager
    async def streaming(self) -> AsyncIterator[None]:
        """Within it events are sent. The status and the headers go out at once, and in silence something that
        clients skip, so that nothing in between takes the connection for a dead one."""
        self.record.is_streamed = True
        await self._start(200, EVENTS, {b"cache-control": b"no-cache", b"x-accel-buffering": b"no"})
        async with open_task_group() as group:
            group.start_soon(self._keep_alive, self.service.http_limits.stream_keepalive_s)
            yield
            group.cancel_scope.cancel()

    async def _keep_alive(self, interval_s: float) -> None:
        while True:
            # A write that waits until the client has read is no silence.
            silent_s = 0.0 if self._is_writing else time.monotonic() - self._written_s
            if silent_s >= interval_s:
                await self._write(self._error_format.keepalive, more=True)
            else:
                await anyio.sleep(interval_s - silent_s)  # noqa: TID251 - the interval is the purpose

    async def send_events(self, data: bytes, *, last: bool = False) -> None:
        """Sends whole server-sent events; waits where the client reads more slowly than they come."""
        await self._write(data, more=not last)

    async def refuse(self, refusal: ApiError) -> None:
        """Ends the answer with an error."""
        refusal = refusal.shortened()
        self.record.error = refusal.code
        if self.has_begun:
            await self._write(self._error_format.event(refusal, self.id), more=False)
            return
        body = self._error_format.body(refusal, self.id)
        headers = {b"content-length": b"%d" % len(body)}
        if refusal.retry_after_s is not None:
            headers[b"retry-after"] = b"%d" % math.ceil(refusal.retry_after_s)
        if refusal.status == 401:
            headers[b"www-authenticate"] = b"Bearer"
        if not self.is_body_read:
            headers[b"connection"] = b"close"  # the rest of it would be taken for the next request
        await self._start(self._error_format.status(refusal), JSON, headers)
        await self._write(body, more=False)

    async def _start(self, status: int, media_type: bytes, headers: Mapping[bytes, bytes]) -> None:
        self.has_begun = True
        self.record.status = status
        own = [(b"content-type", media_type), (self._error_format.request_id_header, self.id.encode())]
        await self._send(
            {"type": "http.response.start", "status": status, "headers": [*own, *headers.items()]}
        )

    async def _write(self, data: bytes, *, more: bool) -> None:
        if not more:
            self.is_over = True
        if self.record.asked is not None:
            self.record.answered = self.record.answered or LoggedBody()
            self.record.answered.add(data)
        self._is_writing = True
        await self._send({"type": "http.response.body", "body": data, "more_body": more})
        self._is_writing, self._written_s = False, time.monotonic()

    async def read_body(self) -> None:
        """Reads the body within the limits of size, content and time. ``RateLimited`` where the tenant may
        send no large one now."""
        limits = self.service.http_limits
        encoding = self.headers.get("content-encoding", "identity")
        if encoding.lower() != "identity":
            text = f"a body with Content-Encoding {encoding[:100]!r} is not read: send it as it is"
            raise ApiError(415, "unsupported_encoding", text)
        length = self.headers.get("content-length", "")
        announced_bytes = int(length) if length.isdigit() else 0
        if announced_bytes > limits.body_bytes:
            raise _too_large(limits.body_bytes)
        self._charge(announced_bytes)
        scan = JsonScan(BODY_BOUNDS)
        parts: list[bytes] = []
        num_bytes = 0
        self._held = held = MemoryBudget(
            within=self.service.bodies.of(self.tenant.name), free_bytes=SMALL_BODY_BYTES
        )
        with anyio.move_on_after(limits.body_timeout_s) as scope:
            while not self.is_body_read:
                message: Message = await self._receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                parts.append(message.get("body", b""))
                num_bytes += len(parts[-1])
                if num_bytes > limits.body_bytes:
                    raise _too_large(limits.body_bytes)
                held.reserve(len(parts[-1]))
                self._charge(num_bytes)
                _count(scan, parts[-1])
                self.is_body_read = not message.get("more_body", False)
        if scope.cancelled_caught:
            seconds = limits.body_timeout_s
            raise ApiError(
                408, "request_timeout", f"the body did not come within {seconds:g} s: send it faster"
            )
        self._body = b"".join(parts)
        if self.service.logs_prompts:
            self.record.asked = LoggedBody(self._body)

    def _charge(self, num_bytes: int) -> None:
        """For a body of at least so many bytes, where it is not small."""
        more = num_bytes // BYTES_PER_TOKEN - self._num_charged_tokens
        if num_bytes <= SMALL_BODY_BYTES or more <= 0:
            return
        gate = self.service.models.gate
        if not self._num_charged_tokens:
            gate.check_buckets(self.tenant)
        gate.charge(self.tenant, more)
        self._num_charged_tokens += more

    def release_body(self) -> None:
        """What it holds of the request's body is needed no longer. Of what the body was charged, the tenant
        gets back what the request was charged for its prompt, and all where the server could not serve it."""
        if self._held is not None:
            self._held.close()
        if not self._num_charged_tokens:
            return
        given_back = self.record.prompt_tokens if self._is_prompt_charged else 0
        if self.record.status >= 429:
            given_back = self._num_charged_tokens
        with suppress(AgentflowError, ApiError):  # the key, or the server, is gone
            gate = self.service.models.gate
            gate.charge(self.tenant, -min(given_back, self._num_charged_tokens))

    async def until_gone(self) -> None:
        """Returns when the client has closed the connection. Only after the body was read."""
        while (await self._receive())["type"] != "http.disconnect":
            pass


def address_of(scope: Scope) -> str | None:
    """Where a request comes from: an IP address, where it is known."""
    client = scope.get("client")
    return client[0] if client else None


def request_id_of(headers: Headers) -> str:
    """What the client calls its request, or else a new id."""
    asked_id = headers.get("x-request-id", "")
    return asked_id if _REQUEST_ID.fullmatch(asked_id) else f"req_{secrets.token_hex(12)}"


class ClientGone(Exception):
    """Nobody is there to be answered."""


Handler = Callable[[ApiCall], Awaitable[None]]


class ApiEndpoint:
    """An ASGI application that answers the requests to one path of an API, its ``route``."""

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
            except (ClientGone, OSError):
                call.record.error = "client_gone"
            except Exception as error:
                await self._refuse(call, error)
        finally:
            call.release_body()
            call.record.took_s = time.perf_counter() - began_s
            if not call.is_over:
                call.record.error = call.record.error or "client_gone"
            self._count(scope, call)
            log_request(call.record)

    def _count(self, scope: Scope, call: ApiCall) -> None:
        answers: Counter[tuple[str, int]] = scope["app"].state.answers
        answers[self._route, call.record.status if call.is_over else 0] += 1

    async def _answer(self, call: ApiCall) -> None:
        service = call.service
        call.tenant = service.tenants.of_request(call.headers, call.address)
        call.record.tenant = call.tenant.name
        service.check_open()
        with service.calls:
            await call.read_body()
            async with open_task_group() as group:
                group.start_soon(_cancel_when_gone, call, group.cancel_scope)
                await self._handler(call)
                group.cancel_scope.cancel()

    async def _refuse(self, call: ApiCall, error: Exception) -> None:
        refusal = api_error_of(error)
        if refusal.status == 500:
            logger.error("request %s failed", call.id, exc_info=error)
        if call.is_over:
            return
        try:
            await call.refuse(refusal)
        except OSError:
            call.record.error = "client_gone"


async def _cancel_when_gone(call: ApiCall, scope: anyio.CancelScope) -> None:
    await call.until_gone()
    if not call.is_over:
        scope.cancel()


def _too_large(limit: int) -> ApiError:
    return ApiError(
        413, "request_too_large", f"the body has more than {limit:,} bytes, which is the limit: send less"
    )


def _count(scan: JsonScan, piece: bytes) -> None:
    try:
        scan.push(piece)
    except TooMuchJson as error:
        text = f"the body has {error}, which is the limit: send less"
        raise ApiError(413, "request_too_large", text) from None


def _shown_fault(error: msgspec.ValidationError) -> tuple[str, str | None]:
    """What is wrong, and with which field: msgspec names its place at the end, as `$.a[0]`, or as
    `key` in `$.a` for a name in the field. Names and values that the client wrote are cut: a message holds
    as much of them as the body."""
    text, has_place, place = str(error).rpartition(" - at `")
    if not has_place:
        text, place = str(error), ""
    place = cut(place, MAX_PARAM_CHARS)
    is_key = place.startswith("key` in `")
    at = place.removeprefix("key` in `").rstrip("`").lstrip("$.")
    if text.startswith(_UNKNOWN):
        field = _field(at, text.removeprefix(_UNKNOWN))
        return f"there is no parameter {field!r} here", field
    if text.startswith(_MISSING):
        field = _field(at, text.removeprefix(_MISSING))
        return f"the required parameter {field!r} is missing", field
    text = cut(text, MAX_PARAM_CHARS)
    of_key = "a key: " if is_key else ""
    return (f"{at}: {of_key}{text}" if at else text), at or None


def _field(at: str, name: str) -> str:
    return cut(f"{at}.{name.removesuffix('`')}".lstrip("."), MAX_PARAM_CHARS)
