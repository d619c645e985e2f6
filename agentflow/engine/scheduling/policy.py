"""In which order waiting requests are admitted, by name.

``fair-lpm`` (the default): longest cached prefix first, with a share for each tenant, room for short prompts
beside long ones, and a bound on how far any request is overtaken (``fair_policy``). For comparison: ``lpm``,
longest cached prefix first; ``dfs-weight``, the waiting requests' tree depth first, heaviest branch first
(``prefix_policy``); ``fcfs``, in order of arrival; ``random``. These know no tenants, shares or priorities,
and compute one prompt after the other.

A policy holds the waiting requests and says whose rows are next. It follows what steps compute and evict,
so that it need not match all requests against the cache again and again.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from agentflow.engine.cache.radix_cache import TokenRun
from agentflow.engine.request import CacheIdentity, Request

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

    def start_step(self, prompts: Sequence[Request]) -> None:
        """A step is planned; ``prompts``: running requests that can take rows of it."""

    def next(self, prompts: Sequence[Request], is_blocked: IsBlocked | None) -> Request | None:
        """Whose prompt gets the next rows of the step: one of ``prompts``, which run, in the order of their
        admission, or a waiting one that is not blocked, to be admitted now (``is_blocked`` None: none may
        be). None where there is neither."""

    def charge(self, request: Request, num_rows: int) -> None:
        """So many rows of the request, which no step computed for it before, are part of the step."""

    def remove(self, request: Request) -> None:
        """It was cancelled."""

    def admit(self, request: Request) -> None:
        """It runs now, and waits no longer."""

    def finish(self, request: Request) -> None:
        """It was admitted once, and now it is over."""

    def tokens_cached(self, identity: CacheIdentity, run: TokenRun) -> None:
        """The run is cached now."""

    def tokens_evicted(self, identity: CacheIdentity, run: Callable[[], TokenRun], kept: int) -> None:
        """Of what ``run`` gives and what continues it only the first ``kept`` tokens are cached still."""


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


class WaitingRequests(ABC):
    """What policies without tenants have in common: prompts that run have all rows before others begin, and
    requests that lost their slots run first again."""

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

    def next(self, prompts: Sequence[Request], is_blocked: IsBlocked | None) -> Request | None:
        if prompts:
            return prompts[0]
        if is_blocked is None:
            return None
        return self._returned.first(is_blocked) or self._next_waiting(is_blocked)

    @abstractmethod
    def _next_waiting(self, is_blocked: IsBlocked) -> Request | None:
        """Of those that have not run yet, the first that is not blocked."""

    def admit(self, request: Request) -> None:
        self.remove(request)

    def start_step(self, prompts: Sequence[Request]) -> None:  # noqa: B027  most of them keep nothing
        pass

    def charge(self, request: Request, num_rows: int) -> None:  # noqa: B027
        pass

    def finish(self, request: Request) -> None:  # noqa: B027
        pass

    def tokens_cached(self, identity: CacheIdentity, run: TokenRun) -> None:  # noqa: B027
        pass

    def tokens_evicted(self, identity: CacheIdentity, run: Callable[[], TokenRun], kept: int) -> None:  # noqa: B027
        pass


class FirstCome(WaitingRequests):
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
