"""Scheduling policies: which request gets the next prompt tokens of a step.

A policy owns the waiting requests. The scheduler reports to it which tokens are cached and evicted, so that
it need not match all requests against the cache again and again. Read ``Policy`` first, then the simple
policies, which exist for comparison. ``fair_policy`` is the default.

``lpm`` follows only the cache. It has the best possible hit rate if all requests are known, one runs at a
time, and the cache holds the longest of them (Zheng et al., "SGLang", 2024, theorem 3.1): each token of the
requests' tree is then computed once. It is not fair: a request that shares nothing waits for all that do.
``fcfs`` is the order of arrival, and ``random`` a random order. The simple policies ignore tenants, weights,
priorities and programs, and compute one prompt after the other.
"""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from agentflow.engine.cache.token_run import TokenRun
from agentflow.engine.request import CacheKey, Origin, Request
from agentflow.engine.scheduling.policies.charges import Charged
from agentflow.engine.scheduling.policies.match_order import MatchOrder
from agentflow.engine.scheduling.policies.waiting_tree import IsBlocked, SearchEnds

PeekCache = Callable[[CacheKey, TokenRun], int]
"""The number of cached tokens of a run under a key. Changes nothing."""
Clock = Callable[[], float]
"""Seconds: the times in requests are on this clock."""
MAX_PASSED_OVER = 128
"""Policies without a tree, and lines of preempted requests, look at this many blocked requests for one that
is not."""


class Policy(ABC):
    """The waiting requests, and which of them is next.

    The scheduler reports every change to its policy, which may ignore the events whose methods are not
    abstract.
    """

    num_waiting: int = 0
    """Number of waiting requests, aside or in line."""

    @property
    def num_tenants(self) -> int:
        """Tenants with requests that wait or run, if the policy takes turns between them; otherwise 1."""
        return 1

    def __len__(self) -> int:
        return self.num_waiting

    @abstractmethod
    def __iter__(self) -> Iterator[Request]:
        """All waiting requests, in no particular order."""

    @abstractmethod
    def __contains__(self, request: Request) -> bool:
        """Whether the request waits."""

    @abstractmethod
    def next(self, prompts: Sequence[Request], is_blocked: IsBlocked | None) -> Request | None:
        """The request whose prompt gets the next tokens of the step: one of ``prompts``, which are in the
        order of their admission, or a waiting request that is not blocked, to be admitted now
        (``is_blocked`` None: admit none). None if there is neither."""

    @abstractmethod
    def add(self, request: Request) -> None:
        """A new request arrived."""

    @abstractmethod
    def restore(self, request: Request) -> None:
        """A running request was preempted. It goes before requests that have not run."""

    @abstractmethod
    def remove(self, request: Request) -> None:
        """A waiting request was cancelled."""

    @abstractmethod
    def admit(self, request: Request) -> None:
        """A waiting request starts to run."""

    def update_origin(self, request: Request, origin: Origin, patience_end: float = math.inf) -> None:
        """The scheduling hint of a request that waits or runs changed. The tenant and the priority stay.
        ``patience_end``: its patience ends then, if not earlier."""
        request.origin = origin

    pauses_programs = False
    """Whether ``pause`` has an effect."""

    def pause(self, tenant: str, program: int) -> None:
        """Requests of the program do not start until ``resume``."""
        return

    def resume(self, tenant: str, program: int) -> None:
        """The program is no longer paused. Its requests go before requests that have not run."""
        return

    def start_step(self) -> None:
        """A step is being planned."""
        return

    def hold_back_paced(self, tenant: str) -> None:
        """Until the next step, all requests of the tenant are blocked that ``pace`` holds back together
        (``Request.is_paced``), so that the policy need not ask about them."""
        return

    def set_unencoded(self, request: Request, is_unencoded: bool) -> None:
        """A request waits for the encoding of an image (``Request.is_unencoded``), or no longer does."""
        request.is_unencoded = is_unencoded

    def hold_back_unencoded(self) -> None:
        """Until the next step, all requests that wait for the encoding of an image are blocked, so that the
        policy need not ask about them."""
        return

    def charge(self, request: Request, num_tokens: int) -> None:
        """The step computes ``num_tokens`` tokens of the request that no step computed before."""
        return

    charged: Charged | None = None
    """If not None, the policy adds its charges. The caller takes them out."""

    def charge_elsewhere(self, tenant: str, used: float) -> None:
        """Another engine computed tokens for the tenant: ``used`` of them for each unit of its weight."""
        return

    def program_elsewhere(self, tenant: str, program: int, num_tokens: int) -> None:
        """Another engine computed tokens for the tenant's program."""
        return

    def finish(self, request: Request) -> None:
        """A running request ended."""
        return

    def tokens_cached(self, cache_key: CacheKey, run: TokenRun) -> None:
        """The whole run is cached now."""
        return

    def tokens_evicted(self, cache_key: CacheKey, run: Callable[[], TokenRun], kept: int) -> None:
        """Of the run that ``run()`` returns, and of all its continuations, only the first ``kept`` tokens
        are still cached."""
        return


