"""Runs failed batches again, in parts, before any other work.

A batch that ran out of memory is divided until its parts fit. Later passes are limited to the same size, so
that they do not fail first. A request that does not fit even alone does not lower this limit. After any other
failure, each request of the batch runs alone, which finds the one at fault.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from agentflow.engine.request import Request, Status, Work
from agentflow.engine.scheduling.in_flight import InFlight

RECOVERY_PASSES = 100
"""After this many passes without a failure, larger ones are tried again: memory may be free by then."""


class Retries:
    """The parts of failed batches, and the size of passes.

    Args:
        in_flight: Has the batch that failed, the oldest one.
        whole_prompts: A prompt is computed in one pass.
    """

    def __init__(self, in_flight: InFlight, *, whole_prompts: bool) -> None:
        self._in_flight = in_flight
        self._whole_prompts = whole_prompts
        self.limit: float = math.inf
        """The most tokens of a pass."""
        self.parts: deque[Sequence[Work]] = deque()
        """To be run next."""
        self.is_used = False
        """Whether parts are left, or the last batch was one of them."""
        self._is_dividing = False  # parts of a batch that ran out of memory are left to run
        self._limit_before: float = math.inf  # the limit when that batch failed
        self._most_failed = 0  # tokens of the largest failed pass
        self._num_passes = 0  # since the last failure

    def next(self) -> Sequence[Work]:
        """The next part of a failed batch, without requests released since. Its slots are available: the
        whole batch had them, and nothing else has run. Empty if none is left."""
        while self.parts:
            left = [item for item in self.parts.popleft() if item[0].status is Status.RUNNING]
            if left:
                return left
        self.is_used = self._is_dividing = False
        return ()

    def first_part(self, work: Sequence[Work]) -> Sequence[Work]:
        """The first part of the work, which is too large for a pass. The others are next."""
        first, *others = self._divided(work, int(self.limit))
        self._run_next(others)
        return first

    def alone(self, work: Sequence[Work]) -> None:
        """Each request of the work runs alone, before other parts."""
        self._run_next([[item] for item in work])

    def one_by_one(self) -> list[Request]:
        """The batch failed: runs each of its requests alone. If there is only one, returns it, and the caller
        must release it."""
        work = self._in_flight.oldest_work()
        requests = self._in_flight.discard()
        if len(work) == 1:
            return requests
        self.alone(work)
        return []

    def smaller(self) -> list[Request]:
        """The batch ran out of memory: runs it in halves, and keeps later passes as small. If it cannot be
        divided, returns its request, and the caller must release it."""
        work = self._in_flight.oldest_work()
        requests = self._in_flight.discard()
        if not work:  # its requests have left
            return requests
        num_tokens = sum([count for _, count in work])
        if len(work) == 1 if self._whole_prompts else num_tokens == 1:
            if self._is_dividing:
                self.limit, self._is_dividing = self._limit_before, False
            return requests
        if not self._is_dividing:
            self.is_used = self._is_dividing = True
            self._limit_before = self.limit
        self._most_failed = max(self._most_failed, num_tokens)
        self._num_passes = 0
        self.limit = size = (num_tokens + 1) // 2
        parts = self._divided(work, size)
        if len(parts) == 1:
            return requests
        self._run_next(parts)
        return []

    def fits(self) -> None:
        """A pass has run while there is a limit."""
        self._num_passes += 1
        if self._num_passes >= RECOVERY_PASSES:
            self._num_passes = 0
            self.limit *= 2
            if self.limit >= self._most_failed:
                self.limit = math.inf

    def _run_next(self, parts: Sequence[Sequence[Work]]) -> None:
        self.is_used = True
        self.parts.extendleft(reversed(parts))

    def _divided(self, work: Sequence[Work], num_tokens: int) -> list[list[Work]]:
        """Parts of at most ``num_tokens`` tokens each, or larger ones with a single prompt that must be
        whole."""
        if not self._whole_prompts:
            return divide_work(work, num_tokens)
        parts: list[list[Work]] = []
        room = 0
        for item in work:
            if not parts or item[1] > room:
                parts.append([])
                room = num_tokens
            parts[-1].append(item)
            room -= item[1]
        return parts


def divide_work(work: Sequence[Work], num_tokens: int) -> list[list[Work]]:
    """The work as parts of at most ``num_tokens`` tokens and nodes each, or larger ones with a single run of
    a medium that attends both ways."""
    parts: list[list[Work]] = [[]]
    room = num_tokens
    for request, num_left in work:
        start = request.num_computed
        while num_left:
            num_here = min(num_left, max(room, 1))
            num_here = request.media.whole_end(start, start + num_here) - start
            if num_here > room and parts[-1]:
                parts.append([])
                room = num_tokens
                continue
            parts[-1].append((request, num_here))
            num_left -= num_here
            start += num_here
            room = max(0, room - num_here)
    return parts
