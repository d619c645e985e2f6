"""Which states of programs are open: what they computed is evicted after everything else.

A weight, never a lock: it expires when much else was computed since, and kept tokens are evicted where
nothing else is left.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from agentflow.server.core.radix_cache import RadixCache
from agentflow.server.core.radix_node import PrefixMatch

EXPIRES_AFTER_POOLS = 4
"""A state that did nothing while so many times the pool was computed counts as finished."""


class _End(NamedTuple):
    match: PrefixMatch
    num_computed: int


class Liveness:
    """The open states of one model, each with the end of what it last computed."""

    def __init__(self, cache: RadixCache, num_slots: int) -> None:
        self._cache = cache
        self._lifetime = EXPIRES_AFTER_POOLS * num_slots
        self._max_states = num_slots
        self._ends: dict[Hashable, _End] = {}  # least recently refreshed first

    def __len__(self) -> int:
        return len(self._ends)

    def refresh(self, state: Hashable, end: PrefixMatch, *, num_computed: int) -> None:
        """The state is open and ends here now; ``num_computed``: tokens computed by the engine so far."""
        self.close(state)
        self._cache.keep(end)
        self._ends[state] = _End(end, num_computed)
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
