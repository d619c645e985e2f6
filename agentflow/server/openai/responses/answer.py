"""Writes a response: its items as they are generated, and the events of a stream.

``ResponseWriter`` reads the deltas of one answer. The events of a stream are ``response.created`` and
``response.in_progress``; for each item ``response.output_item.added``, its parts or its arguments, and
``response.output_item.done``; and ``response.completed`` or ``response.incomplete``. A background
response has ``response.queued`` after the first event, and may end with ``response.failed``. Events are
numbered. The constant part of an item's deltas is encoded once.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from agentflow.protocol.chat import CalledTool, Message
from agentflow.protocol.events import Usage
from agentflow.server.compatible.error_format import OpenAIErrorFormat
from agentflow.server.compatible.logprobs import ChatTokenLogprob, token_logprob
from agentflow.server.completion.request import (
    AnswerEnded,
    CompletionDelta,
    ReasoningDelta,
    TextDelta,
    ToolArguments,
    ToolCallBegun,
)
from agentflow.server.completion.streaming import CommentedEvents
from agentflow.server.errors import ApiError
from agentflow.server.event_stream import EVENT_END, event, event_head
from agentflow.server.openai.answer import encode_json
from agentflow.server.openai.responses.types import (
    FailureCode,
    FunctionCall,
    Incomplete,
    InputDetails,
    ItemStatus,
    OutputDetails,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputText,
    ReasoningTextPart,
    ResponseAnswer,
    ResponseFailure,
    ResponseUsage,
)


class ResponsesErrorFormat(OpenAIErrorFormat):
    """OpenAI's format of errors, except that an error in a stream is a named event."""

    def in_stream(self, body: bytes) -> bytes:
        return event(body, b"error")


