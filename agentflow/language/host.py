"""A session without a block, which notebooks need: one cell opens it, another closes it.

Each cell runs in a separate task, and a task group must be left in the task that entered it. Such a session
therefore lives in a dedicated task, the host, which ends with the session. No task group can own the host: it
is the one task in this package that does not belong to any.
"""

from __future__ import annotations

import asyncio
import sys
import warnings
import weakref
from contextlib import suppress
from types import TracebackType
from typing import Any

import anyio

from agentflow.language.failures.stack_frames import ProgramLine, calling_line
from agentflow.language.session import Session
from agentflow.runtime.task_group import loop_caller


class OpenSession(Session):
    """A session that stays open until ``close``, across the cells of a notebook. Made by
    ``await af.open_session(...)``. A session that is dropped without ``close`` is ended, with a
    ``ResourceWarning``. It can also be entered with ``async with``, which closes it at the end of the block.

    >>> flow = await af.open_session()
    >>> await flow.run(judge, essay)
    'A'
    >>> await flow.close()
    >>> flow.is_alive
    False
    """

    def __init__(self, host: SessionHost) -> None:
        self._share(host.session)
        self._host = host
        # At the end of the process there is nothing left to end.
        weakref.finalize(self, host.abandon).atexit = False

    async def close(self) -> None:
        """Ends the session and everything that it started. May be repeated.

        >>> flow = await af.open_session()
        >>> await flow.close()
        """
        if not self._host.has_ended:
            self._link.check_loop()
        await self._host.close()

    async def __aenter__(self) -> OpenSession:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class SessionHost:
    """Enters and leaves ``session`` in a dedicated task. It holds no reference to the ``OpenSession``, so
    that the garbage collector can notice a dropped one."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._opened_at: ProgramLine | None = calling_line()
        self._scope = anyio.CancelScope()
        self._opened = anyio.Event()
        self._close = anyio.Event()
        self._ended = anyio.Event()
        self._failure: Exception | None = None
        self._call_in_loop = loop_caller()
        self._task: Any = None

    @property
    def has_ended(self) -> bool:
        """Whether the session has ended."""
        return self._ended.is_set()

    async def open(self) -> OpenSession:
        """Starts the task, and waits until the session is open. Raises the error if it cannot be opened."""
        self._task = self._spawn()
        try:
            await self._opened.wait()
        except BaseException:
            self._close.set()
            self._scope.cancel()
            raise
        if self._failure is not None:
            raise self._failure from self._failure.__cause__
        return OpenSession(self)

    async def close(self) -> None:
        """Ends the session, and waits for its end."""
        self._close.set()
        await self._ended.wait()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure from failure.__cause__

    def abandon(self) -> None:
        """Ends a session that was dropped. The garbage collector may call this in any thread."""
        if self._close.is_set():
            return
        with suppress(RuntimeError):  # the loop has ended, and the session with it
            self._call_in_loop(self._close.set)
            self._warn()

    def _spawn(self) -> Any:
        with suppress(RuntimeError):  # not in asyncio
            loop = asyncio.get_running_loop()
            return loop.create_task(self._live(), name="agentflow session")
        # trio refuses a coroutine, and wants the function.
        return sys.modules["trio"].lowlevel.spawn_system_task(self._live, name="agentflow session")

    async def _live(self) -> None:
        try:
            with self._scope:
                async with self.session:
                    self._opened.set()
                    await self._close.wait()
        except Exception as error:
            self._failure = error  # raised where the session is opened or closed
        except anyio.get_cancelled_exc_class():
            if not self._close.is_set():
                self._close.set()
                self._warn()
            raise
        finally:
            self._opened.set()
            self._ended.set()

    def _warn(self) -> None:
        where = "" if self._opened_at is None else f", which was opened at {self._opened_at}"
        warnings.warn(
            f"a session was not closed{where}: write `await flow.close()`, or open it with `async with`",
            ResourceWarning,
            stacklevel=2,
        )
