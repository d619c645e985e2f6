"""The free list of the KV pool: which slots (one token's place each) are nobody's.

Slots are handed out in ascending runs where possible, because neighbouring slots are read faster.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from agentflow.engine.cache.radix_node import SlotArray


class KVSlots:
    """``total`` slots, numbered from 0. Double frees and foreign slots raise ``ValueError``."""

    def __init__(self, total: int) -> None:
        self.total = total
        # A stack whose top is at the end; descending at first, so that slots come out ascending.
        self._stack: SlotArray = np.arange(total - 1, -1, -1, dtype=np.int32)
        self._is_free: NDArray[np.bool_] = np.ones(total, dtype=np.bool_)
        self.num_free = total

    def allocate(self, count: int) -> SlotArray:
        """``count`` slots, or ``MemoryError`` when fewer are free (nothing is taken then)."""
        if count > self.num_free:
            raise MemoryError(f"{count} slots asked for, {self.num_free} free")
        taken = self._stack[self.num_free - count : self.num_free][::-1].copy()
        self.num_free -= count
        self._is_free[taken] = False
        return taken

    def release(self, slots: SlotArray) -> None:
        """Gives slots back."""
        count = len(slots)
        if count == 0:
            return
        if np.count_nonzero(self._is_free[slots]):
            raise ValueError("a slot was released that is free already")
        self._is_free[slots] = True
        self._stack[self.num_free : self.num_free + count] = slots[::-1]
        self.num_free += count

    def check(self) -> None:
        """Raises ``AssertionError`` where the free list does not hold each free slot once."""
        free = self._stack[: self.num_free]
        assert self._is_free[free].all()
        assert np.count_nonzero(self._is_free) == self.num_free, "a slot is in the free list twice"
