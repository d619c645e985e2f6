"""An event loop in a background thread, for frameworks that have no event loop or start a new one per call.

``BackgroundLoop`` runs coroutine functions and asynchronous generators for callers in any thread: blocking
(``run``, ``stream``), or from another event loop (``arun``, ``astream``). Cancelling or closing the caller's
side cancels the task. Items are passed in a ``Mailbox``, which wakes its reader once for any number of items.

A call gets the OpenTelemetry context of its caller, so that its spans are in the caller's trace, and no other
context variables. At most ``MAX_THREADS`` idle loops keep running: beyond that, the least recently used one
ends, and starts again with its next call.

anyio's ``BlockingPortal`` does not fit, because it blocks the calling thread for a round trip per call, and a
caller may itself be an event loop with thousands of calls to start.
"""

from __future__ import annotations

import asyncio
import atexit
import contextvars
import itertools
import os
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator
from concurrent.futures import Future
from contextlib import aclosing, suppress
from typing import Any, Final, Generic, TypeVar
from weakref import WeakSet

import anyio
from anyio.abc import TaskGroup

from agentflow.errors import Cancelled, ProgramError
from agentflow.language.failures.user_code import UserCode
from agentflow.runtime.task_group import first_error, loop_caller
from agentflow.runtime.telemetry import attached, current_context

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")
LoopFunction = Callable[[], Awaitable[ResultT]]
OpenStream = Callable[[], AsyncGenerator[ResultT, None]]
# How long the interpreter's exit waits for the thread.
_EXIT_TIMEOUT_S: Final = 5.0
MAX_THREADS: Final = 16


