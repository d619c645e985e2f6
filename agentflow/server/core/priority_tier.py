"""The waiting requests of one tenant that have the same priority, and which of them goes first.

That is the one with the first deadline, if any has one; then the siblings of the task group that was
admitted last; then the longest match among those with the objective ``latency``, then among the others.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable

from agentflow.server.core.policy import IsBlocked
from agentflow.server.core.request import Request
from agentflow.server.core.token_run import TokenRun
from agentflow.server.core.waiting_tree import WaitingTree


class PriorityTier:
    """Requests in the order that the module's docstring gives."""

    def __init__(self) -> None:
        self.trees = {"latency": WaitingTree(), "throughput": WaitingTree()}
        self.groups: dict[Hashable, dict[int, Request]] = {}
        self._deadlines: list[tuple[float, int, Request]] = []  # a heap; old entries stay

    def add(self, request: Request, run: TokenRun, match: int) -> None:
        """A request, the tokens of it that may come from the cache, and how many of these are there."""
        self.trees[request.objective].add(request, run, match)
        if request.task_group is not None:
            self.groups.setdefault(request.task_group, {})[request.id] = request
        if request.deadline < math.inf:
            heapq.heappush(self._deadlines, (request.deadline, request.id, request))

    def remove(self, request: Request) -> None:
        """It waits no longer."""
        self.trees[request.objective].remove(request)
        group = request.task_group
        if group is not None:
            del self.groups[group][request.id]
            if not self.groups[group]:
                del self.groups[group]

    def next(self, current_group: Hashable, is_blocked: IsBlocked) -> Request | None:
        """The first that is not blocked. ``current_group``: of the request that was admitted last."""
        urgent = self._most_urgent() if self._deadlines else None
        if urgent is not None and not is_blocked(urgent, self.match_of(urgent)):
            return urgent
        if current_group in self.groups:
            for sibling in self.groups[current_group].values():
                if not is_blocked(sibling, self.match_of(sibling)):
                    return sibling
        for tree in self.trees.values():
            found = tree.longest_match(is_blocked)
            if found is not None:
                return found[0]
        return None

    def match_of(self, request: Request) -> int:
        """How much of a waiting request is cached."""
        return self.trees[request.objective].match_of(request)

    def _most_urgent(self) -> Request | None:
        """The one with the first deadline."""
        while self._deadlines and self._deadlines[0][2] not in self.trees[self._deadlines[0][2].objective]:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][2] if self._deadlines else None
