"""When a backend sends its requests, learned from the answers.

The limits that a provider reports are kept before it refuses anything (``rate_limits``). Other limits cannot
be known. For these, ``RequestPacer`` works like TCP's congestion control (Chiu and Jain, 1989): each answer
widens the window of concurrent requests a little, and a refusal halves it. The requests that wait, wait
together: no one is sent before the time that the provider asks for. Without limits and refusals, nothing
waits but the requests of a first crowd, until the first answer has told the limits.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

import anyio

from agentflow.backends.apis.http.rate_limits import Demand, RateLimits, SentRequest

MAX_WAIT_S = 66.0
"""Longer waits are not kept: the request is sent, and the provider refuses it. The transport asks for up to a
tenth more than the longest pause of a provider that it keeps, to spread its requests."""
_UNLIMITED = 1024.0
"""A window of this size is unlimited again."""
_SOON_S = 1e-9
FIRST_REQUESTS = 16
"""The requests that are sent before the first answer."""
FIRST_WAIT_S = 1.0
"""The longest wait for it."""


class PacedRequest:
    """The time of one request, after it was admitted.

    Attributes:
        began_at: When that was.
        sent: Its use of the limits; None: nothing.
    """

    def __init__(self, pace: RequestPacer, began_at: float, sent: SentRequest | None) -> None:
        self.began_at = began_at
        self.sent = sent
        self._pace = pace
        self._is_refused = False

    def answered(self, headers: Mapping[str, str], *, is_refused: bool = False) -> None:
        """The headers of the answer have arrived."""
        self._is_refused = is_refused
        if self.sent is not None:
            self._pace.answered(self.sent, headers)

    def end(self) -> None:
        """The answer has ended, or there is none."""
        if self.sent is not None:
            self._pace.limits.end(self.sent, anyio.current_time(), is_refused=self._is_refused)


class RequestPacer:
    """Admits the requests of one key and model, in the order in which they come.

    Attributes:
        window: The most concurrent requests.
        num_running: The requests that were admitted and have not ended.
        limits: The limits that the provider reports.
    """

    def __init__(self) -> None:
        self.window = math.inf
        self.num_running = 0
        self.limits = RateLimits()
        self._num_waiting = 0
        self._has_answer = False
        self._began_at: float | None = None  # when the first request was admitted
        self._resumes_at = -math.inf
        self._narrowed_at = -math.inf
        self._front = anyio.Lock()  # held by the request that is the next to be admitted
        self._changed = anyio.Event()

    @asynccontextmanager
    async def turn(
        self, demand: Demand | None = None, check: Callable[[float], None] = lambda wait_s: None
    ) -> AsyncIterator[PacedRequest]:
        """The time of one request, after it was admitted.

        Args:
            demand: Its use of the limits; None: nothing.
            check: Called before a wait for a limit of the rate, with its seconds. May raise.
        """
        if self._num_waiting or self._left_s(demand) > 0:
            await self._admitted(demand, check)
        self.num_running += 1
        now = anyio.current_time()
        if self._began_at is None:
            self._began_at = now
        turn = PacedRequest(self, now, None if demand is None else self.limits.send(demand, now))
        try:
            yield turn
        finally:
            self.num_running -= 1
            turn.end()
            self._changed.set()

    def answered(self, sent: SentRequest, headers: Mapping[str, str]) -> None:
        """The headers of the answer to a request have arrived."""
        self._has_answer = True
        self.limits.answered(sent, headers, anyio.current_time())
        self._changed.set()

    def widen(self) -> None:
        """A request was answered."""
        if self.window != math.inf:
            self.window += 1 / self.window
            if self.window > _UNLIMITED:
                self.window = math.inf
        self._changed.set()

    def narrow(self, turn: PacedRequest, wait_s: float) -> None:
        """A request was refused, and its turn has ended.

        Args:
            turn: The turn of the request. The window is halved once for the requests that ran together,
                unless the provider's reported limits had too little left: then these are the reason.
            wait_s: No request is sent before that time, in seconds.
        """
        now = anyio.current_time()
        is_short = turn.sent is not None and self.limits.wait_s(turn.sent.demand, now) > 0
        if turn.began_at > self._narrowed_at and not is_short:
            self._narrowed_at = now
            self.window = max(1.0, min(self.window, self.num_running + 1) / 2)
        if wait_s <= MAX_WAIT_S:
            self._resumes_at = max(self._resumes_at, now + wait_s)
        self._changed.set()

    def _left_s(self, demand: Demand | None) -> float:
        """The seconds until a request may be sent: infinite while the window is full, and 0 or less if it may
        be sent now."""
        if self.num_running + 1 > self.window:
            return math.inf
        now = anyio.current_time()
        left_s = max(self._resumes_at - now, self._rate_s(demand, now))
        if not self._has_answer and self._began_at is not None and self.num_running >= FIRST_REQUESTS:
            left_s = max(left_s, self._began_at + FIRST_WAIT_S - now)
        return left_s

    def _rate_s(self, demand: Demand | None, now: float, count: int = 1) -> float:
        """The seconds until the limits admit ``count`` requests; 0 if that is too long to be waited for."""
        wait_s = 0.0 if demand is None else self.limits.wait_s(demand, now, count)
        return wait_s if wait_s <= MAX_WAIT_S or count > 1 else 0.0

    async def _admitted(self, demand: Demand | None, check: Callable[[float], None]) -> None:
        self._num_waiting += 1
        try:
            self._check(demand, check)
            async with self._front:
                while (left_s := self._left_s(demand)) > _SOON_S:
                    self._check(demand, check)
                    self._changed = anyio.Event()
                    with anyio.move_on_after(left_s):
                        await self._changed.wait()
        finally:
            self._num_waiting -= 1

    def _check(self, demand: Demand | None, check: Callable[[float], None]) -> None:
        """Calls ``check`` if the limits let a request wait behind those that wait already."""
        now = anyio.current_time()
        wait_s = max(self._resumes_at - now, self._rate_s(demand, now, self._num_waiting))
        if wait_s > 0:
            check(wait_s)
