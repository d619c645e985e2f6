"""A conversation as chat APIs have it: whole messages, the tool calls in them, the tools, and which of those
the next answer may call."""

from __future__ import annotations

from collections import Counter
from typing import Any, Final, Literal, Self

import msgspec

from agentflow.errors import BadArgument

ROLES: Final = ("system", "user", "assistant", "tool")


class ToolSpec(msgspec.Struct, frozen=True):
    """A tool that the model may ask to have called. ``parameters``: the JSON schema of an object."""

    name: str
    description: str
    parameters: dict[str, Any]


class CalledTool(msgspec.Struct, frozen=True):
    """A tool call of an assistant's turn. ``arguments``: a JSON object, as text.

    >>> call = af.CalledTool("call_1", "weather", '{"city": "Oslo"}')
    >>> json.loads(call.arguments)
    {'city': 'Oslo'}
    """

    id: str
    name: str
    arguments: str


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """One turn: who speaks and what. ``generated``: a model wrote some of it. ``tool_calls``: what an
    assistant asked for; a ``tool`` turn answers the call ``tool_call_id``, of the tool ``name``.

    >>> question = af.Message("user", "What do plants do?")
    >>> async with flow.state() as s:
    ...     s += af.conversation([question]) + af.gen("answer")
    """

    role: str
    content: str
    generated: bool = False
    tool_calls: tuple[CalledTool, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """As OpenAI's API has it, and ``af.conversation`` takes it.

        >>> af.Message("tool", "12 degrees", tool_call_id="call_1").as_dict()
        {'role': 'tool', 'content': '12 degrees', 'tool_call_id': 'call_1'}
        """
        shown: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.tool_calls:
            shown["tool_calls"] = [
                {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
                for c in self.tool_calls
            ]
        named = {"tool_call_id": self.tool_call_id, "name": self.name}
        return shown | {key: value for key, value in named.items() if value is not None}


class ToolChoice(msgspec.Struct, frozen=True, omit_defaults=True):
    """``auto``: the model may call tools, and writes what it likes beside them. ``required``: it calls at
    least one, and writes nothing else. ``none``: it calls none, though it is told of them. ``name``: with
    ``required``, this tool. ``parallel``: it may call several."""

    mode: Literal["auto", "required", "none"] = "auto"
    name: str | None = None
    parallel: bool = True


FREE_CHOICE = ToolChoice()
"""Where nobody says anything."""


class Conversation(msgspec.Struct, frozen=True, omit_defaults=True):
    """``messages``: after them the assistant speaks; a last turn of its own is not ended, but goes on.
    ``tools``: what it is told of. ``choice``: which of them it may call."""

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()
    choice: ToolChoice = FREE_CHOICE

    def check(self) -> Self:
        """Itself, or ``BadArgument`` for a message that nobody could have said."""
        for message in self.messages:
            if message.role not in ROLES:
                known = ", ".join(ROLES)
                raise BadArgument(f"conversation: there is no role {message.role!r} (there are: {known})")
            if message.tool_calls and message.role != "assistant":
                raise BadArgument(
                    f"conversation: a {message.role} message calls no tools: an assistant's does"
                )
        names = [tool.name for tool in self.tools]
        if len(set(names)) < len(names):
            twice = next(name for name, count in Counter(names).items() if count > 1)
            raise BadArgument(f"conversation: two tools have the name {twice!r}")
        if self.choice.mode == "required" and not names:
            raise BadArgument("conversation: a tool has to be called, and there are no tools")
        if self.choice.name is not None and self.choice.name not in names:
            known = ", ".join(map(repr, names))
            raise BadArgument(f"conversation: there is no tool {self.choice.name!r} (there are: {known})")
        return self
