"""``dfs-weight``: depth first through the tree of waiting requests, for comparison in simulations.

Like ``lpm`` it follows only the cache, and has the best possible hit rate if all requests are known, one runs
at a time, and the cache holds the longest of them (Zheng et al., "SGLang", 2024, theorem 3.1): each token of
the requests' tree is then computed once. It is not fair: a request that shares nothing waits for all that do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from agentflow.engine.cache.token_run import TokenRun
from agentflow.engine.request import CacheKey, Request
from agentflow.engine.scheduling.policies.policy import Clock, PeekCache, SimplePolicy
from agentflow.engine.scheduling.policies.waiting_tree import IsBlocked, WaitingNode, WaitingTree
from agentflow.engine.scheduling.scheduler import POLICIES, NewPolicy


class DepthFirst(SimplePolicy):
    """Depth first through the tree of waiting requests: first the requests below the one that was admitted
    last, then the subtree with the most requests."""

    def __init__(self, peek: PeekCache, token_budget: int, clock: Clock) -> None:
        super().__init__()
        self._peek = peek
        self._tree = WaitingTree()
        self._path: list[WaitingNode] = []  # from the root to the end of the last admitted request
        self._num_waiting: dict[WaitingNode, int] = {}  # requests at and below each node of the tree
        self._tree.on_joined = self._joined

    def add(self, request: Request) -> None:
        super().add(request)
        run = request.reusable_run()
        self._tree.add(request, run, self._peek(request.cache_key, run))
        counts = self._num_waiting
        for node in self._nodes_up(request):
            if node in counts:
                counts[node] += 1
            else:  # new: below it nothing else is
                counts[node] = len(node.requests) + sum([counts[child] for child in node.children.values()])

    def remove(self, request: Request) -> None:
        if request.id in self._waiting:
            for node in self._nodes_up(request):
                self._num_waiting[node] -= 1
                if not self._num_waiting[node]:
                    del self._num_waiting[node]
            self._tree.remove(request)
        super().remove(request)

    def _joined(self, nodes: Sequence[WaitingNode]) -> None:
        """The last node takes the place of all."""
        for node in nodes[:-1]:
            del self._num_waiting[node]
        heirs = dict.fromkeys(nodes, nodes[-1])
        self._path = [*dict.fromkeys([heirs.get(node, node) for node in self._path])]

    def _nodes_up(self, request: Request) -> Iterator[WaitingNode]:
        node: WaitingNode | None = self._tree.nodes[request.id]
        while node is not None:
            yield node
            node = node.parent

    def _next_waiting(self, is_blocked: IsBlocked) -> Request | None:
        while self._path and not self._path[-1].has_requests:
            self._path.pop()
        for node in reversed(self._path):
            request = self._heaviest_first(node, is_blocked)
            if request is not None:
                return request
        roots = [root for by_rank in self._tree.roots.values() for root in by_rank.values()]
        for root in sorted(roots, key=lambda root: -self._num_waiting[root]):
            request = self._heaviest_first(root, is_blocked)
            if request is not None:
                return request
        return None

    def _heaviest_first(self, root: WaitingNode, is_blocked: IsBlocked) -> Request | None:
        """Depth first, without recursion: the tree is as deep as clients nest their prompts."""
        pending = [root]
        while pending:
            node = pending.pop()
            if node.start + node.cached < node.end and node.unblocked(None, is_blocked) is None:
                continue  # all below need the same token next
            for request in node.requests.values():
                if not is_blocked(request, None):
                    return request
            pending += sorted(node.children.values(), key=self._num_waiting.__getitem__)
        return None

    def admit(self, request: Request) -> None:
        if request.id in self._waiting:
            self._path = [*self._nodes_up(request)]
            self._path.reverse()
        super().admit(request)

    def tokens_cached(self, cache_key: CacheKey, run: TokenRun) -> None:
        self._tree.tokens_cached(cache_key, run)

    def tokens_evicted(self, cache_key: CacheKey, run: Callable[[], TokenRun], kept: int) -> None:
        self._tree.tokens_evicted(cache_key, run, kept)


SIMULATED_POLICIES: Mapping[str, NewPolicy] = {**POLICIES, "dfs-weight": DepthFirst}
"""The policies of ``agentflow simulate``: an engine's policies, and others for comparison."""
