"""Runs code of the user so that only its own call fails, however it ends.

Tools, approval hooks, programs, contenders, inputs, mapped functions, keys, validators, judges and scripts
are code of the user. An ``Exception`` that leaves it is a failure that its caller handles. Other endings
would cancel unrelated tasks, or hang the tasks that wait for the call: the ``CancelledError`` of a job that
was cancelled elsewhere, ``sys.exit()``, a ``StopIteration``. ``UserCode`` converts them to ``RunFailed``.
Three endings concern more than the call, and pass: the cancellation of the call's own task, an exception of a
signal handler (such as Ctrl-C), and the closing of a coroutine.
"""

from __future__ import annotations

import contextvars
import dis
import inspect
import math
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from types import CodeType, TracebackType
from typing import Any, Final

import anyio
import anyio.lowlevel
import anyio.to_thread

from agentflow.errors import RunFailed, shown_error
from agentflow.runtime.task_group import cancel_requests, forget_loop, loop_caller


class UserCode:
    """A block that runs code of the user, in the task that enters it. ``what``: its name in messages.

    >>> with UserCode("tool 'weather'"):
    ...     sys.exit(3)
    Traceback (most recent call last):
    RunFailed: tool 'weather' raised SystemExit(3)
    """

    __slots__ = ("_num_cancelled", "_task", "_what")

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        self._task = _current_task()
        self._num_cancelled = cancel_requests()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or not _is_odd(error):
            return
        odd = [one for one in _leaves(error) if _is_odd(one)]
        passing = [one for one in odd if self._concerns_others(one)]
        if not passing:
            raise _failure(self._what, error) from error
        if len(passing) < len(odd):  # of a group: the others are to end nothing
            raise max(passing, key=lambda one: isinstance(one, KeyboardInterrupt | SystemExit))

    def _concerns_others(self, error: BaseException) -> bool:
        if isinstance(error, GeneratorExit):  # thrown by close(), which another task or none calls
            return self._task is None or _current_task() != self._task
        if isinstance(error, KeyboardInterrupt | SystemExit):
            return _is_of_signal(error)
        if self._task is None or not isinstance(error, anyio.get_cancelled_exc_class()):
            return False
        return cancel_requests() != self._num_cancelled or anyio.current_effective_deadline() == -math.inf


def _failure(what: str, error: BaseException) -> RunFailed:
    """The error of a call whose code ended with ``error``."""
    return RunFailed(f"{what} raised {shown_error(error)}")


def _is_async(function: Callable[..., Any]) -> bool:
    """Whether calling it returns a coroutine: an async function, or an object with an async ``__call__``."""
    while isinstance(function, partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004  # of an object with an async __call__
    )


async def call(
    what: str, limiter: anyio.CapacityLimiter, function: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    """Calls a function of the user: an async one here, a plain one in a thread.

    If the call is cancelled, the thread continues. Neither the caller nor the end of the process waits for
    it.

    Args:
        what: The function's name in messages.
        limiter: Limits the number of threads.
        function: Called with ``args`` and ``kwargs``.

    Returns:
        The function's result, awaited.

    Raises:
        Exception: The function's exception; ``RunFailed`` if it ended in another way.
    """
    with UserCode(what):
        if _is_async(function):
            return await function(*args, **kwargs)
        result = await _in_thread(what, partial(function, *args, **kwargs), limiter)
        return await result if inspect.isawaitable(result) else result


async def _in_thread(what: str, function: Callable[[], Any], limiter: anyio.CapacityLimiter) -> Any:
    results: list[Any] = []
    failures: list[Exception] = []

    def work() -> None:
        try:
            results.append(function())
        except BaseException as error:
            # No signal is handled in this thread, so that nothing here concerns others.
            failures.append(_as_exception(what, error))

    if cancel_requests() is None:  # on trio, whose threads do not keep the process alive
        await anyio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=limiter)
    else:
        async with limiter:
            await _in_daemon_thread(work)
    if not failures:
        return results[0]
    try:
        raise failures[0]
    finally:
        failures.clear()  # its traceback holds this frame


async def _in_daemon_thread(work: Callable[[], None]) -> None:
    """Like ``anyio.to_thread.run_sync`` on asyncio, whose threads the end of the process waits for."""
    call_in_loop, ended = loop_caller(), anyio.Event()
    current_token = getattr(anyio.lowlevel, "current_token", None)
    token = None if current_token is None else current_token()

    def run() -> None:
        forget_loop()
        with suppress(AttributeError, ImportError):  # versions of anyio differ here
            from anyio._core._eventloop import threadlocals

            threadlocals.current_token = token  # for anyio.from_thread
        work()
        with suppress(RuntimeError):  # the loop has ended
            call_in_loop(ended.set)

    context = contextvars.copy_context()
    threading.Thread(target=context.run, args=(run,), name="agentflow tool", daemon=True).start()
    await ended.wait()


def _as_exception(what: str, error: BaseException) -> Exception:
    if isinstance(error, Exception) and not _is_odd(error):
        return error
    failure = _failure(what, error)
    failure.__cause__ = error
    return failure


def _is_odd(error: BaseException) -> bool:
    """Whether the error would have another meaning to the code that it passes through."""
    return not isinstance(error, Exception) or isinstance(error, StopIteration | StopAsyncIteration)


def _leaves(error: BaseException) -> Iterator[BaseException]:
    pending = [error]
    while pending:
        one = pending.pop()
        if isinstance(one, BaseExceptionGroup):
            pending += one.exceptions
        else:
            yield one


_RAISE: Final = dis.opmap["RAISE_VARARGS"]


def _is_of_signal(error: BaseException) -> bool:
    """Whether a signal handler raised it; such a handler may run at any line of the program."""
    if threading.current_thread() is not threading.main_thread():
        return False
    handlers = {_find_code(signal.getsignal(number)) for number in signal.valid_signals()}
    trace, is_raised = error.__traceback__, True
    while trace is not None:
        code = trace.tb_frame.f_code
        if code in handlers:
            return True
        is_raised = code.co_code[trace.tb_lasti] == _RAISE
        trace = trace.tb_next
    # The default handler of Ctrl-C has no frame, and no statement raises its exception.
    return isinstance(error, KeyboardInterrupt) and not is_raised


def _find_code(handler: Any) -> CodeType | None:
    while isinstance(handler, partial):
        handler = handler.func
    return getattr(handler, "__code__", None)  # also of a method


def _current_task() -> int | None:
    try:
        return anyio.get_current_task().id
    except Exception:  # none runs here; libraries differ in how they say so
        return None
