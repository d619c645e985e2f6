"""Events as a program's user sees them: text of every branch as it comes, values, the result."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import anyio
import msgspec

from agentflow.protocol.chat import CalledTool
from agentflow.protocol.events import Usage

if TYPE_CHECKING:
    from agentflow.language.variable import Variable


class TextDelta(msgspec.Struct, frozen=True):
    """More text of variable ``name`` in the state at ``path`` of the fork tree; of a reply, of its prose.

    >>> async for event in flow.stream(judge, essay):
    ...     if isinstance(event, af.TextDelta) and event.path == ():  # of the root, not of its branches
    ...         print(event.name, event.text)
    grade A
    """

    path: tuple[int, ...]
    name: str
    text: str


class VariableDone(msgspec.Struct, frozen=True):
    """Variable ``name`` of the state at ``path`` is complete. ``value``: its text, of a reply the prose.
    ``finish_reason``, ``usage`` (in tokens) and a reply's ``tool_calls``: as ``Variable`` has them.

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
    tool_calls: tuple[CalledTool, ...] = ()


class RunDone(msgspec.Struct, frozen=True):
    """The program returned. ``result``: what it returned.

    >>> async for event in flow.stream(judge, essay):
    ...     if isinstance(event, af.RunDone):
    ...         print(event.result)
    A
    """

    result: Any


ProgramEvent = TextDelta | VariableDone | RunDone


class EventStream:
    """An async iterator over the events of some variables. It holds no queue: what a slow reader
    missed arrives as one larger delta. ``is_over`` says whether nothing more can come. ``as_sent``: texts are
    the variables' notations (``agentflow.reply``)."""

    def __init__(self, is_over: Callable[[], bool], *, as_sent: bool = False) -> None:
        self._is_over = is_over
        self._as_sent = as_sent
        self._fresh: dict[int, Variable[Any]] = {}
        self._heard: dict[int, int] = {}
        self._changed = anyio.Event()

    def touch(self, variable: Variable[Any]) -> None:
        """``variable`` has news. For the run."""
        self._fresh[variable.id] = variable
        self.wake()

    def wake(self) -> None:
        """Something changed that the reader must look at. For the run."""
        self._changed.set()

    def __aiter__(self) -> EventStream:
        return self

    async def __anext__(self) -> TextDelta | VariableDone:
        while True:
            event = self._next()
            if event is not None:
                return event
            if self._is_over():
                raise StopAsyncIteration
            if self._changed.is_set():
                self._changed = anyio.Event()
            await self._changed.wait()

    def _next(self) -> TextDelta | VariableDone | None:
        while self._fresh:
            var_id, variable = next(iter(self._fresh.items()))
            heard = self._heard.get(var_id, 0)
            text = variable.notation if self._as_sent else variable.text
            if len(text) > heard:
                self._heard[var_id] = len(text)
                if not variable.is_done:
                    del self._fresh[var_id]
                return TextDelta(variable.state.path, variable.name, text[heard:])
            del self._fresh[var_id]
            if variable.has_value:
                self._heard.pop(var_id, None)
                path, end, usage = variable.state.path, variable.finish_reason, variable.usage
                return VariableDone(path, variable.name, text, end, usage, variable.tool_calls)
        return None
