"""Additions to anyio: a task group that raises a single error without an exception group, and calls
into the event loop from other threads or from the garbage collector."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import anyio
from anyio.abc import TaskGroup

CallInLoop = Callable[[Callable[[], object]], object]


def running_loop() -> object | None:
    """The event loop that runs in this thread, asyncio's or trio's; None if none does. Unlike anyio and
    sniffio, it ignores context variables, which threads may have from the task that started them."""
    trio = sys.modules.get("trio")  # imported wherever trio runs
    if trio is not None:
        with suppress(RuntimeError):
            token: object = trio.lowlevel.current_trio_token()
            return token
    with suppress(RuntimeError):
        return asyncio.get_running_loop()
    return None


def loop_getter() -> Callable[[], object]:
    """A function that returns the running event loop of the current library, asyncio or trio, and raises
    ``RuntimeError`` where none runs."""
    trio = sys.modules.get("trio")
    if trio is not None:
        with suppress(RuntimeError):
            trio.lowlevel.current_trio_token()
            get: Callable[[], object] = trio.lowlevel.current_trio_token
            return get
    return asyncio.get_running_loop


def forget_loop() -> None:
    """Lets anyio start an event loop in this thread, whose context may come from a task of another loop."""
    with suppress(AttributeError, ImportError):  # versions of anyio differ here
        from anyio._core._eventloop import set_current_async_library

        set_current_async_library(None)


def adopt_callback() -> None:
    """Tells anyio which library runs, for a callback of asyncio's loop, such as a line that is typed into
    ``python -m asyncio``: it runs in no task, by which anyio would know."""
    with suppress(AttributeError, ImportError):  # versions of anyio differ here
        from anyio._core._eventloop import set_current_async_library

        set_current_async_library("asyncio")


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
    """A task group. If exactly one error ends it, that error is raised itself, not in a group, unless it has
    stopped asyncio's event loop already."""
    before: int | None = None
    failure: BaseException | None = None
    lone: BaseException
    try:
        async with anyio.create_task_group() as group:
            try:
                yield group
            except anyio.get_cancelled_exc_class():
                raise
            except BaseException as error:
                before, failure = cancel_requests(), error
                raise
            before = cancel_requests()
        return
    except BaseExceptionGroup as error:
        lone = error
        while isinstance(lone, BaseExceptionGroup) and len(lone.exceptions) == 1:
            lone = lone.exceptions[0]
        is_of_task = lone is not failure and cancel_requests() is not None
        if is_of_task and isinstance(lone, KeyboardInterrupt | SystemExit):
            raise  # by itself, it would stop asyncio's loop again, before all blocks are left
    except anyio.get_cancelled_exc_class():
        if before is None or cancel_requests() != before:
            raise
        # Nothing else cancelled this task while the group ended, so this is the group's own cancellation.
        # anyio takes it for another's: up to Python 3.12 a failed asyncio.TaskGroup in the block leaves
        # Task.cancelling() one too high.
        if failure is None:
            return
        lone = failure
    raise lone from lone.__cause__


def cancel_requests() -> int | None:
    """The number of cancellations that this task has received and that were not revoked. None outside
    asyncio."""
    try:
        task = asyncio.current_task()
    except RuntimeError:
        return None
    if task is None:
        return None
    # ``cancelling()`` also counts one that the next await will raise, such as Ctrl-C while the task runs.
    return task.cancelling() - bool(getattr(task, "_must_cancel", False))


def first_error(error: Exception) -> Exception:
    """The error itself, or the first one of a group.

    >>> first_error(ExceptionGroup("two tasks failed", [OSError("a"), ValueError("b")]))
    OSError('a')
    """
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error
