"""In which form a chat template wants tool calls, found by giving it one in each form."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import TypeAlias

from agentflow.engine.text.chat_values import ToolDialect
from agentflow.errors import NotSupported
from agentflow.protocol.chat import CalledTool, Message

RenderIn: TypeAlias = Callable[[Sequence[Message], ToolDialect], str]
"""Renders messages, or raises ``NotSupported``."""

_DIALECTS = tuple(
    ToolDialect(arguments, short_ids) for short_ids in (False, True) for arguments in ("text", "object")
)


def find_dialect(render: RenderIn) -> ToolDialect:
    """The first form in which a call is shown as it was given; arguments as text come before those as an
    object, as a template that takes both leaves a text alone. Where no form is, that of most templates."""
    # A template may refuse a call without its result, or (one that only calls are shown by) any result.
    for is_answered in (True, False):
        for dialect in _DIALECTS:
            # Ids are the clients' own: some template wants at least nine characters, another one just nine.
            if all(
                _shows_calls(render, dialect, call_id, is_answered) for call_id in ("1", "call_0123456789")
            ):
                return dialect
    return ToolDialect()


def _shows_calls(render: RenderIn, dialect: ToolDialect, call_id: str, is_answered: bool) -> bool:
    name, key, value = [f"n{secrets.token_hex(8)}" for _ in range(3)]
    # No writer of JSON puts white space so: what is shown so was left alone.
    arguments = f'{{"{key}" :  "{value}"}}'
    call = CalledTool(call_id, name, arguments)
    messages = [Message("user", "?"), Message("assistant", "", tool_calls=(call,))]
    if is_answered:
        messages.append(Message("tool", "!", tool_call_id=call_id, name=name))
    try:
        text = render(messages, dialect)
    except NotSupported:
        return False
    if name not in text or arguments in text:
        return name in text
    # A dictionary that a template takes apart member by member is shown too; but text as Python writes a
    # dictionary, or as JSON writes a string, is not what the model has seen.
    is_misread = f"'{key}'" in text or f'\\"{key}' in text
    return dialect.arguments == "object" and key in text and not is_misread