class ResponseWriter(CommentedEvents):
    """Writes the response to one request. ``answer``: the response so far. ``has_logprobs``: its text has
    log-probabilities."""

    def __init__(self, answer: ResponseAnswer, *, has_logprobs: bool) -> None:
        self.answer = answer
        self._has_logprobs = has_logprobs
        self._num_events = 0
        self._parts: list[str] = []
        self._logprobs: list[ChatTokenLogprob] = []
        self._early: list[ChatTokenLogprob] = []  # tokens that came outside of a message, before its text
        self._open: OutputItem | None = None
        self._head = b""
        self._body: bytes | None = None

    @property
    def body(self) -> bytes:
        """The response so far, as JSON. An open item has no text yet, so most deltas do not change it: polls
        read the same bytes."""
        if self._body is None:
            self._body = msgspec.json.encode(self.answer)
        return self._body

    def start(self, prompt_tokens: int) -> bytes:
        """The events before the first delta."""
        return self._of_answer("created") + self._of_answer("in_progress")

    def queue(self) -> bytes:
        """The events of a queued background response. It is in progress from the first delta on."""
        self.answer.status = "queued"
        return self._of_answer("created") + self._of_answer("queued")

    def write(self, deltas: Sequence[CompletionDelta]) -> bytes:
        """The events of these deltas."""
        events: list[bytes] = []
        if self.answer.status == "queued" and deltas:
            self.answer.status = "in_progress"
            events.append(self._of_answer("in_progress"))
        for delta in deltas:
            match delta:
                case ReasoningDelta():
                    events.append(self._reasoning(delta.text))
                case TextDelta():
                    events.append(self._text(delta))
                case ToolCallBegun():
                    events.append(self._begin_call(delta))
                case ToolArguments():
                    self._parts.append(delta.text)
                    events.append(self._delta(delta.text))
                case AnswerEnded():
                    events.append(self._finish(delta))
        return b"".join(events)

    def end(self, usage: Usage) -> bytes:
        """The last event, with the whole response."""
        return self._of_answer("incomplete" if self.answer.status == "incomplete" else "completed")

    def fail(self, error: ApiError) -> bytes:
        """The last events of a background response that failed."""
        closed = self._close("incomplete")
        code: FailureCode = "server_error" if error.status >= 500 else "invalid_prompt"
        code = "rate_limit_exceeded" if error.status == 429 else code
        self.answer.status = "failed"
        self.answer.error = ResponseFailure(
            code=code, message=error.message, type=error.code, param=error.param
        )
        return closed + self._of_answer("failed")

    def cancel(self) -> bytes:
        """The last events of a cancelled background response. The API has no event for that, so only the
        response's status shows it."""
        closed = self._close("incomplete")
        self.answer.status = "cancelled"
        return closed + self._of_answer("incomplete")

    def message(self) -> Message:
        """The answer as a message of the conversation."""
        texts, reasoning, calls = [], [], []
        for item in self.answer.output:
            match item:
                case OutputMessage():
                    texts += [part.text for part in item.content]
                case OutputReasoning():
                    reasoning += [part.text for part in item.content]
                case FunctionCall():
                    calls.append(CalledTool(item.call_id, item.name, item.arguments))
        return Message(
            "assistant",
            "".join(texts),
            generated=True,
            tool_calls=tuple(calls),
            reasoning="".join(reasoning) or None,
        )

    # Items

    def _reasoning(self, text: str) -> bytes:
        if not text:
            return b""
        begun = b"" if isinstance(self._open, OutputReasoning) else self._begin_reasoning()
        self._parts.append(text)
        return begun + self._delta(text)

    def _begin_reasoning(self) -> bytes:
        closed = self._close("completed")
        item = OutputReasoning(id=f"rs_{secrets.token_hex(12)}", status="in_progress", content=[])
        added = self._add(item)
        position = {"item_id": item.id, "output_index": self._index, "content_index": 0}
        begun = self._event("response.content_part.added", {**position, "part": ReasoningTextPart(text="")})
        item.content.append(ReasoningTextPart(text=""))
        self._prepare("response.reasoning_text.delta", position)
        return closed + added + begun

    def _text(self, delta: TextDelta) -> bytes:
        if not delta.text and not delta.tokens:
            return b""
        logprobs = [token_logprob(token) for token in delta.tokens] if self._has_logprobs else []
        is_open = isinstance(self._open, OutputMessage)
        if not delta.text and not is_open:
            self._early += logprobs
            return b""
        begun = b"" if is_open else self._begin_text()
        return begun + self._append_text(delta.text, logprobs)

    def _append_text(self, text: str, logprobs: Sequence[ChatTokenLogprob]) -> bytes:
        logprobs, self._early = [*self._early, *logprobs], []
        self._parts.append(text)
        self._logprobs += logprobs
        return self._delta(text, logprobs)

    def _begin_text(self) -> bytes:
        closed = self._close("completed")
        item = OutputMessage(id=f"msg_{secrets.token_hex(12)}", status="in_progress", content=[])
        added = self._add(item)
        position = {"item_id": item.id, "output_index": self._index, "content_index": 0}
        begun = self._event("response.content_part.added", {**position, "part": OutputText(text="")})
        item.content.append(OutputText(text=""))
        self._prepare("response.output_text.delta", position)
        return closed + added + begun

    def _begin_call(self, delta: ToolCallBegun) -> bytes:
        closed = self._close("completed")
        self._early = []  # the tokens of the call's notation, for which the API has no place
        item = FunctionCall(
            id=f"fc_{secrets.token_hex(12)}",
            call_id=delta.id,
            name=delta.name,
            arguments="",
            status="in_progress",
        )
        added = self._add(item)
        position = {"item_id": item.id, "output_index": self._index}
        self._prepare("response.function_call_arguments.delta", position)
        return closed + added

    @property
    def _index(self) -> int:
        return len(self.answer.output) - 1

    def _add(self, item: OutputItem) -> bytes:
        self.answer.output.append(item)
        self._open = item
        return self._event("response.output_item.added", {"output_index": self._index, "item": item})

    def _close(self, status: ItemStatus) -> bytes:
        """Ends the open item, if there is one."""
        item, self._open = self._open, None
        if item is None:
            return b""
        text, index = "".join(self._parts), self._index
        self._parts.clear()
        item.status = status
        position: dict[str, Any] = {"item_id": item.id, "output_index": index}
        if isinstance(item, OutputMessage):
            [part] = item.content
            part.text, part.logprobs, self._logprobs = text, self._logprobs, []
            position["content_index"] = 0
            done = self._event(
                "response.output_text.done", {**position, "text": text, "logprobs": part.logprobs}
            )
            done += self._event("response.content_part.done", {**position, "part": part})
        elif isinstance(item, OutputReasoning):
            [reasoning] = item.content
            reasoning.text, position["content_index"] = text, 0
            done = self._event("response.reasoning_text.done", {**position, "text": text})
            done += self._event("response.content_part.done", {**position, "part": reasoning})
        else:
            item.arguments = text
            fields = {**position, "name": item.name, "arguments": text}
            done = self._event("response.function_call_arguments.done", fields)
        return done + self._event("response.output_item.done", {"output_index": index, "item": item})

    def _finish(self, end: AnswerEnded) -> bytes:
        status: ItemStatus = "incomplete" if end.finish_reason == "length" else "completed"
        answer, begun = self.answer, b""
        if not answer.output:
            begun = self._begin_text() + (self._append_text("", ()) if self._early else b"")
        for item in reversed(answer.output):  # under a constraint, all tokens come at the end
            if isinstance(item, OutputMessage) and self._early:
                item.content[0].logprobs += self._early
                break
        closed = self._close(status)
        answer.status = status
        answer.incomplete_details = Incomplete("max_output_tokens") if status == "incomplete" else None
        answer.usage = make_usage(end.usage)
        answer.completed_at = int(time.time())
        self._body = None
        return begun + closed

    # Events

    def _prepare(self, kind: str, position: dict[str, Any]) -> None:
        """Encodes the constant part of the deltas of the open item."""
        self._body = None  # the open item is complete now
        fields = {"type": kind, **position}
        self._head = event_head(kind.encode()) + encode_json(fields)[:-1] + b',"sequence_number":'

    def _delta(self, text: str, logprobs: Sequence[ChatTokenLogprob] | None = None) -> bytes:
        number = self._number()
        shown = b"" if logprobs is None else b',"logprobs":' + encode_json(logprobs)
        return b'%b%d%b,"delta":%b}%b' % (self._head, number, shown, encode_json(text), EVENT_END)

    def _of_answer(self, kind: str) -> bytes:
        return self._event(f"response.{kind}", {"response": self.answer})

    def _event(self, kind: str, fields: dict[str, Any]) -> bytes:
        self._body = None  # each change but those above has an event
        numbered = {"type": kind, "sequence_number": self._number(), **fields}
        return event(encode_json(numbered), kind.encode())

    def _number(self) -> int:
        number = self._num_events
        self._num_events += 1
        return number


def make_usage(usage: Usage) -> ResponseUsage:
    """The usage in the API's form."""
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputDetails(cached_tokens=usage.cached_tokens),
        output_tokens=usage.output_tokens,
        output_tokens_details=OutputDetails(reasoning_tokens=usage.reasoning_tokens),
        total_tokens=usage.prompt_tokens + usage.output_tokens,
    )
