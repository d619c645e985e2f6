"""Responses that run without a connection.

A background response is a task of the server: it continues when its client disconnects, and ends with the
server. ``BackgroundRuns`` owns the tasks, limits their number for each tenant, and finds them by their ids.
An ``EventLog`` keeps the events of a response, so that a stream can begin at any event.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TypeAlias

import anyio
from anyio.abc import TaskGroup, TaskStatus

from agentflow.errors import RateLimited
from agentflow.runtime.limits import MemoryBudget
from agentflow.runtime.task_group import open_task_group
from agentflow.server.errors import ApiError, make_api_error
from agentflow.server.event_stream import EVENT_END
from agentflow.server.responses.item import Item

logger = logging.getLogger(__name__)

# The memory of an event in addition to its bytes.
_EVENT_BYTES = 64
# The limit of events that a stream sends in one piece, so that a long stream does not delay others.
_EVENTS_AT_ONCE = 256


class EventLog:
    """The events of one response, numbered from 0.

    >>> log = EventLog()
    >>> num_bytes = log.add(b"data: 1\\n\\ndata: 2\\n\\n")
    >>> log.end()
    >>> [events async for events in log.since(1)]
    [b'data: 2\\n\\n']
    """

    def __init__(self) -> None:
        self._events: list[bytes] = []
        self._has_ended = False
        self._changed = anyio.Event()
        self.num_bytes = 0
        """The estimated memory of the log."""

    def add(self, events: bytes) -> int:
        """Appends whole events. Returns the bytes of memory that they add."""
        added = [data + EVENT_END for data in events.split(EVENT_END)[:-1]]
        self._events += added
        num_bytes = len(events) + _EVENT_BYTES * len(added)
        self.num_bytes += num_bytes
        self._notify()
        return num_bytes

    @classmethod
    def ended(cls, events: Sequence[bytes]) -> EventLog:
        """All events of a response that has ended."""
        log = cls()
        log.add(b"".join(events))
        log.end()
        return log

    def end(self) -> None:
        """Records that no further events follow."""
        self._has_ended = True
        self._notify()

    def all(self) -> tuple[bytes, ...]:
        """All events so far."""
        return tuple(self._events)

    async def piece(self, number: int, most_s: float) -> tuple[bytes, int, bool]:
        """Waits up to ``most_s`` seconds for events from this number on. Returns some of them, the number of
        the next event, and whether none follow."""
        if number >= len(self._events) and not self._has_ended:
            with anyio.move_on_after(most_s):
                await self._changed.wait()
        some = self._events[number : number + _EVENTS_AT_ONCE]
        number += len(some)
        return b"".join(some), number, self._has_ended and number >= len(self._events)

    async def since(self, number: int) -> AsyncIterator[bytes]:
        """Yields the events from this number on until the end. Existing events come several at a time.
        Readers do not affect each other."""
        while number < len(self._events) or not self._has_ended:
            if number < len(self._events):
                some = self._events[number : number + _EVENTS_AT_ONCE]
                number += len(some)
                yield b"".join(some)
            else:
                await self._changed.wait()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()


Finish: TypeAlias = Callable[[ApiError | None, bool], Awaitable[None]]
"""Stores a response that has ended. Arguments: the error if it failed, and whether it was cancelled."""


class BackgroundRun:
    """A running response.

    Args:
        response_id: its id.
        tenant: the name of its tenant.
        memory: the memory of its parts, which is released at its end.
        shown: returns the response so far, as JSON.
        input_items: the items of its turn.
        events: its events, if it is streamed.
        is_valid: whether the API key of its request still identifies the tenant.
    """

    def __init__(
        self,
        response_id: str,
        tenant: str,
        memory: MemoryBudget,
        shown: Callable[[], bytes],
        input_items: Sequence[Item],
        events: EventLog | None,
        is_valid: Callable[[], bool] = lambda: True,
    ) -> None:
        self.is_valid = is_valid
        self.id = response_id
        self.tenant = tenant
        self.memory = memory
        self.input_items = input_items
        self.events = events
        self.num_prompt_tokens = 0
        self._shown = shown
        self._scope = anyio.CancelScope()
        self._ended = anyio.Event()

    @property
    def body(self) -> bytes:
        """The response so far, as JSON."""
        return self._shown()

    def write(self, events: bytes, *, is_last: bool = False) -> None:
        """Keeps these events, if the response is streamed. ``Overloaded`` if there is no memory for them; the
        last events are always kept."""
        if self.events is not None and events:
            num_bytes = self.events.add(events)
            if is_last:
                self.memory.count(num_bytes)
            else:
                self.memory.reserve(num_bytes)

    def stop(self) -> None:
        """Cancels the response."""
        self._scope.cancel()

    async def cancel(self) -> None:
        """Cancels the response, and waits until it has ended."""
        self.stop()
        await self._ended.wait()

    async def run(
        self,
        generate: Callable[[Callable[[], None]], Awaitable[None]],
        finish: Finish,
        accepted: Callable[[], None],
    ) -> None:
        """Runs ``generate``, which calls its argument when the request is accepted. An error before that is
        raised; a later error, or a cancellation, is passed to ``finish``. Nothing else is raised, since that
        would end the task group of all background responses."""
        is_accepted = False
        failure: ApiError | None = None

        def accept() -> None:
            nonlocal is_accepted
            is_accepted = True
            accepted()

        try:
            try:
                with self._scope:
                    await generate(accept)
            except Exception as error:
                if not is_accepted:
                    raise
                failure = make_api_error(error)
                if failure.status == 500:
                    logger.error("the background response %s failed", self.id, exc_info=error)
            try:
                with anyio.CancelScope(shield=True):  # store it even if the server shuts down
                    await finish(failure, self._scope.cancelled_caught)
            except Exception:
                logger.exception("the background response %s was not stored", self.id)
        finally:
            self.memory.close()
            if self.events is not None:
                self.events.end()
            self._ended.set()


class BackgroundRuns:
    """The running responses. ``most``: the limit for each tenant. ``open_background_runs`` creates it."""

    def __init__(self, group: TaskGroup, most: int) -> None:
        self._group = group
        self._most = most
        self._runs: dict[tuple[str, str], BackgroundRun] = {}
        self._num_of: Counter[str] = Counter()

    def find(self, tenant: str, response_id: str) -> BackgroundRun | None:
        """The tenant's running response with this id, or None."""
        return self._runs.get((tenant, response_id))

    def end_revoked(self) -> None:
        """Cancels the responses whose API keys were revoked."""
        for run in [*self._runs.values()]:
            if not run.is_valid():
                run.stop()

    async def start(
        self,
        run: BackgroundRun,
        generate: Callable[[Callable[[], None]], Awaitable[None]],
        finish: Finish,
    ) -> None:
        """Starts ``run.run``, and returns when the request is accepted. ``RateLimited`` if the tenant has too
        many running responses; raises the error of a rejected request."""
        await self._group.start(self._run, run, generate, finish)

    async def _run(
        self,
        run: BackgroundRun,
        generate: Callable[[Callable[[], None]], Awaitable[None]],
        finish: Finish,
        *,
        task_status: TaskStatus[None],
    ) -> None:
        # Here, before the first await, so that the limit holds for concurrent requests.
        if self._num_of[run.tenant] >= self._most:
            run.memory.close()
            raise RateLimited(
                f"{self._most} responses of this API key's tenant run in the background, which is the limit: "
                "wait until some have ended, or cancel them"
            )
        key = (run.tenant, run.id)
        self._runs[key] = run
        self._num_of[run.tenant] += 1
        try:
            await run.run(generate, finish, task_status.started)
        finally:
            del self._runs[key]
            self._num_of[run.tenant] -= 1
            if not self._num_of[run.tenant]:
                del self._num_of[run.tenant]


@asynccontextmanager
async def open_background_runs(most: int) -> AsyncIterator[BackgroundRuns]:
    """The scope in which background responses run; leaving it cancels them. ``most``: the limit for each
    tenant."""
    async with open_task_group() as group:
        yield BackgroundRuns(group, most)
        group.cancel_scope.cancel()
