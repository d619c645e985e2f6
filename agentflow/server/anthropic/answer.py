"""What Anthropic's API answers: whole messages, and the events of streamed ones.

The events of a stream, in their order: ``message_start``; for each block ``content_block_start``, its deltas,
``content_block_stop``; then ``message_delta`` with the stop reason and the usage, and ``message_stop``. A
``ping`` follows the first block's start. What is the same in every delta is encoded once for a block.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jiter
import msgspec

from agentflow.protocol.events import Usage
from agentflow.server.anthropic.types import (
    AnswerText,
    AnswerToolUse,
    MessageAnswer,
    MessageUsage,
    StopReason,
)
from agentflow.server.completion.request import (
    AnswerEnded,
    CompletionDelta,
    FinishReason,
    TextDelta,
    ToolArguments,
    ToolCallBegun,
)

_PING = b'event: ping\ndata: {"type":"ping"}\n\n'
_MESSAGE_STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
encode_json = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class AnswerFrame:
    """What an answer has from its beginning. ``max_tokens``: what was asked for; ``max_context``: of the
    model, prompt and output together."""

    id: str
    model: str
    max_tokens: int
    max_context: int | None

    @classmethod
    def new(cls, model: str, max_tokens: int, max_context: int | None) -> AnswerFrame:
        """Of an answer that begins now."""
        return cls(f"msg_{secrets.token_hex(12)}", model, max_tokens, max_context)

    def stop_reason(self, reason: FinishReason, usage: Usage, stop: str | int | None) -> StopReason:
        """Why it ended."""
        if reason == "tool_calls":
            return "tool_use"
        if reason == "length":
            is_full = usage.prompt_tokens + usage.output_tokens >= (self.max_context or float("inf"))
            is_cut = is_full and usage.output_tokens < self.max_tokens
            return "model_context_window_exceeded" if is_cut else "max_tokens"
        return "stop_sequence" if isinstance(stop, str) else "end_turn"

    def whole(self, deltas: Sequence[CompletionDelta]) -> MessageAnswer:
        """The answer that is not streamed, of all its deltas."""
        end = deltas[-1]
        assert isinstance(end, AnswerEnded)
        return MessageAnswer(
            id=self.id,
            model=self.model,
            content=_blocks(deltas),
            stop_reason=self.stop_reason(end.finish_reason, end.usage, end.stop),
            stop_sequence=end.stop if isinstance(end.stop, str) else None,
            usage=usage_of(end.usage),
        )


def _blocks(deltas: Sequence[CompletionDelta]) -> list[AnswerText | AnswerToolUse]:
    """In the order in which they came, as they are streamed."""
    blocks: list[AnswerText | AnswerToolUse] = []
    parts: list[str] = []
    for delta in deltas:
        is_text = bool(blocks) and isinstance(blocks[-1], AnswerText)
        match delta:
            case TextDelta(text=text) if text:
                if not is_text:
                    _finish(blocks, parts)
                    blocks.append(AnswerText(text=""))
                parts.append(text)
            case ToolCallBegun():
                _finish(blocks, parts)
                blocks.append(AnswerToolUse(id=delta.id, name=delta.name, input={}))
            case ToolArguments():
                parts.append(delta.text)
    _finish(blocks, parts)
    return blocks


def _finish(blocks: list[AnswerText | AnswerToolUse], parts: list[str]) -> None:
    """Puts into the last block what came for it."""
    text = "".join(parts)
    parts.clear()
    match blocks[-1:]:
        case [AnswerText() as block]:
            block.text = text
        case [AnswerToolUse() as call]:
            call.input = _object(text)


def usage_of(usage: Usage) -> MessageUsage:
    """Tokens of the prompt that were computed and cached, and of the output."""
    return MessageUsage(
        input_tokens=usage.prompt_tokens - usage.cached_tokens,
        cache_read_input_tokens=usage.cached_tokens,
        output_tokens=usage.output_tokens,
    )


def _object(arguments: str) -> dict[str, Any]:
    """Arguments of a call. An answer that was cut may end within them: then as far as they go, as the client
    reads them from a stream."""
    try:
        read = jiter.from_json(arguments.encode(), partial_mode=True)
    except ValueError:
        return {}
    return read if isinstance(read, dict) else {}


class AnswerEvents:
    """Writes the events of one answer."""

    def __init__(self, frame: AnswerFrame, prompt_tokens: int) -> None:
        """``prompt_tokens``: all of the prompt. Which of them were cached is known, and told, at the end."""
        self._frame = frame
        self._prompt_tokens = prompt_tokens
        self._num_blocks = 0
        self._kind: type[TextDelta] | type[ToolArguments] | None = None
        self._head = b""

    def start(self) -> bytes:
        """The first event."""
        message = MessageAnswer(
            id=self._frame.id,
            model=self._frame.model,
            content=[],
            stop_reason=None,
            stop_sequence=None,
            usage=usage_of(Usage(self._prompt_tokens)),
        )
        return _event("message_start", {"message": message})

    def write(self, deltas: Sequence[CompletionDelta]) -> bytes:
        """The events of these deltas."""
        parts: list[bytes] = []
        for delta in deltas:
            match delta:
                case TextDelta():
                    if delta.text:
                        if self._kind is not TextDelta:
                            parts.append(self._begin(TextDelta, AnswerText(text="")))
                        parts += (self._head, encode_json(delta.text), b"}}\n\n")
                case ToolArguments():
                    parts += (self._head, encode_json(delta.text), b"}}\n\n")
                case ToolCallBegun():
                    block = AnswerToolUse(id=delta.id, name=delta.name, input={})
                    parts.append(self._begin(ToolArguments, block))
                case AnswerEnded():
                    parts += (self._end_block(), self._ended(delta), _MESSAGE_STOP)
        return b"".join(parts)

    def _begin(self, kind: type[TextDelta] | type[ToolArguments], block: AnswerText | AnswerToolUse) -> bytes:
        before, index = self._end_block(), self._num_blocks
        self._num_blocks += 1
        self._kind = kind
        delta = b'"text_delta","text":' if kind is TextDelta else b'"input_json_delta","partial_json":'
        self._head = (
            b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":%b'
            % (index, delta)
        )
        start = _event("content_block_start", {"index": index, "content_block": block})
        return before + start + (b"" if index else _PING)

    def _end_block(self) -> bytes:
        if self._kind is None:
            return b""
        self._kind = None
        return _event("content_block_stop", {"index": self._num_blocks - 1})

    def _ended(self, end: AnswerEnded) -> bytes:
        delta = {
            "stop_reason": self._frame.stop_reason(end.finish_reason, end.usage, end.stop),
            "stop_sequence": end.stop if isinstance(end.stop, str) else None,
        }
        return _event("message_delta", {"delta": delta, "usage": usage_of(end.usage)})


def _event(kind: str, fields: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), encode_json({"type": kind, **fields}))
