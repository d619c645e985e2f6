"""Bounded turns of the event loop for work whose size depends on clients."""

from __future__ import annotations

import time

import anyio
import anyio.lowlevel

TURN_S = 0.005
"""The time after which work lets the event loop run."""
MAX_STARTS = 8
"""The number of tasks that begin before the clock is checked: a start takes up to a millisecond."""


async def end_loop_turn() -> None:
    """Ends a turn of the event loop that has taken many milliseconds: lets all tasks run that have become
    ready in it. Timers and received data are queued in the next iteration of the loop, behind this task, and
    wake their tasks for the one after it, so a single checkpoint would come back before them."""
    for _ in range(3):
        await anyio.lowlevel.checkpoint()


class LoopTurn:
    """Lets the event loop run when a piece of work has taken ``TURN_S``.

    Args:
        units: calls of ``pause`` between two checks of the clock, for units of work that take microseconds.

    >>> turn = LoopTurn()
    >>> for child in children:
    ...     start(child)
    ...     await turn.pause()
    """

    __slots__ = ("_end", "_num_left", "_units")

    def __init__(self, units: int = 1) -> None:
        self._units = self._num_left = units
        self._end = time.perf_counter() + TURN_S

    @property
    def is_over(self) -> bool:
        """Whether the turn has taken ``TURN_S``."""
        return time.perf_counter() > self._end

    async def pause(self) -> None:
        """Lets the event loop run if the turn is over, and begins the next one."""
        self._num_left -= 1
        if self._num_left > 0:
            return
        self._num_left = self._units
        if self.is_over:
            await end_loop_turn()
            self._end = time.perf_counter() + TURN_S


class Starts:
    """Lets tasks that become ready at the same time begin in bounded turns, first come, first served.

    >>> async def call(request):
    ...     await starts.pause()
    ...     await send(request)
    """

    __slots__ = ("_front", "_turn")

    def __init__(self) -> None:
        self._front: anyio.Lock | None = None  # of the event loop in which the first task begins
        self._turn = LoopTurn(MAX_STARTS)

    async def pause(self) -> None:
        """Waits until the task may begin: if it is not among the first ones, the event loop runs before."""
        if self._front is None:
            self._front = anyio.Lock(fast_acquire=True)
        async with self._front:
            await self._turn.pause()
