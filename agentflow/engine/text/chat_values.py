"""What a chat template is given: messages, tool calls and tools as the dictionaries that templates expect.

What comes from outside (names, descriptions, schemas, arguments) passes through a *mark*, with which a
layout finds it again in the rendering. The arguments of a call are a dictionary that remembers its text:
where a template writes it as JSON, it is written as the model wrote it.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from agentflow.engine.grammar.schema_keywords import ALL_TYPED, ANNOTATIONS
from agentflow.errors import BadArgument
from agentflow.protocol.chat import CalledTool, Message, ToolSpec
from agentflow.protocol.json_nesting import MOST_NESTING, nests_deeper

Mark: TypeAlias = Callable[[str], str]
"""Makes a string of outside recognisable in a rendering."""

SHORT_ID_CHARS = 9


@dataclass(frozen=True, slots=True)
class ToolDialect:
    """How a template wants tool calls. ``arguments``: as an object, or as the text of one. ``short_ids``:
    it takes only ids of nine letters and digits, and is given such ones in place of others."""

    arguments: Literal["object", "text"] = "object"
    short_ids: bool = False


class JsonObject(dict[str, Any]):
    """An object as it was read, and the text that it was read from."""

    def __init__(self, members: dict[str, Any], text: str) -> None:
        super().__init__(members)
        self._text = text  # with an underscore: templates reach members by name, and may not see this one


def unmarked(text: str) -> str:
    """The mark that changes nothing."""
    return text


def message_values(
    messages: Sequence[Message], dialect: ToolDialect, mark: Mark = unmarked
) -> list[dict[str, Any]]:
    """Messages in the shape of OpenAI's API. ``BadArgument`` as of ``read_arguments``."""
    return [_message_value(message, dialect, mark) for message in messages]


def tool_values(tools: Sequence[ToolSpec], mark: Mark = unmarked) -> list[dict[str, Any]] | None:
    """Tools in the shape of OpenAI's API; None without any, as templates ask for that."""
    if not tools:
        return None
    return [
        {
            "type": "function",
            "function": {
                "name": mark(tool.name),
                "description": mark(tool.description),
                "parameters": marked_leaves(tool.parameters, mark),
            },
        }
        for tool in tools
    ]


def marked_leaves(value: Any, mark: Mark) -> Any:
    """A JSON value in which all strings, names of members too, are marked; but not a schema's own words,
    for which templates look."""
    if isinstance(value, str):
        return value if value in _SCHEMA_WORDS else mark(value)
    if isinstance(value, dict):
        return {marked_leaves(key, mark): marked_leaves(member, mark) for key, member in value.items()}
    if isinstance(value, list | tuple):
        return [marked_leaves(item, mark) for item in value]
    return value


def read_arguments(call: CalledTool) -> dict[str, Any]:
    """The arguments of a call. ``BadArgument`` where they are no JSON object, or nest too deep."""
    try:
        members = json.loads(call.arguments)
        if not isinstance(members, dict):
            why = f"they are {call.arguments[:40]!r}"
        elif nests_deeper(members, MOST_NESTING):
            why = f"they nest deeper than {MOST_NESTING} objects and lists"
        else:
            return members
    except (ValueError, RecursionError) as error:
        why = str(error)
    raise BadArgument(f"the arguments of the call of {call.name!r} must be a JSON object, as text: {why}")


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter ``tojson``. (Jinja's own escapes for HTML, which no model was trained on.)"""
    options: dict[str, Any] = {"ensure_ascii": ensure_ascii, "indent": indent, "separators": separators}
    if ensure_ascii or sort_keys or indent is not None or separators is not None:
        return json.dumps(value, sort_keys=sort_keys, **options)
    texts: dict[str, str] = {}
    written = json.dumps(_with_stand_ins(value, texts), ensure_ascii=False)
    for stand_in, text in texts.items():
        written = written.replace(json.dumps(stand_in), text)
    return written


def _with_stand_ins(value: Any, texts: dict[str, str]) -> Any:
    if isinstance(value, JsonObject):
        stand_in = secrets.token_hex(16)
        texts[stand_in] = value._text
        return stand_in
    if isinstance(value, dict):
        return {key: _with_stand_ins(member, texts) for key, member in value.items()}
    if isinstance(value, list | tuple):
        return [_with_stand_ins(item, texts) for item in value]
    return value


def _message_value(message: Message, dialect: ToolDialect, mark: Mark) -> dict[str, Any]:
    value: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        value["tool_calls"] = [_call_value(call, dialect, mark) for call in message.tool_calls]
    if message.tool_call_id is not None:
        value["tool_call_id"] = _id(message.tool_call_id, dialect, mark)
    if message.name is not None:
        value["name"] = mark(message.name)
    return value


def _call_value(call: CalledTool, dialect: ToolDialect, mark: Mark) -> dict[str, Any]:
    members = read_arguments(call)
    text = mark(call.arguments)
    as_object = dialect.arguments == "object"
    arguments: Any = JsonObject(marked_leaves(members, mark), text) if as_object else text
    function = {"name": mark(call.name), "arguments": arguments}
    return {"id": _id(call.id, dialect, mark), "type": "function", "function": function}


def _id(call_id: str, dialect: ToolDialect, mark: Mark) -> str:
    if not dialect.short_ids:
        return mark(call_id)
    if len(call_id) == SHORT_ID_CHARS and call_id.isascii() and call_id.isalnum():
        return call_id
    return hashlib.sha256(call_id.encode(errors="replace")).hexdigest()[:SHORT_ID_CHARS]


_SCHEMA_WORDS = frozenset(
    {"", *ALL_TYPED, *ANNOTATIONS}
    | {"type", "object", "string", "number", "integer", "boolean", "array", "null"}
    | {"properties", "required", "items", "enum", "const", "anyOf", "oneOf", "allOf", "$ref", "$defs"}
    | {"additionalProperties", "description", "title", "default", "format", "nullable"}
)
