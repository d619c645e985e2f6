"""Which owner (tenant) loses cached tokens first.

Eviction takes from the owner with the most cached tokens for its weight, its *level*, until it comes down to
the next (max-min fairness), so that an owner below the others loses nothing to them. It takes at least
``EVICTION_BATCH`` tokens of an owner that has them, so levels become equal to within a batch. An owner that
has not used the cache for long has next to no weight.

The order is a heap with lazy deletion: an eviction touches the owners that lose tokens, however many there
are.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Hashable

EVICTION_BATCH = 64
IDLE_WEIGHT = 1e-6
"""Factor of an owner's weight once it has not used the cache for long."""


class Holding:
    """Tokens of one owner in the cache."""

    def __init__(self, owner: Hashable) -> None:
        self.owner = owner
        self.num_cached = 0
        self.num_locked = 0  # of the cached tokens
        self.weight = 1.0  # against other owners
        self.last_used = 0  # tokens that had entered the cache when the owner last used it
        self.is_idle = False  # it has not used the cache for long
        self.queued_level = 0.0  # its level in the heap; 0: not in the heap

    @property
    def num_evictable(self) -> int:
        """Tokens that could be evicted now."""
        return self.num_cached - self.num_locked

    @property
    def current_weight(self) -> float:
        """Its weight, which is almost zero while it is idle."""
        return self.weight * IDLE_WEIGHT if self.is_idle else self.weight

    @property
    def level(self) -> float:
        """Cached tokens for its weight."""
        return self.num_cached / (self.current_weight if self.is_idle else self.weight)


class Holdings:
    """All owners' holdings, by level. ``idle_after``: an owner that does not use the cache while this many
    tokens enter it is idle (0: never)."""

    def __init__(self, idle_after: int) -> None:
        self._idle_after = idle_after
        self._num_entered = 0
        self._in_use: OrderedDict[Holding, None] = OrderedDict()  # not idle, the least recently used first
        self._by_level: list[tuple[float, int, Holding]] = []  # heap of (-level, tie-break, holding)
        self._max_entries = 64
        self._ties = itertools.count()

    def used(self, holding: Holding) -> None:
        """The owner uses the cache."""
        holding.last_used = self._num_entered
        holding.is_idle = False
        if holding.num_cached:
            self._in_use[holding] = None
            self._in_use.move_to_end(holding)

    def entered(self, holding: Holding, num_tokens: int) -> None:
        """Tokens of the owner enter the cache."""
        holding.num_cached += num_tokens
        self._num_entered += num_tokens
        self.used(holding)
        self.update(holding)

    def left(self, holding: Holding, num_tokens: int) -> None:
        """Tokens of the owner leave the cache."""
        holding.num_cached -= num_tokens
        if not holding.num_cached:
            holding.queued_level = 0.0
            self._in_use.pop(holding, None)

    def update(self, holding: Holding) -> None:
        """Queues the holding if its level rose. A level that fell is corrected when it is the highest."""
        level = holding.level
        if level > holding.queued_level:
            holding.queued_level = level
            heapq.heappush(self._by_level, (-level, next(self._ties), holding))
            if len(self._by_level) > self._max_entries:
                live = {entry[2]: entry for entry in self._by_level if entry[2].queued_level == -entry[0]}
                self._by_level = list(live.values())
                heapq.heapify(self._by_level)
                self._max_entries = 64 + 4 * len(live)

    def pop(self) -> Holding | None:
        """Removes and returns the holding with the highest level. ``update`` puts it back."""
        while self._in_use and self._idle_after:
            holding = next(iter(self._in_use))
            if self._num_entered - holding.last_used <= self._idle_after:
                break
            del self._in_use[holding]
            holding.is_idle = True
            self.update(holding)
        highest = self._highest()
        if highest is not None:
            heapq.heappop(self._by_level)
            highest.queued_level = 0.0
        return highest

    def excess(self, holding: Holding) -> int:
        """How many tokens to take from the holding just popped: down to the next level, at least a batch."""
        highest = self._highest()
        kept = 0 if highest is None else int(highest.level * holding.current_weight)
        return max(EVICTION_BATCH, holding.num_cached - kept)

    def excess_over(self, holding: Holding | None) -> int:
        """How many tokens the holding with the highest level has above the level of ``holding``, if that is
        another one."""
        highest = self._highest()
        if highest is None or highest is holding:
            return 0
        kept = 0 if holding is None else int(holding.level * highest.current_weight)
        return max(0, min(highest.num_evictable, highest.num_cached - kept))

    def _highest(self) -> Holding | None:
        """The holding at the top of the heap, after old entries are gone."""
        while self._by_level:
            key, _, holding = self._by_level[0]
            if holding.queued_level != -key:
                heapq.heappop(self._by_level)
            elif (level := holding.level) < holding.queued_level:
                holding.queued_level = level
                heapq.heapreplace(self._by_level, (-level, next(self._ties), holding))
            else:
                return holding
        return None
