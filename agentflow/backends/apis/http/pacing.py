"""How many requests a backend sends at a time, learned from its answers.

A provider refuses requests beyond a rate that clients cannot know. ``Pace`` therefore works like TCP's
congestion control (Chiu and Jain, 1989): each answer widens the window of concurrent requests a little, and
a refusal halves it. The requests that wait, wait together: no one is sent before the time that the provider
asks for. Without refusals the window is unlimited, and nothing waits.
"""

from __future__ import annotations

import math
import re
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime

import anyio

MAX_WAIT_S = 66.0
"""Longer waits are not kept: the request is sent, and the provider refuses it. The transport asks for up to a
tenth more than the longest pause of a provider that it keeps, to spread its requests."""
_UNLIMITED = 1024.0
"""A window of this size is unlimited again."""
# What is left until ``reset``: of OpenAI's requests and tokens, and of Anthropic's.
_LIMITS = (
    ("x-ratelimit-remaining-requests", "x-ratelimit-reset-requests"),
    ("x-ratelimit-remaining-tokens", "x-ratelimit-reset-tokens"),
    ("anthropic-ratelimit-requests-remaining", "anthropic-ratelimit-requests-reset"),
    ("anthropic-ratelimit-tokens-remaining", "anthropic-ratelimit-tokens-reset"),
)
_DURATION = re.compile(r"(?:(\d+)h)?(?:(\d+)m(?!s))?(?:([\d.]+)s)?(?:([\d.]+)ms)?")


class Pace:
    """Admits requests, in the order in which they come."""

    def __init__(self) -> None:
        self.window = math.inf  # the most concurrent requests
        self.num_running = 0
        self._resumes_at = -math.inf
        self._narrowed_at = -math.inf
        self._front = anyio.Lock()  # held by the request that is the next to be admitted
        self._changed = anyio.Event()

    @asynccontextmanager
    async def turn(self, check: Callable[[float], None] = lambda wait_s: None) -> AsyncIterator[float]:
        """The time of one request, after it was admitted. Yields when that was, for ``narrow``.

        Args:
            check: Called before a wait for a limit of the rate, with its seconds. May raise.
        """
        if self._front.locked() or self._left_s() > 0:
            async with self._front:
                await self._until_open(check)
                self.num_running += 1
        else:
            self.num_running += 1
        try:
            yield anyio.current_time()
        finally:
            self.num_running -= 1
            self._changed.set()

    def widen(self, headers: Mapping[str, str]) -> None:
        """A request was answered. If nothing is left of a limit, the next ones wait until it is reset."""
        if self.window != math.inf:
            self.window += 1 / self.window
            if self.window > _UNLIMITED:
                self.window = math.inf
            self._changed.set()
        for remaining, reset in _LIMITS:
            if headers.get(remaining) == "0":
                self._wait(reset_s(headers.get(reset, "")))

    def narrow(self, began_at: float, wait_s: float) -> None:
        """A request was refused.

        Args:
            began_at: When it was admitted. The window is halved once for the requests that ran together.
            wait_s: No request is sent before that time, in seconds.
        """
        if began_at > self._narrowed_at:
            self._narrowed_at = anyio.current_time()
            running = min(self.window, self.num_running + 1)  # it has left already
            self.window = max(1.0, running / 2)
        self._wait(wait_s)

    def _wait(self, seconds: float) -> None:
        if seconds <= MAX_WAIT_S:
            self._resumes_at = max(self._resumes_at, anyio.current_time() + seconds)
            self._changed.set()

    def _left_s(self) -> float:
        """The seconds until requests may be sent: infinite while the window is full, and 0 or less if they
        may be sent now."""
        if self.num_running + 1 > self.window:
            return math.inf
        return self._resumes_at - anyio.current_time()

    async def _until_open(self, check: Callable[[float], None]) -> None:
        while (left_s := self._left_s()) > 0:
            check(self._resumes_at - anyio.current_time())
            self._changed = anyio.Event()
            with anyio.move_on_after(left_s):
                await self._changed.wait()


def reset_s(value: str) -> float:
    """The seconds until a limit is reset, given as a duration or as a time; 0 for anything else.

    >>> reset_s("1m30s"), reset_s("250ms"), reset_s("12"), reset_s("soon")
    (90.0, 0.25, 12.0, 0.0)
    """
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    found = _DURATION.fullmatch(value)
    if found and value:
        hours, minutes, seconds, milliseconds = [float(part or 0) for part in found.groups()]
        return 3600 * hours + 60 * minutes + seconds + milliseconds / 1000
    try:
        return max(0.0, (datetime.fromisoformat(value) - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError):
        return 0.0
