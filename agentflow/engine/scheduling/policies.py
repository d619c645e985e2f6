"""The scheduling policies by name, and the simple ones, which exist for comparison.

``fair-lpm`` is the default (see ``fair_policy``). ``lpm`` and ``dfs-weight`` follow only the cache. Both have
the best possible hit rate if all requests are known, one runs at a time, and the cache holds the longest of
them (Zheng et al., "SGLang", 2024, theorem 3.1): each token of the requests' tree is then computed once.
Neither is fair: a request that shares nothing waits for all that do. ``fcfs`` is the order of arrival, and
``random`` a random order. The simple policies ignore tenants, weights and priorities, and compute one prompt
after the other.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence

from agentflow.engine.cache.radix_cache import TokenRun
from agentflow.engine.request import CacheIdentity, Request
from agentflow.engine.scheduling.defaults import DEFAULT_POLICY
from agentflow.engine.scheduling.fair_policy import FairLongestPrefix
from agentflow.engine.scheduling.policy import IsBlocked, Peek, Policy, Retracted
from agentflow.engine.scheduling.waiting_tree import WaitingNode, WaitingTree
from agentflow.errors import BadArgument

MAX_PASSED_OVER = 128
"""Policies without a tree look at this many blocked requests for one that is not."""


class _SimplePolicy(ABC):
    """What policies without tenants have in common: running prompts get all tokens before others start, and
    retracted requests run again first."""

    def __init__(self) -> None:
        self._retracted = Retracted()
        self._waiting: dict[int, Request] = {}

    def __len__(self) -> int:
        return len(self._retracted) + len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        yield from self._retracted
        yield from self._waiting.values()

    def __contains__(self, request: Request) -> bool:
        return request.id in self._waiting or request in self._retracted

    def add(self, request: Request) -> None:
        self._waiting[request.id] = request

    def restore(self, request: Request) -> None:
        self._retracted.add(request)

    def remove(self, request: Request) -> None:
        if not self._retracted.discard(request):
            del self._waiting[request.id]

    def next(self, prompts: Sequence[Request], is_blocked: IsBlocked | None) -> Request | None:
        if prompts:
            return prompts[0]
        if is_blocked is None:
            return None
        return self._retracted.first(is_blocked) or self._next_waiting(is_blocked)

    @abstractmethod
    def _next_waiting(self, is_blocked: IsBlocked) -> Request | None:
        """The first request that has not run yet and is not blocked."""

    def admit(self, request: Request) -> None:
        self.remove(request)

    def start_step(self, prompts: Sequence[Request]) -> None:  # noqa: B027  most of them track nothing
        pass

    def charge(self, request: Request, num_tokens: int) -> None:  # noqa: B027
        pass

    def finish(self, request: Request) -> None:  # noqa: B027
        pass

    def tokens_cached(self, identity: CacheIdentity, run: TokenRun) -> None:  # noqa: B027
        pass

    def tokens_evicted(self, identity: CacheIdentity, run: Callable[[], TokenRun], kept: int) -> None:  # noqa: B027
        pass


class FirstCome(_SimplePolicy):
    """In order of arrival."""

    def __init__(self, peek: Peek, token_budget: int) -> None:
        super().__init__()

    def _next_waiting(self, is_blocked: IsBlocked) -> Request | None:
        for _, request in zip(range(MAX_PASSED_OVER), self._in_order(), strict=False):
            if not is_blocked(request, None):
                return request
        return None

    def _in_order(self) -> Iterator[Request]:
        return iter(self._waiting.values())


class RandomOrder(FirstCome):
    """In a random order, from a fixed seed. A request once drawn stays first until it is admitted, also while
    it waits for memory."""

    def __init__(self, peek: Peek, token_budget: int) -> None:
        super().__init__(peek, token_budget)
        self._random = random.Random(0)
        self._order: list[Request] = []

    def add(self, request: Request) -> None:
        super().add(request)
        self._order.append(request)
        other = self._random.randrange(len(self._order))
        self._order[other], self._order[-1] = self._order[-1], self._order[other]

    def _in_order(self) -> Iterator[Request]:
        while self._order and self._order[-1].id not in self._waiting:
            self._order.pop()
        return (request for request in reversed(self._order) if request.id in self._waiting)


class LongestPrefix(_SimplePolicy):
    """Longest cached prefix first; of equals roughly the oldest."""

    def __init__(self, peek: Peek, token_budget: int) -> None:
        super().__init__()
        self._peek = peek
        self._tree = WaitingTree()

    def add(self, request: Request) -> None:
        super().add(request)
        run = request.reusable_run()
        self._tree.add(request, run, self._peek(request.extra_key, run))

    def _next_waiting(self, is_blocked: IsBlocked) -> Request | None:
        found = self._tree.first(is_blocked)
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
    """Depth first through the tree of waiting requests: below the request that was admitted last as long as
    there are any, and otherwise into the subtree with the most requests."""

    def __init__(self, peek: Peek, token_budget: int) -> None:
        super().__init__(peek, token_budget)
        self._path: list[WaitingNode] = []  # from the root to the end of the last admitted request

    def _next_waiting(self, is_blocked: IsBlocked) -> Request | None:
        while self._path and not self._path[-1].num_waiting:
            self._path.pop()
        for node in reversed(self._path):
            request = _heaviest_first(node, is_blocked)
            if request is not None:
                return request
        roots = [root for by_rank in self._tree.roots.values() for root in by_rank.values()]
        for root in sorted(roots, key=lambda root: -root.num_waiting):
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
        if node.start + node.cached < node.end and is_blocked(node.any_request(), None):
            continue  # all below need the same token next
        for request in node.requests.values():
            if not is_blocked(request, None):
                return request
        pending += sorted(node.children.values(), key=lambda child: child.num_waiting)
    return None


POLICIES: dict[str, Callable[[Peek, int], Policy]] = {
    DEFAULT_POLICY: FairLongestPrefix,
    "lpm": LongestPrefix,
    "dfs-weight": DfsWeight,
    "fcfs": FirstCome,
    "random": RandomOrder,
}


def policy_named(name: str, peek: Peek, token_budget: int) -> Policy:
    """A new policy, for a scheduler with this token budget. ``BadArgument`` for an unknown name."""
    if name not in POLICIES:
        raise BadArgument(f"unknown scheduling policy {name!r}; known: {', '.join(POLICIES)}", param="policy")
    return POLICIES[name](peek, token_budget)
