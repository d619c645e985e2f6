"""Translates the items of a request into a conversation.

Items are messages, tool calls and their results. Reasoning belongs to the assistant's message or call after
it, and chat templates decide where it is shown. Each item is parsed once: the store has its known fields as
JSON and its step in the conversation, by its id.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from agentflow.protocol.bounds.json_bounds import OBJECT_BOUNDS, JsonScan
from agentflow.protocol.chat import CalledTool, Message, ToolChoice, ToolSpec
from agentflow.protocol.events import Capabilities
from agentflow.protocol.images import Medium, PlacedImage, placed_in
from agentflow.protocol.unreadable import UNREADABLE
from agentflow.server.compatible.fields import Unread, is_given
from agentflow.server.compatible.functions import function_tool
from agentflow.server.compatible.images import check_media, image_from_url, video_from_url
from agentflow.server.errors import ApiError, invalid_field, unsupported
from agentflow.server.http.json_body import decoded
from agentflow.server.openai.responses.types import MAX_ITEMS, FunctionTool, NamedChoice
from agentflow.server.responses.item import Find, Item, Reasoning, Step

_Id: TypeAlias = Annotated[str, Meta(max_length=256)]


class _Head(msgspec.Struct):
    type: str | None = None


class _Fields(msgspec.Struct, kw_only=True):
    """The fields of all items. ``status``: set in items from the API's answers."""

    id: _Id | None = None
    status: Annotated[str, Meta(max_length=64)] | None = None


class _Message(_Fields, kw_only=True):
    role: Literal["user", "assistant", "system", "developer"]
    content: msgspec.Raw


class _Call(_Fields, kw_only=True):
    call_id: Annotated[str, Meta(min_length=1)]
    name: Annotated[str, Meta(min_length=1)]
    arguments: str


class _Result(_Fields, kw_only=True):
    call_id: Annotated[str, Meta(min_length=1)]
    output: msgspec.Raw


class _Reference(msgspec.Struct, kw_only=True):
    id: str


class _ReferenceHead(msgspec.Struct):
    type: Any = None
    id: Any = None


class _Part(msgspec.Struct, kw_only=True, omit_defaults=True):
    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None
    video_url: str | None = None
    num_frames: int | None = None
    # Lists of items have these, as clients require them. Given annotations are not read.
    detail: str | None = None
    annotations: Unread = None


class _JsonPart(msgspec.Struct):
    data: msgspec.Raw


class _Reasoning(_Fields, kw_only=True):
    content: list[_Part] | None = None
    summary: list[_Part] | None = None


_NO_ANNOTATIONS = msgspec.Raw(b"[]")
_TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "refusal")


def read_items(given: Unread) -> list[msgspec.Raw]:
    """The items of ``input``. ``ApiError`` if it is neither a text nor a list of objects."""
    if not is_given(given):
        return []
    assert given is not None
    if bytes(memoryview(given)[:1]) == b'"':
        text = decoded(given, str, "input")
        return [msgspec.Raw(msgspec.json.encode({"type": "message", "role": "user", "content": text}))]
    items = decoded(given, list[msgspec.Raw], "input")
    if len(items) > MAX_ITEMS:
        raise invalid_field("input", f"it has {len(items):,} items; the limit is {MAX_ITEMS:,}")
    return items


def references_in(given: Unread) -> list[str]:
    """The ids of the items that ``input`` only refers to. Errors are left for ``ItemReader``."""
    if not is_given(given) or given is None:
        return []
    data = bytes(memoryview(given))
    if b"item_reference" not in data and b"\\u" not in data:  # an escape may stand for a letter of it
        return []
    try:
        heads = msgspec.json.decode(data, type=list[_ReferenceHead])
    except UNREADABLE:
        return []
    return [head.id for head in heads if head.type == "item_reference" and isinstance(head.id, str)]


