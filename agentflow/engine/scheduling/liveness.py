"""Open states of programs: their KV is evicted last, and kept from new requests while the next op is due.

A state that is open will probably continue from what it computed last. Liveness ranks evictions and delays
admissions, but never locks. The rank expires once much else was computed, and does not help if only kept
tokens are left. The delay lasts two steps. While the batch has room, it concerns only requests that would
evict many of these tokens.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from agentflow.engine.cache.radix_cache import Node, PrefixMatch, RadixCache

EXPIRES_AFTER_POOLS = 4
"""A state without requests while this many times the pool is computed counts as finished."""

EXPECTED_STEPS = 2
"""The next request of a state is expected for this many steps. Programs continue at once; people do not."""


class _End(NamedTuple):
    match: PrefixMatch
    num_computed: int
    step: int


class Liveness:
    """The open states of one model, each with the end of its last request in the cache."""

    def __init__(self, cache: RadixCache, num_slots: int) -> None:
        self._cache = cache
        self._lifetime = EXPIRES_AFTER_POOLS * num_slots
        self._max_states = num_slots
        self._ends: dict[Hashable, _End] = {}  # least recently refreshed first

    def __len__(self) -> int:
        return len(self._ends)

    def refresh(self, state: Hashable, end: PrefixMatch, *, num_computed: int, step: int) -> None:
        """A request of the state ended here. ``num_computed``, ``step``: the engine's totals so far."""
        self.close(state)
        self._cache.keep(end)
        self._ends[state] = _End(end, num_computed, step)
        if len(self._ends) > self._max_states:
            self.close(next(iter(self._ends)))

    def close(self, state: Hashable) -> None:
        """The state was closed. Unknown states are ignored."""
        known = self._ends.pop(state, None)
        if known is not None:
            self._cache.unkeep(known.match)

    def expire(self, num_computed: int) -> None:
        """Drops states without recent requests."""
        while self._ends:
            state, end = next(iter(self._ends.items()))
            if num_computed - end.num_computed <= self._lifetime:
                return
            self.close(state)

    def num_expected(self, step: int) -> int:
        """Unlocked cached tokens that open states are expected to need within a few steps."""
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