class BackgroundLoop:
    """An event loop in a daemon thread called ``name``. The thread starts with the first call. It ends with
    ``close``, with the process, or when it is idle and there are too many loops. It starts again with the
    next call, also in a forked process."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.RLock()  # the garbage collector may close the loop anywhere
        self._thread: _LoopThread | None = None
        self.last_use = 0
        with _all_lock:
            _all.add(self)

    @property
    def is_running(self) -> bool:
        """Whether the thread runs."""
        thread = self._thread
        return thread is not None and thread.is_running

    def run(self, function: LoopFunction[ResultT]) -> ResultT:
        """Runs the function in the loop, blocks until it has ended, and returns its result."""
        [result] = self.stream(lambda: _single(function))
        return result

    async def arun(self, function: LoopFunction[ResultT]) -> ResultT:
        """Like ``run``, without blocking the caller's event loop."""
        async with aclosing(self.astream(lambda: _single(function))) as results:
            [result] = [result async for result in results]
        return result

    def stream(self, source: OpenStream[ResultT]) -> Generator[ResultT, None, None]:
        """Yields the items of an asynchronous generator that runs in the loop; blocks between them.

        Raises the generator's error, ``Cancelled`` if the loop is closed meanwhile, or ``ProgramError`` in
        the loop's own thread, which would wait for itself. Closing this generator cancels the task.
        """
        if self._thread is not None and self._thread.is_current:
            raise ProgramError(
                f"a blocking call in the thread of {self._name!r} would wait for itself: await the "
                "asynchronous one there, or make the call in another thread"
            )
        ready = threading.Event()
        call = self._start(source, ready.set)
        try:
            while (items := call.mailbox.take()) is not None:
                yield from items
                if not items:
                    ready.wait()
                    ready.clear()
        finally:
            call.cancel()

    async def astream(self, source: OpenStream[ResultT]) -> AsyncGenerator[ResultT, None]:
        """Like ``stream``, without blocking the caller's event loop."""
        call_in_reader = loop_caller()
        ready = anyio.Event()

        def wake() -> None:
            with suppress(RuntimeError):  # the reader's loop has ended
                call_in_reader(lambda: ready.set())

        call = self._start(source, wake)
        try:
            while (items := call.mailbox.take()) is not None:
                for item in items:
                    yield item
                if not items:
                    await ready.wait()
                    ready = anyio.Event()
        finally:
            call.cancel()

    def call_soon(self, function: Callable[[], object]) -> None:
        """Schedules a function in the loop, from any thread. Does nothing if no loop is running."""
        thread = self._thread
        if thread is not None:
            thread.call_soon(function)

    async def start(self, serve: Callable[..., Coroutine[Any, Any, None]]) -> Any:
        """Starts a task that may run until the loop ends; returns the value that it passes to
        ``task_status.started``. Must be called from a task in the loop."""
        assert self._thread is not None
        return await self._thread.group.start(serve)

    def close(self, timeout_s: float | None = None) -> None:
        """Cancels all tasks and waits for the thread to end. May be called from any other thread, and more
        than once."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.stop(timeout_s)
            atexit.unregister(self.close)

    def close_if_idle(self) -> bool:
        """Ends the thread, without waiting for it, if it runs and has no call. Returns whether it did."""
        with self._lock:
            thread = self._thread
            if thread is None or not thread.is_idle:
                return False
            self._thread = None
        thread.stop(0.0)
        atexit.unregister(self.close)
        return True

    def after_fork(self) -> None:
        """Resets the loop in a forked process, where no thread releases held locks or ends the calls."""
        self._lock = threading.RLock()
        thread, self._thread = self._thread, None
        if thread is not None:
            atexit.unregister(self.close)
            thread.after_fork()

    def _start(self, source: OpenStream[ResultT], wake: Callable[[], object]) -> _Call[ResultT]:
        self.last_use = next(_uses)
        with self._lock:
            is_new = self._thread is None or not self._thread.is_running
            if self._thread is None or is_new:
                self._thread = _LoopThread(self._name)
                atexit.register(self.close, _EXIT_TIMEOUT_S)
            call = _Call(self._thread, source, wake)
            self._thread.start_call(call)
        if is_new:
            _close_idle()
        return call


_all: WeakSet[BackgroundLoop] = WeakSet()
_all_lock = threading.Lock()
_uses = itertools.count(1)


def _close_idle() -> None:
    """Ends the least recently used idle loops beyond ``MAX_THREADS``."""
    with _all_lock:
        running = [loop for loop in _all if loop.is_running]
    surplus = len(running) - MAX_THREADS
    for loop in sorted(running, key=lambda loop: loop.last_use):
        if surplus <= 0:
            return
        surplus -= loop.close_if_idle()


def _after_fork() -> None:
    global _all_lock
    _all_lock = threading.Lock()
    for loop in list(_all):
        loop.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class _LoopThread:
    """One thread and its event loop, from start to end."""

    group: TaskGroup
    _loop: asyncio.AbstractEventLoop
    _context: contextvars.Context

    def __init__(self, name: str) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._calls: set[_Call[Any]] = set()  # the calls that have not ended
        self._has_ended = False
        started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(started,), name=name, daemon=True)
        self._thread.start()
        started.result()  # raises if no loop can be created, for lack of file descriptors for example

    @property
    def is_running(self) -> bool:
        """False also in a forked process, which has none of its parent's threads."""
        return not self._has_ended and self._process == os.getpid()

    @property
    def is_idle(self) -> bool:
        """Whether it runs and has no call."""
        return self.is_running and not self._calls

    @property
    def is_current(self) -> bool:
        """Whether the caller runs in this thread."""
        return self.is_running and threading.current_thread() is self._thread

    def start_call(self, call: _Call[Any]) -> None:
        """Starts the task of a call; if the loop has ended, the call ends with ``Cancelled``."""
        with self._lock:
            if not self._has_ended:
                self._calls.add(call)
                self.call_soon(lambda: self.group.start_soon(self._run_call, call))
                return
        call.mailbox.end(_cancelled())

    def call_soon(self, function: Callable[[], object]) -> None:
        # In the loop's own context: callers must not pass their context variables to its tasks.
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(function, context=self._context)

    def stop(self, timeout_s: float | None) -> None:
        if self.is_running:
            self.call_soon(self.group.cancel_scope.cancel)
            if not self.is_current:  # the garbage collector closes loops in any thread
                self._thread.join(timeout_s)

    def after_fork(self) -> None:
        """Ends its calls."""
        for call in self._calls:
            call.mailbox.after_fork(_cancelled())

    def _run(self, started: Future[None]) -> None:
        try:
            anyio.run(self._serve, started)
        except BaseException as error:
            if started.done():
                raise
            started.set_exception(error)
        finally:
            with self._lock:
                self._has_ended = True
                calls, self._calls = self._calls, set()
            for call in calls:  # those whose tasks never began
                call.mailbox.end(_cancelled())

    async def _serve(self, started: Future[None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._context = contextvars.copy_context()
        async with anyio.create_task_group() as self.group:
            started.set_result(None)
            await anyio.sleep_forever()

    async def _run_call(self, call: _Call[Any]) -> None:
        try:
            await call.run()
        finally:
            self._calls.discard(call)


class _Call(Generic[ResultT]):
    """One task in the loop; the items of its generator go into ``mailbox``."""

    def __init__(self, thread: _LoopThread, source: OpenStream[ResultT], wake: Callable[[], object]) -> None:
        self.mailbox: Mailbox[ResultT] = Mailbox(wake)
        self._thread = thread
        self._source = source
        self._telemetry = current_context()
        self._scope: anyio.CancelScope | None = None
        self._is_cancelled = False

    async def run(self) -> None:
        error: Exception | None = _cancelled()
        try:
            with anyio.CancelScope() as self._scope:
                if self._is_cancelled:
                    self._scope.cancel()
                with attached(self._telemetry), UserCode("the call"):
                    async with aclosing(self._source()) as items:
                        async for item in items:
                            self.mailbox.put(item)
                error = None
        except Exception as failure:
            error = first_error(failure)
        finally:
            self.mailbox.end(error)

    def cancel(self) -> None:
        """Cancels the task unless it has ended. May be called from any thread."""
        if not self.mailbox.has_ended:
            self._thread.call_soon(self._cancel)

    def _cancel(self) -> None:
        self._is_cancelled = True  # the task may not have begun
        if self._scope is not None:
            self._scope.cancel()


class Mailbox(Generic[ItemT]):
    """A queue from one writer to one reader, in two threads, from which all waiting items are taken together.

    ``wake`` is called in the writer's thread when there is something to take, and not again until ``take``.
    """

    def __init__(self, wake: Callable[[], object]) -> None:
        self.has_ended = False
        self._wake = wake
        self._lock = threading.Lock()
        self._items: list[ItemT] = []
        self._error: BaseException | None = None
        self._is_awake = False

    def put(self, item: ItemT) -> None:
        """Adds an item."""
        with self._lock:
            self._items.append(item)
            is_awake, self._is_awake = self._is_awake, True
        if not is_awake:
            self._wake()

    def end(self, error: BaseException | None = None) -> None:
        """Adds the end, after which nothing is added. ``error``: the reader gets this error at the end."""
        with self._lock:
            self.has_ended, self._error = True, error
            is_awake, self._is_awake = self._is_awake, True
        if not is_awake:
            self._wake()

    def after_fork(self, error: BaseException) -> None:
        """Ends it in a forked process, where no other thread holds its lock or waits for it."""
        self._lock = threading.Lock()
        if not self.has_ended:
            self.has_ended, self._error = True, error

    def take(self) -> list[ItemT] | None:
        """Returns the waiting items, an empty list if there are none yet, and None at the end. Raises the
        error that the mailbox ended with, after the last item."""
        with self._lock:
            items, self._items = self._items, []
            self._is_awake = False
            if items or not self.has_ended:
                return items
        if self._error is not None:
            raise self._error
        return None


def _cancelled() -> Cancelled:
    return Cancelled("the call was cancelled, or its connection was closed")


async def _single(function: LoopFunction[ResultT]) -> AsyncGenerator[ResultT, None]:
    yield await function()
