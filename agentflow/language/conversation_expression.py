"""``conversation``: a state begins with messages as chat APIs have them, and tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from agentflow.errors import BadArgument
from agentflow.language.expressions import ConversationExpression, tuple_of
from agentflow.language.tool_call import Tool, spec_of
from agentflow.protocol.chat import CalledTool, Conversation, Message, ToolChoice, ToolSpec
from agentflow.protocol.op_checks import check_types

MODES = ("auto", "required", "none")


def conversation(
    messages: Sequence[Message | Mapping[str, Any]],
    *,
    tools: Sequence[Tool | ToolSpec] = (),
    choice: str | ToolChoice = "auto",
    parallel: bool = True,
) -> ConversationExpression:
    """A whole conversation; the assistant's turn is open after it, or goes on where the last message is the
    assistant's own. It begins a state: nothing stands before it. ``gen`` or ``reply`` comes next.

    ``messages``: as OpenAI's API has them, with the ``tool_calls`` of an assistant and the results of tools,
    or ``af.Message``. What the model has said before is found again as the tokens that it generated.
    ``tools``: what it is told of: functions with annotated parameters, or their schemas. ``choice``: whether
    an ``af.reply`` may call them: ``"auto"``, ``"required"``, ``"none"``, or the name of the one that it has
    to call; ``parallel``: several at once.

    >>> async with flow.state() as s:
    ...     s += af.conversation([{"role": "user", "content": "What do plants do?"}])
    ...     s += af.reply("answer", max_tokens=32)
    ...     print((await s["answer"]).text)
    Plants turn light into sugar.
    """
    told = tuple([_message(message) for message in tuple_of(messages, "conversation", "messages")])
    given = tuple_of(tools, "conversation: tools", "functions or schemas")
    specs = tuple([tool if isinstance(tool, ToolSpec) else spec_of(tool) for tool in given])
    if not isinstance(choice, ToolChoice):
        choice = ToolChoice(choice) if choice in MODES else ToolChoice("required", choice)  # type: ignore[arg-type]
        choice = msgspec.structs.replace(choice, parallel=parallel)
    whole = Conversation(told, specs, choice)
    check_types(whole)
    return ConversationExpression(whole.check())


class _Function(msgspec.Struct):
    name: str
    arguments: str


class _Call(msgspec.Struct):
    id: str
    function: _Function


class _Asked(msgspec.Struct, forbid_unknown_fields=True):
    """A message as OpenAI's API has it, text only."""

    role: str
    content: str | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None
    name: str | None = None


def _message(message: object) -> Message:
    if not isinstance(message, Message):
        try:
            asked = msgspec.convert(message, _Asked)
        except ValueError as error:  # also of half a character in a name
            raise BadArgument(f"conversation: {message!r:.200} is no message: {error}") from None
        calls = [CalledTool(c.id, c.function.name, c.function.arguments) for c in asked.tool_calls or ()]
        message = Message(
            asked.role,
            asked.content or "",
            tool_calls=tuple(calls),
            tool_call_id=asked.tool_call_id,
            name=asked.name,
        )
    return message
