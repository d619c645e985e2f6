"""Refuses what would wait too long, before it waits: a queue that only grows helps nobody.

How long a new request will wait is foreseen from those of its tenant that wait already. Each request that
starts has shown how long the queue took for each place before it; their moving average, times the places
that are taken now, is the wait to come. Other tenants count by themselves: the more of them there are, the
longer a place takes. While nothing starts at all, the age of the oldest request that came since says how long
it takes at least.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from agentflow.errors import Overloaded
from agentflow.server.engine_messages import Failed, Finished, FromEngine, Started, Submit

# Weight of the newest sample in the moving average: the last twenty or so requests count.
NEWEST = 0.1
# Of tenants that have nothing waiting so many are remembered.
MAX_IDLE_TENANTS = 1_000


@dataclass(slots=True)
class _Waiting:
    since_s: float
    num_before: int  # when it came


@dataclass(slots=True)
class _Line:
    """The waiting requests of one tenant. ``place_s``: how long one place takes; None: nobody knows yet.
    ``since_start``: those that came since the last one started. One from before that waits for its priority,
    and says nothing of the wait of others."""

    waiting: OrderedDict[int, _Waiting] = field(default_factory=OrderedDict)
    place_s: float | None = None
    since_start: OrderedDict[int, _Waiting] = field(default_factory=OrderedDict)

    def expected_wait_s(self, now_s: float) -> float:
        if not self.waiting:
            return 0.0
        oldest = next(iter(self.since_start.values()), None)
        at_least_s = 0.0 if oldest is None else (now_s - oldest.since_s) / (oldest.num_before + 1)
        return len(self.waiting) * max(self.place_s or 0.0, at_least_s)

    def has_started(self, request: _Waiting, now_s: float) -> None:
        sample_s = (now_s - request.since_s) / (request.num_before + 1)
        self.since_start.clear()
        before = sample_s if self.place_s is None else self.place_s
        self.place_s = before + NEWEST * (sample_s - before)


class Admission:
    """A ``RequestObserver`` of one engine. ``max_wait_s``: what a request may expect to wait; None: any time.
    ``clock``: seconds."""

    def __init__(self, max_wait_s: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_wait_s = max_wait_s
        self._clock = clock
        self._lines: OrderedDict[str, _Line] = OrderedDict()
        self._tenant_of: dict[int, str] = {}

    def expected_wait_s(self, tenant: str) -> float:
        """How long a request of this tenant would wait that came now."""
        line = self._lines.get(tenant)
        return 0.0 if line is None else line.expected_wait_s(self._clock())

    def check(self, tenant: str) -> None:
        """``Overloaded``, with a time after which it makes sense to try again."""
        if self._max_wait_s is None:
            return
        wait_s = self.expected_wait_s(tenant)
        if wait_s > self._max_wait_s:
            error = Overloaded(
                f"the server is busy: a request would wait about {wait_s:.0f} s, and {self._max_wait_s:g} s "
                "are the limit; try again later"
            )
            error.retry_after_s = max(1.0, wait_s - self._max_wait_s)
            raise error

    def sent(self, submit: Submit) -> None:
        """It waits from now on."""
        tenant = submit.origin.tenant
        line = self._lines.get(tenant)
        if line is None:
            line = self._lines[tenant] = _Line()
        self._lines.move_to_end(tenant)
        request = _Waiting(self._clock(), len(line.waiting))
        line.waiting[submit.request_id] = line.since_start[submit.request_id] = request
        self._tenant_of[submit.request_id] = tenant
        self._forget_the_idle()

    def heard(self, messages: Sequence[FromEngine]) -> None:
        """Starts, and ends of what never started."""
        for message in messages:
            match message:
                case Started():
                    now_s = self._clock()
                    for request_id in message.request_ids:
                        self._leave(request_id, now_s)
                case Finished() | Failed():
                    self._leave(message.request_id, None)

    def _leave(self, request_id: int, started_s: float | None) -> None:
        tenant = self._tenant_of.pop(request_id, None)
        if tenant is None:  # it started before
            return
        line = self._lines[tenant]
        request = line.waiting.pop(request_id)
        line.since_start.pop(request_id, None)
        if started_s is not None:
            line.has_started(request, started_s)

    def _forget_the_idle(self) -> None:
        while len(self._lines) > MAX_IDLE_TENANTS:
            tenant, line = next(iter(self._lines.items()))
            if line.waiting:
                return
            del self._lines[tenant]
