"""The part of the radix trees that was used last, for those that watch the cache."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable
from itertools import islice

from agentflow.engine.cache.nodes import Account, Node
from agentflow.engine.cache.radix_cache import RadixCache

PUSHES_PER_NODE = 2


def list_accounts(cache: RadixCache, owner: Hashable) -> list[Account]:
    """The cached tokens of ``owner``; for None, of each owner."""
    if owner is None:
        return [*cache.accounts()]
    account = cache.find_account(owner)
    return [] if account is None else [account]


def recent_nodes(cache: RadixCache, most: int, owner: Hashable = None) -> list[Node]:
    """The most recently used nodes of ``owner`` (None: of all), ``most`` at most, with all their parents, and
    parents before their children.

    First come the paths to the ends of prefixes that were used last, as far as the cache remembers them, then
    other nodes from the top, the most recent of those that were seen first. The time depends on ``most`` and
    ``MAX_RECENT``, not on the size of the trees: of a node with very many children only the newest are seen.
    A tree with at most ``most`` nodes is complete.
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
    _fill(chosen, most, (root for account in list_accounts(cache, owner) for root in account.roots))
    return [*chosen]


def _fill(chosen: dict[Node, None], most: int, roots: Iterable[Node]) -> None:
    """Adds nodes from the top: a heap has the children of the chosen ones, the most recently used first."""
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
