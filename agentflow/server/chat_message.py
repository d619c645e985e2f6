"""A conversation as the chat template is given it: messages, the tool calls in them, and the tools."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool that the model may ask to have called. ``parameters``: the JSON schema of an object."""

    name: str
    description: str
    parameters: dict[str, Any]


@dataclass(frozen=True, slots=True)
class CalledTool:
    """A tool call of an assistant's turn. ``arguments``: a JSON object, as text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """One turn: who speaks and what. ``generated``: a model wrote some of it. ``tool_calls``: what an
    assistant asked for; a ``tool`` turn answers the call ``tool_call_id``, of the tool ``name``."""

    role: str
    content: str
    generated: bool = False
    tool_calls: tuple[CalledTool, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
