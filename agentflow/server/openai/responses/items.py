"""Translates the items of a request into a conversation.

Items are messages, tool calls and their results. Reasoning belongs to the assistant's message or call after
it, and chat templates decide where it is shown. The items of a stored response are also known by their ids.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from agentflow.protocol.chat import CalledTool, Message, ToolChoice, ToolSpec
from agentflow.protocol.json_bounds import OBJECT_BOUNDS, JsonScan, object_of
from agentflow.server.http.call import decoded
from agentflow.server.http.errors import ApiError, invalid_field, unsupported
from agentflow.server.openai.request import NO_PARAMETERS
from agentflow.server.openai.responses.types import MAX_ITEMS, FunctionTool, NamedChoice
from agentflow.server.openai.types import Unread, is_given

Find: TypeAlias = Callable[[str], dict[str, Any] | None]
"""Finds an item of a stored response by its id."""


class _Head(msgspec.Struct):
    type: str | None = None


class _Message(msgspec.Struct, kw_only=True):
    role: Literal["user", "assistant", "system", "developer"]
    content: msgspec.Raw


class _Call(msgspec.Struct, kw_only=True):
    call_id: Annotated[str, Meta(min_length=1)]
    name: Annotated[str, Meta(min_length=1)]
    arguments: str


class _Result(msgspec.Struct, kw_only=True):
    call_id: Annotated[str, Meta(min_length=1)]
    output: msgspec.Raw


class _Reference(msgspec.Struct, kw_only=True):
    id: str


class _Part(msgspec.Struct, kw_only=True):
    type: str
    text: str | None = None
    refusal: str | None = None


class _Reasoning(msgspec.Struct, kw_only=True):
    content: list[_Part] | None = None
    summary: list[_Part] | None = None


_TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "refusal")


def items_of(given: Unread) -> list[msgspec.Raw]:
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


class Turns:
    """A conversation that grows by items. ``messages``: those before them. ``find``: items that are only
    referred to."""

    def __init__(self, messages: Sequence[Message], model: str, find: Find) -> None:
        self.messages = [*messages]
        self._called = {call.id: call.name for message in messages for call in message.tool_calls}
        self._model = model
        self._find = find
        self._thoughts: str | None = None  # of the assistant's next item

    def add(self, item: msgspec.Raw, place: str) -> None:
        """Appends an item. ``ApiError`` names what is wrong or not supported at ``place``."""
        kind = decoded(item, _Head, place).type or "message"
        match kind:
            case "message":
                message = decoded(item, _Message, place)
                role = "system" if message.role == "developer" else message.role
                text = self._text(message.content, f"{place}.content")
                self.messages.append(Message(role, text))
                if role == "assistant":
                    self._think()
                self._thoughts = None
            case "function_call":
                self._call(decoded(item, _Call, place))
            case "function_call_output":
                self._result(decoded(item, _Result, place), place)
            case "reasoning":
                given = decoded(item, _Reasoning, place)
                parts = given.content or given.summary or []
                self._thoughts = "".join([part.text or "" for part in parts]) or None
            case "item_reference":
                reference = decoded(item, _Reference, place).id
                found = self._find(reference)
                if found is None:
                    text = f"no stored response has the item {reference[:100]!r}"
                    raise ApiError(404, "item_not_found", text, f"{place}.id")
                self.add(msgspec.Raw(msgspec.json.encode(found)), place)
            case _:
                why = "use messages, function calls and their outputs"
                raise unsupported(f"{place}.type", f"{kind[:100]!r}: {why}")

    def _call(self, call: _Call) -> None:
        """Calls belong to the assistant's message before them."""
        called = CalledTool(call.call_id, call.name, call.arguments.strip() or "{}")
        self._called[called.id] = called.name
        last = self.messages[-1] if self.messages else None
        if last is not None and last.role == "assistant":
            self.messages[-1] = msgspec.structs.replace(last, tool_calls=(*last.tool_calls, called))
        else:
            self.messages.append(Message("assistant", "", tool_calls=(called,)))
        self._think()

    def _think(self) -> None:
        """Gives the last message the thoughts before it."""
        last = self.messages[-1]
        if self._thoughts is not None:
            thoughts = f"{last.reasoning}\n{self._thoughts}" if last.reasoning else self._thoughts
            self.messages[-1] = msgspec.structs.replace(last, reasoning=thoughts)
            self._thoughts = None

    def _result(self, result: _Result, place: str) -> None:
        name = self._called.get(result.call_id)
        if name is None:
            text = f"no earlier item has the function call {result.call_id[:100]!r}"
            raise invalid_field(f"{place}.call_id", text)
        text = self._text(result.output, f"{place}.output")
        self.messages.append(Message("tool", text, tool_call_id=result.call_id, name=name))

    def _text(self, content: msgspec.Raw, place: str) -> str:
        """A text, or parts, which are joined without a separator."""
        if bytes(memoryview(content)[:1]) == b'"':
            return decoded(content, str, place)
        return "".join(
            [
                self._part(part, f"{place}[{number}]")
                for number, part in enumerate(decoded(content, list[msgspec.Raw], place))
            ]
        )

    def _part(self, raw: msgspec.Raw, place: str) -> str:
        part = decoded(raw, _Part, place)
        if part.type not in _TEXT_PARTS:
            raise unsupported(place, f"{self._model} takes only text, no {part.type[:100]!r}")
        text = part.refusal if part.type == "refusal" else part.text
        if text is None:
            raise invalid_field(place, "its text is missing")
        return text


