"""The reader of the streams of OpenAI's responses API.

A response is a list of items: reasoning, messages and tool calls, one after the other. The reader ignores
events and items that it does not know, and is strict about the order of the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from agentflow.backends.apis.answers.answer import CHARS_PER_TOKEN, NO_TOKEN_ID, AnswerCollector, TokenInfo
from agentflow.backends.apis.answers.reported_usage import NULL, is_given, read_usage
from agentflow.backends.apis.answers.stream_reader import StreamReader
from agentflow.backends.apis.generation.conversation import call_item
from agentflow.backends.apis.http.api_errors import ErrorMapping
from agentflow.backends.apis.http.event_stream import ServerEvent
from agentflow.errors import ProtocolError
from agentflow.protocol.chat import CalledTool
from agentflow.protocol.events import TokenLogprob, Usage
from agentflow.protocol.unreadable import UNREADABLE

_encode = msgspec.json.Encoder().encode


class _Likely(msgspec.Struct):
    token: str | None = None
    logprob: float | None = None
    bytes: list[int] | None = None

    @property
    def text(self) -> str:
        try:
            # Without bytes, a part of a character is no text.
            return bytes(self.bytes).decode("utf-8", "replace") if self.bytes else self.token or ""
        except ValueError:  # a number that is no byte
            return self.token or ""


class _Token(_Likely):
    top_logprobs: list[_Likely] | None = None

    def info(self) -> TokenInfo:
        top = [TokenLogprob(NO_TOKEN_ID, one.text, one.logprob or 0.0) for one in self.top_logprobs or ()]
        return TokenInfo(self.text, self.logprob or 0.0, tuple(top))


class _Part(msgspec.Struct):
    """A part of a message, or of the text of reasoning."""

    type: str = ""
    text: str | None = None
    refusal: str | None = None


class _Item(msgspec.Struct):
    type: str = ""
    id: str | None = None
    content: list[_Part] | None = None
    phase: str | None = None  # of a message
    summary: list[_Part] | None = None  # of reasoning
    encrypted_content: str | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None

    @property
    def text(self) -> str:
        return "".join([part.text or "" for part in self.content or () if part.type == "output_text"])

    @property
    def refusal(self) -> str:
        return "".join([part.refusal or "" for part in self.content or ()])

    def again(self) -> dict[str, Any] | None:
        """The item as a request has it; None if the API would not accept it."""
        match self.type:
            case "reasoning" if self.encrypted_content:
                summary = [{"type": "summary_text", "text": part.text or ""} for part in self.summary or ()]
                kept = {"id": self.id or "", "encrypted_content": self.encrypted_content}
                return {"type": "reasoning", "summary": summary, **kept}
            case "message":
                phase = {} if self.phase is None else {"phase": self.phase}
                content = [{"type": "output_text", "text": self.text, "annotations": []}]
                fields = {"role": "assistant", "status": "completed", "content": content, **phase}
                return {"type": "message", "id": self.id or "", **fields}
            case "function_call":
                called = call_item(CalledTool(self.call_id or "", self.name or "", self.arguments or "{}"))
                return called if self.id is None else {**called, "id": self.id}
            case _:
                return None


class _Incomplete(msgspec.Struct):
    reason: str | None = None


class _ResponseFields(msgspec.Struct):
    usage: msgspec.Raw = NULL
    error: Any = None
    incomplete_details: _Incomplete | None = None


_NO_ITEM: Final = msgspec.Raw(b"{}")


class _EventFields(msgspec.Struct):
    type: str = ""
    output_index: int = 0
    summary_index: int = 0
    item: msgspec.Raw = _NO_ITEM
    delta: Any = None  # a text in the events that are read
    logprobs: msgspec.Raw = NULL
    response: _ResponseFields | None = None
    error: Any = None
    code: Any = None
    message: Any = None
    param: Any = None


class _Head(msgspec.Struct):
    type: str = ""


_events = msgspec.json.Decoder(_EventFields)
_heads: msgspec.json.Decoder[_Head | None] = msgspec.json.Decoder(_Head | None)
_tokens = msgspec.json.Decoder(list[_Token])
_known_items = msgspec.json.Decoder(_Item)
_KINDS: Final = {
    "response.output_text.delta": "message",
    "response.refusal.delta": "message",
    "response.function_call_arguments.delta": "function_call",
    "response.reasoning_summary_part.added": "reasoning",
    "response.reasoning_summary_text.delta": "reasoning",
    "response.reasoning_text.delta": "reasoning",
}
"""The kinds of the items that events belong to."""


@dataclass
class _Open:
    """An item of an unfinished answer."""

    kind: str
    has_content: bool = False  # a part of it has come
    done: _Item | None = None


class ResponsesReader(StreamReader):
    """Reads the stream of a response."""

    def __init__(self, answer: AnswerCollector, errors: ErrorMapping, num_sent: int) -> None:
        super().__init__(answer, errors, num_sent)
        self._items: dict[int, _Open] = {}
        self._latest = -1  # the latest item
        self._refusal: list[str] = []
        self._usage = NULL

    @property
    def has_begun(self) -> bool:
        """Whether the model has written something, or begins an item that is no reasoning."""
        return super().has_begun or any(item.kind != "reasoning" for item in self._items.values())

    def _read_event(self, event: ServerEvent) -> None:
        fields, item = self._decoded(_parsed, event.data)
        match fields.type or event.name:
            case kind if kind == "error" or fields.error is not None:
                raise self.errors.of_event(fields.error or _detail(fields))
            case "response.output_item.added":
                self._begin(fields.output_index, item)
            case "response.output_item.done":
                self._finish(fields.output_index, item)
            case kind if kind in _KINDS:
                self._read(kind, self._item(fields.output_index, _KINDS[kind]), fields)
            case "response.completed":
                self._complete("eos", fields.response)
            case "response.incomplete":
                self._complete("length", fields.response)
            case "response.failed":
                detail = None if fields.response is None else fields.response.error
                raise self.errors.of_event(_typed(detail))
            case _:
                pass  # an event that repeats others, or of a later version

    def _begin(self, index: int, item: _Item) -> None:
        if index in self._items:
            raise self._wrong(f"two beginnings of item {index}")
        if not self._items:
            self.answer.on_begin()
        self._items[index] = _Open(item.type)
        self._latest = index
        if item.type == "function_call":
            if not item.name:
                raise self._wrong("a tool call without a name")
            self.answer.begin_call(item.call_id or "", item.name)

    def _item(self, index: int, kind: str) -> _Open:
        """The item that a part belongs to. ``ProtocolError`` if another one has begun since."""
        item = self._items.get(index)
        if item is None or index != self._latest or item.kind != kind or item.done is not None:
            raise self._wrong(f"a part of item {index} out of order")
        return item

    def _read(self, kind: str, item: _Open, fields: _EventFields) -> None:
        if kind == "response.reasoning_summary_part.added":
            if fields.summary_index > 0 and item.has_content:
                self.answer.add_reasoning("\n\n")
            return
        if not isinstance(fields.delta, str):
            raise self._wrong("a part that is no text")
        if self.answer.wants_logprobs and is_given(fields.logprobs):
            for token in self._tokens(fields.logprobs):
                self.answer.add_token(token.info())
        self._add(kind, item, fields.delta)

    def _tokens(self, logprobs: msgspec.Raw) -> list[_Token]:
        try:
            return _tokens.decode(logprobs)
        except UNREADABLE as error:
            raise self._wrong(f"log-probabilities that are not of its API ({error})") from error

    def _add(self, kind: str, item: _Open, part: str) -> None:
        """A part of an item; ``kind``: of its event."""
        if not part:
            return
        item.has_content = True
        if kind == "response.refusal.delta":
            self._refusal.append(part)
        elif item.kind == "message":
            self.answer.add_text(part)
        elif item.kind == "function_call":
            self.answer.add_arguments(part)
        else:
            self.answer.add_reasoning(part)

    def _finish(self, index: int, done: _Item) -> None:
        item = self._items.get(index)
        if item is None or item.kind != done.type or item.done is not None:
            raise self._wrong(f"the end of item {index} out of order")
        if not item.has_content and index == self._latest:  # all of it in one piece
            if done.refusal:
                self._add("response.refusal.delta", item, done.refusal)
            elif done.type in ("message", "function_call"):
                self._add("", item, done.text or done.arguments or "")
        item.done = done

    def _complete(self, reason: str, response: _ResponseFields | None) -> None:
        response = response or _ResponseFields()
        if reason == "length":
            why = None if response.incomplete_details is None else response.incomplete_details.reason
            if why == "content_filter":
                raise self.errors.filtered()
            if why != "max_output_tokens":
                raise self._unknown_end(why)
        if self._refusal:
            raise self.errors.refused("".join(self._refusal))
        self.is_over = True
        self._end(reason)
        self._usage = response.usage
        self._set_usage()
        if reason == "eos":
            self._keep_native()

    def _keep_native(self) -> None:
        """Keeps the items if a message would lose reasoning or phases. The API accepts no reasoning at the
        end."""
        items = [item.done for item in self._items.values() if item.done is not None]
        is_needed = any(item.encrypted_content or item.phase for item in items)
        if is_needed and items[-1].type != "reasoning":
            written = [again for item in items if (again := item.again()) is not None]
            text = "".join([item.text for item in items if item.type == "message"])
            self.answer.keep_native(text, b",".join(map(_encode, written)))

    def _set_usage(self) -> None:
        guess = Usage(self._num_sent // CHARS_PER_TOKEN, 0, self.answer.num_deltas)
        self.answer.usage, self.answer.written_tokens = read_usage(self._usage, guess)


class _WholePart(msgspec.Struct):
    type: str = ""
    text: str | None = None
    refusal: str | None = None
    logprobs: list[msgspec.Raw] | None = None


class _WholeItem(msgspec.Struct):
    type: str = ""
    content: list[_WholePart] | None = None
    summary: list[_WholePart] | None = None


class _Whole(msgspec.Struct):
    status: str = ""
    output: list[msgspec.Raw] = []


_wholes = msgspec.json.Decoder(_Whole)
_whole_items = msgspec.json.Decoder(_WholeItem)


def response_events(response: bytes) -> Iterator[ServerEvent]:
    """The events of a stream with this response. ``ProtocolError`` if it is none."""
    try:
        whole = _wholes.decode(response)
        for index, item in enumerate(whole.output):
            yield _item_event("response.output_item.added", index, item=item)
            kind = (_heads.decode(item) or _Head()).type
            yield from _part_events(index, kind, item)
            yield _item_event("response.output_item.done", index, item=item)
    except UNREADABLE as error:
        shown = response[:100].decode("utf-8", "replace")
        raise ProtocolError(f"a response is not of its API ({error}): {shown!r}") from error
    yield _item_event(f"response.{whole.status}", 0, response=msgspec.Raw(response))


def _part_events(index: int, kind: str, item: msgspec.Raw) -> Iterator[ServerEvent]:
    """The texts that the reader does not take from a complete item."""
    if kind not in ("message", "reasoning"):
        return
    whole = _whole_items.decode(item)
    for number, part in enumerate(whole.summary or ()):
        yield _item_event("response.reasoning_summary_part.added", index, summary_index=number)
        yield _item_event("response.reasoning_summary_text.delta", index, delta=part.text or "")
    for part in whole.content or ():
        if part.type == "output_text":
            logprobs = part.logprobs or []
            yield _item_event("response.output_text.delta", index, delta=part.text or "", logprobs=logprobs)
        elif part.type == "reasoning_text":
            yield _item_event("response.reasoning_text.delta", index, delta=part.text or "")
        elif part.type == "refusal":
            yield _item_event("response.refusal.delta", index, delta=part.refusal or "")


def _item_event(kind: str, index: int, **fields: Any) -> ServerEvent:
    return ServerEvent("", _encode({"type": kind, "output_index": index, **fields}))


def _parsed(event: bytes | msgspec.Raw) -> tuple[_EventFields, _Item]:
    """An event, and the item in it."""
    fields = _events.decode(event)
    return fields, _decoded(fields.item)


def _decoded(item: msgspec.Raw) -> _Item:
    """An item. Of an item of an unknown type, whose fields may have any form, only the type."""
    kind = (_heads.decode(item) or _Head()).type
    return _known_items.decode(item) if kind in _KINDS.values() else _Item(kind)


def _detail(fields: _EventFields) -> Any:
    """The error in an event of the type ``error``."""
    return _typed({"code": fields.code, "message": fields.message, "param": fields.param})


def _typed(detail: Any) -> Any:
    """An error whose type is missing: the API gives only a code."""
    if isinstance(detail, dict) and not detail.get("type"):
        return {**detail, "type": detail.get("code")}
    return detail
