"""Requests that wait for the first of several with the same prefix, whose answer puts the prefix into the
provider's cache.

Branches of a fork ask at the same time. The caches of Anthropic and OpenAI can be read only after the first
of their answers has begun, so the other requests wait for that. If the first one fails, the next one takes
its place.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio

from agentflow.protocol.events import Usage

CACHED_S = 240.0
"""How long a prefix is taken for cached after its last use: a little less than the five minutes for which
Anthropic and OpenAI keep it at least."""


class PrefixGate:
    """The gate before the requests that share one prefix.

    >>> gate = PrefixGate()
    >>> async with gate.passed() as has_begun:  # waits for the first request, unless it is the first
    ...     has_begun()  # the answer begins: the others may go
    """

    def __init__(self) -> None:
        self.usage = Usage()  # of requests that only warmed the cache; the next answer is charged with it
        self._first: anyio.Event | None = None  # of the first request: set when it has begun, or has failed
        self._cached_until_s = float("-inf")
        self._of_models: dict[object, PrefixGate] = {}

    def of(self, model: object) -> PrefixGate:
        """The gate of one of several interchangeable models: each has a separate cache, and a silent model
        must not hold up the others."""
        return self._of_models.setdefault(model, PrefixGate())

    @asynccontextmanager
    async def passed(self) -> AsyncIterator[Callable[[], None]]:
        """The scope of one request. Its value is to be called when the answer begins."""
        while not self._is_cached() and self._first is not None:
            await self._first.wait()
        own: anyio.Event | None = None
        if not self._is_cached():
            own = self._first = anyio.Event()
        try:
            yield self._has_begun
        finally:
            if own is not None and self._first is own:
                self._open()

    @property
    def is_needed(self) -> bool:
        """Whether the prefix is not cached, and no request for it is on its way."""
        return self._first is None and not self._is_cached()

    def take_usage(self) -> Usage:
        """The usage of requests that only warmed the cache, once."""
        usage, self.usage = self.usage, Usage()
        return usage

    def _is_cached(self) -> bool:
        return anyio.current_time() < self._cached_until_s

    def _has_begun(self) -> None:
        self._cached_until_s = anyio.current_time() + CACHED_S
        self._open()

    def _open(self) -> None:
        if self._first is not None:
            self._first.set()
            self._first = None
