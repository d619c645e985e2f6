"""The blocks that enter and leave a cache, in numbered reports.

Reports are numbered from 1. After a gap, a reader asks for a snapshot: all blocks that are cached, under the
number of the last report; the next report continues from there. A report has at most ``max_blocks`` blocks,
or one run of blocks, so that no reader works long on one. The rest of a large snapshot follows as reports.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from agentflow.engine.cache.blocks import BlocksRemoved, BlocksStored


class BlocksReport(NamedTuple):
    """Blocks that entered and left, in order. ``is_snapshot``: before them, the cache was empty."""

    number: int
    changes: list[BlocksStored | BlocksRemoved]
    is_snapshot: bool


class BlockFeed:
    """Collects blocks. ``on_blocks`` is the cache's (``RadixCache``). ``changes``: those that no report has
    had. ``max_blocks``: of one report; None: any number."""

    def __init__(self, max_blocks: int | None = None) -> None:
        self._max_blocks = max_blocks
        self._number = 0
        self.changes: deque[BlocksStored | BlocksRemoved] = deque()

    def on_blocks(self, change: BlocksStored | BlocksRemoved) -> None:
        """Blocks enter or leave the cache."""
        self.changes.append(change)

    def flush(self) -> BlocksReport | None:
        """Returns the next report, or None if nothing has changed."""
        if not self.changes:
            return None
        self._number += 1
        return BlocksReport(self._number, self._take(), False)

    def snapshot(self, stored: Iterable[BlocksStored]) -> BlocksReport:
        """Returns the first report of all blocks that are cached now. ``flush`` returns the others."""
        self.changes = deque(stored)
        return BlocksReport(self._number, self._take(), True)

    def _take(self) -> list[BlocksStored | BlocksRemoved]:
        taken: list[BlocksStored | BlocksRemoved] = []
        num_blocks = 0
        while self.changes:
            num_blocks += len(self.changes[0].digests)
            if taken and self._max_blocks is not None and num_blocks > self._max_blocks:
                break
            taken.append(self.changes.popleft())
        return taken
