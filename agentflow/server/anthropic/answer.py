"""The answers of Anthropic's API: whole messages, the events of streams, and errors.

The events of a stream are ``message_start``; for each block ``content_block_start``, its deltas (for
reasoning, a last one with its signature) and ``content_block_stop``; ``message_delta`` with the stop reason
and the usage; and ``message_stop``. A ``ping`` follows the start of the first block. The constant part of a
block's deltas is encoded once.
"""

from __future__ import annotations

import base64
import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import msgspec

from agentflow.protocol.events import Usage
from agentflow.server.anthropic.types import (
    AnswerTextBlock,
    AnswerThinkingBlock,
    AnswerToolUseBlock,
    MessageAnswer,
    MessageUsage,
    StopReason,
)
from agentflow.server.completion.request import (
    NO_ARGUMENTS,
    AnswerEnded,
    CompletionDelta,
    FinishReason,
    ReasoningDelta,
    TextDelta,
    ToolArguments,
    ToolCallBegun,
    arguments_json,
)
from agentflow.server.completion.streaming import CommentedEvents
from agentflow.server.errors import ApiError
from agentflow.server.event_stream import CONTENT_TYPE, EVENT_END, event, event_head
from agentflow.server.tenants.limit_headers import anthropic_limit_headers
from agentflow.server.tenants.rate_limit import LimitState

_encode_json = msgspec.json.Encoder().encode
_PING = event(b'{"type":"ping"}', b"ping")
_END_OF_DELTA = b"}}" + EVENT_END
_Kind: TypeAlias = type[ReasoningDelta] | type[TextDelta] | type[ToolArguments]
_DELTAS: dict[_Kind, bytes] = {
    ReasoningDelta: b'"thinking_delta","thinking":',
    TextDelta: b'"text_delta","text":',
    ToolArguments: b'"input_json_delta","partial_json":',
}
_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
# This API's status for a service that is unavailable.
_OVERLOADED_STATUS = 529


@dataclass(frozen=True, slots=True)
class AnswerFrame:
    """The fields of an answer that are known at its beginning."""

    id: str
    model: str
    max_tokens: int  # as requested
    max_context: int | None  # the model's limit of prompt and output together
    shows_reasoning: bool = True  # the text of reasoning is shown

    @classmethod
    def new(
        cls, model: str, max_tokens: int, max_context: int | None, shows_reasoning: bool = True
    ) -> AnswerFrame:
        """The frame of a new answer."""
        return cls(f"msg_{secrets.token_hex(12)}", model, max_tokens, max_context, shows_reasoning)

    def stop_reason(self, reason: FinishReason, usage: Usage, stop: str | int | None) -> StopReason:
        """Why the answer ended."""
        if reason == "tool_calls":
            return "tool_use"
        if reason == "length":
            is_full = usage.prompt_tokens + usage.output_tokens >= (self.max_context or float("inf"))
            is_truncated = is_full and usage.output_tokens < self.max_tokens
            return "model_context_window_exceeded" if is_truncated else "max_tokens"
        return "stop_sequence" if isinstance(stop, str) else "end_turn"

    def whole(self, deltas: Sequence[CompletionDelta]) -> MessageAnswer:
        """The whole message, from all of its deltas."""
        end = deltas[-1]
        assert isinstance(end, AnswerEnded)
        return MessageAnswer(
            id=self.id,
            model=self.model,
            content=_blocks(deltas, self.shows_reasoning),
            stop_reason=self.stop_reason(end.finish_reason, end.usage, end.stop),
            stop_sequence=end.stop if isinstance(end.stop, str) else None,
            usage=make_usage(end.usage),
        )


Block: TypeAlias = AnswerThinkingBlock | AnswerTextBlock | AnswerToolUseBlock


def _blocks(deltas: Sequence[CompletionDelta], shows_reasoning: bool) -> list[Block]:
    """The content blocks, in the order of the stream."""
    blocks: list[Block] = []
    parts: list[str] = []
    for delta in deltas:
        last = blocks[-1] if blocks else None
        match delta:
            case ReasoningDelta(text=text) if text:
                if not isinstance(last, AnswerThinkingBlock):
                    _finish(blocks, parts)
                    blocks.append(AnswerThinkingBlock(thinking="", signature=""))
                parts.append(text)
            case TextDelta(text=text) if text:
                if not isinstance(last, AnswerTextBlock):
                    _finish(blocks, parts)
                    blocks.append(AnswerTextBlock(text=""))
                parts.append(text)
            case ToolCallBegun():
                _finish(blocks, parts)
                blocks.append(AnswerToolUseBlock(id=delta.id, name=delta.name, input=NO_ARGUMENTS))
            case ToolArguments():
                parts.append(delta.text)
    _finish(blocks, parts)
    for block in blocks:
        if isinstance(block, AnswerThinkingBlock) and not shows_reasoning:
            block.thinking = ""
    return blocks


def _finish(blocks: list[Block], parts: list[str]) -> None:
    """Puts the collected text into the last block."""
    text = "".join(parts)
    parts.clear()
    match blocks[-1:]:
        case [AnswerThinkingBlock() as block]:
            block.thinking, block.signature = text, _signature([text])
        case [AnswerTextBlock() as block]:
            block.text = text
        case [AnswerToolUseBlock() as call]:
            call.input = arguments_json(text)