class Preempted(dict[int, Request]):
    """Preempted requests by id. They run again before all others, in the order of their arrival."""

    _order: list[tuple[int, int]] | None = None  # their arrivals and ids; None before the first request

    def add(self, request: Request) -> None:
        """Adds a request. May be repeated."""
        if request.id not in self:
            if self._order is None:
                self._order = []
            insort(self._order, (request.arrival, request.id))
            self[request.id] = request

    def discard(self, request: Request) -> bool:
        """Removes the request. Returns whether it was there."""
        if self._order is None or self.pop(request.id, None) is None:
            return False
        del self._order[bisect_left(self._order, (request.arrival, request.id))]
        return True

    def first(self, is_blocked: IsBlocked) -> Request | None:
        """The first request that is not blocked, unless there are ``MAX_PASSED_OVER`` before it."""
        for _, number in islice(self._order or (), MAX_PASSED_OVER):
            if not is_blocked(self[number], None):
                return self[number]
        return None


class SimplePolicy(Policy):
    """A policy without tenants: running prompts get all tokens before others start, and preempted requests
    run again first."""

    def __init__(self) -> None:
        self._preempted = Preempted()
        self._waiting: dict[int, Request] = {}

    def __iter__(self) -> Iterator[Request]:
        yield from self._preempted.values()
        yield from self._waiting.values()

    def __contains__(self, request: Request) -> bool:
        return request.id in self._waiting or request.id in self._preempted

    def add(self, request: Request) -> None:
        self._waiting[request.id] = request
        self.num_waiting += 1

    def restore(self, request: Request) -> None:
        self._preempted.add(request)
        self.num_waiting += 1

    def remove(self, request: Request) -> None:
        if not self._preempted.discard(request):
            del self._waiting[request.id]
        self.num_waiting -= 1

    def next(self, prompts: Sequence[Request], is_blocked: IsBlocked | None) -> Request | None:
        if prompts:
            return prompts[0]
        if is_blocked is None:
            return None
        try:
            return self._preempted.first(is_blocked) or self._next_waiting(is_blocked)
        except SearchEnds:
            return None

    @abstractmethod
    def _next_waiting(self, is_blocked: IsBlocked) -> Request | None:
        """The first request that has not run yet and is not blocked."""

    def admit(self, request: Request) -> None:
        self.remove(request)


class FirstCome(SimplePolicy):
    """In order of arrival."""

    def __init__(self, peek: PeekCache, token_budget: int, clock: Clock) -> None:
        super().__init__()

    def _next_waiting(self, is_blocked: IsBlocked) -> Request | None:
        for request in islice(self._in_order(), MAX_PASSED_OVER):
            if not is_blocked(request, None):
                return request
        return None

    def _in_order(self) -> Iterator[Request]:
        return iter(self._waiting.values())


class RandomOrder(FirstCome):
    """In a random order, from a fixed seed. A request once drawn stays first until it is admitted, also while
    it waits for memory."""

    def __init__(self, peek: PeekCache, token_budget: int, clock: Clock) -> None:
        super().__init__(peek, token_budget, clock)
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


class LongestPrefix(SimplePolicy):
    """Longest cached prefix first; among equals roughly the oldest. ``pace`` holds back the requests of all
    tenants together."""

    def __init__(self, peek: PeekCache, token_budget: int, clock: Clock) -> None:
        super().__init__()
        self._peek = peek
        self._by_match = MatchOrder(math.inf)

    def add(self, request: Request) -> None:
        super().add(request)
        run = request.reusable_run()
        self._by_match.add(request, run, self._peek(request.cache_key, run), _ONE_RANK)

    def _next_waiting(self, is_blocked: IsBlocked) -> Request | None:
        return self._by_match.first(is_blocked)

    def update_origin(self, request: Request, origin: Origin, patience_end: float = math.inf) -> None:
        if request.id not in self._waiting or origin.objective == request.origin.objective:
            request.origin = origin
            return
        match = self._by_match.count_match(request)
        self._by_match.remove(request)
        request.origin = origin
        self._by_match.add(request, request.reusable_run(), match, _ONE_RANK)

    def start_step(self) -> None:
        self._by_match.start_step()

    def hold_back_paced(self, tenant: str) -> None:
        self._by_match.hold_back_paced()

    def set_unencoded(self, request: Request, is_unencoded: bool) -> None:
        self._by_match.set_unencoded(request, is_unencoded)

    def hold_back_unencoded(self) -> None:
        self._by_match.holds_back_unencoded = True

    def remove(self, request: Request) -> None:
        self._by_match.remove(request)
        super().remove(request)

    def tokens_cached(self, cache_key: CacheKey, run: TokenRun) -> None:
        self._by_match.tokens_cached(cache_key, run)

    def tokens_evicted(self, cache_key: CacheKey, run: Callable[[], TokenRun], kept: int) -> None:
        self._by_match.tokens_evicted(cache_key, run, kept)


_ONE_RANK = (0, 0, 0)
