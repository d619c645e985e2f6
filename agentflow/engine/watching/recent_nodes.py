"""Selects the most recently used nodes of the radix trees, for watches."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable
from itertools import islice

from agentflow.engine.cache.nodes import Node
from agentflow.engine.cache.radix_cache import RadixCache

PUSHES_PER_NODE = 2


def recent_nodes(cache: RadixCache, most: int, owner: Hashable = None) -> list[Node]:
    """Returns at most ``most`` recently used nodes of ``owner`` (None: of all owners). Each node comes after
    its parents.

    The result has the paths to the ends of the prefixes that were used last, as far as the cache remembers
    them, then other nodes from the roots down, the most recently used first. The time depends on ``most`` and
    ``MAX_RECENT``, not on the size of the trees: if a node has very many children, only the newest are
    considered. Trees with at most ``most`` nodes are complete.
    """
    chosen: dict[Node, None] = {}
    for end in reversed(cache.recent):
        if owner is not None and end.account.owner != owner:
            continue
        path: list[Node] = []
        node = end
        while node.parent is not None and node not in chosen:
            path.append(node)
            node = node.parent
        path.reverse()
        for node in path[: most - len(chosen)]:
            chosen[node] = None
        if len(chosen) >= most:
            return [*chosen]
    _fill(chosen, most, (root for account in cache.accounts(owner) for root in account.roots))
    return [*chosen]


def _fill(chosen: dict[Node, None], most: int, roots: Iterable[Node]) -> None:
    """Adds nodes from the roots down. A heap has the children of chosen nodes, the most recently used
    first."""
    num_left = PUSHES_PER_NODE * most
    frontier: list[tuple[int, int, Node]] = []
    above = islice(roots, num_left)
    node: Node | None = next(above, None)
    while node is not None:
        seen = [*islice(reversed(node.children.values()), num_left)]
        num_left -= len(seen)
        for child in seen:
            heapq.heappush(frontier, (-child.last_access, child.number, child))
        node = next(above, None)
        if node is None and frontier and len(chosen) < most:
            node = heapq.heappop(frontier)[2]
            chosen[node] = None
