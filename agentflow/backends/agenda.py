"""In which order a replay tells what was recorded.

An event may be told once the program has sent what it answers. Of those the earliest recorded comes
first, and it waits for its turn: until all that was recorded before it has been told, and as many ops
have been sent as when it was recorded. So a program that looks at which of two branches is first sees
the same one first. A program that does things in another order would then wait for ever, so nobody
waits longer than the program has something to do: ``PATIENCE`` turns of the event loop after the last
op that it sent, the event is told anyway.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable

import anyio
import anyio.lowlevel

from agentflow.recording.runs import RecordedEvent

PATIENCE = 50

Tell = Callable[[], None]

LATE = math.inf
"""After everything that was recorded."""


class Agenda:
    """``expected``: the numbers of the events that will be pushed if the program does what it did.
    ``batches``: of each event, a number for what was told together, and is told together again."""

    def __init__(self, expected: list[int], batches: list[int]) -> None:
        self.num_sent = 0  # ops of content
        self._expected = expected
        self._batches = batches
        self._next = 0  # in ``expected``: all before it were told, or nobody waits for them any more
        self._told: set[float] = set()
        self._num_missing = 0  # ops that nobody waits for any more
        self._heap: list[tuple[float, int, int, Tell]] = []
        self._order = itertools.count()
        self._followers: dict[int, list[Tell]] = {}
        self._changed = anyio.Event()

    def push(self, recorded: RecordedEvent, tell: Tell) -> None:
        """The program has sent what this event answers."""
        self.push_at(recorded.seq, tell, num_ops=recorded.num_ops)

    def push_at(self, seq: float, tell: Tell, *, num_ops: int = 0) -> None:
        """Something to be told right after the event of number ``seq``."""
        heapq.heappush(self._heap, (seq, next(self._order), num_ops, tell))
        self._changed.set()

    def after(self, seq: int | None, follow: Tell) -> None:
        """Calls ``follow`` once the event has been told; None: now."""
        if seq is None or seq in self._told:
            follow()
        else:
            self._followers.setdefault(seq, []).append(follow)

    async def run(self, flush: Callable[[], None]) -> None:
        """Tells what there is to tell, for ever; ``flush`` is called after what is told together."""
        while True:
            while not self._heap:
                self._changed = anyio.Event()
                await self._changed.wait()
            await self._wait_for_turn()
            batch = self._tell_next()
            while self._heap and self._batch(self._heap[0][0]) == batch and self._is_due():
                self._tell_next()
            flush()
            await anyio.lowlevel.checkpoint()

    def _tell_next(self) -> int | None:
        seq, _, _, tell = heapq.heappop(self._heap)
        tell()
        self._told.add(seq)
        if seq != LATE:
            for follow in self._followers.pop(int(seq), ()):
                follow()
        return self._batch(seq)

    def _batch(self, seq: float) -> int | None:
        return self._batches[int(seq)] if 0 <= seq < LATE else None

    async def _wait_for_turn(self) -> None:
        """Until the first in line is due, or the program has been at rest for so long."""
        num_sent, num_turns = self.num_sent, 0
        while num_turns < PATIENCE and not self._is_due():
            await anyio.lowlevel.checkpoint()
            num_turns = num_turns + 1 if num_sent == self.num_sent else 0
            num_sent = self.num_sent
        seq, _, num_ops, _ = self._heap[0]
        while self._next < len(self._expected) and self._expected[self._next] < seq:
            self._next += 1
        self._num_missing = max(self._num_missing, num_ops - self.num_sent)

    def _is_due(self) -> bool:
        seq, _, num_ops, _ = self._heap[0]
        if seq == LATE:
            return False
        while self._next < len(self._expected) and self._expected[self._next] in self._told:
            self._next += 1
        is_next = self._next == len(self._expected) or self._expected[self._next] >= seq
        return is_next and self.num_sent + self._num_missing >= num_ops
