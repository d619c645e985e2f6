"""An anyio task group that raises a lone error as itself, not inside a group of one.

Whoever uses a session should meet the error that happened, not the machinery around it.

How to get something called in the event loop from a place that is not in it: another thread, or the
garbage collector.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio
from anyio.abc import TaskGroup

CallInLoop = Callable[[Callable[[], object]], object]


def loop_caller() -> CallInLoop:
    """A function that other threads may call to have something called in this event loop."""
    trio = sys.modules.get("trio")  # where trio runs, somebody has imported it
    if trio is not None:
        try:
            call_soon: CallInLoop = trio.lowlevel.current_trio_token().run_sync_soon
        except RuntimeError:
            pass  # another loop runs
        else:
            return call_soon
    return asyncio.get_running_loop().call_soon_threadsafe


@asynccontextmanager
async def open_task_group() -> AsyncIterator[TaskGroup]:
    """A task group; when it ends with exactly one error, that error is raised."""
    lone: BaseException
    try:
        async with anyio.create_task_group() as group:
            yield group
        return
    except BaseExceptionGroup as error:
        lone = error
        while isinstance(lone, BaseExceptionGroup) and len(lone.exceptions) == 1:
            lone = lone.exceptions[0]
    raise lone from lone.__cause__


def first_of(error: Exception) -> Exception:
    """The error itself, or of a group of them the first: for one who can be told only one.

    >>> first_of(ExceptionGroup("two tasks failed", [OSError("a"), ValueError("b")]))
    OSError('a')
    """
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error
