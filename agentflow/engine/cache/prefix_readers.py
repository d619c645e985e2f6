"""Which running requests read each node of the radix tree: the prefixes that they share.

Attention reads such a prefix once for all of its readers. The record is kept as requests start, end and grow,
so that no step searches for shared prefixes. A request is the row of its slots in the table.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from agentflow.engine.cache.nodes import Node, PrefixMatch
from agentflow.engine.cache.radix_cache import RadixCache

SharedPrefix = tuple[int, np.ndarray[tuple[int], np.dtype[np.int64]]]
"""A number of tokens, and the rows of the requests that all begin with the same ones, in the same slots."""


class PrefixReaders:
    """The rows that read each node of one cache. Costs depend on the number of nodes in a request's path and
    of readers of the nodes that it shares, not on the lengths of prefixes.

    Args:
        cache: The cache. Its nodes with readers are locked.
    """

    def __init__(self, cache: RadixCache) -> None:
        cache.on_split = self._split
        self._rows: dict[Node, dict[int, None]] = {}
        self._shared: dict[Node, SharedPrefix | None] = {}  # nodes with several readers; None: not made yet
        self._prefixes: Sequence[SharedPrefix] | None = ()

    def enter(self, row: int, match: PrefixMatch) -> None:
        """A request reads a prefix from now on."""
        self._add(row, match.node, None)

    def move(self, row: int, old: PrefixMatch, new: PrefixMatch) -> None:
        """A request that reads ``old`` reads ``new`` from now on, which continues it."""
        self._add(row, new.node, old.node)

    def _add(self, row: int, node: Node, last: Node | None) -> None:
        while node.parent is not None and node is not last:
            rows = self._rows.get(node)
            if rows is None:
                self._rows[node] = {row: None}
            else:
                rows[row] = None
                self._shared[node] = self._prefixes = None
            node = node.parent

    def leave(self, row: int, match: PrefixMatch) -> None:
        """A request no longer reads a prefix."""
        node = match.node
        while node.parent is not None:
            rows = self._rows[node]
            del rows[row]
            if rows:
                self._prefixes = None
                if len(rows) > 1:
                    self._shared[node] = None
                else:
                    del self._shared[node]
            else:
                del self._rows[node]
            node = node.parent

    def _split(self, lower: Node, upper: Node) -> None:
        """A node was split into two, which have the same readers. The shared prefixes do not change."""
        rows = self._rows.get(lower)
        if rows is not None:
            self._rows[upper] = dict(rows)
            if len(rows) > 1:
                self._shared[upper] = None

    def prefixes(self) -> Sequence[SharedPrefix]:
        """The prefixes that several rows read, in any order: for each set of rows the longest."""
        if self._prefixes is None:
            rows_of = self._rows
            # Nodes all of whose readers continue in the same child.
            inner = {
                node.parent
                for node in self._shared
                if node.parent in rows_of and len(rows_of[node.parent]) == len(rows_of[node])
            }
            self._prefixes = [self._prefix(node) for node in self._shared if node not in inner]
        return self._prefixes

    def _prefix(self, node: Node) -> SharedPrefix:
        known = self._shared[node]
        if known is None:
            rows = self._rows[node]
            known = node.start + len(node.slots), np.fromiter(rows, np.int64, len(rows))
            self._shared[node] = known
        return known

    def check(self) -> None:
        """For tests. ``AssertionError`` if anything is read while no request runs."""
        assert not self._rows
        assert not self._shared
        assert not self.prefixes()
