"""Which tasks append to a state: two that do so at the same time would leave its order to chance."""

from __future__ import annotations

import asyncio
import sys
import weakref
from types import CoroutineType
from typing import Any

from agentflow.errors import ConcurrentAppend


class Appenders:
    """One task may append after another, and a task may hand the state to a child and go on when that
    has ended. What is refused is a task that comes back while one that appended since is still alive."""

    def __init__(self) -> None:
        # Coroutines of tasks, in the order of their last append, without repetition.
        self._last: list[weakref.ref[Any]] = []

    def check(self) -> None:
        """The running task appends now."""
        now = _running()
        if now is None or (self._last and self._last[-1]() is now):
            return
        alive = [ref for ref in self._last if not _has_ended(ref())]
        if any(ref() is now for ref in alive):
            raise ConcurrentAppend(
                "two tasks append to this state at the same time, so that the order of what they append is "
                "chance: fork it, and give each task a branch"
            )
        self._last = [*alive, weakref.ref(now)]


def _running() -> object | None:
    """The coroutine of the running task; None outside of all event loops, as in a trace."""
    try:
        task: Any = asyncio.current_task()
        return None if task is None else _object(task.get_coro())
    except RuntimeError:  # no asyncio here
        trio = sys.modules.get("trio")
    try:
        return None if trio is None else _object(trio.lowlevel.current_task().coro)
    except RuntimeError:
        return None


def _object(coroutine: object) -> object:
    return coroutine


def _has_ended(coroutine: object | None) -> bool:
    if coroutine is None:
        return True
    return isinstance(coroutine, CoroutineType) and coroutine.cr_frame is None
