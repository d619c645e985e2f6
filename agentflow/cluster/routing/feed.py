"""A replica's reports of its cache, in numbered messages, and the router's reading of them.

A replica collects the blocks that enter and leave its cache and sends them after each step as one *update*.
Updates are numbered. The router applies each once and in order; after a gap it asks for a *snapshot*, which
has all blocks that are cached, and ignores updates until it comes. Each incarnation of an engine process has
a higher *epoch*: messages of an earlier one are ignored, and the first of a new one clears the replica's
blocks. Messages may therefore be lost, come twice, late or in another order: the tree is then behind, and
becomes right with the next snapshot.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from agentflow.cluster.routing.prefix_tree import PrefixTree, ReplicaNumber
from agentflow.engine.cache.blocks import BlockFeed, BlocksRemoved, BlocksReport, BlocksStored


@dataclass(frozen=True, slots=True)
class Update:
    """Blocks that entered and left a cache, in order."""

    replica: ReplicaNumber
    epoch: int  # of its engine process
    number: int  # counts the updates of the epoch from 1
    changes: Sequence[BlocksStored | BlocksRemoved]  # the blocks
    is_snapshot: bool = False  # ``changes`` are all blocks that are cached after the update of this number


class Feed:
    """The replica's side. ``on_blocks`` is the cache's (``RadixCache``)."""

    def __init__(self, replica: ReplicaNumber, epoch: int) -> None:
        self._replica = replica
        self._epoch = epoch
        self._blocks = BlockFeed()
        self.on_blocks = self._blocks.on_blocks

    def flush(self) -> Update | None:
        """The changes since the last update, or None if there are none."""
        report = self._blocks.flush()
        return None if report is None else self._update(report)

    def snapshot(self, stored: Iterable[BlocksStored]) -> Update:
        """All blocks that are cached now. The next update continues from here."""
        return self._update(self._blocks.snapshot(stored))

    def _update(self, report: BlocksReport) -> Update:
        return Update(self._replica, self._epoch, report.number, report.changes, report.is_snapshot)


class Follower:
    """The router's side of one replica's feed."""

    def __init__(self, tree: PrefixTree, replica: ReplicaNumber) -> None:
        self._tree = tree
        self._replica = replica
        self._epoch = -1
        self._number = 0  # of the last update that was applied
        self.is_behind = False
        """Updates are missing. A snapshot is needed."""

    def receive(self, update: Update) -> bool:
        """Applies an update. Returns False if a snapshot is needed now."""
        if update.epoch < self._epoch:
            return True  # of a process that is gone; nothing can be asked of it
        if update.epoch > self._epoch:
            self._reset(update.epoch)
        if update.is_snapshot:
            if update.number >= self._number and (self.is_behind or update.number > self._number):
                self._tree.forget(self._replica)
                self._number, self.is_behind = update.number, False
                self._apply(update)
        elif update.number > self._number:
            if update.number > self._number + 1:
                self.is_behind = True
            if not self.is_behind:
                self._number = update.number
                self._apply(update)
        return not self.is_behind

    def lost(self) -> None:
        """The replica is gone. Messages of its present epoch are ignored from now on."""
        self._reset(self._epoch + 1)

    def _reset(self, epoch: int) -> None:
        self._tree.forget(self._replica)
        self._epoch, self._number, self.is_behind = epoch, 0, False

    def _apply(self, update: Update) -> None:
        for change in update.changes:
            if isinstance(change, BlocksStored):
                is_consistent = self._tree.store(self._replica, change)
            else:
                is_consistent = self._tree.remove(self._replica, change.digests)
            if not is_consistent:
                self.is_behind = True
