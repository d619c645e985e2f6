"""Forwards HTTP requests to targets, and their answers to clients, byte for byte.

::

    client ──▶ body kept ──▶ placed ──▶ sent ──▶ first part of the answer ──▶ … ──▶ end
                               ▲                   │
                               └─ another target ──┘  no connection, a lost one, 429, 502, 503, 504, 529

Until the first part of an answer has arrived, the request can be sent to another target. After that nothing
is retried: a stream that breaks ends with an error, in the format of its API. An answer is read as fast as
the client reads it. If the client disconnects, the request to the target is cancelled.

An answer that is late, or stops, is no failure of its target: a long generation without a stream, or a wait
for a variable of a program, takes as long at a healthy server. The health checks find a target that hangs.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Iterable
from dataclasses import dataclass
from functools import partial

import anyio
import anyio.to_thread
import httpx2
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from agentflow.runtime.limits import MemoryBudget
from agentflow.runtime.task_group import first_error, open_task_group
from agentflow.server.errors import ApiError, ClientGone
from agentflow.server.gateway.client_body import ClientBody
from agentflow.server.gateway.defaults import GatewayLimits
from agentflow.server.gateway.request_facts import RequestFacts, read_asked
from agentflow.server.gateway.target import CONNECT_TIMEOUT_S, HeaderList, Target, logger
from agentflow.server.gateway.target_choice import Assignment, TargetChoice
from agentflow.server.http.call import read_request_id
from agentflow.server.http.json_body import SMALL_BODY_BYTES
from agentflow.server.routes import error_response, find_error_format

MAX_ATTEMPTS = 3
"""The limit of attempts at a request, without attempts at targets that lack the object that it refers to."""
MAX_LOST = 2
"""The limit of connections that a request loses: it may be the cause."""
MAX_PAUSE_S = 30.0
"""The longest pause that a target can ask for."""
MAX_REFUSAL_BYTES = 65_536
_BUSY = (503, 529)  # the second in Anthropic's API
REFUSALS = (429, 502, 504, *_BUSY)
NOT_FOUND = 404
"""After an answer with this status, another target may have the requested object."""
TARGET_HEADER = b"x-agentflow-target"
_HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer "
    b"transfer-encoding upgrade".split()
)
_SET_HERE = frozenset([b"host", b"content-length", b"expect", b"via", b"x-forwarded-for"])
# Ids of objects that a server stores are at the beginning of its answer, and the usage is at the end.
_ID = re.compile(rb'"(?:id|ticket)"\s*:\s*"([!#-\[\]-~]{6,256})"')
_OUTPUT = re.compile(rb'"(?:completion_tokens|output_tokens|eval_count)"\s*:\s*(\d{1,9})')
_HEAD_BYTES = _TAIL_BYTES = 4_096
MAX_IDS = 8
"""The limit of ids that are read from one answer. Further ids may be a client's text in the answer."""
_MARKS = {b"text/event-stream": b"data:", b"application/x-ndjson": b"\n"}
"""The bytes that each event of a stream has once, by the type of the stream."""


@dataclass(slots=True)
class Refusal:
    """The answer of a target that refused a request, or the error if a target did not answer. ``is_lost``:
    the target may have begun to work on the request."""

    status: int
    headers: HeaderList
    body: bytes = b""
    error: ApiError | None = None
    is_lost: bool = False


