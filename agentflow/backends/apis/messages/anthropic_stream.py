"""The answers of Anthropic's messages API: the reading of a stream, and of errors.

The reader ignores unknown events, deltas and blocks, as the API's rules for new versions demand, and is
strict about the others.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Final

import msgspec

from agentflow.backends.apis.answers.answer import CHARS_PER_TOKEN, AnswerCollector
from agentflow.backends.apis.answers.reported_usage import NULL, counts_in, is_given, read_count
from agentflow.backends.apis.answers.stream_reader import StreamReader
from agentflow.backends.apis.http.api_errors import ErrorMapping
from agentflow.backends.apis.http.event_stream import ServerEvent
from agentflow.errors import (
    AgentflowError,
    NotAuthorized,
    NotSupported,
    ProtocolError,
    RequestRefused,
    UnknownModel,
)
from agentflow.protocol.chat import CalledTool
from agentflow.protocol.events import Usage
from agentflow.protocol.unreadable import UNREADABLE

_INVALID: Final = "INVALID_JSON"
"""The member under which the API expects arguments of a call that are no JSON object."""
_encode = msgspec.json.Encoder().encode


def call_block(call: CalledTool) -> dict[str, Any]:
    """A tool call as a block of the assistant's message."""
    arguments: Any = msgspec.Raw(call.arguments.encode()) if call.is_whole else {_INVALID: call.arguments}
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments}


_PARAM = re.compile(r"`?([a-z_]+)`?(?:[.\d][\w.]*)?(?::| is| and| cannot| does| may)")
_REFUSED = re.compile(
    r"deprecated|not support|cannot both be|not available|not enabled|too complex|grammar is too large",
    re.IGNORECASE,
)


class AnthropicErrors(ErrorMapping):
    """Makes the errors of the API, which writes the parameter at the beginning of a message."""

    def _of(self, status: int, detail: Any) -> AgentflowError:
        message = detail.message
        if status == 402 or detail.kind == "billing_error":
            return NotAuthorized(
                f"the account of the API key ({self.key_source}) cannot be billed at {self.server} for "
                f"{self.model}: add credit: {self._quoted(message)}"
            )
        if detail.kind == "not_found_error" and "model" in message:
            return UnknownModel(
                f"{self.server} has no model {self.model!r}: give another name: {self._quoted(message)}",
                param="model",
            )
        found = _PARAM.match(message)
        if detail.kind == "invalid_request_error" and found is not None:
            detail = replace(detail, param=found[1])
        error = super()._of(status, detail)
        if type(error) is RequestRefused and _REFUSED.search(message):
            return NotSupported(*error.args, param=error.param)
        return error


class _MessageFields(msgspec.Struct):
    usage: msgspec.Raw = NULL


class _WholeMessage(msgspec.Struct):
    """An answer that is not streamed."""

    content: list[msgspec.Raw]
    stop_reason: str | None = None
    stop_details: msgspec.Raw = NULL
    usage: msgspec.Raw = NULL


class _BlockFields(msgspec.Struct):
    type: str
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    data: str | None = None
    id: str | None = None
    name: str | None = None
    input: msgspec.Raw = NULL


class _StopDetails(msgspec.Struct):
    category: str | None = None
    explanation: str | None = None


class _DeltaFields(msgspec.Struct):
    type: str | None = None
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    partial_json: str | None = None
    stop_reason: str | None = None
    stop_details: _StopDetails | None = None


class _EventFields(msgspec.Struct):
    type: str
    index: int = 0
    message: _MessageFields | None = None
    content_block: _BlockFields | None = None
    delta: _DeltaFields | None = None
    usage: msgspec.Raw = NULL
    error: Any = None


_events = msgspec.json.Decoder(_EventFields)


