"""``fair-lpm``: longest prefix match with a share for each tenant and a bound on overtaking.

**Between tenants**: deficit round robin (Shreedhar and Varghese, SIGCOMM 1995) over *uncached* tokens:
prompt tokens that have to be computed when a request is admitted, and generated ones when it is over.
A cached token costs its tenant nothing, so sharing is rewarded (compare Sheng et al., "Fairness in
Serving Large Language Models", OSDI 2024, and deficit longest prefix match, Cao et al. 2025). A tenant's
turn is as long as its share says: q = TURN_BATCHES * token_budget times the share of its latest request.

**The shares.** Let tenants a and b with shares s(a) and s(b) begin to wait together, owing nothing, and both
have somebody waiting who is not blocked from then on. Let C(x) be what x was charged since then, L the most
that one admission is charged, and G the most that requests of one tenant generate which run together. Then::

    | C(a) / s(a) - C(b) / s(b) |  <  q + (L + G) / min(s(a), s(b))

Proof. After k(x) turns, C(x) = k(x) q s(x) - d(x), with the deficit d(x) <= q s(x), and <= 0 between turns.
Who is admitted had d(x) > 0, so d(x) > -L after it, and only running requests that end take more, at most
G: d(x) > -(L + G). Turns alternate: k(a) = k(b), or one more for whose turn it is or was. If k(a) = k(b),
the difference is d(b) / s(b) - d(a) / s(a), which lies between -q - (L + G) / s(b) and q + (L + G) / s(a).
If k(a) = k(b) + 1, then d(b) <= 0, and q more of it lies between -(L + G) / s(b) and q + (L + G) / s(a). ∎

**Within a tenant**: requests that lost their slots; then the oldest, if it has been overtaken as far
as anybody may be; then those of the highest priority, and of lower ones only where all of these are blocked;
among equal priorities in the order of ``priority_tier``: deadline, patience, task group, objective, longest
match.

**The bound.** The *work* w(r) of a request is its uncached tokens on arrival (at least 1), the nodes of
a select's tree among them. When r arrives, A(r) is the work that waits before it in its tenant's line,
and it gets the limit M(r) = B + OVERTAKEN_SHARE * A(r), where B = OVERTAKEN_BATCHES * token_budget. Let
O(r) be the work of later arrivals of its tenant that were admitted (or left) while r waited, and W the
largest w of any request. Then, not counting while what r needs next is being computed by a running
request::

    O(r) < M(r) + W

Proof. A request other than the oldest, h, is admitted only while O(h) < M(q) for all waiting q. Let x,
later than r, be admitted while r waits. Then x is not the oldest, so O(h) < M(r) before. Every request
that overtook r arrived after h too, and while h waited, so O(r) <= O(h) < M(r) before, and O(r) <
M(r) + w(x) <= M(r) + W after. ∎

So r waits for at most A(r) + O(r) < (1 + OVERTAKEN_SHARE) A(r) + B + W of its tenant's work:
against first-come order, waiting grows by at most that factor and a constant, whatever arrives later.

The bound does not ask for priorities, so nobody starves: a request of a higher priority that came later
overtakes, as one with a longer match does. While many of a lower priority wait, higher ones go first for
B of work at once, and beyond that for OVERTAKEN_SHARE of what the lower ones get in that time.
"""

from __future__ import annotations

import heapq
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import NamedTuple

from agentflow.server.core.policy import IsBlocked, Peek, Returned
from agentflow.server.core.priority_tier import PriorityTier
from agentflow.server.core.request import CacheIdentity, Request
from agentflow.server.core.token_run import TokenRun
from agentflow.server.core.waiting_tree import WaitingTree

OVERTAKEN_BATCHES = 48
OVERTAKEN_SHARE = 0.5
"""Chosen on the workloads of ``benchmarks/workloads`` (docs/benchmarks.md): less costs hits, more costs
those who share nothing."""
TURN_BATCHES = 16
"""So many full batches of uncached tokens may a tenant use in its turn."""


class InLine(NamedTuple):
    """A waiting request: what it has to compute, and the total of work left from which on what leaves
    overtakes it, because all that was before it has left."""

    request: Request
    work: int
    overtaken_from: int


class Line:
    """The waiting requests of one tenant in order of arrival, and how far the oldest was overtaken.

    ``work_added`` and ``work_left`` are running totals: what waits is their difference, and what left
    since the oldest arrived, less what was before it, is what overtook it.
    """

    def __init__(self, min_overtaken: int) -> None:
        # Its first is found at once however many left before it, which a dict does not promise.
        self.waiting: OrderedDict[int, InLine] = OrderedDict()
        self._min_overtaken = min_overtaken
        self._limits: list[tuple[float, int]] = []  # heap of (limit, request id), old entries stay
        self.work_added = 0
        self.work_left = 0

    def add(self, request: Request, work: int) -> None:
        """A request that has to compute so many tokens."""
        limit = self._min_overtaken + OVERTAKEN_SHARE * (self.work_added - self.work_left)
        self.waiting[request.id] = InLine(request, work, self.work_added)
        heapq.heappush(self._limits, (limit, request.id))
        self.work_added += work

    def remove(self, request: Request) -> None:
        """It left, admitted or not."""
        self.work_left += self.waiting.pop(request.id).work
        while self._limits and self._limits[0][1] not in self.waiting:
            heapq.heappop(self._limits)

    def overdue(self) -> Request | None:
        """The oldest, if one more may not overtake it."""
        for oldest in self.waiting.values():
            overtaken = self.work_left - oldest.overtaken_from
            return oldest.request if overtaken >= self._limits[0][0] else None
        return None


