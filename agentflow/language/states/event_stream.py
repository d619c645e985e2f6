"""The events of a running program, and the streams of them that ``flow.stream`` and ``async for event in s``
iterate over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import anyio
import msgspec

from agentflow.language.typed.json_form import JsonRecord
from agentflow.language.typed.tools import ToolCall
from agentflow.protocol.events import Usage, Value
from agentflow.protocol.growing_text import GrowingText


class TextDelta(JsonRecord, msgspec.Struct, frozen=True):
    """More text of variable ``name`` in the state at ``path`` of the fork tree; of a reply, more prose.

    >>> async for event in flow.stream(judge, essay):
    ...     if isinstance(event, af.TextDelta) and event.path == ():  # of the root, not of its branches
    ...         print(event.name, event.text)
    grade A
    """

    path: tuple[int, ...]
    name: str
    text: str


class VariableDone(JsonRecord, msgspec.Struct, frozen=True):
    """Variable ``name`` of the state at ``path`` is complete. ``value``: its text; of a reply, the prose.
    ``finish_reason``, ``usage`` (in tokens) and ``tool_calls`` are as in ``Variable``. ``model``: the
    one that answered, if the session chose among several (``af.Fallback``).

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
    model: str = ""


class RunDone(JsonRecord, msgspec.Struct, frozen=True):
    """The program returned ``result``.

    >>> async for event in flow.stream(judge, essay):
    ...     if isinstance(event, af.RunDone):
    ...         print(event.result)
    A
    """

    result: Any


ProgramEvent = TextDelta | VariableDone | RunDone


class StreamedVariable(Protocol):
    """The members of a ``VariableNode`` that a stream reads."""

    id: int
    name: str
    state: Any
    grown: GrowingText

    @property
    def notation(self) -> str:
        """The text received so far; of a reply, with its tool calls."""

    @property
    def is_done(self) -> bool:
        """Whether it has a value or has failed."""

    @property
    def has_value(self) -> bool:
        """Whether it is complete."""

    @property
    def text(self) -> str:
        """The text received so far."""

    def text_from(self, at: int) -> str:
        """``text`` from character ``at`` on."""

    @property
    def end(self) -> Value:
        """The event that completed it."""

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The calls of a reply."""

    async def settled(self) -> None:
        """Waits until it is done."""

    def raise_failure(self) -> None:
        """Raises the error for which it has no value, if there is one."""


class StreamedState(Protocol):
    """The members of a ``StateNode`` that a stream reads."""

    @property
    def shown(self) -> Sequence[StreamedVariable]:
        """The program's own variables."""


class EventStream:
    """An async iterator over the events of several variables. It has no queue: a slow reader gets fewer and
    larger deltas. ``is_over``: whether no further event can come. ``raw``: the texts of replies are their
    notations (``VariableNode.notation``)."""

    def __init__(self, is_over: Callable[[], bool], *, raw: bool = False) -> None:
        self._is_over = is_over
        self._is_raw = raw
        self._changed_variables: dict[int, StreamedVariable] = {}
        self._num_read: dict[int, int] = {}  # variable → characters
        self._changed = anyio.Event()

    def touch(self, variable: StreamedVariable) -> None:
        """The variable has changed."""
        self._changed_variables[variable.id] = variable
        self.wake()

    def wake(self) -> None:
        """Makes the reader check for events, and whether the stream is over."""
        self._changed.set()

    async def change(self) -> None:
        """Waits for the next change after the call."""
        if self._changed.is_set():
            self._changed = anyio.Event()
        await self._changed.wait()

    def __aiter__(self) -> EventStream:
        return self

    async def __anext__(self) -> TextDelta | VariableDone:
        while True:
            event = self._next()
            if event is not None:
                return event
            if self._is_over():
                raise StopAsyncIteration
            await self.change()

    def _next(self) -> TextDelta | VariableDone | None:
        while self._changed_variables:
            var_id, variable = next(iter(self._changed_variables.items()))
            num_read = self._num_read.get(var_id, 0)
            delta = variable.grown.part(num_read) if self._is_raw else variable.text_from(num_read)
            if delta:
                self._num_read[var_id] = num_read + len(delta)
                if not variable.is_done:
                    del self._changed_variables[var_id]
                return TextDelta(variable.state.path, variable.name, delta)
            del self._changed_variables[var_id]
            if variable.has_value:
                self._num_read.pop(var_id, None)
                path, end = variable.state.path, variable.end
                text = variable.notation if self._is_raw else variable.text
                calls = variable.tool_calls
                return VariableDone(path, variable.name, text, end.finish_reason, end.usage, calls, end.model)
        return None


class StateStream(EventStream):
    """The events of one state. Raises at its end the first failure of the state's variables."""

    def __init__(self, state: StreamedState) -> None:
        super().__init__(lambda: all(variable.is_done for variable in state.shown))
        self._state = state
        self._has_ended = False

    def touch(self, variable: StreamedVariable) -> None:
        if variable.state is self._state:
            super().touch(variable)

    async def __anext__(self) -> TextDelta | VariableDone:
        try:
            return await super().__anext__()
        except StopAsyncIteration:
            if not self._has_ended:
                self._has_ended = True
                for variable in self._state.shown:
                    await variable.settled()
                    variable.raise_failure()
            raise
