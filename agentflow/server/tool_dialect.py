"""In which form a chat template wants tool calls, found by giving it one in each form."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import TypeAlias

from agentflow.errors import NotSupported
from agentflow.server.chat_message import CalledTool, Message
from agentflow.server.chat_values import ToolDialect

RenderIn: TypeAlias = Callable[[Sequence[Message], ToolDialect], str]
"""Renders messages, or raises ``NotSupported``."""

_DIALECTS = tuple(
    ToolDialect(arguments, short_ids) for short_ids in (False, True) for arguments in ("text", "object")
)


def find_dialect(render: RenderIn) -> ToolDialect:
    """The first form in which a call is shown as it was given; arguments as text come before those as an
    object, as a template that takes both leaves a text alone. Where no form is, that of most templates."""
    for dialect in _DIALECTS:
        if _shows_calls(render, dialect):
            return dialect
    return ToolDialect()


def _shows_calls(render: RenderIn, dialect: ToolDialect) -> bool:
    name, key, value = [f"n{secrets.token_hex(8)}" for _ in range(3)]
    # No writer of JSON puts white space so: what is shown so was left alone.
    arguments = f'{{"{key}" :  "{value}"}}'
    call = CalledTool("call_" + secrets.token_hex(8), name, arguments)
    asked = [Message("user", "?"), Message("assistant", "", tool_calls=(call,))]
    answered = [*asked, Message("tool", "!", tool_call_id=call.id, name=name)]
    for messages in (asked, answered):
        try:
            text = render(messages, dialect)
        except NotSupported:
            continue
        if name not in text:
            return False
        if arguments in text:
            return True
        # A dictionary that a template takes apart member by member is shown too; but text as Python
        # writes a dictionary, or as JSON writes a string, is not what the model has seen.
        is_misread = f"'{key}'" in text or f'\\\\"{key}' in text or f'\\"{key}' in text
        return dialect.arguments == "object" and key in text and not is_misread
    return False
