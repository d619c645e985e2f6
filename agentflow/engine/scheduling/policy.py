"""The interface of a scheduling policy: which request gets the next prompt tokens of a step.

A policy owns the waiting requests. The scheduler tells it what steps compute and what is evicted, so that it
need not match all requests against the cache again and again. ``fair_policy`` has the default, ``policies``
the simple ones and the table of names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from agentflow.engine.cache.radix_cache import TokenRun
from agentflow.engine.request import CacheIdentity, Request

Peek = Callable[[CacheIdentity, TokenRun], int]
"""How many tokens of a run are cached under an identity. Changes nothing."""
IsBlocked = Callable[[Request, int | None], bool]
"""Whether a request should wait because a running one is computing what it needs next, or because it does not
fit into memory in this step (``Request.is_held_back``). The second argument is the request's match if the
policy knows it."""


class Policy(Protocol):
    """The waiting requests, and which of them is next."""

    def __len__(self) -> int:
        """Number of waiting requests."""

    def __iter__(self) -> Iterator[Request]:
        """All waiting requests, in no particular order."""

    def __contains__(self, request: Request) -> bool:
        """Whether the request waits."""

    def add(self, request: Request) -> None:
        """A new request arrived."""

    def restore(self, request: Request) -> None:
        """A running request was retracted. It goes before requests that have not run."""

    def start_step(self, prompts: Sequence[Request]) -> None:
        """A step is being planned. ``prompts``: running requests with prompt tokens left."""

    def next(self, prompts: Sequence[Request], is_blocked: IsBlocked | None) -> Request | None:
        """The request whose prompt gets the next tokens of the step: one of ``prompts``, which are in the
        order of their admission, or a waiting request that is not blocked, to be admitted now
        (``is_blocked`` None: admit none). None if there is neither."""

    def charge(self, request: Request, num_tokens: int) -> None:
        """The step computes so many tokens of the request that no step computed before."""

    def remove(self, request: Request) -> None:
        """A waiting request was cancelled."""

    def admit(self, request: Request) -> None:
        """A waiting request starts to run."""

    def finish(self, request: Request) -> None:
        """A running request ended."""

    def tokens_cached(self, identity: CacheIdentity, run: TokenRun) -> None:
        """The whole run is cached now."""

    def tokens_evicted(self, identity: CacheIdentity, run: Callable[[], TokenRun], kept: int) -> None:
        """Of the run that ``run()`` returns, and of all its continuations, only the first ``kept`` tokens
        are still cached."""


class Retracted:
    """Retracted requests, in the order of their arrival. They run again before all others."""

    def __init__(self) -> None:
        self.requests: dict[int, Request] = {}

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self.requests.values())

    def __contains__(self, request: Request) -> bool:
        return request.id in self.requests

    def add(self, request: Request) -> None:
        """Adds a request. Sorts all of them, which are few."""
        requests = [*self.requests.values(), request]
        self.requests = {r.id: r for r in sorted(requests, key=lambda r: r.arrival)}

    def discard(self, request: Request) -> bool:
        """Removes the request. Returns whether it was there."""
        return self.requests.pop(request.id, None) is not None

    def first(self, is_blocked: IsBlocked) -> Request | None:
        """The first that is not blocked."""
        for request in self.requests.values():
            if not is_blocked(request, None):
                return request
        return None
