"""Finds a model's notation of tool calls by rendering its chat template.

``tool_format`` renders an assistant's turn with calls whose names and arguments are random; the text around
these is the model's notation. A template that does not render tools, calls and results does not support
tools; ``as_plain_messages`` then writes them into contents in the notation ``FALLBACK``.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from msgspec.structs import replace

from agentflow.engine.text.channels import CALL_MARK
from agentflow.engine.text.chat_template import ChatTemplate
from agentflow.engine.text.common_prefix import common_prefix
from agentflow.errors import NotSupported
from agentflow.protocol.chat import CalledTool, Message, ToolSpec
from agentflow.protocol.constraint import Whitespace
from agentflow.protocol.images import PlacedImage, shift_images


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """The notation of calls. A call is ``begin``, a JSON object, ``end``."""

    begin: str  # with channels: the beginning of a call's head
    end: str
    name_key: str = "name"  # the member of the object that has the name
    arguments_key: str = "arguments"  # the member that has the arguments
    name_first: bool = True  # the name comes before the arguments
    constants: tuple[tuple[str, str], ...] = ()  # further members, before the other two
    is_list: bool = False  # a JSON list of objects instead of one
    before: str = "\n"  # the text between prose and the first ``begin``
    between: str | None = "\n"  # the text from one ``end`` to the next ``begin``; None: at most one call
    whitespace: Whitespace = "compact"  # of the JSON, as in ``Constraint``
    lead: str = ""  # white space that the template writes before an answer's content
    is_native: bool = True  # the notation comes from the template
    has_channels: bool = False  # a call is a separate message (``channels``), whose head has the name

    @property
    def mark(self) -> str:
        """The text by which a reader finds calls: ``begin`` without surrounding white space. Empty if calls
        have no mark; then only a whole turn can be a call."""
        return self.begin.strip()

    @property
    def allows_several(self) -> bool:
        """Whether one turn can hold several calls."""
        return self.is_list or self.between is not None


FALLBACK = ToolFormat("<tool_call>", "</tool_call>", is_native=False)
"""The notation for templates that do not support tools."""
IN_CHANNELS = ToolFormat(CALL_MARK, "", before="", between=None, whitespace="free", has_channels=True)
"""The notation for templates that write answers in channels."""

RESULT_BEGIN = "<tool_response>\n"
RESULT_END = "\n</tool_response>"
"""The text around the result of a tool, for templates that do not support tools."""


@lru_cache(maxsize=64)
def tool_format(template: ChatTemplate) -> ToolFormat:
    """Returns the template's notation, or ``FALLBACK``. Renders about ten times, once for each template."""
    if not template.has_template or not _knows_tools(template):
        return FALLBACK
    if template.has_channels:
        return IN_CHANNELS
    return _native(template) or FALLBACK


def _nonce() -> str:
    return f"n{secrets.token_hex(8)}"


def _call() -> CalledTool:
    return CalledTool(_nonce(), _nonce(), json.dumps({_nonce(): _nonce()}))


def _knows_tools(template: ChatTemplate) -> bool:
    """Whether the template renders tools, calls and results."""
    tool = ToolSpec(_nonce(), _nonce(), {"type": "object", "properties": {_nonce(): {"type": "string"}}})
    call, result, question = _call(), _nonce(), _nonce()
    messages = [
        Message("user", question),
        Message("assistant", "", tool_calls=(call,)),
        Message("tool", result, tool_call_id=call.id, name=call.name),
    ]
    try:
        told = template.render(messages[:1], tools=[tool], add_generation_prompt=True)
        called = template.render(messages, tools=[tool])
    except NotSupported:
        return False
    (parameter,) = tool.parameters["properties"]
    in_tools = all(said in told for said in (tool.name, tool.description, parameter))
    return in_tools and all(said in called for said in (call.name, *_words(call), result))


def _words(call: CalledTool) -> tuple[str, str]:
    ((key, value),) = json.loads(call.arguments).items()
    return key, value


