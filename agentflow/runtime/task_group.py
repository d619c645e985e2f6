"""Additions to anyio: a task group that raises a single error without an exception group around it, and calls
into the event loop from other threads or from the garbage collector."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio
from anyio.abc import TaskGroup

CallInLoop = Callable[[Callable[[], object]], object]


def loop_caller() -> CallInLoop:
    """A function that schedules calls in this event loop and may be called from other threads."""
    trio = sys.modules.get("trio")  # imported wherever trio runs
    if trio is not None:
        try:
            call_soon: CallInLoop = trio.lowlevel.current_trio_token().run_sync_soon
        except RuntimeError:
            pass  # the loop is asyncio's
        else:
            return call_soon
    return asyncio.get_running_loop().call_soon_threadsafe


@asynccontextmanager
async def open_task_group() -> AsyncIterator[TaskGroup]:
    """A task group. If exactly one error ends it, that error is raised itself, not in a group."""
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
    """The error itself, or the first one of a group.

    >>> first_of(ExceptionGroup("two tasks failed", [OSError("a"), ValueError("b")]))
    OSError('a')
    """
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error