class ItemReader:
    """Reads items. ``model``: the features of the model. ``find``: finds items that a request only refers to.
    ``takes_json``: messages may have parts with JSON, which the model gets as text."""

    def __init__(self, model: Capabilities, find: Find, *, takes_json: bool = False) -> None:
        self._model = model
        self._find = find
        self._takes_json = takes_json

    def read(self, raw: msgspec.Raw, param: str) -> Item:
        """Reads an item, or finds the item that a reference refers to. ``ApiError``, with the field below
        ``param``, if it is wrong or not supported."""
        kind = decoded(raw, _Head, param).type or "message"
        match kind:
            case "message":
                return self._message(decoded(raw, _Message, param), param)
            case "function_call":
                call = decoded(raw, _Call, param)
                fields = {"call_id": call.call_id, "name": call.name, "arguments": call.arguments}
                return _item(
                    kind, call, fields, CalledTool(call.call_id, call.name, call.arguments.strip() or "{}")
                )
            case "function_call_output":
                result = decoded(raw, _Result, param)
                text, images, parts = self._shown(result.output, f"{param}.output")
                shown = {"call_id": result.call_id, "output": text if parts is None else parts}
                turn = Message("tool", text, tool_call_id=result.call_id, images=images)
                return _item(kind, result, shown, turn)
            case "reasoning":
                reasoning = decoded(raw, _Reasoning, param)
                given = reasoning.content or reasoning.summary or []
                shown = {"summary": reasoning.summary or []}
                if reasoning.content is not None:
                    shown["content"] = reasoning.content
                return _item(kind, reasoning, shown, Reasoning("".join([part.text or "" for part in given])))
            case "item_reference":
                reference = decoded(raw, _Reference, param).id
                found = self._find(reference)
                if found is None:
                    text = f"no stored response has the item {reference[:100]!r}"
                    raise ApiError(404, "item_not_found", text, f"{param}.id")
                if isinstance(found.step, Message):  # it may have been read for another model
                    check_media(f"{param}.id", self._model, found.step.images)
                return found
            case _:
                why = "use messages, function calls and their outputs"
                raise unsupported(f"{param}.type", f"{kind[:100]!r}: {why}")

    def _message(self, message: _Message, param: str) -> Item:
        text, images, parts = self._shown(message.content, f"{param}.content")
        if images and message.role != "user":
            raise unsupported(f"{param}.content", "only messages of the user may have images")
        if parts is None:
            parts = [_text_part("output_text" if message.role == "assistant" else "input_text", text)]
        role = "system" if message.role == "developer" else message.role
        return _item(
            "message", message, {"role": message.role, "content": parts}, Message(role, text, images=images)
        )

    def _shown(
        self, content: msgspec.Raw, param: str
    ) -> tuple[str, tuple[PlacedImage, ...], list[_Part] | None]:
        """Returns the text (parts are joined without a separator), the images, and the parts, if any."""
        if bytes(memoryview(content)[:1]) == b'"':
            return decoded(content, str, param), (), None
        parts = [
            self._part(part, f"{param}[{number}]")
            for number, part in enumerate(decoded(content, list[msgspec.Raw], param))
        ]
        text, images = placed_in(
            [
                self._medium(part, f"{param}[{number}]") or part.text or part.refusal or ""
                for number, part in enumerate(parts)
            ]
        )
        return text, images, parts

    def _medium(self, part: _Part, param: str) -> Medium | None:
        if part.image_url is not None:
            return image_from_url(part.image_url, f"{param}.image_url", self._model)
        if part.video_url is not None:
            return video_from_url(part.video_url, part.num_frames, f"{param}.video_url", self._model)
        return None

    def _part(self, raw: msgspec.Raw, param: str) -> _Part:
        part = decoded(raw, _Part, param)
        if part.type == "input_json" and self._takes_json:
            data = decoded(raw, _JsonPart, param).data
            if bytes(memoryview(data)[:1]) not in (b"{", b"["):
                raise invalid_field(f"{param}.data", "give an object, or a list of objects")
            return _Part(type="input_text", text=bytes(memoryview(data)).decode())
        if part.type == "input_image" and self._model.images and part.image_url is not None:
            return _Part(type=part.type, image_url=part.image_url, detail=part.detail or "auto")
        if part.type == "input_video" and self._model.videos and part.video_url is not None:
            return _Part(type=part.type, video_url=part.video_url, num_frames=part.num_frames)
        if part.type not in _TEXT_PARTS:
            raise unsupported(param, f"{self._model.model} accepts only text, no {part.type[:100]!r}")
        text = part.refusal if part.type == "refusal" else part.text
        if text is None:
            raise invalid_field(param, "its text is missing")
        return _text_part(part.type, text)


def _text_part(kind: str, text: str) -> _Part:
    if kind == "refusal":
        return _Part(type=kind, refusal=text)
    return _Part(type=kind, text=text, annotations=_NO_ANNOTATIONS if kind == "output_text" else None)


