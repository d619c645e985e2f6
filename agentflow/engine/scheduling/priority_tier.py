"""The waiting requests of one tenant that have the same priority, and which of them goes first.

That is the one with the first deadline, if any has one; then the one whose patience ended first, if that of
any has; then the siblings of the task group that was admitted last; then those with the objective
``latency``, then the others. Of these the short ones go first, which need few steps, and of equals the
longest match.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Hashable

from agentflow.engine.cache.token_run import TokenRun
from agentflow.engine.request import Request
from agentflow.engine.scheduling.policy import IsBlocked
from agentflow.engine.scheduling.waiting_tree import WaitingTree

MIN_GONE = 64


class TimeHeap:
    """Waiting requests that have a time, the earliest first. ``waits``: whether one still does."""

    def __init__(self, waits: Callable[[Request], bool]) -> None:
        self._heap: list[tuple[float, int, Request]] = []  # old entries stay for a while
        self._num_gone = 0
        self._waits = waits

    def add(self, at: float, request: Request) -> None:
        """Unless it is at no time at all."""
        if at < math.inf:
            heapq.heappush(self._heap, (at, request.id, request))

    def gone(self) -> None:
        """Some request, with a time or without one, waits no longer. Where most have gone, all of these are
        dropped: many may have left from the middle."""
        self._num_gone += 1
        if self._num_gone > MIN_GONE and 2 * self._num_gone > len(self._heap):
            self._heap = [entry for entry in self._heap if self._waits(entry[2])]
            heapq.heapify(self._heap)
            self._num_gone = 0

    def first(self, by: float = math.inf) -> Request | None:
        """The earliest, if its time is not after ``by``."""
        while self._heap and not self._waits(self._heap[0][2]):
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap and self._heap[0][0] <= by else None

    def __bool__(self) -> bool:
        return bool(self._heap)


class PriorityTier:
    """Requests in the order that the module's docstring gives. ``clock``: seconds. ``short_tokens``: a
    request with at most so many tokens to compute is short."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, short_tokens: int = 0) -> None:
        self._trees = {objective: (WaitingTree(), WaitingTree()) for objective in ("latency", "throughput")}
        self.groups: dict[Hashable, dict[int, Request]] = {}
        self._tree_of: dict[int, WaitingTree] = {}
        self._deadlines = TimeHeap(self._waits)
        self._patience_ends = TimeHeap(self._waits)
        self._clock = clock
        self._short_tokens = short_tokens

    @property
    def trees(self) -> list[WaitingTree]:
        """All of them: of short and long requests with each objective."""
        return [tree for pair in self._trees.values() for tree in pair]

    def add(self, request: Request, run: TokenRun, match: int) -> None:
        """A request, the tokens of it that may come from the cache, and how many of these are there."""
        short, long = self._trees[request.objective]
        tree = short if self._is_short(request, match) else long
        tree.add(request, run, match)
        self._tree_of[request.id] = tree
        if request.task_group is not None:
            self.groups.setdefault(request.task_group, {})[request.id] = request
        self._deadlines.add(request.deadline, request)
        self._patience_ends.add(request.patience_end, request)

    def remove(self, request: Request) -> None:
        """It waits no longer."""
        self._tree_of.pop(request.id).remove(request)
        self._deadlines.gone()
        self._patience_ends.gone()
        group = request.task_group
        if group is not None:
            del self.groups[group][request.id]
            if not self.groups[group]:
                del self.groups[group]

    def next(self, current_group: Hashable, is_blocked: IsBlocked) -> Request | None:
        """The first that is not blocked. ``current_group``: of the request that was admitted last."""
        for urgent in (self._deadlines.first(), self._most_impatient()):
            if urgent is not None and not is_blocked(urgent, self.match_of(urgent)):
                return urgent
        if current_group in self.groups:
            for sibling in self.groups[current_group].values():
                if not is_blocked(sibling, self.match_of(sibling)):
                    return sibling
        for short, long in self._trees.values():
            found = self._better(short.longest_match(is_blocked), long.longest_match(is_blocked))
            if found is not None:
                return found
        return None

    def match_of(self, request: Request) -> int:
        """How much of a waiting request is cached."""
        return self._tree_of[request.id].match_of(request)

    def _better(self, short: tuple[Request, int] | None, long: tuple[Request, int] | None) -> Request | None:
        """Of the longest matches of both kinds the short one, unless the cache has made the long one
        short."""
        if short is None or long is None:
            found = short or long
            return None if found is None else found[0]
        return long[0] if self._is_short(*long) and long[1] > short[1] else short[0]

    def _is_short(self, request: Request, match: int) -> bool:
        return request.num_tokens + request.num_nodes - match <= self._short_tokens

    def _most_impatient(self) -> Request | None:
        return self._patience_ends.first(by=self._clock()) if self._patience_ends else None

    def _waits(self, request: Request) -> bool:
        return request.id in self._tree_of
