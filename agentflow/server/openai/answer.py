"""What all answers of OpenAI's API have in common: errors, usage, identity, and streams of events.

A stream's status and headers are sent when the engine has accepted the request. A later error is the last
event of the stream.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from agentflow.protocol.events import Usage
from agentflow.server.completion.completion import Completion
from agentflow.server.completion.request import AnswerEnded, CompletionDelta
from agentflow.server.http.call import ApiCall
from agentflow.server.http.errors import ApiError
from agentflow.server.log import RequestRecord
from agentflow.server.openai.types import PromptDetails, UsageBody
from agentflow.version import __version__

encode_json = msgspec.json.Encoder().encode
_DONE = b"data: [DONE]\n\n"
# An unknown key or model is an invalid request in this API; the code has the cause.
_ERROR_TYPES = {403: "permission_error", 429: "rate_limit_error"}


class OpenAIError(msgspec.Struct, kw_only=True):
    """``param``: the field of the request that is wrong, if any. ``code``: the cause."""

    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIErrorBody(msgspec.Struct):
    """The body of an error."""

    error: OpenAIError


class OpenAIErrorFormat:
    """The ``ErrorFormat`` of OpenAI's API."""

    request_id_header = b"x-request-id"
    keepalive = b": keep-alive\n\n"
    body_type: type[msgspec.Struct] = OpenAIErrorBody

    def status(self, error: ApiError) -> int:
        return error.status

    def body(self, error: ApiError, request_id: str) -> bytes:
        shown = OpenAIError(
            message=error.message,
            type="server_error"
            if error.status >= 500
            else _ERROR_TYPES.get(error.status, "invalid_request_error"),
            param=error.param,
            code=error.code,
        )
        return msgspec.json.encode(OpenAIErrorBody(shown))

    def event(self, error: ApiError, request_id: str) -> bytes:
        return b"data: " + self.body(error, request_id) + b"\n\n"


def usage_of_prompts(answers: Sequence[Usage], n: int) -> Usage:
    """The usage of prompts with ``n`` answers each. What the first answer of a prompt computes does not count
    as cached, although the other answers find it in the cache."""
    total = Usage()
    for start in range(0, len(answers), n):
        same = answers[start : start + n]
        total += Usage(
            same[0].prompt_tokens,
            min(usage.cached_tokens for usage in same),
            sum(usage.output_tokens for usage in same),
        )
    return total


def usage_body(usage: Usage, record: RequestRecord) -> UsageBody:
    """The usage in the shape of the API, which is also recorded for the log."""
    record.prompt_tokens, record.cached_tokens = usage.prompt_tokens, usage.cached_tokens
    record.output_tokens = usage.output_tokens
    return UsageBody(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.output_tokens,
        total_tokens=usage.prompt_tokens + usage.output_tokens,
        prompt_tokens_details=PromptDetails(usage.cached_tokens),
    )


@dataclass(frozen=True, slots=True)
class AnswerIdentity:
    """The fields that all chunks of an answer share."""

    id: str
    created: int
    model: str
    system_fingerprint: str

    @classmethod
    def new(cls, prefix: str, model: str) -> AnswerIdentity:
        """The identity of a new answer."""
        made_of = f"{__version__} {model}".encode()
        fingerprint = f"fp_{hashlib.sha256(made_of).hexdigest()[:10]}"
        return cls(f"{prefix}-{secrets.token_hex(12)}", int(time.time()), model, fingerprint)

    def event(self, kind: str, fields: dict[str, Any]) -> bytes:
        """A whole chunk."""
        return self.event_head(kind) + encode_json(fields)[1:] + b"\n\n"

    def event_head(self, kind: str) -> bytes:
        """The beginning of a chunk, up to the comma before its own fields."""
        head = {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
        }
        return b"data: " + encode_json(head)[:-1] + b","


class ChunkWriter(Protocol):
    """Writes the events of one endpoint."""

    def write(self, deltas: Sequence[CompletionDelta]) -> bytes:
        """The events of these deltas."""

    def usage(self, usage: UsageBody) -> bytes:
        """The event with the usage."""


async def stream_answers(
    call: ApiCall, completion: Completion, writer: ChunkWriter, *, n: int, include_usage: bool
) -> None:
    """Sends all deltas and the end of the stream. ``n``: answers to each prompt. If the request is rejected,
    the error is raised before the status is sent."""
    await completion.until_accepted()
    ends: dict[int, AnswerEnded] = {}
    async with call.streaming():
        while deltas := await completion.next():
            ends.update({delta.index: delta for delta in deltas if isinstance(delta, AnswerEnded)})
            await call.send_events(writer.write(deltas))
    usage = usage_body(usage_of_prompts([ends[index].usage for index in sorted(ends)], n), call.record)
    await call.send_events(writer.usage(usage) + _DONE if include_usage else _DONE, last=True)
