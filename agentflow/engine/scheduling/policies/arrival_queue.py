"""The bound on overtaking among the waiting requests of one tenant.

The *work* w(r) of a request is its number of uncached tokens on arrival, nodes of a select's tree included.
When r arrives, A(r) is the work that waits before it in its tenant's line, and r gets the limit M(r) = B +
OVERTAKEN_FRACTION * A(r), where B = OVERTAKEN_BATCHES * token_budget. Let O(r) be the work of later arrivals
of its tenant that were admitted (or left) while r waited, and W the largest w of any request. Then, not
counting time in which a running request computes the tokens that r needs next::

    O(r) < M(r) + W

This includes the requests that pass r while it does not fit into memory: if the oldest request does not fit
and has been overtaken this far, no other of its tenant starts. Requests of other tenants may pass it, as long
as the reservation in ``admission`` allows.

Proof. A request other than the oldest, h, is admitted only while O(h) < M(q) for all waiting q. Let x, later
than r, be admitted while r waits. Then x is not the oldest, so O(h) < M(r) before. Every request that
overtook r arrived after h too, and while h waited, so O(r) <= O(h) < M(r) before, and O(r) < M(r) + w(x) <=
M(r) + W after. ∎

So r waits for at most A(r) + O(r) < (1 + OVERTAKEN_FRACTION) A(r) + B + W of its tenant's work. Compared to
first-come order, waiting grows by at most that factor and a constant, whatever arrives later.

The bound does not depend on priorities, so no request starves: a later request of a higher priority overtakes
as one with a longer match does. While many requests of a lower priority wait, higher ones go first for B of
work immediately, and beyond that for OVERTAKEN_FRACTION of the work that the lower ones get in the same time.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from typing import NamedTuple

from agentflow.engine.request import Request

OVERTAKEN_BATCHES = 32
OVERTAKEN_FRACTION = 0.3
"""Chosen on the workloads of ``benchmarks/workloads``: smaller values cost cache hits, larger ones delay
requests that share nothing."""


class Arrived(NamedTuple):
    """A waiting request."""

    request: Request
    work: int  # tokens to compute
    # ``ArrivalQueue.work_departed`` once all requests before it have left: later departures overtake it.
    overtaken_from: int


class ArrivalQueue:
    """One tenant's waiting requests in order of arrival, and how far the oldest was overtaken.

    ``work_added`` and ``work_departed`` are running totals. Their difference is the waiting work. The work
    that departed since the oldest arrived, minus the work that was before it, has overtaken it.
    """

    def __init__(self, token_budget: int) -> None:
        # Finds its first entry in constant time after many removals, which a dict does not guarantee.
        self.waiting: OrderedDict[int, Arrived] = OrderedDict()
        self._min_overtaken = OVERTAKEN_BATCHES * token_budget
        self._limits: list[tuple[float, int]] = []  # heap of (limit, request id), with old entries
        self.work_added = 0
        self.work_departed = 0

    def add(self, request: Request, work: int) -> None:
        """A request arrived. ``work``: the tokens that it has to compute."""
        limit = self._min_overtaken + OVERTAKEN_FRACTION * (self.work_added - self.work_departed)
        self.waiting[request.id] = Arrived(request, work, self.work_added)
        heapq.heappush(self._limits, (limit, request.id))
        self.work_added += work

    def remove(self, request: Request) -> None:
        """A request left, admitted or not."""
        self.work_departed += self.waiting.pop(request.id).work
        while self._limits and self._limits[0][1] not in self.waiting:
            heapq.heappop(self._limits)

    def overdue(self) -> Request | None:
        """The oldest request, if no other may overtake it any more."""
        for oldest in self.waiting.values():
            overtaken = self.work_departed - oldest.overtaken_from
            return oldest.request if overtaken >= self._limits[0][0] else None
        return None
