"""In which order waiting requests are admitted, by name.

``fair-lpm`` (the default): longest cached prefix first, with a share for each tenant and a bound on
how far anybody is overtaken (``fair_policy``). For comparison: ``lpm``, longest cached prefix first;
``dfs-weight``, the waiting requests' tree depth first, heaviest branch first (``prefix_policy``);
``fcfs``, in order of arrival; ``random``. These know no tenants, shares or priorities.

A policy holds the waiting requests and says which is next. What steps compute and evict is told to
it, so that it need not match everybody against the cache again and again.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Protocol

from agentflow.server.core.request import CacheIdentity, Request
from agentflow.server.core.token_run import TokenRun

Peek = Callable[[CacheIdentity, TokenRun], int]
"""How many of a run's tokens are cached under an identity, looked up without changing anything."""
IsBlocked = Callable[[Request, int | None], bool]
"""Whether a request should wait because a running one computes what it needs next; the second
argument is its match where the policy knows it."""

MAX_PASSED_OVER = 128
"""Policies that keep no tree look at so many blocked requests for one that is not."""


class Policy(Protocol):
    """The waiting requests, and which of them is next."""

    def __len__(self) -> int:
        """How many wait."""

    def __iter__(self) -> Iterator[Request]:
        """All that wait, in no promised order."""

    def __contains__(self, request: Request) -> bool:
        """Whether it waits."""

    def add(self, request: Request) -> None:
        """A new one."""

    def restore(self, request: Request) -> None:
        """One that had been admitted and lost its slots: it goes before those that were not."""

    def next(self, is_blocked: IsBlocked) -> Request | None:
        """The one to admit next, of those that are not blocked. It stays until ``remove``."""

    def remove(self, request: Request) -> None:
        """It was cancelled."""

    def admit(self, request: Request, num_uncached: int) -> None:
        """It runs now: no longer waiting; so many of its tokens (and nodes) have to be computed."""

    def finish(self, request: Request) -> None:
        """It was admitted once, and now it is over."""

    def tokens_cached(self, identity: CacheIdentity, run: TokenRun) -> None:
        """The run is cached now."""

    def tokens_evicted(self, identity: CacheIdentity, run: TokenRun, kept: int) -> None:
        """Of the run and what continues it only the first ``kept`` tokens are cached still."""


class Returned:
    """Requests that lost their slots, in the order of their first arrival: they run first again."""

    def __init__(self) -> None:
        self.requests: dict[int, Request] = {}

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self.requests.values())

    def __contains__(self, request: Request) -> bool:
        return request.id in self.requests

    def add(self, request: Request) -> None:
        """Sorted anew: there are few, and rarely."""
        everybody = [*self.requests.values(), request]
        self.requests = {r.id: r for r in sorted(everybody, key=lambda r: r.arrival)}

    def discard(self, request: Request) -> bool:
        """Whether it was there."""
        return self.requests.pop(request.id, None) is not None

    def first(self, is_blocked: IsBlocked) -> Request | None:
        """The first that is not blocked."""
        for request in self.requests.values():
            if not is_blocked(request, None):
                return request
        return None


class WaitingRequests:
    """What policies without tenants have in common: who waits, and who lost its slots."""

    def __init__(self) -> None:
        self._returned = Returned()
        self._waiting: dict[int, Request] = {}

    def __len__(self) -> int:
        return len(self._returned) + len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        yield from self._returned
        yield from self._waiting.values()

    def __contains__(self, request: Request) -> bool:
        return request.id in self._waiting or request in self._returned

    def add(self, request: Request) -> None:
        self._waiting[request.id] = request

    def restore(self, request: Request) -> None:
        self._returned.add(request)

    def remove(self, request: Request) -> None:
        if not self._returned.discard(request):
            del self._waiting[request.id]

    def admit(self, request: Request, num_uncached: int) -> None:
        self.remove(request)

    def finish(self, request: Request) -> None: ...

    def tokens_cached(self, identity: CacheIdentity, run: TokenRun) -> None: ...

    def tokens_evicted(self, identity: CacheIdentity, run: TokenRun, kept: int) -> None: ...


class FirstCome(WaitingRequests):
    """In order of arrival."""

    def __init__(self, peek: Peek, token_budget: int) -> None:
        super().__init__()

    def next(self, is_blocked: IsBlocked) -> Request | None:
        returned = self._returned.first(is_blocked)
        if returned is not None:
            return returned
        for _, request in zip(range(MAX_PASSED_OVER), self._in_order(), strict=False):
            if not is_blocked(request, None):
                return request
        return None

    def _in_order(self) -> Iterator[Request]:
        return iter(self._waiting.values())


class RandomOrder(FirstCome):
    """Anybody next, drawn from a generator with a fixed seed. What is drawn stays drawn until it is
    admitted, so that a request that has to wait for room is not passed over by smaller ones."""

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