def listed(item: msgspec.Raw, find: Find) -> dict[str, Any]:
    """An item as it is listed later: with an id, and the content of a message as parts. A reference becomes
    what it refers to."""
    shown: dict[str, Any] = msgspec.json.decode(item)
    kind = shown.setdefault("type", "message")
    if kind == "item_reference":
        return find(shown["id"]) or shown
    if not shown.get("id"):
        shown["id"] = f"{'msg' if kind == 'message' else 'item'}_{secrets.token_hex(12)}"
    if isinstance(content := shown.get("content"), str):
        part = "output_text" if shown.get("role") == "assistant" else "input_text"
        shown["content"] = [{"type": part, "text": content}]
    return shown


def tools_of(given: Sequence[msgspec.Raw]) -> tuple[ToolSpec, ...]:
    """The tools that the model may call. ``ApiError`` names one that OpenAI's servers run."""
    scan = JsonScan(OBJECT_BOUNDS)
    return tuple([_tool(tool, f"tools[{number}]", scan) for number, tool in enumerate(given)])


def _tool(raw: msgspec.Raw, place: str, scan: JsonScan) -> ToolSpec:
    kind = decoded(raw, _Head, place).type
    if kind != "function":
        why = f"{(kind or '')[:100]!r}: the server runs no tools, define functions"
        raise unsupported(f"{place}.type", why)
    tool, parameters = decoded(raw, FunctionTool, place), NO_PARAMETERS
    if tool.parameters is not None and is_given(tool.parameters):
        parameters = object_of(tool.parameters, f"{place}.parameters", scan)
    return ToolSpec(tool.name, tool.description or "", parameters, strict=bool(tool.strict))


def tool_choice_of(given: Unread, *, has_tools: bool, parallel: bool | None) -> ToolChoice:
    """Which tools the model may or must call."""
    is_parallel = parallel is not False
    if not is_given(given):
        return ToolChoice("auto" if has_tools else "none", None, is_parallel)
    assert given is not None
    if bytes(memoryview(given)[:1]) == b'"':
        mode = decoded(given, str, "tool_choice")
        if mode not in ("none", "auto", "required"):
            raise invalid_field("tool_choice", f"{mode[:100]!r} is none of 'none', 'auto' and 'required'")
        return ToolChoice(mode, None, is_parallel)  # type: ignore[arg-type]
    if decoded(given, _Head, "tool_choice").type != "function":
        why = "its type must be 'function'; leave out tools that may not be called"
        raise unsupported("tool_choice", why)
    return ToolChoice("required", decoded(given, NamedChoice, "tool_choice").name, is_parallel)
