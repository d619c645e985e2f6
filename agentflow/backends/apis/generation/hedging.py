"""Hedged requests (Dean and Barroso, "The tail at scale", 2013): a second, equal request, if the answer to
the first one does not begin in time.

The answer that begins first is kept, and the other request is cancelled. Nothing of an answer is read before
that, so a text always comes from one request.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

import anyio

from agentflow.backends.apis.http.event_stream import EventSink, ServerEvent
from agentflow.errors import AgentflowError
from agentflow.runtime.task_group import open_task_group

ResultT = TypeVar("ResultT")


class Race(Generic[ResultT]):
    """One call, as at most two equal requests.

    Args:
        run: Makes a request and returns its result.
        after_s: The seconds after which the second request is sent.
    """

    def __init__(self, run: Callable[[Lane[ResultT]], Awaitable[ResultT]], after_s: float) -> None:
        self._run = run
        self._after_s = after_s
        self._lanes = [Lane(self)]
        self.winner: Lane[ResultT] | None = None
        self._is_sent = anyio.Event()  # the first request was sent, or has failed
        self._is_decided = anyio.Event()  # an answer has begun, or the first request has failed

    @property
    def is_hedged(self) -> bool:
        """Whether a second request was sent."""
        return len(self._lanes) > 1 and self._lanes[1].was_sent

    async def result(self) -> ResultT:
        """The result of the request whose answer began first. If there is none, the first one's error."""
        async with open_task_group() as group:
            group.start_soon(self._run_lane, self._lanes[0])
            await self._is_sent.wait()
            with anyio.move_on_after(self._after_s):
                await self._is_decided.wait()
            if not self._is_decided.is_set():
                self._lanes.append(Lane(self))
                group.start_soon(self._run_lane, self._lanes[1])
        lane = self.winner or self._lanes[0]
        if lane.error is not None:
            raise lane.error
        assert lane.result is not None
        return lane.result

    async def _run_lane(self, lane: Lane[ResultT]) -> None:
        with lane.scope:
            try:
                lane.result = await self._run(lane)
            except AgentflowError as error:
                lane.error = error
        self.sent()
        self._is_decided.set()

    def sent(self) -> None:
        """A request was sent."""
        self._is_sent.set()

    def begun(self, lane: Lane[ResultT]) -> None:
        """The answer to a request has begun."""
        if self.winner is None:
            self.winner = lane
            self._is_decided.set()
            for other in self._lanes:
                if other is not lane:
                    other.scope.cancel()


class Lane(Generic[ResultT]):
    """A request of the hedge."""

    def __init__(self, race: Race[ResultT]) -> None:
        self._race = race
        self.scope = anyio.CancelScope()
        self.result: ResultT | None = None
        self.error: AgentflowError | None = None
        self.was_sent = False

    @property
    def is_lost(self) -> bool:
        """Whether the answer to the other request began first."""
        return self._race.winner not in (None, self)

    def sink(self, inner: EventSink) -> EventSink:
        """The sink of an attempt that is sent now."""
        self.was_sent = True
        self._race.sent()
        return _LaneSink(self, inner)

    def begun(self) -> None:
        """The answer has begun."""
        self._race.begun(self)


class _LaneSink:
    """Passes events on, unless the other request has won: a cancellation may come after the next event."""

    def __init__(self, lane: Lane[Any], inner: EventSink) -> None:
        self._lane = lane
        self._inner = inner

    @property
    def is_visible(self) -> bool:
        return self._inner.is_visible

    @property
    def has_begun(self) -> bool:
        return self._inner.has_begun

    @property
    def is_over(self) -> bool:
        return self._inner.is_over

    @property
    def is_left(self) -> bool:
        return self._inner.is_left or self._lane.is_lost

    def event(self, event: ServerEvent) -> None:
        if not self._lane.is_lost:
            self._inner.event(event)
            self._lane.begun()

    def close(self) -> None:
        self._inner.close()