def _native(template: ChatTemplate) -> ToolFormat | None:
    """Returns the template's notation; None if it does not write calls as JSON objects."""
    call, more, prose = _call(), _call(), _nonce()
    alone = _after_prompt(template, Message("assistant", "", tool_calls=(call,)))
    plain = _after_prompt(template, Message("assistant", prose))
    if alone is None or plain is None or prose not in plain:
        return None
    found = _json_with(alone, call)
    if found is None:
        return None
    start, stop, members = found
    head, tail = alone[:start], alone[stop:].removesuffix(plain.partition(prose)[2])
    form = _members(alone[start:stop], members, call)
    if form is None:
        return None
    between = _between(template, call, more)
    is_list = head.endswith("[") and tail.startswith("]")
    if is_list:
        head, tail, between = head[:-1], tail[1:], None
    elif between is not None:
        # Before a first call, ``head`` may include the opening of the turn.
        head = head[len(head) - common_prefix(head[::-1], between[::-1]) :]
    begin = head.lstrip()
    if between is not None:
        if not between.startswith(tail):
            return None
        between = between[len(tail) : len(between) - len(begin)]
    before = _before(template, call, prose, begin) if begin else ""
    lead = plain.partition(prose)[0]
    lead = "" if lead.strip() else lead
    return ToolFormat(begin, tail, **form, is_list=is_list, before=before, between=between, lead=lead)


def _after_prompt(template: ChatTemplate, *turns: Message) -> str | None:
    """Returns the rendering of an assistant's turns, after the generation prompt."""
    question = Message("user", _nonce())
    try:
        prompt = template.render([question], add_generation_prompt=True)
        text = template.render([question, *turns])
    except NotSupported:
        return None
    if text.startswith(prompt):
        return text[len(prompt) :]
    shorter = prompt.rstrip()  # in some templates, a line break at the end of the prompt belongs to a content
    return text[len(shorter) :] if text.startswith(shorter) else None


def _json_with(text: str, call: CalledTool) -> tuple[int, int, dict[str, Any]] | None:
    """Returns the start, the end and the value of the first JSON object that has the call's name as a
    member."""
    decoder = json.JSONDecoder()
    at = text.find("{")
    while at >= 0:
        try:
            value, end = decoder.raw_decode(text, at)
        except ValueError:
            end, value = at, None
        if isinstance(value, dict) and call.name in value.values():
            return at, end, value
        at = text.find("{", at + 1)
    return None


def _members(written: str, members: dict[str, Any], call: CalledTool) -> dict[str, Any] | None:
    """Returns the fields of ``ToolFormat`` that describe the members of the object."""
    arguments = json.loads(call.arguments)
    names = [key for key, value in members.items() if value == call.name]
    holders = [key for key, value in members.items() if value == arguments]
    if len(names) != 1 or len(holders) != 1:
        return None
    keys = list(members)
    constants = {
        key: value
        for key, value in members.items()
        if isinstance(value, str) and key not in (names[0], holders[0]) and call.id not in value
    }
    # The template may have received a short id instead of the call's id.
    constants = {key: value for key, value in constants.items() if key != "id"}
    layouts: dict[Whitespace, tuple[str, str]] = {"compact": (", ", ": "), "tight": (",", ":")}
    # Arguments keep their text, so only the text around them shows the separators.
    shown = written.replace(call.arguments, '""')
    outline = {key: "" if key == holders[0] else value for key, value in members.items()}
    whitespace = next(
        (name for name, separators in layouts.items() if json.dumps(outline, separators=separators) == shown),
        "free",
    )
    return {
        "name_key": names[0],
        "arguments_key": holders[0],
        "name_first": keys.index(names[0]) < keys.index(holders[0]),
        "constants": tuple(constants.items()),
        "whitespace": whitespace,
    }


def _between(template: ChatTemplate, one: CalledTool, other: CalledTool) -> str | None:
    """Returns the text between the objects of two calls; None if only one call is possible."""
    text = _after_prompt(template, Message("assistant", "", tool_calls=(one, other)))
    first = _json_with(text, one) if text is not None else None
    if text is None or first is None:
        return None
    second = _json_with(text[first[1] :], other)
    return None if second is None else text[first[1] : first[1] + second[0]]


