"""Tools for a model whose chat template knows of none: told in the system turn, called and answered in
contents, in the notation of ``tool_format.FALLBACK``."""

from __future__ import annotations

import json
from collections.abc import Sequence

from msgspec.structs import replace

from agentflow.engine.text.chat_template import ChatTemplate
from agentflow.engine.text.chat_values import read_arguments
from agentflow.engine.text.tool_format import FALLBACK
from agentflow.errors import NotSupported
from agentflow.protocol.chat import Message, ToolSpec


def as_plain_messages(
    messages: Sequence[Message], tools: Sequence[ToolSpec], template: ChatTemplate
) -> tuple[Message, ...]:
    """The same conversation in messages that have nothing but a content.

    Tools are told in the system turn; where there is none one is added, or, where the template takes none,
    in front of the first turn's content. Results are turns of the user; several in a row are one, and what
    the user says right after them stands in it too, as many templates want the roles to alternate.
    """
    plain: list[Message] = []
    parts: list[list[str]] = []  # of each of them the lines of its content, put together once
    is_answering = False
    for message in messages:
        content = message.content
        if message.role == "tool":
            content, role = f"<tool_response>\n{content}\n</tool_response>", "user"
        else:
            role = message.role
        if message.tool_calls:
            content = _with_calls(message)
        if is_answering and role == "user":
            parts[-1].append(content)
        else:
            plain.append(Message(role, "", message.generated))
            parts.append([content])
        is_answering = message.role == "tool"
    plain = [replace(one, content="\n".join(said)) for one, said in zip(plain, parts, strict=True)]
    return tuple(_told(plain, tools, template) if tools else plain)


def _with_calls(message: Message) -> str:
    written: list[str] = []
    for call in message.tool_calls:
        read_arguments(call)  # refused like under other templates
        name = json.dumps(call.name, ensure_ascii=False)
        written.append(f'{FALLBACK.begin}{{"name": {name}, "arguments": {call.arguments}}}{FALLBACK.end}')
    calls = (FALLBACK.between or "").join(written)
    return f"{message.content}{FALLBACK.before}{calls}" if message.content else calls


def _told(plain: list[Message], tools: Sequence[ToolSpec], template: ChatTemplate) -> list[Message]:
    text = _description(tools)
    if plain and plain[0].role == "system":
        said = plain[0].content
        return [replace(plain[0], content=f"{said}\n\n{text}" if said else text), *plain[1:]]
    with_system = [Message("system", text), *plain]
    if not plain or _takes_system(template):
        return with_system
    return [replace(plain[0], content=f"{text}\n\n{plain[0].content}"), *plain[1:]]


def _takes_system(template: ChatTemplate) -> bool:
    try:
        template.render([Message("system", "x"), Message("user", "x")], add_generation_prompt=True)
    except NotSupported:
        return False
    return True


def _description(tools: Sequence[ToolSpec]) -> str:
    """Short: the models that need it are small."""
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
