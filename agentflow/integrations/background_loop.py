"""An event loop in a thread of its own, for code that has none, or several one after the other.

What runs there is asked for from any thread: synchronously, which blocks that thread, or from its event
loop, which goes on meanwhile. Cancelling the one who waits cancels what runs.

What a task in one thread's event loop gives to a reader in another place: all that is there, at once.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator
from contextlib import aclosing, suppress
from typing import Any, Generic, TypeVar

import anyio
from anyio.abc import TaskGroup

from agentflow.errors import Cancelled
from agentflow.runtime.task_group import first_of, loop_caller

ItemT = TypeVar("ItemT")


class Mailbox(Generic[ItemT]):
    """Items, and an end, which may be an error. One side puts, the other takes what is there. ``wake`` is
    called where there is something new, once until ``take``."""

    def __init__(self, wake: Callable[[], object]) -> None:
        self._wake = wake
        self._items: deque[ItemT] = deque()
        self._lock = threading.Lock()
        self._has_woken = False
        self._has_ended = False
        self._error: BaseException | None = None

    def put(self, item: ItemT) -> None:
        """One more."""
        self._items.append(item)
        self._tell()

    def end(self, error: BaseException | None = None) -> None:
        """Nothing more comes; ``error``: because of that."""
        self._error = error
        self._has_ended = True
        self._tell()

    def take(self) -> list[ItemT] | None:
        """All that is there: empty where nothing is yet, None after the last, the error where it ended so."""
        with self._lock:
            self._has_woken = False
        has_ended = self._has_ended  # before: what was put before the end is taken before it
        items = [self._items.popleft() for _ in range(len(self._items))]
        if items or not has_ended:
            return items
        if self._error is not None:
            raise self._error
        return None

    def _tell(self) -> None:
        with self._lock:
            if self._has_woken:
                return
            self._has_woken = True
        self._wake()


class Waiter:
    """Something for an event loop to wait on that any thread may set: to be made in that loop."""

    def __init__(self) -> None:
        self._call_in_loop = loop_caller()
        self._event = anyio.Event()

    def set(self) -> None:
        """Nothing happens where the loop has ended."""
        with suppress(RuntimeError):
            self._call_in_loop(self._set)

    async def wait(self) -> None:
        """Until it was set, since the last wait."""
        await self._event.wait()
        self._event = anyio.Event()

    def _set(self) -> None:
        self._event.set()


logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")
Function = Callable[[], Awaitable[ResultT]]
Source = Callable[[], AsyncGenerator[ResultT, None]]
# How long the end of the process waits for what runs here.
END_S = 5.0


class LoopThread:
    """Starts with the first call, and ends with ``close`` or with the process. ``name``: of the thread."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._loop: _Loop | None = None

    def run(self, function: Function[ResultT]) -> ResultT:
        """What the function gives; blocks until then."""
        [result] = self.stream(lambda: _only(function))
        return result

    async def arun(self, function: Function[ResultT]) -> ResultT:
        """The same for a caller in an event loop, which goes on."""
        async with aclosing(self.astream(lambda: _only(function))) as results:
            [result] = [result async for result in results]
        return result

    def stream(self, source: Source[ResultT]) -> Generator[ResultT, None, None]:
        """What the asynchronous iterator gives, as it comes; blocks in between. Closing this cancels that."""
        told = threading.Event()
        call = self._start(source, told.set)
        try:
            while (items := call.mailbox.take()) is not None:
                yield from items
                if not items:
                    told.wait()
                    told.clear()
        finally:
            call.cancel()

    async def astream(self, source: Source[ResultT]) -> AsyncGenerator[ResultT, None]:
        """The same for a reader in an event loop."""
        waiter = Waiter()
        call = self._start(source, waiter.set)
        try:
            while (items := call.mailbox.take()) is not None:
                for item in items:
                    yield item
                if not items:
                    await waiter.wait()
        finally:
            call.cancel()

    def call_soon(self, function: Callable[[], object]) -> None:
        """Has it called in the loop; nothing happens where that has ended."""
        loop = self._loop
        if loop is not None:
            loop.jobs.put(function)

    def close(self, timeout_s: float | None = None) -> None:
        """Cancels what still runs, and waits for the thread's end. From any other thread; may be repeated."""
        with self._lock:
            loop, self._loop = self._loop, None
        if loop is not None:
            loop.end(timeout_s)
            atexit.unregister(self.close)

    async def keep(self, serve: Callable[..., Coroutine[Any, Any, None]]) -> Any:
        """In the loop: starts a task that lasts as long as the loop, and gives what it tells its
        ``task_status``."""
        assert self._loop is not None
        return await self._loop.group.start(serve)

    def _start(self, source: Source[ResultT], wake: Callable[[], object]) -> _Call[ResultT]:
        with self._lock:
            if self._loop is None or not self._loop.is_here:
                self._loop = _Loop(self._name)
                atexit.register(self.close, END_S)
            call = _Call(self._loop, source, wake)
            self._loop.start(call)
        return call


