"""The admission of requests to a model: it rejects requests that would wait too long, before they wait.

The expected wait is estimated for each tenant from how fast its requests start while some wait: the average
time between the latest starts, times the number of waiting requests with the same or a higher priority. It
does not depend on the order of the starts. Requests of other tenants affect it through the time between
starts.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from agentflow.engine.messages import Failed, Finished, FromEngine, Started
from agentflow.engine.request import Submit
from agentflow.errors import Overloaded

# The number of latest starts that the average covers.
NUM_REMEMBERED = 32
# Tenants without waiting requests whose averages are kept.
MAX_IDLE_TENANTS = 1_000


@dataclass(slots=True)
class _Line:
    """The waiting requests of one tenant with their priorities. ``busy_s``: the time in which the latest
    ``num_started`` requests started, without times when none waited. ``moved_s``: when the last request
    started, or the first one arrived."""

    waiting: dict[int, int] = field(default_factory=dict)
    num_waiting: Counter[int] = field(default_factory=Counter)  # by priority
    busy_s: float = 0.0
    num_started: float = 0.0
    moved_s: float = 0.0

    def expected_wait_s(self, priority: int, now_s: float) -> float:
        num_before = sum(num for other, num in self.num_waiting.items() if other >= priority)
        if not num_before:
            return 0.0
        since_s = now_s - self.moved_s  # if nothing starts, it takes at least that long
        if not self.num_started:
            return since_s
        return max(since_s, num_before * (self.busy_s + since_s) / self.num_started)

    def add(self, request_id: int, priority: int, now_s: float) -> None:
        if not self.waiting:
            self.moved_s = now_s
        self.waiting[request_id] = priority
        self.num_waiting[priority] += 1

    def remove(self, request_id: int) -> None:
        priority = self.waiting.pop(request_id)
        self.num_waiting[priority] -= 1
        if not self.num_waiting[priority]:
            del self.num_waiting[priority]

    def start(self, request_ids: Sequence[int], now_s: float) -> None:
        """Records that these requests started in one step. If none is left waiting, the engine had room for
        more, so the measured time is an upper bound."""
        for request_id in request_ids:
            self.remove(request_id)
        num, took_s = len(request_ids), now_s - self.moved_s
        if self.waiting or took_s * self.num_started < num * self.busy_s:
            kept = max(0.0, 1 - num / NUM_REMEMBERED)
            self.busy_s = self.busy_s * kept + took_s
            self.num_started = self.num_started * kept + num
        self.moved_s = now_s


class WaitLimit:
    """A ``RequestObserver`` of one engine. ``max_wait_s``: the longest accepted expected wait; None: any.
    ``clock``: seconds."""

    def __init__(self, max_wait_s: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_wait_s = max_wait_s
        self._clock = clock
        self._lines: OrderedDict[str, _Line] = OrderedDict()
        self._tenant_of: dict[int, str] = {}

    def expected_wait_s(self, tenant: str, priority: int = 0) -> float:
        """The expected wait of a new request of this tenant."""
        line = self._lines.get(tenant)
        return 0.0 if line is None else line.expected_wait_s(priority, self._clock())

    def check(self, tenant: str, priority: int = 0) -> None:
        """``Overloaded`` with ``retry_after_s``, if a new request would wait too long."""
        if self._max_wait_s is None:
            return
        wait_s = self.expected_wait_s(tenant, priority)
        if wait_s > self._max_wait_s:
            error = Overloaded(
                f"the server is busy: a request would wait about {wait_s:.0f} s, and the limit is "
                f"{self._max_wait_s:g} s; try again later"
            )
            error.retry_after_s = max(1.0, wait_s - self._max_wait_s)
            raise error

    def sent(self, submit: Submit) -> None:
        """Adds a waiting request."""
        tenant = submit.origin.tenant
        line = self._lines.get(tenant)
        if line is None:
            line = self._lines[tenant] = _Line()
        self._lines.move_to_end(tenant)
        line.add(submit.request_id, submit.origin.priority, self._clock())
        self._tenant_of[submit.request_id] = tenant
        self._forget_the_idle()

    def received(self, messages: Sequence[FromEngine]) -> None:
        """Removes requests that started, or ended before they started."""
        for message in messages:
            match message:
                case Started():
                    self._start(message.request_ids)
                case Finished() | Failed():
                    tenant = self._tenant_of.pop(message.request_id, None)
                    if tenant is not None:  # otherwise it had started
                        self._lines[tenant].remove(message.request_id)

    def _start(self, request_ids: Sequence[int]) -> None:
        started: defaultdict[str, list[int]] = defaultdict(list)
        for request_id in request_ids:
            tenant = self._tenant_of.pop(request_id, None)
            if tenant is not None:  # otherwise it had started before, and was preempted
                started[tenant].append(request_id)
        now_s = self._clock()
        for tenant, ids in started.items():
            self._lines[tenant].start(ids, now_s)

    def _forget_the_idle(self) -> None:
        while len(self._lines) > MAX_IDLE_TENANTS:
            tenant, line = next(iter(self._lines.items()))
            if line.waiting:
                return
            del self._lines[tenant]