def _before(template: ChatTemplate, call: CalledTool, prose: str, begin: str) -> str:
    """Returns the text between prose and the calls after it."""
    text = _after_prompt(template, Message("assistant", prose, tool_calls=(call,)))
    written = "" if text is None else text.partition(prose)[2].partition(begin)[0]
    return written if not written.strip() else ""


def as_plain_messages(
    messages: Sequence[Message], tools: Sequence[ToolSpec], template: ChatTemplate
) -> tuple[Message, ...]:
    """Returns the conversation in messages that have only a content.

    Tools are described in the system turn. If there is none, it is added; if the template has no system
    turns, the description precedes the first content. Results become turns of the user. Consecutive results,
    and the user's text directly after them, share a turn, because many templates require alternating roles.
    """
    plain: list[Message] = []
    parts: list[list[Message]] = []  # the contents of each message, on lines
    is_answering = False
    for message in messages:
        content, role = message.content, message.role
        if message.role == "tool":
            shown = _after(RESULT_BEGIN, message)
            content, role = f"{shown.content}{RESULT_END}", "user"
            message = replace(message, images=shown.images)
        if message.tool_calls:
            content = _with_calls(message)
        said = Message(role, content, images=message.images)
        if is_answering and role == "user":
            parts[-1].append(said)
        else:
            plain.append(Message(role, "", message.generated))
            parts.append([said])
        is_answering = message.role == "tool"
    plain = [_on_lines(one, said) for one, said in zip(plain, parts, strict=True)]
    return tuple(_with_tools(plain, tools, template) if tools else plain)


def num_plain_turns(messages: Sequence[Message]) -> int:
    """Returns how many messages ``as_plain_messages`` makes of these, without one that it adds."""
    num_turns = 0
    is_answering = False
    for message in messages:
        num_turns += not (is_answering and message.role in ("user", "tool"))
        is_answering = message.role == "tool"
    return num_turns


def _after(text: str, message: Message) -> Message:
    """Returns the message with ``text`` before its content."""
    return replace(message, content=text + message.content, images=shift_images(message.images, len(text)))


def _on_lines(message: Message, said: Sequence[Message]) -> Message:
    """Returns the message with the contents of others, one on each line."""
    images: list[PlacedImage] = []
    num_chars = 0
    for line in said:
        images += shift_images(line.images, num_chars)
        num_chars += len(line.content) + 1
    content = "\n".join([line.content for line in said])
    return replace(message, content=content, images=tuple(images))


def _with_calls(message: Message) -> str:
    written: list[str] = []
    for call in message.tool_calls:
        name = json.dumps(call.name, ensure_ascii=False)
        written.append(f'{FALLBACK.begin}{{"name": {name}, "arguments": {call.arguments}}}{FALLBACK.end}')
    calls = (FALLBACK.between or "").join(written)
    return f"{message.content}{FALLBACK.before}{calls}" if message.content else calls


def _with_tools(plain: list[Message], tools: Sequence[ToolSpec], template: ChatTemplate) -> list[Message]:
    text = tool_description(tools)
    if plain and plain[0].role == "system":
        said = plain[0].content
        return [replace(plain[0], content=f"{said}\n\n{text}" if said else text), *plain[1:]]
    with_system = [Message("system", text), *plain]
    if not plain or takes_system(template):
        return with_system
    return [_after(f"{text}\n\n", plain[0]), *plain[1:]]


def takes_system(template: ChatTemplate) -> bool:
    """Whether a conversation may begin with a system turn."""
    try:
        template.render([Message("system", "x"), Message("user", "x")], add_generation_prompt=True)
    except NotSupported:
        return False
    return True


def tool_description(tools: Sequence[ToolSpec]) -> str:
    """Describes the tools, for templates that do not show them. Short, because models that need it are
    small."""
    lines = [
        json.dumps(
            {"name": tool.name, "description": tool.description, "parameters": tool.parameters},
            ensure_ascii=False,
        )
        for tool in tools
    ]
    how = f'{FALLBACK.begin}{{"name": ..., "arguments": {{...}}}}{FALLBACK.end}'
    return "\n".join(
        ["You can call these tools:", "<tools>", *lines, "</tools>", f"To call one, write {how}"]
    )
