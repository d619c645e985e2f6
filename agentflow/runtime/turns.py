"""Bounded turns of the event loop for work whose size a client chooses."""

from __future__ import annotations

import time

import anyio.lowlevel

TURN_S = 0.005
"""The time after which work lets the event loop run."""


class Turn:
    """Lets the event loop run when a piece of work has taken ``TURN_S``. Each unit between two calls of
    ``pause`` must be short.

    >>> turn = Turn()
    >>> for child in children:
    ...     start(child)
    ...     await turn.pause()
    """

    __slots__ = ("_end",)

    def __init__(self) -> None:
        self._end = time.perf_counter() + TURN_S

    @property
    def is_over(self) -> bool:
        """Whether ``pause`` would let the event loop run."""
        return time.perf_counter() > self._end

    async def pause(self) -> None:
        """Lets the event loop run if the turn is over, and begins the next one."""
        if self.is_over:
            await anyio.lowlevel.checkpoint()
            self._end = time.perf_counter() + TURN_S