def _signature(reasoning: Sequence[str]) -> str:
    """The signature of reasoning. Clients send it back, and it is not checked."""
    digest = hashlib.sha256("".join(reasoning).encode("utf-8", "surrogatepass")).digest()
    return base64.b64encode(digest).decode()


def make_usage(usage: Usage) -> MessageUsage:
    """The usage in the API's form."""
    return MessageUsage(
        input_tokens=usage.prompt_tokens - usage.cached_tokens,
        cache_read_input_tokens=usage.cached_tokens,
        output_tokens=usage.output_tokens,
    )


class AnswerEvents(CommentedEvents):
    """Writes the events of one answer."""

    def __init__(self, frame: AnswerFrame) -> None:
        self._frame = frame
        self._num_blocks = 0
        self._kind: _Kind | None = None
        self._head = b""
        self._reasoning: list[str] = []

    def start(self, prompt_tokens: int) -> bytes:
        """The first event. The number of cached tokens is known only at the end."""
        message = MessageAnswer(
            id=self._frame.id,
            model=self._frame.model,
            content=[],
            stop_reason=None,
            stop_sequence=None,
            usage=make_usage(Usage(prompt_tokens)),
        )
        return _event("message_start", {"message": message})

    def write(self, deltas: Sequence[CompletionDelta]) -> bytes:
        """The events of these deltas."""
        parts: list[bytes] = []
        for delta in deltas:
            match delta:
                case ReasoningDelta(text=text) if text:
                    if self._kind is not ReasoningDelta:
                        parts.append(
                            self._begin(ReasoningDelta, AnswerThinkingBlock(thinking="", signature=""))
                        )
                    self._reasoning.append(text)
                    if self._frame.shows_reasoning:
                        parts += (self._head, _encode_json(text), _END_OF_DELTA)
                case TextDelta():
                    if delta.text:
                        if self._kind is not TextDelta:
                            parts.append(self._begin(TextDelta, AnswerTextBlock(text="")))
                        parts += (self._head, _encode_json(delta.text), _END_OF_DELTA)
                case ToolArguments():
                    parts += (self._head, _encode_json(delta.text), _END_OF_DELTA)
                case ToolCallBegun():
                    block = AnswerToolUseBlock(id=delta.id, name=delta.name, input=NO_ARGUMENTS)
                    parts.append(self._begin(ToolArguments, block))
                case AnswerEnded():
                    parts += (self._end_block(), self._ended(delta))
        return b"".join(parts)

    def end(self, usage: Usage) -> bytes:
        """The last event. Its usage was written with the stop reason."""
        return _event("message_stop", {})

    def _begin(self, kind: _Kind, block: Block) -> bytes:
        before, index = self._end_block(), self._num_blocks
        self._num_blocks += 1
        self._kind = kind
        fields = b'{"type":"content_block_delta","index":%d,"delta":{"type":%b' % (index, _DELTAS[kind])
        self._head = event_head(b"content_block_delta") + fields
        start = _event("content_block_start", {"index": index, "content_block": block})
        return before + start + (b"" if index else _PING)

    def _end_block(self) -> bytes:
        if self._kind is None:
            return b""
        signed, index = b"", self._num_blocks - 1
        if self._kind is ReasoningDelta:
            delta = {"type": "signature_delta", "signature": _signature(self._reasoning)}
            self._reasoning = []
            signed = _event("content_block_delta", {"index": index, "delta": delta})
        self._kind = None
        return signed + _event("content_block_stop", {"index": index})

    def _ended(self, end: AnswerEnded) -> bytes:
        delta = {
            "stop_reason": self._frame.stop_reason(end.finish_reason, end.usage, end.stop),
            "stop_sequence": end.stop if isinstance(end.stop, str) else None,
        }
        return _event("message_delta", {"delta": delta, "usage": make_usage(end.usage)})


def _event(kind: str, fields: dict[str, Any]) -> bytes:
    return event(_encode_json({"type": kind, **fields}), kind.encode())


class AnthropicErrorDetails(msgspec.Struct, kw_only=True):
    """``error_code``: the cause, as in OpenAI's ``code``. ``param``: the field of the request that is wrong,
    if any."""

    error_code: str
    param: str | None


class AnthropicError(msgspec.Struct, kw_only=True):
    """An error. Clients choose their exception by the status, not by ``type``."""

    type: str
    message: str
    details: AnthropicErrorDetails


class AnthropicErrorBody(msgspec.Struct, kw_only=True):
    """The body of an error."""

    type: Literal["error"]
    error: AnthropicError
    request_id: str


class AnthropicErrorFormat:
    """The ``ErrorFormat`` of Anthropic's API."""

    request_id_header = b"request-id"
    processing_header = b""
    stream_type = CONTENT_TYPE
    keepalive = _PING
    body_type: type[msgspec.Struct] = AnthropicErrorBody

    def status(self, error: ApiError) -> int:
        return _OVERLOADED_STATUS if error.status == 503 else error.status

    def body(self, error: ApiError, request_id: str) -> bytes:
        kind = _ERROR_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
        details = AnthropicErrorDetails(error_code=error.code, param=error.param)
        shown = AnthropicError(type=kind, message=error.message, details=details)
        return msgspec.json.encode(AnthropicErrorBody(type="error", error=shown, request_id=request_id))

    def limit_headers(self, limits: LimitState) -> dict[bytes, bytes]:
        return anthropic_limit_headers(limits)

    def in_stream(self, body: bytes) -> bytes:
        return event(body, b"error")