def _item(kind: str, given: _Fields, fields: dict[str, Any], step: Step) -> Item:
    item_id = given.id or f"{'msg' if kind == 'message' else 'item'}_{secrets.token_hex(12)}"
    status = given.status or "completed"  # an item that is given is complete
    return Item.made(item_id, {"id": item_id, "type": kind, **fields, "status": status}, step)


class Turns:
    """A conversation to which items are added. ``before``: the messages before them."""

    def __init__(self, before: Sequence[Message]) -> None:
        self._messages = [*before]
        self._called = {call.id: call.name for message in before for call in message.tool_calls}
        self._reasoning: str | None = None  # the reasoning before the assistant's next item
        # Calls and reasoning that belong to the last message, the assistant's, and are not in it yet.
        self._new_calls: list[CalledTool] = []
        self._new_reasoning: list[str] = []

    @property
    def messages(self) -> list[Message]:
        """All messages."""
        self._complete_last()
        return self._messages

    def add(self, item: Item, param: str) -> None:
        """Appends an item. ``ApiError``, with the field below ``param``, if it cannot follow."""
        match item.step:
            case Reasoning(text):
                self._reasoning = text or None
            case CalledTool() as call:
                self._called[call.id] = call.name
                if not self._messages or self._messages[-1].role != "assistant":
                    self._append(Message("assistant", ""))
                self._new_calls.append(call)
                self._add_reasoning()
            case Message(tool_call_id=str() as call_id) as result:
                name = self._called.get(call_id)
                if name is None:
                    text = f"no earlier item has the function call {call_id[:100]!r}"
                    raise invalid_field(f"{param}.call_id", text)
                self._append(msgspec.structs.replace(result, name=name))
            case message:
                self._append(message)
                if message.role == "assistant":
                    self._add_reasoning()
                self._reasoning = None

    def _append(self, message: Message) -> None:
        self._complete_last()
        self._messages.append(message)

    def _add_reasoning(self) -> None:
        """Adds the reasoning to the last message."""
        if self._reasoning is not None:
            self._new_reasoning.append(self._reasoning)
            self._reasoning = None

    def _complete_last(self) -> None:
        """Adds pending calls and reasoning to the last message. They are added together, because each
        addition copies the earlier ones."""
        if self._new_calls or self._new_reasoning:
            last = self._messages[-1]
            reasoning = [last.reasoning, *self._new_reasoning] if last.reasoning else self._new_reasoning
            self._messages[-1] = msgspec.structs.replace(
                last,
                tool_calls=(*last.tool_calls, *self._new_calls),
                reasoning="\n".join(reasoning) if reasoning else None,
            )
            self._new_calls, self._new_reasoning = [], []


def read_tools(given: Sequence[msgspec.Raw]) -> tuple[ToolSpec, ...]:
    """The tools that the model may call. ``ApiError`` for a tool that OpenAI's servers run."""
    scan = JsonScan(OBJECT_BOUNDS)
    return tuple([_tool(tool, f"tools[{number}]", scan) for number, tool in enumerate(given)])


def _tool(raw: msgspec.Raw, param: str, scan: JsonScan) -> ToolSpec:
    kind = decoded(raw, _Head, param).type
    if kind != "function":
        why = f"{(kind or '')[:100]!r}: the server runs no tools; define functions"
        raise unsupported(f"{param}.type", why)
    return function_tool(decoded(raw, FunctionTool, param), param, scan)


def read_tool_choice(given: Unread, *, has_tools: bool, parallel: bool | None) -> ToolChoice:
    """Which tools the model may or must call."""
    is_parallel = parallel is not False
    if not is_given(given):
        return ToolChoice("auto" if has_tools else "none", None, is_parallel)
    assert given is not None
    if bytes(memoryview(given)[:1]) == b'"':
        mode = decoded(given, str, "tool_choice")
        if mode not in ("none", "auto", "required"):
            raise invalid_field("tool_choice", f"it must be 'none', 'auto' or 'required', not {mode[:100]!r}")
        return ToolChoice(mode, None, is_parallel)  # type: ignore[arg-type]
    if decoded(given, _Head, "tool_choice").type != "function":
        why = "its type must be 'function'; leave out tools that may not be called"
        raise unsupported("tool_choice", why)
    return ToolChoice("required", decoded(given, NamedChoice, "tool_choice").name, is_parallel)
