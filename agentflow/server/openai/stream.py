"""The streams of OpenAI's API: deltas become server-sent events as they come, one write for each batch.

The headers go out when the request is accepted. What fails later is the stream's last event.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

import agentflow
from agentflow.server.completion.request import AnswerEnded, CompletionDelta
from agentflow.server.http.call import ApiCall
from agentflow.server.openai.usage import UsageBody, usage_body, usage_of_prompts

DONE = b"data: [DONE]\n\n"
encode_json = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class AnswerIdentity:
    """What is the same in all chunks of an answer."""

    id: str
    created: int
    model: str
    system_fingerprint: str

    @classmethod
    def new(cls, prefix: str, model: str) -> AnswerIdentity:
        """Of an answer that begins now."""
        made_of = f"{agentflow.__version__} {model}".encode()
        fingerprint = f"fp_{hashlib.sha256(made_of).hexdigest()[:10]}"
        return cls(f"{prefix}-{secrets.token_hex(12)}", int(time.time()), model, fingerprint)

    def event(self, kind: str, fields: dict[str, Any]) -> bytes:
        """A whole chunk."""
        return self.event_head(kind) + encode_json(fields)[1:] + b"\n\n"

    def event_head(self, kind: str) -> bytes:
        """The front of a chunk, up to the comma before its other fields."""
        head = {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
        }
        return b"data: " + encode_json(head)[:-1] + b","


class DeltaSource(Protocol):
    """A ``Completion``, or several."""

    async def until_accepted(self) -> None: ...

    async def next(self) -> list[CompletionDelta]: ...


class ChunkWriter(Protocol):
    """Writes the events of one API."""

    def write(self, deltas: Sequence[CompletionDelta]) -> bytes:
        """The events of these deltas."""

    def usage(self, usage: UsageBody) -> bytes:
        """The event that tells the tokens."""


async def stream_answers(
    call: ApiCall, source: DeltaSource, writer: ChunkWriter, *, n: int, include_usage: bool
) -> None:
    """Sends all deltas, and then the end. What the request is refused with is raised before the status is
    sent. ``n``: answers for each prompt."""
    await source.until_accepted()
    ends: dict[int, AnswerEnded] = {}
    async with call.streaming():
        while deltas := await source.next():
            ends.update({delta.index: delta for delta in deltas if isinstance(delta, AnswerEnded)})
            await call.send_events(writer.write(deltas))
    usage = usage_body(usage_of_prompts([ends[index].usage for index in sorted(ends)], n), call.record)
    await call.send_events(writer.usage(usage) + DONE if include_usage else DONE, last=True)
