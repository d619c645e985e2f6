"""The events of a running program, as ``flow.stream`` and ``async for event in s`` yield them."""

from __future__ import annotations

from typing import Any

import msgspec

from agentflow.language.typed.tools import ToolCall
from agentflow.protocol.events import Usage


class TextDelta(msgspec.Struct, frozen=True):
    """More text of variable ``name`` in the state at ``path`` of the fork tree; of a reply, more prose.

    >>> async for event in flow.stream(judge, essay):
    ...     if isinstance(event, af.TextDelta) and event.path == ():  # of the root, not of its branches
    ...         print(event.name, event.text)
    grade A
    """

    path: tuple[int, ...]
    name: str
    text: str


class VariableDone(msgspec.Struct, frozen=True):
    """Variable ``name`` of the state at ``path`` is complete. ``value``: its text; of a reply, the prose.
    ``finish_reason``, ``usage`` (in tokens) and ``tool_calls`` are as in ``Variable``.

    >>> async for event in flow.stream(judge, essay):
    ...     if isinstance(event, af.VariableDone):
    ...         print(event.name, event.finish_reason)
    judgment eos
    judgment eos
    grade choice
    """

    path: tuple[int, ...]
    name: str
    value: str
    finish_reason: str
    usage: Usage
    tool_calls: tuple[ToolCall, ...] = ()


class RunDone(msgspec.Struct, frozen=True):
    """The program returned ``result``.

    >>> async for event in flow.stream(judge, essay):
    ...     if isinstance(event, af.RunDone):
    ...         print(event.result)
    A
    """

    result: Any


ProgramEvent = TextDelta | VariableDone | RunDone
