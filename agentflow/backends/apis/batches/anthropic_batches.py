"""Anthropic's message batches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final
from urllib.parse import quote

import anyio
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
from agentflow.backends.apis.messages.anthropic_stream import message_events
from agentflow.errors import ProtocolError
from agentflow.protocol.batches import BatchRecord
from agentflow.protocol.unreadable import UNREADABLE

FIND_AFTER_S: Final = 1800.0
"""How long after its record a batch may have been created."""
_PATH: Final = "v1/messages/batches"
_MAX_PAGES: Final = 100
_encode = msgspec.json.Encoder().encode


class _Counts(msgspec.Struct):
    processing: int = 0
    succeeded: int = 0
    errored: int = 0
    canceled: int = 0
    expired: int = 0

    @property
    def num_failed(self) -> int:
        return self.errored + self.canceled + self.expired

    @property
    def total(self) -> int:
        return self.processing + self.succeeded + self.num_failed


class _Batch(msgspec.Struct):
    id: str
    processing_status: str = ""
    created_at: datetime | None = None
    request_counts: _Counts = msgspec.field(default_factory=_Counts)


class _Page(msgspec.Struct):
    data: list[_Batch]
    has_more: bool = False


class _Error(msgspec.Struct):
    error: Any = None


class _Result(msgspec.Struct):
    type: str
    message: msgspec.Raw = msgspec.Raw()
    error: _Error | None = None


class _Line(msgspec.Struct):
    custom_id: str
    result: _Result


class AnthropicBatches:
    """The endpoints of Anthropic's message batches."""

    max_requests = 100_000
    max_bytes = 256_000_000

    def __init__(self, transport: ApiTransport) -> None:
        self._transport = transport
        self._errors = transport.errors

    def line(self, request_id: str, path: str, fields: Mapping[str, msgspec.Raw]) -> bytes:
        """A member of ``requests``."""
        return _encode({"custom_id": request_id, "params": fields})

    async def create(self, path: str, lines: Sequence[bytes], tag: str, *, is_shielded: bool) -> str:
        """Begins the batch; returns its id. The API keeps no tag."""
        body = b'{"requests":[' + b",".join(lines) + b"]}"
        with anyio.CancelScope(shield=is_shielded):
            created = await self._transport.post_once(_PATH, body)
        return str(self._converted(created, _Batch).id)

    async def find(self, record: BatchRecord) -> Sequence[Candidate]:
        """The batches with as many requests that were created at the time. The API shows the ids of requests
        only with their results."""
        after, found = "", []
        for _ in range(_MAX_PAGES):
            page = self._converted(await self._transport.get(f"{_PATH}?limit=100{after}"), _Page)
            for batch in page.data:
                is_near = self._is_near(batch, record.sent_at)
                if is_near and batch.request_counts.total == len(record.requests):
                    found.append(Candidate(batch.id, is_certain=False))
            if not page.has_more or not page.data:
                break
            oldest = page.data[-1].created_at
            if oldest is not None and oldest.timestamp() < record.sent_at - FIND_BEFORE_S:
                break
            after = f"&after_id={quote(page.data[-1].id, safe='')}"
        return found

    def _is_near(self, batch: _Batch, sent_at: float) -> bool:
        if batch.created_at is None:
            return True
        return -FIND_BEFORE_S <= batch.created_at.timestamp() - sent_at <= FIND_AFTER_S

    async def state(self, batch: str) -> BatchState:
        """The state of a batch."""
        found = self._converted(await self._transport.get(f"{_PATH}/{quote(batch, safe='')}"), _Batch)
        counts = found.request_counts
        missing = ProtocolError(f"batch {batch} of {self._errors.server} has no outcome for a request")
        return BatchState(
            found.processing_status == "ended",
            counts.total - counts.processing,
            counts.num_failed,
            missing=missing,
        )

    async def read(self, batch: str, state: BatchState, receive: Receive) -> None:
        """Reads the results."""

        def read(line: bytes) -> None:
            try:
                found = msgspec.json.decode(line, type=_Line)
            except UNREADABLE as error:
                raise ProtocolError(f"batch {batch} has a line that is not of its API: {error}") from error
            receive(found.custom_id, self._outcome(batch, found.result))

        await self._transport.read_lines(f"{_PATH}/{quote(batch, safe='')}/results", read)

    async def cancel(self, batch: str) -> None:
        """Cancels a batch."""
        await self._transport.post(f"{_PATH}/{quote(batch, safe='')}/cancel", b"")

    def events(self, path: str, message: bytes) -> Iterable[ServerEvent]:
        """The events of a stream with this message."""
        return message_events(message)

    def _outcome(self, batch: str, result: _Result) -> BatchOutcome:
        match result.type:
            case "succeeded" if bytes(result.message):
                return bytes(result.message)
            case "errored":
                return self._errors.of_event(None if result.error is None else result.error.error)
            case "expired":
                return expired(batch, self._errors.server)
            case "canceled":
                return batch_cancelled(batch, self._errors.server)
            case _:
                kind = result.type
                return ProtocolError(
                    f"batch {batch} of {self._errors.server} has a result of type {kind!r:.50}"
                )

    def _converted(self, found: Any, kind: type[Any]) -> Any:
        try:
            return msgspec.convert(found, kind)
        except msgspec.ValidationError as error:
            raise ProtocolError(f"{self._errors.server} answered without a valid batch: {error}") from error
