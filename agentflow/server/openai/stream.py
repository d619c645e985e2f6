"""The streams of OpenAI's API: deltas become server-sent events as they come, one write for each batch.

The headers go out when the request is accepted. What fails later is the stream's last event.

The chunks of a streamed chat completion, as bytes.

A chunk is written some thousand times a second, so all of it but the text is prepared once for each answer.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import msgspec

from agentflow.server.completion.request import (
    AnswerEnded,
    CompletionDelta,
    TextDelta,
    TokenLogprob,
    ToolArguments,
    ToolCallBegun,
)
from agentflow.server.http.call import ApiCall
from agentflow.server.openai.types import ChatTokenLogprob, ChoiceLogprobs, TopLogprob
from agentflow.server.openai.usage import UsageBody, usage_body, usage_of_prompts
from agentflow.version import __version__

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
        made_of = f"{__version__} {model}".encode()
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


KIND = "chat.completion.chunk"


class ChatChunks:
    """Those of one request. ``include_usage``: chunks say that their own usage is null."""

    def __init__(self, identity: AnswerIdentity, n: int, *, include_usage: bool) -> None:
        self._identity = identity
        front = identity.event_head(KIND)
        self._fronts = [front + b'"choices":[{"index":%d,"delta":' % index for index in range(n)]
        self._text_fronts = [front + b'{"content":' for front in self._fronts]
        self._end = b'}],"usage":null}\n\n' if include_usage else b"}]}\n\n"
        self._goes_on = b',"logprobs":null,"finish_reason":null' + self._end
        self._text_goes_on = b"}" + self._goes_on
        self._is_begun = [False] * n

    def write(self, deltas: Sequence[CompletionDelta]) -> bytes:
        """The events of these deltas."""
        parts: list[bytes] = []
        for delta in deltas:
            if not self._is_begun[delta.index]:
                parts.append(self._role(delta))
            if isinstance(delta, TextDelta):
                parts += (self._text_fronts[delta.index], encode_json(delta.text))
                parts.append(self._with_logprobs(delta.tokens) if delta.tokens else self._text_goes_on)
            elif isinstance(delta, AnswerEnded):
                parts += (self._fronts[delta.index], b'{},"logprobs":null,"finish_reason":')
                parts += (encode_json(delta.finish_reason), self._end)
            else:
                parts += (self._fronts[delta.index], _tool_call(delta), self._goes_on)
        return b"".join(parts)

    def usage(self, usage: UsageBody) -> bytes:
        """The event that tells the tokens."""
        return self._identity.event(KIND, {"choices": [], "usage": usage})

    def _role(self, delta: CompletionDelta) -> bytes:
        self._is_begun[delta.index] = True
        content = b"null" if isinstance(delta, ToolCallBegun) else b'""'
        return (
            self._fronts[delta.index]
            + b'{"role":"assistant","content":%b,"refusal":null}' % content
            + self._goes_on
        )

    def _with_logprobs(self, tokens: Sequence[TokenLogprob]) -> bytes:
        told = encode_json(chat_logprobs(tokens))
        return b'},"logprobs":' + told + b',"finish_reason":null' + self._end


def _tool_call(delta: ToolCallBegun | ToolArguments) -> bytes:
    if isinstance(delta, ToolArguments):
        return b'{"tool_calls":[{"index":%d,"function":{"arguments":%b}}]}' % (
            delta.call,
            encode_json(delta.text),
        )
    begun = {
        "index": delta.call,
        "id": delta.id,
        "type": "function",
        "function": {"name": delta.name, "arguments": ""},
    }
    return encode_json({"tool_calls": [begun]})


def chat_logprobs(tokens: Sequence[TokenLogprob]) -> ChoiceLogprobs:
    """As OpenAI's chat endpoint tells them."""
    return ChoiceLogprobs(content=[_token_logprob(token) for token in tokens])


def _token_logprob(told: TokenLogprob) -> ChatTokenLogprob:
    return ChatTokenLogprob(
        token=told.text,
        bytes=_byte_values(told.raw),
        logprob=told.logprob,
        top_logprobs=[
            TopLogprob(token=top.text, bytes=_byte_values(top.raw), logprob=top.logprob) for top in told.top
        ],
    )


@lru_cache(maxsize=16_384)
def _byte_values(raw: bytes) -> list[int]:
    """Shared by all that tell the token, and only ever written out."""
    return list(raw)
