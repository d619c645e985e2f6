"""The scheduling policies by name.

The policies that follow the cache and nothing else: ``lpm`` and ``dfs-weight``.

Both reach the best possible hit rate when all requests are known, one runs at a time, and the cache
holds the longest of them (Zheng et al., "SGLang", 2024, theorem 3.1): each token of the requests' tree
is then computed once. Neither is fair: a request that shares nothing waits for all that do.
"""

from __future__ import annotations

from collections.abc import Callable

from agentflow.engine.cache.radix_cache import TokenRun
from agentflow.engine.request import CacheIdentity, Request
from agentflow.engine.scheduling.fair_policy import FairLongestPrefix
from agentflow.engine.scheduling.policy import (
    FirstCome,
    IsBlocked,
    Peek,
    Policy,
    RandomOrder,
    WaitingRequests,
)
from agentflow.engine.scheduling.waiting_tree import WaitingNode, WaitingTree
from agentflow.errors import BadArgument


class LongestPrefix(WaitingRequests):
    """Longest cached prefix first; of equals, about the one that came first."""

    def __init__(self, peek: Peek, token_budget: int) -> None:
        super().__init__()
        self._peek = peek
        self._tree = WaitingTree()

    def add(self, request: Request) -> None:
        super().add(request)
        run = request.reusable_run()
        self._tree.add(request, run, self._peek(request.extra_key, run))

    def _next_waiting(self, is_blocked: IsBlocked) -> Request | None:
        found = self._tree.longest_match(is_blocked)
        return found[0] if found is not None else None

    def remove(self, request: Request) -> None:
        if request.id in self._waiting:
            self._tree.remove(request)
        super().remove(request)

    def tokens_cached(self, identity: CacheIdentity, run: TokenRun) -> None:
        self._tree.tokens_cached(identity, run)

    def tokens_evicted(self, identity: CacheIdentity, run: Callable[[], TokenRun], kept: int) -> None:
        self._tree.tokens_evicted(identity, run, kept)


class DfsWeight(LongestPrefix):
    """Depth first through the tree of the waiting requests: below the request that was admitted last
    for as long as there is any, and where the path is open, into the branch that holds most."""

    def __init__(self, peek: Peek, token_budget: int) -> None:
        super().__init__(peek, token_budget)
        self._path: list[WaitingNode] = []  # from the root to where the last one ended

    def _next_waiting(self, is_blocked: IsBlocked) -> Request | None:
        while self._path and not self._path[-1].num_waiting:
            self._path.pop()
        for node in reversed(self._path):
            request = _heaviest_first(node, is_blocked)
            if request is not None:
                return request
        for root in sorted(self._tree.roots.values(), key=lambda root: -root.num_waiting):
            request = _heaviest_first(root, is_blocked)
            if request is not None:
                return request
        return None

    def admit(self, request: Request) -> None:
        if request.id in self._waiting:
            node: WaitingNode | None = self._tree.node_of(request)
            self._path = []
            while node is not None:
                self._path.append(node)
                node = node.parent
            self._path.reverse()
        super().admit(request)


def _heaviest_first(root: WaitingNode, is_blocked: IsBlocked) -> Request | None:
    """Depth first, without recursion: the tree is as deep as clients nest their prompts."""
    pending = [root]
    while pending:
        node = pending.pop()
        for request in node.requests.values():
            if not is_blocked(request, None):
                return request
        # All below a child need the same token next where they leave this node.
        pending += sorted(node.children.values(), key=lambda child: child.num_waiting)
    return None


DEFAULT_POLICY = "fair-lpm"
POLICIES: dict[str, Callable[[Peek, int], Policy]] = {
    DEFAULT_POLICY: FairLongestPrefix,
    "lpm": LongestPrefix,
    "dfs-weight": DfsWeight,
    "fcfs": FirstCome,
    "random": RandomOrder,
}


def policy_named(name: str, peek: Peek, token_budget: int) -> Policy:
    """A new policy, for batches of so many rows. ``BadArgument`` names those there are."""
    if name not in POLICIES:
        raise BadArgument(f"no scheduling policy {name!r}; there are: {', '.join(POLICIES)}")
    return POLICIES[name](peek, token_budget)
