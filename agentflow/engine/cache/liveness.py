"""Which states of programs are open: what they computed is evicted after everything else, and where the
batch is well filled no waiting request begins on it in the steps in which the state's next request may come.

Weights, never locks: the first expires when much else was computed since, and is given up where only kept
tokens are left; the second only keeps waiting requests waiting, for two steps.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from agentflow.engine.cache.radix_cache import Node, PrefixMatch, RadixCache

EXPIRES_AFTER_POOLS = 4
"""A state that did nothing while so many times the pool was computed counts as finished."""

EXPECTED_STEPS = 2
"""So many steps after a request of a state its next one is expected: programs answer at once, people do
not."""


class _End(NamedTuple):
    match: PrefixMatch
    num_computed: int
    step: int


class Liveness:
    """The open states of one model, each with the end of what it last computed."""

    def __init__(self, cache: RadixCache, num_slots: int) -> None:
        self._cache = cache
        self._lifetime = EXPIRES_AFTER_POOLS * num_slots
        self._max_states = num_slots
        self._ends: dict[Hashable, _End] = {}  # least recently refreshed first

    def __len__(self) -> int:
        return len(self._ends)

    def refresh(self, state: Hashable, end: PrefixMatch, *, num_computed: int, step: int) -> None:
        """The state is open and ends here now; ``num_computed``: tokens computed by the engine so far."""
        self.close(state)
        self._cache.keep(end)
        self._ends[state] = _End(end, num_computed, step)
        if len(self._ends) > self._max_states:
            self.close(next(iter(self._ends)))

    def close(self, state: Hashable) -> None:
        """The state is over. Unknown ones are ignored."""
        known = self._ends.pop(state, None)
        if known is not None:
            self._cache.unkeep(known.match)

    def expire(self, num_computed: int) -> None:
        """Forgets states that did nothing for too long."""
        while self._ends:
            state, end = next(iter(self._ends.items()))
            if num_computed - end.num_computed <= self._lifetime:
                return
            self.close(state)

    def num_expected(self, step: int) -> int:
        """Cached tokens without a lock that requests of open states are expected to need within a few
        steps."""
        seen: set[Node] = set()
        total = 0
        for end in reversed(self._ends.values()):
            if step - end.step >= EXPECTED_STEPS:
                break
            node = end.match.node
            while node.moved_to is not None:
                node = node.moved_to
            while node.parent is not None and not node.locks and node not in seen:
                seen.add(node)
                total += len(node.slots)
                node = node.parent
        return total
