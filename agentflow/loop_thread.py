"""An event loop in a thread of its own, for code that has none, or several one after the other.

What runs there is asked for from any thread: synchronously, which blocks that thread, or from its event
loop, which goes on meanwhile. Cancelling the one who waits cancels what runs.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator
from contextlib import aclosing, suppress
from typing import Any, Generic, TypeVar

import anyio
from anyio.abc import TaskGroup

from agentflow.errors import Cancelled
from agentflow.loop_caller import CallInLoop, loop_caller
from agentflow.mailbox import Mailbox, Waiter
from agentflow.task_group import first_of

ResultT = TypeVar("ResultT")
# How long the end of the process waits for what runs here.
END_S = 5.0
Function = Callable[[], Awaitable[ResultT]]
Source = Callable[[], AsyncGenerator[ResultT, None]]


class _Call(Generic[ResultT]):
    """One task in the loop, whose items, or one result, go into a mailbox."""

    def __init__(self, thread: LoopThread, source: Source[ResultT], wake: Callable[[], object]) -> None:
        self.mailbox: Mailbox[ResultT] = Mailbox(wake)
        self._source = source
        self._thread = thread
        self._scope = anyio.CancelScope()

    async def run(self) -> None:
        """In the loop."""
        error: Exception | None = Cancelled("it was cancelled, or the loop that it ran in has ended")
        try:
            with self._scope:
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
        self._thread.call_soon(self._scope.cancel)


class LoopThread:
    """Starts with the first call, and ends with ``close`` or with the process. ``name``: of the thread."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._group: TaskGroup | None = None
        self._call_in_loop: CallInLoop | None = None
        self._closing: anyio.Event | None = None
        self._process = 0

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
        call_in_loop = self._call_in_loop
        if call_in_loop is not None:
            with suppress(RuntimeError):  # it ended just now
                call_in_loop(function)

    def close(self, timeout_s: float | None = None) -> None:
        """Cancels what still runs, and waits for the thread's end. From any other thread; may be repeated."""
        with self._lock:
            thread, self._thread = self._thread, None
            if thread is None:
                return
            closing = self._closing
            assert closing is not None
            if self._process == os.getpid():
                self.call_soon(closing.set)
                thread.join(timeout_s)
            self._call_in_loop = None
        atexit.unregister(self.close)

    async def keep(self, serve: Callable[..., Coroutine[Any, Any, None]]) -> Any:
        """In the loop: starts a task that lasts as long as the loop, and gives what it tells its
        ``task_status``."""
        assert self._group is not None
        return await self._group.start(serve)

    def _start(self, source: Source[ResultT], wake: Callable[[], object]) -> _Call[ResultT]:
        with self._lock:
            if self._thread is None or self._process != os.getpid():  # a fork of the process has no threads
                self._begin()
            group = self._group
            assert group is not None
        call = _Call(self, source, wake)
        self.call_soon(lambda: group.start_soon(call.run))
        return call

    def _begin(self) -> None:
        has_begun = threading.Event()
        self._process = os.getpid()
        atexit.register(self.close, END_S)
        self._thread = threading.Thread(
            target=anyio.run, args=(self._serve, has_begun.set), name=self._name, daemon=True
        )
        self._thread.start()
        has_begun.wait()

    async def _serve(self, has_begun: Callable[[], None]) -> None:
        self._closing = anyio.Event()
        async with anyio.create_task_group() as group:
            self._group = group
            self._call_in_loop = loop_caller()
            has_begun()
            await self._closing.wait()
            group.cancel_scope.cancel()


async def _only(function: Function[ResultT]) -> AsyncGenerator[ResultT, None]:
    yield await function()