class _Loop:
    """A thread and its event loop, from one start to one end."""

    group: TaskGroup
    jobs: Mailbox[Callable[[], object]]

    def __init__(self, name: str) -> None:
        self._process = os.getpid()
        self._calls: set[_Call[Any]] = set()  # those that have not ended
        self._lock = threading.Lock()
        self._is_over = False
        self._has_begun = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._live, name=name, daemon=True)
        self._thread.start()
        self._has_begun.wait()
        if self._failure is not None:
            raise self._failure

    @property
    def is_here(self) -> bool:
        """Whether it runs: a fork of the process has no threads."""
        return not self._is_over and self._process == os.getpid()

    def _live(self) -> None:
        try:
            anyio.run(self._serve)
        except BaseException as error:
            if self._has_begun.is_set():
                raise
            self._failure = error  # no loop can be made: too many files are open, say
        finally:
            self._has_begun.set()

    def start(self, call: _Call[Any]) -> None:
        """Runs it, or ends it where the loop has ended."""
        with self._lock:
            if self._is_over:
                call.mailbox.end(_ended())
                return
            self._calls.add(call)
        self.jobs.put(lambda: self.group.start_soon(self._run, call))

    def end(self, timeout_s: float | None) -> None:
        """Cancels all that runs, and waits for the thread."""
        if self.is_here:
            self.jobs.end()
            self._thread.join(timeout_s)

    async def _run(self, call: _Call[Any]) -> None:
        try:
            await call.run()
        finally:
            self._calls.discard(call)

    def _do(self, job: Callable[[], object]) -> None:
        try:
            job()
        except Exception:  # of one caller: the others go on
            logger.exception("what was to be called in the loop of another thread failed")

    async def _serve(self) -> None:
        waiter = Waiter()
        self.jobs = Mailbox(waiter.set)
        try:
            async with anyio.create_task_group() as self.group:
                self._has_begun.set()
                # Tasks are started by a task: callbacks from other threads are in none.
                while (jobs := self.jobs.take()) is not None:
                    for job in jobs:
                        self._do(job)
                    if not jobs:
                        await waiter.wait()
                self.group.cancel_scope.cancel()
        finally:
            with self._lock:
                self._is_over = True
            for call in self._calls:  # which were cancelled before they began
                call.mailbox.end(_ended())


class _Call(Generic[ResultT]):
    """One task in the loop, whose items go into a mailbox."""

    def __init__(self, loop: _Loop, source: Source[ResultT], wake: Callable[[], object]) -> None:
        self.mailbox: Mailbox[ResultT] = Mailbox(wake)
        self._source = source
        self._loop = loop
        self._scope: anyio.CancelScope | None = None
        self._is_cancelled = False

    async def run(self) -> None:
        """In the loop."""
        error: Exception | None = _ended()
        try:
            with anyio.CancelScope() as self._scope:
                if self._is_cancelled:
                    self._scope.cancel()
                async with aclosing(self._source()) as items:
                    async for item in items:
                        self.mailbox.put(item)
                error = None
        except Exception as failure:
            error = first_of(failure)
        finally:
            self.mailbox.end(error)

    def cancel(self) -> None:
        """From any thread."""
        self._loop.jobs.put(self._cancel)

    def _cancel(self) -> None:
        self._is_cancelled = True  # perhaps it has not begun
        if self._scope is not None:
            self._scope.cancel()


def _ended() -> Cancelled:
    return Cancelled("it was cancelled, or what it ran in has been closed")


async def _only(function: Function[ResultT]) -> AsyncGenerator[ResultT, None]:
    yield await function()
