"""Which tasks append to a state: two that do so at the same time would leave its order to chance."""

from __future__ import annotations

import asyncio
import sys
import weakref
from contextlib import suppress
from types import CoroutineType, GeneratorType
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
        if alive and alive[-1]() is now:  # those that appended since have ended
            self._last = alive
            return
        if any(ref() is now for ref in alive):
            raise ConcurrentAppend(
                "two tasks append to this state at the same time, so that the order of what they append is "
                "chance: fork it, and give each task a branch"
            )
        self._last = [*alive, weakref.ref(now)]


def _running() -> object | None:
    """The coroutine of the running task."""
    with suppress(RuntimeError):  # no asyncio here
        task: Any = asyncio.current_task()
        return None if task is None else task.get_coro()
    trio = sys.modules.get("trio")
    if trio is not None:
        with suppress(RuntimeError):  # no trio either
            return trio.lowlevel.current_task().coro  # type: ignore[no-any-return]
    raise ConcurrentAppend(
        "this thread has no event loop: append from the task that runs the program "
        "(from a worker thread by anyio.from_thread.run_sync)"
    )


def _has_ended(coroutine: object | None) -> bool:
    """Whether its task has. Of other kinds than Python's own nothing is known: they are not accused."""
    if isinstance(coroutine, CoroutineType):
        return coroutine.cr_frame is None
    return not isinstance(coroutine, GeneratorType) or coroutine.gi_frame is None
