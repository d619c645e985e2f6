"""What an interpreter has to say, as cursors: each variable and state knows how far the listener has
heard, and ``drain`` makes the events that bring it up to date.

Nothing is queued: text that came while nobody listened leaves as one delta. After a broken
connection, ``rewind`` moves the cursors back to what the listener says it has.
"""

from __future__ import annotations

from typing import Protocol

import anyio

from agentflow.protocol.events import Event


class Cell(Protocol):
    """Something with progress of its own: a variable, a state, an answer."""

    def news(self) -> list[Event]:
        """Events since the last call; moves the cursor."""


class Outbox:
    """The set of cells that have news. One listener."""

    def __init__(self) -> None:
        self._fresh: dict[Cell, None] = {}  # a dict: an ordered set
        self._changed = anyio.Event()

    def mark(self, cell: Cell) -> None:
        """``cell`` has news."""
        # To the end: what a state has reached is told after the variables that it has reached.
        self._fresh.pop(cell, None)
        self._fresh[cell] = None
        self._changed.set()

    async def wait(self) -> None:
        """Until there are news."""
        await self._changed.wait()

    def drain(self) -> list[Event]:
        """All news, in the order in which the cells last changed."""
        fresh, self._fresh = self._fresh, {}
        self._changed = anyio.Event()
        events: list[Event] = []
        for cell in fresh:
            events += cell.news()
        return events
