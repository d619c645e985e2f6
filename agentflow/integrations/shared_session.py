"""One session for all threads and event loops of a process: for code that others call as they like."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import aclosing
from typing import TypeVar

import anyio
from anyio.abc import TaskStatus

from agentflow.integrations.background_loop import LoopThread
from agentflow.language.session import Session

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")
Function = Callable[[Session], Awaitable[ResultT]]
Source = Callable[[Session], AsyncGenerator[ResultT, None]]


class SharedSession:
    """Opened (``open_session``) when something is first asked of it, in a thread with a loop of its own, and
    again when it was lost. What fails to open fails who asked.

    >>> shared = SharedSession(af.session)
    >>> shared.run(lambda flow: flow.run(judge, essay))  # from any thread
    >>> await shared.arun(lambda flow: flow.run(judge, essay))  # from any event loop
    """

    def __init__(self, open_session: Callable[[], Session], name: str = "agentflow session") -> None:
        self._open_session = open_session
        self._thread = LoopThread(name)
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        self._session: Session | None = None
        self._opening = anyio.Lock()
        self._replaced = anyio.Event()

    def run(self, function: Function[ResultT]) -> ResultT:
        """What the function gives; blocks until then."""
        return self._thread.run(lambda: self._call(function))

    async def arun(self, function: Function[ResultT]) -> ResultT:
        """The same for a caller in an event loop, which goes on. Cancelling this cancels that."""
        return await self._thread.arun(lambda: self._call(function))

    def stream(self, source: Source[ResultT]) -> Generator[ResultT, None, None]:
        """What the asynchronous generator gives, as it comes. Closing this closes that."""
        return self._thread.stream(lambda: self._iterate(source))

    def astream(self, source: Source[ResultT]) -> AsyncGenerator[ResultT, None]:
        """The same for a reader in an event loop."""
        return self._thread.astream(lambda: self._iterate(source))

    def call_soon(self, function: Callable[[], object]) -> None:
        """Has it called in the session's loop; nothing happens where there is none."""
        self._thread.call_soon(function)

    def close(self) -> None:
        """Ends the session, and cancels what still runs there. The next call opens another one."""
        self._thread.close()

    async def _call(self, function: Function[ResultT]) -> ResultT:
        return await function(await self._opened())

    async def _iterate(self, source: Source[ResultT]) -> AsyncGenerator[ResultT, None]:
        async with aclosing(source(await self._opened())) as items:
            async for item in items:
                yield item

    async def _opened(self) -> Session:
        if self._process != os.getpid():
            self._begin()  # a fork of the process has another loop: the session's tasks are not in it
        async with self._opening:
            if self._session is None or not self._session.is_alive:
                self._replaced.set()
                self._session = await self._thread.keep(self._serve)
            return self._session

    async def _serve(self, *, task_status: TaskStatus[Session]) -> None:
        """Keeps the session open until another one takes its place, or the loop ends."""
        replaced = self._replaced = anyio.Event()
        is_open = False
        try:
            async with self._open_session() as flow:
                is_open = True
                task_status.started(flow)
                await replaced.wait()
        except Exception:
            if not is_open:
                raise  # to whoever waits for it
            logger.warning("a session did not end well", exc_info=True)
