"""OpenAI's batches: a file of requests, a batch, and the files of its outcomes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final
from urllib.parse import quote

import anyio
import httpx2
import msgspec

from agentflow.backends.apis.batches.batch_api import (
    FIND_BEFORE_S,
    BatchOutcome,
    BatchState,
    Candidate,
    Receive,
    batch_cancelled,
    expired,
)
from agentflow.backends.apis.http.event_stream import ServerEvent
from agentflow.backends.apis.http.transport import ApiTransport
from agentflow.backends.apis.responses.openai_responses import RESPONSES_PATH
from agentflow.backends.apis.responses.responses_stream import response_events
from agentflow.errors import AgentflowError, NotSupported, Overloaded, ProtocolError, RequestRefused
from agentflow.protocol.batches import BatchRecord
from agentflow.protocol.unreadable import UNREADABLE

TAG: Final = "agentflow"
"""The key of a record's tag in the metadata of its batch."""
_PATHS: Final = ("chat/completions", RESPONSES_PATH)
_ENDED: Final = ("completed", "failed", "expired", "cancelled")
_MAX_PAGES: Final = 100
_encode = msgspec.json.Encoder().encode


class _Counts(msgspec.Struct):
    total: int = 0
    completed: int = 0
    failed: int = 0


class _Fault(msgspec.Struct):
    code: str | None = None
    message: str | None = None


class _Faults(msgspec.Struct):
    data: list[_Fault] | None = None


class _Batch(msgspec.Struct):
    id: str
    status: str = ""
    created_at: float = 0.0
    errors: _Faults | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    request_counts: _Counts | None = None
    metadata: dict[str, Any] | None = None


class _Page(msgspec.Struct):
    data: list[_Batch]
    has_more: bool = False


class _Response(msgspec.Struct):
    status_code: int
    body: msgspec.Raw


class _Line(msgspec.Struct):
    custom_id: str
    response: _Response | None = None
    error: _Fault | None = None


class OpenAIBatches:
    """The batch endpoints of OpenAI."""

    max_requests = 50_000
    max_bytes = 200_000_000

    def __init__(self, transport: ApiTransport) -> None:
        self._transport = transport
        self._errors = transport.errors

    def line(self, request_id: str, path: str, fields: Mapping[str, msgspec.Raw]) -> bytes:
        """A line of the file of requests."""
        if path not in _PATHS:
            raise NotSupported(
                f"{self._errors.server} runs no requests to {path} in batches here", param="batch"
            )
        return _encode({"custom_id": request_id, "method": "POST", "url": f"/v1/{path}", "body": fields})

    async def create(self, path: str, lines: Sequence[bytes], tag: str, *, is_shielded: bool) -> str:
        """Uploads the requests and begins the batch; returns its id."""
        file = ("requests.jsonl", b"\n".join([*lines, b""]), "application/jsonl")
        form = httpx2.Request("POST", "", data={"purpose": "batch"}, files={"file": file})
        sent = await self._transport.post("files", form.read(), form.headers["content-type"])
        wanted = {
            "input_file_id": self._converted(sent, _Batch).id,
            "endpoint": f"/v1/{path}",
            "completion_window": "24h",
            "metadata": {TAG: tag},
        }
        with anyio.CancelScope(shield=is_shielded):
            created = await self._transport.post_once("batches", _encode(wanted))
        return str(self._converted(created, _Batch).id)

    async def find(self, record: BatchRecord) -> Sequence[Candidate]:
        """The batch with the record's tag."""
        after = ""
        for _ in range(_MAX_PAGES):
            page = self._converted(await self._transport.get(f"batches?limit=100{after}"), _Page)
            for batch in page.data:
                if (batch.metadata or {}).get(TAG) == record.tag:
                    return [Candidate(batch.id, is_certain=True)]
            if not page.has_more or not page.data:
                break
            if page.data[-1].created_at < record.sent_at - FIND_BEFORE_S:  # the newest come first
                break
            after = f"&after={quote(page.data[-1].id, safe='')}"
        return []

    async def state(self, batch: str) -> BatchState:
        """The state of a batch."""
        found = self._converted(await self._transport.get(f"batches/{quote(batch, safe='')}"), _Batch)
        counts = found.request_counts or _Counts()
        files = tuple([file for file in (found.output_file_id, found.error_file_id) if file])
        return BatchState(
            found.status in _ENDED,
            counts.completed + counts.failed,
            counts.failed,
            self._failure(found) if found.status == "failed" else None,
            self._missing(found),
            files,
        )

    async def read(self, batch: str, state: BatchState, receive: Receive) -> None:
        """Reads the files of outcomes and of errors."""

        def read(line: bytes) -> None:
            try:
                found = msgspec.json.decode(line, type=_Line)
            except UNREADABLE as error:
                raise ProtocolError(f"batch {batch} has a line that is not of its API: {error}") from error
            receive(found.custom_id, self._outcome(batch, found))

        for file in state.files:
            await self._transport.read_lines(f"files/{quote(file, safe='')}/content", read)

    async def cancel(self, batch: str) -> None:
        """Cancels a batch."""
        await self._transport.post(f"batches/{quote(batch, safe='')}/cancel", b"")

    def events(self, path: str, message: bytes) -> Iterable[ServerEvent]:
        """The events of a stream with this message. A chat completion is read like the one chunk of a
        stream."""
        return response_events(message) if path == RESPONSES_PATH else [ServerEvent("", message)]

    def _outcome(self, batch: str, line: _Line) -> BatchOutcome:
        response, fault = line.response, line.error
        if fault is not None and fault.code == "batch_expired":
            return expired(batch, self._errors.server)
        if response is None:
            detail = {} if fault is None else {"message": fault.message, "code": fault.code}
            return self._errors.of_event(detail)
        if response.status_code == 200:
            return bytes(response.body)
        return self._errors.of_response(response.status_code, {}, bytes(response.body))

    def _failure(self, found: _Batch) -> AgentflowError:
        faults = (found.errors and found.errors.data) or [_Fault()]
        said = "; ".join([fault.message or fault.code or "" for fault in faults[:3]]) or "it gives no reason"
        message = f"batch {found.id} was refused by {self._errors.server}: {said}"
        if faults[0].code == "token_limit_exceeded":
            return Overloaded(f"{message}: run the map again later, or with a smaller concurrency")
        return RequestRefused(message)

    def _missing(self, found: _Batch) -> AgentflowError:
        if found.status == "expired":
            return expired(found.id, self._errors.server)
        if found.status in ("cancelled", "cancelling"):
            return batch_cancelled(found.id, self._errors.server)
        return ProtocolError(f"batch {found.id} of {self._errors.server} has no outcome for a request")

    def _converted(self, found: Any, kind: type[Any]) -> Any:
        try:
            return msgspec.convert(found, kind)
        except msgspec.ValidationError as error:
            raise ProtocolError(f"{self._errors.server} answered without a valid batch: {error}") from error