class HttpProxy:
    """The proxy of all requests that the gateway does not answer itself.

    Args:
        placement: Chooses the targets.
        transport: Sends the requests.
        limits: The gateway's limits.
        via: The gateway's entry in the header ``via``.
    """

    def __init__(
        self, placement: TargetChoice, transport: httpx2.AsyncBaseTransport, limits: GatewayLimits, via: str
    ) -> None:
        self._placement = placement
        self._transport = transport
        self._limits = limits
        self._via = via.encode()
        self._bodies = MemoryBudget(limits.bodies_bytes)
        self._readers = anyio.CapacityLimiter(1)  # more threads would compete for the GIL
        self.answers: Counter[tuple[int, int]] = Counter()
        """Answers by target and status; the target is -1 if none answered."""
        self.retries: Counter[str] = Counter()
        """Further attempts by their cause."""
        self.num_prompt_bytes: Counter[int] = Counter()
        """Bytes of prompts by target."""
        self.num_hit_bytes: Counter[int] = Counter()
        """Bytes of prompts that the target was expected to have cached, by target."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        body = ClientBody(receive, self._bodies, self._limits)
        answer = _Answer(scope, send, body)
        try:
            await body.buffer()
            asked = await self._read(scope, body)
            asked.model = self._placement.resolve(asked.model)
            body.charge(len(asked.run or b""))
            async with open_task_group() as group:
                group.start_soon(_cancel_when_gone, body, answer, group.cancel_scope)
                await self._serve(scope, body, answer, asked)
                group.cancel_scope.cancel()
        except Exception as error:
            error = first_error(error)
            if isinstance(error, ApiError):
                self.answers[-1, error.status] += 1
                await answer.fail(error)
            elif not isinstance(error, ClientGone):
                logger.error("a request failed", exc_info=error)
                text = "the gateway failed to answer this request; its log has the reason"
                await answer.fail(ApiError(500, "internal_error", text))
        finally:
            body.close()

    async def _read(self, scope: Scope, body: ClientBody) -> RequestFacts:
        method, path, headers = scope["method"], raw_path(scope).decode("latin-1"), Headers(scope=scope)
        query = scope.get("query_string", b"").decode("latin-1")
        data = bytes(body.data)
        reading = partial(read_asked, method, path, headers, data, query, is_whole=body.is_whole)
        if len(data) <= SMALL_BODY_BYTES:
            return reading()
        return await anyio.to_thread.run_sync(reading, limiter=self._readers)

    async def _serve(self, scope: Scope, body: ClientBody, answer: _Answer, asked: RequestFacts) -> None:
        """Tries one target after the other, until one answers."""
        tried: list[Target] = []
        num_attempts = num_lost = 0
        owner = self._placement.owner(asked.names)
        refusal: Refusal | None = None
        while True:
            if refusal is not None and not self._placement.candidates(asked, tried):
                break
            assignment = await self._placement.place(asked, tried)
            tried.append(assignment.target)
            num_attempts += 1
            has_other = num_attempts < MAX_ATTEMPTS and bool(self._placement.candidates(asked, tried))
            may_refuse = (*REFUSALS, NOT_FOUND) if has_other and body.can_be_sent else ()
            if owner is not None and owner is not assignment.target:
                may_refuse = (*may_refuse, NOT_FOUND)
            try:
                request = self._request(scope, assignment.target, body)
                refusal = await self._attempt(request, assignment, asked, body, answer, may_refuse)
            finally:
                assignment.ended()
            if refusal is None:
                return
            num_lost += refusal.is_lost
            num_attempts -= refusal.status == NOT_FOUND
            if not body.can_be_sent or num_lost >= MAX_LOST or num_attempts >= MAX_ATTEMPTS:
                break
            self.retries["lost" if refusal.is_lost else str(refusal.status)] += 1
        if refusal.status == NOT_FOUND and owner is not None and owner not in tried:
            text = "the server that has the object of this request does not answer: try again in a moment"
            raise ApiError(503, "no_target", text, retry_after_s=self._limits.check_s)
        if refusal.error is not None:
            raise refusal.error
        self.answers[tried[-1].number, refusal.status] += 1
        await answer.begin(refusal.status, refusal.headers)
        await answer.write(refusal.body, is_last=True)

    def _request(self, scope: Scope, target: Target, body: ClientBody) -> httpx2.Request:
        headers = request_headers(scope, target, self._via)
        if scope["method"] == "POST":
            # The usage is read from the end of an answer. Most servers do not compress anyway.
            headers = [(name, value) for name, value in headers if name != b"accept-encoding"]
            headers.append((b"accept-encoding", b"identity"))
        sent = dict(scope["headers"])
        if body.is_whole:
            if body.data or b"content-length" in sent:
                headers.append((b"content-length", b"%d" % len(body.data)))
        elif b"content-length" in sent:
            headers.append((b"content-length", sent[b"content-length"]))
        else:
            headers.append((b"transfer-encoding", b"chunked"))
        return httpx2.Request(
            scope["method"],
            target.url(raw_path(scope), scope.get("query_string", b"")),
            headers=headers,
            stream=body.stream(),
            extensions={"timeout": {"connect": CONNECT_TIMEOUT_S}},
        )

    async def _attempt(
        self,
        request: httpx2.Request,
        assignment: Assignment,
        asked: RequestFacts,
        body: ClientBody,
        answer: _Answer,
        may_refuse: Collection[int],
    ) -> Refusal | None:
        """Sends the request to one target and forwards its answer. Returns a refusal if nothing was
        forwarded: there was no answer, or its status is in ``may_refuse``."""
        target, attempt = assignment.target, assignment.target.circuit.attempt()
        size, num_hit = assignment.num_bytes
        self.num_prompt_bytes[target.number] += size
        self.num_hit_bytes[target.number] += num_hit
        received: _Received | None = None
        try:
            with anyio.move_on_after(self._limits.first_byte_s) as scope:
                received = _Received(await self._transport.handle_async_request(request))
                await received.next()
            if (received is None or scope.cancelled_caught) and not body.is_read:
                text = f"the body did not arrive within {self._limits.first_byte_s:g} s"
                raise ApiError(408, "request_timeout", text)  # not the target's fault
            if received is None or scope.cancelled_caught:  # no failure: see the top of this file
                text = f"the server did not answer within {self._limits.first_byte_s:g} s"
                raise ApiError(504, "timeout", text)
            status = received.status
            if status == 502:
                self._placement.failed(target, attempt, f"it answers with the status {status}")
            elif status != 504:  # a proxy's error if the server behind it is slow
                attempt.succeeded()
            if status in _BUSY:
                target.pause(asked.model, received.pause_s)
            if status in may_refuse and (status != NOT_FOUND or asked.names or asked.model):
                refusal = await received.refusal()
                refusal.headers.append((TARGET_HEADER, b"%d" % target.number))
                return refusal
            self.answers[target.number, status] += 1
            await self._pass_on(received, assignment, asked, answer)
        except httpx2.LocalProtocolError as error:
            raise ApiError(400, "invalid_request", f"the request cannot be forwarded: {error}") from error
        except httpx2.TransportError as error:
            is_unreached = isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout)
            why = str(error) or type(error).__name__
            is_gone = isinstance(error, httpx2.ConnectError)
            if not isinstance(error, httpx2.ReadTimeout):
                self._placement.failed(target, attempt, why, is_gone=is_gone)
            if answer.has_begun:
                await answer.break_off(_broken())
                return None
            text = "the server that had this request does not answer"
            return Refusal(502, [], error=ApiError(502, "target_failed", text), is_lost=not is_unreached)
        finally:
            attempt.left()
            if received is not None:
                await received.close()
        return None

    async def _pass_on(
        self, received: _Received, assignment: Assignment, asked: RequestFacts, answer: _Answer
    ) -> None:
        headers = answer_headers(received.response.headers.raw)
        headers.append((TARGET_HEADER, b"%d" % assignment.target.number))
        is_good, stores = received.status < 300, asked.stores and received.status < 300
        mark = _MARKS.get(_find_type(received.response.headers.raw), b"")
        head = tail = b""
        num_events = 0
        part = received.part
        while True:
            if stores and len(head) < _HEAD_BYTES:
                head += part[:_HEAD_BYTES]
                for name in _ID.findall(head)[:MAX_IDS]:
                    self._placement.own(name.decode("latin-1"), assignment.target, is_sure=False)
            if mark:
                num_events += part.count(mark)
                if num_events:
                    assignment.started()
            else:
                tail = (tail + part)[-_TAIL_BYTES:]
            if not answer.has_begun:
                await answer.begin(received.status, headers)
            await answer.write(part, is_last=received.is_read)
            if received.is_read:
                break
            with anyio.move_on_after(self._limits.stall_s) as scope:
                part = await received.next()
            if scope.cancelled_caught:
                raise httpx2.ReadTimeout(f"nothing came for {self._limits.stall_s:g} s")
        if is_good:
            found = _OUTPUT.findall(tail)
            assignment.completed(num_events if mark else int(found[-1]) if found else 0)


class _Received:
    """The answer of a target."""

    def __init__(self, response: httpx2.Response) -> None:
        self.response = response
        self.status = response.status_code
        stream = response.stream
        assert isinstance(stream, httpx2.AsyncByteStream)
        self._stream = stream
        self._parts: AsyncIterator[bytes] = stream.__aiter__()
        self.part = b""

    @property
    def is_read(self) -> bool:
        """Whether no part follows. Agentflow's connections already know this with the last part."""
        return not self.part or getattr(self._stream, "is_read", False)

    @property
    def pause_s(self) -> float:
        """The pause that a busy target asks for."""
        value = self.response.headers.get("retry-after", "")
        return min(float(value), MAX_PAUSE_S) if value.isdigit() and len(value) < 9 else 1.0

    async def next(self) -> bytes:
        """Waits for the next part, which is empty at the end."""
        self.part = await anext(self._parts, b"")
        return self.part

    async def refusal(self) -> Refusal:
        """Reads the whole answer. If it is too large, its body is dropped."""
        body = bytearray(self.part)
        with anyio.move_on_after(CONNECT_TIMEOUT_S):
            while len(body) <= MAX_REFUSAL_BYTES and await self.next():
                body += self.part
        headers = answer_headers(self.response.headers.raw)
        if self.part or len(body) > MAX_REFUSAL_BYTES:
            body.clear()
            headers = [(name, value) for name, value in headers if name != b"content-length"]
        return Refusal(self.status, headers, bytes(body))

    async def close(self) -> None:
        """Returns the connection for reuse, or closes it."""
        with anyio.CancelScope(shield=True):
            if isinstance(self._parts, AsyncGenerator):
                await self._parts.aclose()  # otherwise the event loop does it, in a task
            await self._stream.aclose()