def message_events(message: bytes) -> Iterator[ServerEvent]:
    """The events of a stream with this message, which was not streamed. ``ProtocolError`` if it is not of the
    API."""
    try:
        whole = msgspec.json.decode(message, type=_WholeMessage)
    except UNREADABLE as error:
        raise ProtocolError(f"an answer is not of Anthropic's API: {error}") from error
    yield _event("message_start", message={"usage": whole.usage})
    for index, block in enumerate(whole.content):
        yield _event("content_block_start", index=index, content_block=block)
        yield _event("content_block_stop", index=index)
    ending = {"stop_reason": whole.stop_reason, "stop_details": whole.stop_details}
    yield _event("message_delta", delta=ending, usage=whole.usage)
    yield _event("message_stop")


def _event(kind: str, **fields: Any) -> ServerEvent:
    return ServerEvent(kind, _encode({"type": kind, **fields}))


_FINISHED: Final = {
    "end_turn": "eos",
    "tool_use": "eos",
    "stop_sequence": "stop",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
}


_COUNTS: Final = {
    "input": "input_tokens",
    "output": "output_tokens",
    "read": "cache_read_input_tokens",
    "written": "cache_creation_input_tokens",
    "thinking": "output_tokens_details.thinking_tokens",
}
"""The fields of the known counts."""


@dataclass
class _Block:
    """A block of an unfinished answer."""

    kind: str
    parts: list[str] = field(default_factory=list)  # of its text, its reasoning, or the arguments of a call
    signature: str = ""  # of reasoning, or all of it that only the vendor can read
    id: str = ""
    name: str = ""

    def encoded(self) -> dict[str, Any] | None:
        """The block, to be sent back; None if it has no content."""
        text = "".join(self.parts)
        match self.kind:
            case "text":
                return {"type": "text", "text": text} if text.strip() else None
            case "thinking":
                return {"type": "thinking", "thinking": text, "signature": self.signature}
            case "redacted_thinking":
                return {"type": "redacted_thinking", "data": self.signature}
            case "tool_use":
                return call_block(CalledTool(self.id, self.name, text or "{}"))
            case _:
                return None


