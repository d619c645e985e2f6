"""A provider with exact rate limits, and a client that keeps them by the headers, in simulated time."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import format_datetime
from typing import Literal

from agentflow.backends.apis.http.rate_limits import Demand, RateLimits, SentRequest
from agentflow.protocol.events import Usage
from agentflow.server.tenants.limit_headers import duration

START_S = 1_800_000_000.0  # Unix time of the vendor's clock at the time 0
Counting = Literal["ahead", "ahead, corrected", "at the end"]
"""When a vendor counts the output: ``max_tokens`` with the request, or what was written."""


@dataclass(frozen=True)
class Job:
    """One request. The times are counted until it arrives, until its headers arrive, and until it ends."""

    prompt: int = 0
    output: int = 0
    max_tokens: int | None = 0
    up_s: float = 0.0
    down_s: float = 0.0
    lasts_s: float = 0.0


@dataclass
class Limit:
    """A counter: a bucket that refills evenly, or a window that is full again when it ends."""

    limit: float
    per_s: float = 60.0
    is_window: bool = False
    left: float = field(init=False)
    at: float = 0.0

    def __post_init__(self) -> None:
        self.left = self.limit

    def advance(self, now: float) -> None:
        if self.is_window:
            if now // self.per_s > self.at // self.per_s:
                self.left = self.limit
        else:
            self.left = min(self.limit, self.left + (now - self.at) * self.limit / self.per_s)
        self.at = now

    def reset_s(self, now: float) -> float:
        """The seconds until it is full."""
        if self.is_window:
            return self.per_s - now % self.per_s
        return (self.limit - self.left) * self.per_s / self.limit


class Vendor:
    """Counts requests and tokens.

    Args:
        requests: The limit of requests; None: there is none.
        tokens: The limit of tokens of prompt and output.
        counting: How the output counts.
        style: Of the headers: ``go`` and ``seconds`` as OpenAI and its relatives, ``rfc`` as Anthropic.
    """

    def __init__(
        self,
        requests: Limit | None = None,
        tokens: Limit | None = None,
        counting: Counting = "ahead",
        style: Literal["go", "seconds", "rfc"] = "go",
    ) -> None:
        self.limits = {
            name: limit for name, limit in (("requests", requests), ("tokens", tokens)) if limit is not None
        }
        self.counting = counting
        self.style = style
        self.num_refused = 0

    def ahead(self, job: Job) -> dict[str, float]:
        """The tokens that a request takes when it arrives."""
        output = (job.max_tokens or 0) if self.counting != "at the end" else 0
        return {"requests": 1, "tokens": job.prompt + output}

    def receive(self, job: Job, now: float) -> bool:
        """Whether a request is admitted."""
        for limit in self.limits.values():
            limit.advance(now)
        taken = self.ahead(job)
        if any(limit.left + 1e-6 < min(taken[name], limit.limit) for name, limit in self.limits.items()):
            self.num_refused += 1
            return False
        for name, limit in self.limits.items():
            limit.left -= taken[name]
        return True

    def finish(self, job: Job, now: float) -> None:
        """A request that was admitted ends."""
        if self.counting != "ahead" and "tokens" in self.limits:
            self.limits["tokens"].advance(now)
            self.limits["tokens"].left += self.ahead(job)["tokens"] - job.prompt - job.output

    def headers(self, now: float) -> dict[str, str]:
        """The headers of an answer."""
        prefix = "anthropic-ratelimit" if self.style == "rfc" else "x-ratelimit"
        found = {"date": format_datetime(datetime.fromtimestamp(START_S + math.floor(now), UTC), usegmt=True)}
        for name, limit in self.limits.items():
            limit.advance(now)
            seconds = limit.reset_s(now)
            at = datetime.fromtimestamp(math.ceil(START_S + now + seconds), UTC)
            reset = {
                "go": duration(math.ceil(seconds * 1e9)),
                "seconds": f"{math.ceil(seconds)}",
                "rfc": at.strftime("%Y-%m-%dT%H:%M:%SZ"),
            }[self.style]
            values = {"limit": limit.limit, "remaining": max(0, math.floor(limit.left)), "reset": reset}
            for part, value in values.items():
                place = f"{name}-{part}" if self.style == "rfc" else f"{part}-{name}"
                found[f"{prefix}-{place}"] = value if isinstance(value, str) else f"{value:.0f}"
        return found


@dataclass
class Outcome:
    """How a simulation went. ``took_s``: until the last answer had ended."""

    took_s: float = 0.0
    num_refused: int = 0
    lowest_margin: float = math.inf  # the vendor's remaining limit minus the client's estimate


def simulate(vendor: Vendor, jobs: Sequence[Job], *, is_checked: bool = False) -> Outcome:
    """Sends the jobs in order, each as soon as the limits admit it, and again if it is refused. The first one
    goes ahead alone. ``is_checked``: nothing counts before it arrives, so the margins are exact."""
    limits, outcome = RateLimits(), Outcome()
    order = itertools.count()
    events: list[tuple[float, int, Callable[[float], None]]] = []
    waiting, left = list(jobs)[::-1], len(jobs)
    has_answer = False
    num_sent = 0

    def at(when: float, do: Callable[[float], None]) -> None:
        heapq.heappush(events, (when, next(order), do))

    def send(job: Job, now: float) -> None:
        is_done = False
        usage = Usage(job.prompt, 0, job.output)
        demand = Demand(4 * job.prompt, job.max_tokens, lambda: usage if is_done else None)
        sent: SentRequest = limits.send(demand, now)

        def arrive(now: float) -> None:
            is_admitted = vendor.receive(job, now)
            headers = vendor.headers(now)

            def answered(now: float) -> None:
                nonlocal has_answer, left
                has_answer = True
                limits.answered(sent, headers, now)
                if not is_admitted:
                    limits.end(sent, now, is_refused=True)
                    waiting.append(job)
                    return

                def end(now: float) -> None:
                    nonlocal is_done, left
                    is_done = True
                    left -= 1
                    vendor.finish(job, now)
                    limits.end(sent, now)

                at(now + job.lasts_s, end)

            at(now + job.down_s, answered)

        at(now + job.up_s, arrive)

    now = 0.0
    while left:
        wakes_at = math.inf
        while waiting and (num_sent == 0 or has_answer):
            job = waiting[-1]
            wait_s = limits.wait_s(Demand(4 * job.prompt, job.max_tokens), now)
            if wait_s > 0:
                wakes_at = now + wait_s
                break
            waiting.pop()
            num_sent += 1
            send(job, now)
        if not events or wakes_at < events[0][0]:
            now = wakes_at
            continue
        now, _, do = heapq.heappop(events)
        do(now)
        if is_checked and has_answer:
            outcome.lowest_margin = min(outcome.lowest_margin, *_margins(vendor, limits, now))
    outcome.took_s, outcome.num_refused = now, vendor.num_refused
    return outcome


def _margins(vendor: Vendor, limits: RateLimits, now: float) -> list[float]:
    margins = []
    for name, limit in vendor.limits.items():
        limit.advance(now)
        counter = limits.counters["requests" if name == "requests" else "tokens"]
        counter.wait_s(0, now)
        margins.append(limit.left - counter.low)
    return margins