class _Answer:
    """The answer to a client."""

    def __init__(self, scope: Scope, send: Send, body: ClientBody) -> None:
        self._scope = scope
        self._send = send
        self._body = body
        self._stream_type = b""  # empty: not begun, or of a known length
        self._is_at_end = True  # of an event
        self.has_begun = False
        self.is_over = False

    async def begin(self, status: int, headers: HeaderList) -> None:
        """Sends the status and the headers."""
        self.has_begun = True
        if not self._body.is_read:
            # The rest of the body would be read as the next request.
            headers = [*headers, (b"connection", b"close")]
        if all(name.lower() != b"content-length" for name, _ in headers):
            self._stream_type = _find_type(headers)
        await self._pass({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, part: bytes, *, is_last: bool = False) -> None:
        """Sends a part of the body. Waits while the client does not read."""
        if is_last:
            self.is_over = True
        if part or is_last:
            self._is_at_end = part.endswith(b"\n")
            await self._pass({"type": "http.response.body", "body": part, "more_body": not is_last})

    async def fail(self, error: ApiError) -> None:
        """Answers with an error, in the format of the path's API."""
        if self.has_begun:
            await self.break_off(error)
            return
        self.has_begun = self.is_over = True
        headers = error.headers if self._body.is_read else {**error.headers, "connection": "close"}
        response = error_response(self._scope["path"], Headers(scope=self._scope), error.shortened(), headers)
        try:
            await response(self._scope, _nothing, self._send)
        except OSError:
            return  # the client is gone

    async def break_off(self, error: ApiError) -> None:
        """Ends an incomplete answer: a stream with an error, other answers by closing the connection."""
        headers = Headers(scope=self._scope)
        shape = find_error_format(self._scope["path"], headers)
        if self._stream_type == shape.stream_type.partition(";")[0].encode():
            body = shape.body(error, read_request_id(headers))
            # An empty line ends an event, but is no event where each line is one.
            end = b"\n\n" if _MARKS[self._stream_type] != b"\n" else b"" if self._is_at_end else b"\n"
            await self.write(end + shape.in_stream(body), is_last=True)

    async def _pass(self, message: dict[str, object]) -> None:
        try:
            await self._send(message)
        except OSError as error:
            raise ClientGone from error


async def _nothing() -> dict[str, object]:
    return {"type": "http.disconnect"}


async def _cancel_when_gone(body: ClientBody, answer: _Answer, scope: anyio.CancelScope) -> None:
    await body.until_gone()
    if not answer.is_over:
        scope.cancel()


def _find_type(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The media type of an answer, without its parameters; empty if it has none."""
    kinds = [value.partition(b";")[0].strip() for name, value in headers if name.lower() == b"content-type"]
    return kinds[0] if kinds else b""


def _broken() -> ApiError:
    return ApiError(502, "target_failed", "the server broke off the answer, which is incomplete")


def raw_path(scope: Scope) -> bytes:
    """The path as the client sent it."""
    found: bytes = scope.get("raw_path") or scope["path"].encode()
    return found


def request_headers(scope: Scope, target: Target, via: bytes) -> HeaderList:
    """The headers of a request for a target: the client's headers, without hop-by-hop headers."""
    sent: HeaderList = scope["headers"]
    dropped = _HOP_BY_HOP | _SET_HERE | _named(sent)
    headers = [(b"host", target.host)]
    forwarded, through, host = [], [], b""
    for name, value in sent:
        if name == b"host":
            host = value
        elif name == b"via":
            through.append(value)
        elif name == b"x-forwarded-for":
            forwarded.append(value)
        elif name not in dropped:
            headers.append((name, value))
    # A page of the gateway's own origin counts as a page of the target's origin, which needs no header.
    own = {b"http://" + host, b"https://" + host}
    headers = [(name, value) for name, value in headers if name != b"origin" or value not in own]
    if scope.get("client"):
        forwarded.append(scope["client"][0].encode())
    headers += [(b"x-forwarded-for", b", ".join(forwarded))] if forwarded else []
    headers.append((b"via", b", ".join([*through, via])))
    return headers


def answer_headers(sent: HeaderList) -> HeaderList:
    """The headers of an answer for a client, without hop-by-hop headers."""
    sent = [(name.lower(), value) for name, value in sent]
    dropped = _HOP_BY_HOP | _named(sent) | {b"date"}  # the gateway's connection adds one
    return [(name, value) for name, value in sent if name not in dropped]


def _named(headers: HeaderList) -> frozenset[bytes]:
    """The headers that are listed in the header ``connection``."""
    values = [value for name, value in headers if name == b"connection"]
    return frozenset(part.strip().lower() for value in values for part in value.split(b","))
