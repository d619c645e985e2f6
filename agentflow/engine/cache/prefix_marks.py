"""Prefixes that clients asked to keep for some time, as with ``cache_control`` of Anthropic's API.

A mark is a rank in the eviction of one owner's tokens, not a lock: marked tokens are evicted after unmarked
ones and before the tokens that open states need. It does not change how many tokens an owner loses
(``nodes``), so an owner that marks everything gets no more room than without marks, and its marked prefixes
lose their tokens in the order of their last use.

A mark belongs to the node at whose end the prefix ends. A heap has the times at which marks end, with old
entries, so a mark and its end each cost one heap operation, and a repeated mark adds no entry.
"""

from __future__ import annotations

import heapq
import itertools

from agentflow.engine.cache.nodes import Node
from agentflow.engine.cache.radix_cache import RadixCache

MIN_REBUILT = 64
MAX_ENDED = 256
"""A step ends at most this many marks."""


class PrefixMarks:
    """The marks in one cache. Times may be on any clock."""

    def __init__(self, cache: RadixCache) -> None:
        self._cache = cache
        self._ends: list[tuple[float, int, Node]] = []  # a heap; the end of a mark is never before its entry
        self._ties = itertools.count()
        self._most = MIN_REBUILT  # entries at which the heap is rebuilt

    def __len__(self) -> int:
        """The number of entries, old ones included."""
        return len(self._ends)

    def mark(self, node: Node, until: float) -> None:
        """Keeps the prefix that ends at ``node`` until ``until``, or longer if it already was marked for
        longer."""
        was_marked = node.marked_until > 0
        if self._cache.mark(node, until) is not None and not was_marked:
            self._push(until, node)

    def expire(self, now: float) -> None:
        """Ends the marks whose time is over. Their prefixes become ordinary cache. If there are many, later
        steps go on."""
        for _ in range(MAX_ENDED):
            if not self._ends or self._ends[0][0] > now:
                return
            node = heapq.heappop(self._ends)[2].present
            if not node.marked_until:
                continue
            if node.marked_until > now:
                self._push(node.marked_until, node)
            else:
                self._cache.mark(node, 0.0)

    def _push(self, until: float, node: Node) -> None:
        heapq.heappush(self._ends, (until, next(self._ties), node))
        if len(self._ends) > self._most:
            # Prefixes may be evicted before their marks end: keep one entry for each that is left.
            left = {node.present: None for _, _, node in self._ends}
            self._ends = [(node.marked_until, next(self._ties), node) for node in left if node.marked_until]
            heapq.heapify(self._ends)
            self._most = MIN_REBUILT + 2 * len(self._ends)
