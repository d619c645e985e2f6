"""The leaves of the radix cache in the order in which they would be evicted.

A heap with lazy deletion: a leaf that is used, locked, extended or removed leaves an old entry behind,
which is dropped when it comes up, or when old entries are most of the heap.
"""

from __future__ import annotations

import heapq

from agentflow.server.core.radix_node import Node

_Entry = tuple[bool, int, int, Node]  # is it kept, its last access, a tie-break, the leaf


class EvictionQueue:
    """``num_leaves``: evictable leaves there are, as the cache counts them."""

    def __init__(self) -> None:
        self._entries: list[_Entry] = []
        self._pushes = 0
        self.num_leaves = 0

    def __len__(self) -> int:
        """Entries, old ones too."""
        return len(self._entries)

    def push(self, node: Node) -> None:
        """The node is an evictable leaf, and its rank may have changed."""
        self._pushes += 1
        heapq.heappush(self._entries, (node.keeps > 0, node.last_access, self._pushes, node))
        if len(self._entries) > 64 + 4 * self.num_leaves:
            # Mostly old entries: keep one for each leaf. Amortised over the pushes that made them.
            live = {id(entry[3]): entry for entry in self._entries if _is_current(entry)}
            self._entries = list(live.values())
            heapq.heapify(self._entries)

    def pop(self) -> Node | None:
        """The leaf of the least rank, or None where no leaf can be evicted."""
        while self._entries:
            entry = heapq.heappop(self._entries)
            if _is_current(entry):
                return entry[3]
        return None

    def nodes(self) -> set[Node]:
        """All leaves in the queue; for checks."""
        return {entry[3] for entry in self._entries if _is_current(entry)}


def _is_current(entry: _Entry) -> bool:
    is_kept, last_access, _, node = entry
    return node.last_access == last_access and node.is_evictable and (node.keeps > 0) == is_kept