class Tenant:
    """What one tenant has waiting, and what it may still use in this round. ``tiers``: by
    priority, highest first, one for each that it has used; mostly one."""

    def __init__(self, token_budget: int, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.share = 1.0
        self.deficit = 0.0
        self.has_turn = False
        self.num_admitted = 0  # and not over yet
        self.num_waiting = 0
        self.returned = Returned()
        self.line = Line(OVERTAKEN_BATCHES * token_budget)
        self.tiers: dict[int, PriorityTier] = {}
        self.trees: list[WaitingTree] = []  # those of all tiers
        self.current_group: Hashable = None

    def add(self, request: Request, run: TokenRun, match: int) -> None:
        self.line.add(request, max(1, request.num_tokens + request.num_nodes - match))
        tier = self.tiers.get(request.priority)
        if tier is None:
            tier = self._new_tier(request.priority)
        tier.add(request, run, match)

    def next(self, is_blocked: IsBlocked) -> Request | None:
        """The order that the module's docstring gives."""
        returned = self.returned.first(is_blocked)
        if returned is not None:
            return returned
        overdue = self.line.overdue()
        if overdue is not None and not is_blocked(overdue, self.tiers[overdue.priority].match_of(overdue)):
            return overdue
        for tier in self.tiers.values():
            found = tier.next(self.current_group, is_blocked)
            if found is not None:
                return found
        return None

    def remove(self, request: Request) -> None:
        """It waits no longer."""
        if self.returned.discard(request):
            return
        self.line.remove(request)
        self.tiers[request.priority].remove(request)

    def _new_tier(self, priority: int) -> PriorityTier:
        tier = self.tiers[priority] = PriorityTier(self._clock)
        self.tiers = dict(sorted(self.tiers.items(), reverse=True))
        self.trees += tier.trees.values()
        return tier


class FairLongestPrefix:
    """``fair-lpm``, as the module's docstring describes it. ``clock``: in seconds."""

    def __init__(self, peek: Peek, token_budget: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._peek = peek
        self._token_budget = token_budget
        self._tenants: dict[str, Tenant] = {}
        self._turns: deque[str] = deque()  # tenants that have somebody waiting
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Request]:
        for tenant in self._tenants.values():
            yield from tenant.returned
            for waiting in tenant.line.waiting.values():
                yield waiting.request

    def __contains__(self, request: Request) -> bool:
        tenant = self._tenants.get(request.tenant)
        return tenant is not None and (request.id in tenant.line.waiting or request in tenant.returned)

    def add(self, request: Request) -> None:
        run = request.reusable_run()
        self._arrived(request).add(request, run, self._peek(request.extra_key, run))

    def restore(self, request: Request) -> None:
        tenant = self._arrived(request)
        tenant.returned.add(request)
        tenant.num_admitted -= 1

    def next(self, is_blocked: IsBlocked) -> Request | None:
        """Turn by turn: the first tenant in the round with anything left of its turn, and with a request
        that is not blocked. Who used more than its turn sits out until that is made good."""
        num_blocked = 0
        while num_blocked < len(self._turns):
            tenant = self._tenants[self._turns[0]]
            if not tenant.has_turn:
                tenant.has_turn = True
                tenant.deficit += TURN_BATCHES * self._token_budget * tenant.share
            if tenant.deficit > 0:
                request = tenant.next(is_blocked)
                if request is not None:
                    return request
                num_blocked += 1
            else:
                tenant.has_turn = False
                num_blocked = 0
            self._turns.rotate(-1)
        return None

    def remove(self, request: Request) -> None:
        tenant = self._tenants[request.tenant]
        tenant.remove(request)
        tenant.num_waiting -= 1
        self._num_waiting -= 1
        if not tenant.num_waiting:
            self._turns.remove(request.tenant)
            tenant.has_turn, tenant.deficit = False, min(0.0, tenant.deficit)
        self._forget_idle(request.tenant)

    def admit(self, request: Request, num_uncached: int) -> None:
        tenant = self._tenants[request.tenant]
        tenant.num_admitted += 1
        tenant.deficit -= num_uncached
        tenant.current_group = request.task_group
        self.remove(request)

    def finish(self, request: Request) -> None:
        tenant = self._tenants[request.tenant]
        tenant.num_admitted -= 1
        tenant.deficit -= request.num_generated
        self._forget_idle(request.tenant)

    def tokens_cached(self, identity: CacheIdentity, run: TokenRun) -> None:
        for tree in self._trees(identity):
            tree.tokens_cached(identity, run)

    def tokens_evicted(self, identity: CacheIdentity, run: TokenRun, kept: int) -> None:
        for tree in self._trees(identity):
            tree.tokens_evicted(identity, run, kept)

    def _arrived(self, request: Request) -> Tenant:
        tenant = self._tenants.get(request.tenant)
        if tenant is None:
            tenant = self._tenants[request.tenant] = Tenant(self._token_budget, self._clock)
        if not tenant.num_waiting:
            self._turns.append(request.tenant)
        tenant.num_waiting += 1
        tenant.share = request.share
        self._num_waiting += 1
        return tenant

    def _forget_idle(self, name: str) -> None:
        tenant = self._tenants[name]
        if not tenant.num_waiting and not tenant.num_admitted:
            del self._tenants[name]  # with what it owes or has left: idle tenants save up nothing

    def _trees(self, identity: CacheIdentity) -> Iterable[WaitingTree]:
        tenant = self._tenants.get(identity.tenant)
        return () if tenant is None else tenant.trees
