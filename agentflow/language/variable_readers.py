"""The readers of one variable: of its text as it comes, and of the parts of its value.

They hold no queue: a slow reader gets one larger step. Not generators: they may be left at any point.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from agentflow.language.partial_value import NothingYet

if TYPE_CHECKING:
    from agentflow.language.variable import Variable

_NOTHING = object()


class TextReader(AsyncIterator[str]):
    """Gives the text, delta by delta, from the start."""

    def __init__(self, variable: Variable[Any]) -> None:
        self._variable = variable
        self._num_heard = 0

    async def __anext__(self) -> str:
        variable = self._variable
        while len(variable.text) <= self._num_heard:
            if variable.is_done:
                variable.raise_failure()
                raise StopAsyncIteration
            await variable.change()
        delta = variable.text[self._num_heard :]
        self._num_heard += len(delta)
        return delta


class PartialReader(AsyncIterator[Any]):
    """Gives the value as far as it is there (``Variable.so_far``), each time further than before; the whole
    value is the last."""

    def __init__(self, variable: Variable[Any]) -> None:
        self._variable = variable
        self._num_heard = 0
        self._shown: Any = _NOTHING
        self._is_over = False

    async def __anext__(self) -> Any:
        variable = self._variable
        while not self._is_over:
            if len(variable.notation) > self._num_heard:
                self._num_heard = len(variable.notation)
                try:
                    partial = variable.so_far()
                except NothingYet:
                    continue
                if self._is_further(partial):
                    return partial
            elif not variable.is_done:
                await variable.change()
            else:
                self._is_over = True
                variable.value_now()  # raises for a text that is no value, or a part of one
                if self._is_further(variable.so_far(is_whole=True)):
                    return self._shown
        raise StopAsyncIteration

    def _is_further(self, value: Any) -> bool:
        is_further = self._shown is _NOTHING or bool(value != self._shown)
        self._shown = value
        return is_further