class MessagesReader(StreamReader):
    """Reads the stream of a message. The arguments are as in ``StreamReader``, except:

    Args:
        lead: White space with which the answer may begin, and which the context has already.
    """

    def __init__(
        self, answer: AnswerCollector, errors: ErrorMapping, num_sent: int = 0, *, lead: str = ""
    ) -> None:
        super().__init__(answer, errors, num_sent)
        self._lead = lead
        self._counts: dict[str, int] = {}
        self._blocks: dict[int, _Block] = {}
        self._open: int | None = None  # the block that has begun and not ended
        self._has_begun = False

    @property
    def has_begun(self) -> bool:
        """Whether the model has written something, or begins a block that is no reasoning."""
        return super().has_begun or any(
            block.kind not in ("thinking", "redacted_thinking") for block in self._blocks.values()
        )

    def _read_event(self, event: ServerEvent) -> None:
        fields = self._decoded(_events.decode, event.data)
        match fields.type:
            case "error":
                raise self.errors.of_event(fields.error)
            case "message_start":
                self._begin(fields)
            case "content_block_start" if fields.content_block is not None:
                self._begin_block(fields.index, fields.content_block)
            case "content_block_delta" if fields.delta is not None:
                self._read(fields.index, fields.delta)
            case "content_block_stop":
                self._open = None
            case "message_delta":
                self._count(fields.usage)
                if fields.delta is not None and fields.delta.stop_reason is not None:
                    self._finish(fields.delta.stop_reason, fields.delta.stop_details or _StopDetails())
            case "message_stop":
                self.is_over = True
                self.close()
            case _:
                pass  # a ping, or an event of a later version

    def close(self) -> None:
        """The stream ended. ``ServerLost`` if the answer is not complete."""
        super().close()
        if any(block.kind in ("thinking", "redacted_thinking") for block in self._blocks.values()):
            # The API requires its reasoning back unchanged, at its place between the other blocks.
            blocks = [found for block in self._blocks.values() if (found := block.encoded()) is not None]
            text = "".join("".join(block.parts) for block in self._blocks.values() if block.kind == "text")
            self.answer.keep_native(text, _encode({"role": "assistant", "content": blocks}))

    def _begin(self, fields: _EventFields) -> None:
        if self._has_begun:
            raise self._wrong("two beginnings of a message")
        self._has_begun = True
        self.answer.on_begin()
        if fields.message is not None:
            self._count(fields.message.usage)

    def _begin_block(self, index: int, begun: _BlockFields) -> None:
        if self._open is not None or index in self._blocks or self._has_ended:
            raise self._wrong(f"the beginning of block {index} out of order")
        block = self._blocks[index] = _Block(begun.type)
        self._open = index
        match begun.type:
            case "text":
                self._add(block, begun.text or "")
            case "thinking":
                block.signature = begun.signature or ""
                self._add(block, begun.thinking or "")
            case "redacted_thinking":
                block.signature = begun.data or ""
            case "tool_use":
                if not begun.name:
                    raise self._wrong("a tool call without a name")
                self.answer.begin_call(begun.id or "", begun.name)
                block.id, block.name = self.answer.calls[-1].id, begun.name
                self._add(block, self._arguments(begun.input))
            case _:
                pass  # a block of a later version, or of a tool that runs at the vendor's

    def _read(self, index: int, delta: _DeltaFields) -> None:
        block = self._blocks.get(index)
        if block is None or index != self._open or self._has_ended:
            raise self._wrong(f"a part of block {index} out of order")
        match delta.type:
            case "text_delta":
                self._add(block, delta.text or "", "text")
            case "thinking_delta":
                self._add(block, delta.thinking or "", "thinking")
            case "signature_delta":
                block.signature += delta.signature or ""
            case "input_json_delta":
                self._add(block, delta.partial_json or "", "tool_use")
            case _:
                pass

    def _add(self, block: _Block, part: str, kind: str | None = None) -> None:
        """More of a block; ``kind``: the kind that a delta belongs to."""
        if kind is not None and block.kind != kind:
            if block.kind in ("text", "thinking", "tool_use"):
                raise self._wrong(f"a part of a {kind} block within a {block.kind} block")
            return
        if not part:
            return
        if block.kind == "text" and self._lead:
            part = self._without_lead(part)
        block.parts.append(part)
        match block.kind:
            case "text":
                self.answer.add_text(part)
            case "thinking":
                self.answer.add_reasoning(part)
            case _:
                self.answer.add_arguments(part)

    def _arguments(self, given: msgspec.Raw) -> str:
        """The arguments of a call in one piece; empty if they follow in parts."""
        if not is_given(given):
            return ""
        text = self._compact(given)
        if not text.startswith("{"):
            raise self._wrong("arguments of a tool call that are no object")
        return "" if text == "{}" else text

    def _without_lead(self, text: str) -> str:
        """The text without the part of ``lead`` with which it begins."""
        num_equal = 0
        while num_equal < min(len(text), len(self._lead)) and text[num_equal] == self._lead[num_equal]:
            num_equal += 1
        # After other text, no white space of the context is expected any more.
        self._lead = self._lead[num_equal:] if num_equal == len(text) else ""
        return text[num_equal:]

    def _finish(self, reason: str, details: _StopDetails) -> None:
        if reason == "refusal":
            raise self.errors.refused(details.explanation or details.category or "it gives no reason")
        if reason not in _FINISHED:
            raise self._unknown_end(reason)
        self._end(_FINISHED[reason])

    def _count(self, usage: msgspec.Raw) -> None:
        """Later counts replace earlier ones, which they include."""
        found = counts_in(usage)
        for name, field_name in _COUNTS.items():
            if (number := read_count(found, field_name)) is not None:
                self._counts[name] = number

    def _set_usage(self) -> None:
        counts = self._counts
        read, written = counts.get("read", 0), counts.get("written", 0)
        num_deltas = self.answer.num_deltas
        output = counts.get("output", num_deltas) if self._has_ended else num_deltas
        guess = 0 if read + written else self._num_sent // CHARS_PER_TOKEN
        prompt = counts.get("input", guess) + read + written
        self.answer.usage = Usage(prompt, read, output, reasoning_tokens=counts.get("thinking", 0))
        self.answer.written_tokens = written
