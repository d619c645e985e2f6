"""``fair-lpm``: longest prefix match, with a weight for each tenant, room for short prompts next to long
ones, and a bound on overtaking.

**Between tenants.** Each token that a step computes for a tenant is charged to it when it is computed, prompt
tokens and generated ones alike. Cached tokens are free, and so are tokens computed again after a preemption
(the virtual token counter of Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024, with
uncached tokens as the cost). Prompt tokens are scheduled in chunks of at most c tokens. Each chunk goes to
the tenant with the lowest charge for its weight among the tenants that can use it. A tenant that returns
after being idle starts at the lowest charge of the active tenants: idle time earns no credit.

**Weights.** Let tenants a and b with weights s(a) and s(b) start at equal charges, and let both be able to
use every chunk from then on: each has a running prompt with tokens left, or a waiting request that is not
blocked and may start by the rules of ``admission``. Let C(x) be the charge of x since then, and G the most
tokens that the requests of one tenant which run together generate from one moment on. Then::

    | C(a) / s(a) - C(b) / s(b) |  <=  (c + G) / min(s(a), s(b))

Proof. Take the last chunk that went to a. Before it, C(a) / s(a) <= C(b) / s(b). The chunk adds at most c to
C(a), and after it a is charged only for generated tokens of requests that run at that moment, at most G. C(b)
never decreases. So C(a) / s(a) - C(b) / s(b) <= (c + G) / s(a); without any chunk for a it is at most G /
s(a). The same holds with a and b exchanged. ∎

**Within a tenant.** Waiting requests are ordered thus: preempted requests; then the oldest request, if it has
been overtaken as far as the bound below allows; then requests of the highest priority, and lower ones only if
all of these are blocked. Among equal priorities the first deadline goes first, if any request has one; then
the request whose patience ended first; then siblings in the task group that was admitted last; then the
objective ``latency`` before ``throughput``, short requests before long ones, and the longest match. A request
is *short* if it has at most SHORT_BATCHES * token_budget tokens to compute.

A chunk goes to the first waiting request rather than to a running prompt if that request was preempted or
overtaken so far, or if it has a higher priority, or else an earlier deadline, or else the objective
``latency`` and the prompt does not, or else is short and the prompt is long. Of running prompts the first in
this order goes first. However, the prompt that was admitted first gets a chunk whenever it has less than a
third of the tokens that the tenant's other prompts got in this step, so that it always advances.

**Short next to long.** Let a short request r of a tenant arrive next to any number of running or waiting long
prompts of its tenant that have no higher priority, no deadline and the same objective. Let S be the tokens to
compute of r and of the short requests before it, and a chunk for each overdue or preempted request that
starts before it. Let P be the least number of prompt tokens that the tenant gets in a step, and P > 2c. Then,
while r is not blocked and may start by the rules of ``admission`` (it fits into memory and does not delay a
request that has waited longer for memory), its prompt is computed after at most::

    ceil(4 S / (3 (P - c)))   steps, however many and however long the long prompts are.

Proof. While r or requests before it have tokens left, a long prompt gets a chunk only as the first admitted
one, and only while it has less than a third of the others' tokens x in this step; with the chunk it has less
than x / 3 + c. So P < x + x / 3 + c in each step, or x > 3 (P - c) / 4, and all of x counts towards S. ∎

With n tenants that all use their weights, P is on average the tenant's part of the tokens, by the bound
above.

**Overtaking.** The *work* w(r) of a request is its number of uncached tokens on arrival (at least 1), nodes
of a select's tree included. When r arrives, A(r) is the work that waits before it in its tenant's line, and r
gets the limit M(r) = B + OVERTAKEN_FRACTION * A(r), where B = OVERTAKEN_BATCHES * token_budget. Let O(r) be
the work of later arrivals of its tenant that were admitted (or left) while r waited, and W the largest w of
any request. Then, not counting time in which a running request computes the tokens that r needs next::

    O(r) < M(r) + W

This includes the requests that pass r while it does not fit into memory: if the oldest request does not fit
and has been overtaken this far, no other of its tenant starts. Requests of other tenants may pass it, as long
as the reservation in ``admission`` says.

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
import math
import time
from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple

from agentflow.engine.cache.radix_cache import TOKEN_BYTES, TokenRun
from agentflow.engine.request import CacheIdentity, Request, Status
from agentflow.engine.scheduling.policies import Peek, Policy, Preempted
from agentflow.engine.scheduling.waiting_tree import IsBlocked, WaitingTree

OVERTAKEN_BATCHES = 32
OVERTAKEN_FRACTION = 0.35
"""Chosen on the workloads of ``benchmarks/workloads``: smaller values cost cache hits, larger ones delay
requests that share nothing."""
SHORT_BATCHES = 1
"""A request with at most this many full batches to compute is short."""
OLDEST_PART = 3
"""A tenant's first admitted prompt gets at least one token for this many of the tenant's other prompts."""
MIN_GONE = 64
AFTER_TOKENS = b"\xff" * TOKEN_BYTES
"""Sorts after all tokens that may follow a run."""


class FairLongestPrefix(Policy):
    """The policy ``fair-lpm``. ``clock``: seconds.

    Tenants with requests stay in a heap between steps, by their charges, which only grow: an outdated one is
    corrected when it comes first. A step touches the tenants that it computes tokens for, and no others.
    """

    def __init__(self, peek: Peek, token_budget: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._peek = peek
        self._token_budget = token_budget
        self._tenants: dict[str, TenantQueue] = {}
        self._num_waiting = 0
        self._num_made = 0
        self._by_charge: list[_Charged] = []  # a heap with old entries
        self._passed: list[TenantQueue] = []  # not in the heap, as they cannot use a chunk of this step
        self._in_step: dict[TenantQueue, None] = {}  # tenants that this step touched

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Request]:
        for tenant in self._tenants.values():
            yield from tenant.preempted
            for waiting in tenant.arrivals.waiting.values():
                yield waiting.request

    def __contains__(self, request: Request) -> bool:
        tenant = self._tenants.get(request.tenant)
        return tenant is not None and (request.id in tenant.arrivals.waiting or request in tenant.preempted)

    def add(self, request: Request) -> None:
        run = request.reusable_run()
        self._arrived(request).add(request, run, self._peek(request.extra_key, run))

    def restore(self, request: Request) -> None:
        tenant = self._arrived(request)
        tenant.preempted.add(request)
        tenant.num_admitted -= 1

    def start_step(self) -> None:
        for tenant in self._in_step:
            tenant.start_step()
        self._in_step.clear()
        self._restore_passed()

    def next(self, prompts: Sequence[Request], is_blocked: IsBlocked | None) -> Request | None:
        """A request of the tenant with the lowest charge that can use a chunk. Within a step charges only
        grow, and a tenant that cannot use one cannot use a later one either."""
        if is_blocked is None:  # only a tenant with a running prompt can use it
            names = {request.tenant for request in prompts}
            tenant = min([self._tenants[name] for name in names], key=_charge_key, default=None)
            return None if tenant is None else self._next_from(tenant, prompts, None)
        while (tenant := self._lowest()) is not None:
            chosen = self._next_from(tenant, prompts, is_blocked)
            if chosen is not None:
                return chosen
            heapq.heappop(self._by_charge)
            self._passed.append(tenant)
        return None

    def _next_from(
        self, tenant: TenantQueue, prompts: Sequence[Request], is_blocked: IsBlocked | None
    ) -> Request | None:
        self._in_step[tenant] = None
        return tenant.next([request for request in prompts if request.tenant == tenant.name], is_blocked)

    def charge(self, request: Request, num_tokens: int) -> None:
        tenant = self._tenants[request.tenant]
        self._in_step[tenant] = None
        tenant.charge(request, num_tokens)

    def remove(self, request: Request) -> None:
        tenant = self._tenants[request.tenant]
        tenant.remove(request)
        tenant.num_waiting -= 1
        self._num_waiting -= 1
        self._forget_idle(request.tenant)

    def admit(self, request: Request) -> None:
        tenant = self._tenants[request.tenant]
        tenant.num_admitted += 1
        tenant.current_group = _group_of(request)
        self.remove(request)

    def finish(self, request: Request) -> None:
        tenant = self._tenants[request.tenant]
        tenant.num_admitted -= 1
        self._forget_idle(request.tenant)

    def tokens_cached(self, identity: CacheIdentity, run: TokenRun) -> None:
        for tree in self._trees(identity):
            tree.tokens_cached(identity, run)

    def tokens_evicted(self, identity: CacheIdentity, run: Callable[[], TokenRun], kept: int) -> None:
        for tree in self._trees(identity):
            tree.tokens_evicted(identity, run, kept)

    def _arrived(self, request: Request) -> TenantQueue:
        tenant = self._tenants.get(request.tenant)
        if tenant is None:
            self._restore_passed()
            lowest = self._lowest()
            used = 0.0 if lowest is None else lowest.used
            self._num_made += 1
            tenant = TenantQueue(request.tenant, self._num_made, self._token_budget, self._clock, used)
            self._tenants[tenant.name] = tenant
            self._queue(tenant)
        tenant.num_waiting += 1
        tenant.weight = request.origin.weight
        self._num_waiting += 1
        return tenant

    def _lowest(self) -> TenantQueue | None:
        """The tenant with the lowest charge that was not passed, at the top of the heap."""
        while self._by_charge:
            used, _, tenant = self._by_charge[0]
            if not self._has_requests(tenant):
                heapq.heappop(self._by_charge)
            elif used != tenant.used:
                heapq.heapreplace(self._by_charge, (*_charge_key(tenant), tenant))
            else:
                return tenant
        return None

    def _queue(self, tenant: TenantQueue) -> None:
        heapq.heappush(self._by_charge, (*_charge_key(tenant), tenant))
        if len(self._by_charge) > 64 + 2 * len(self._tenants):
            self._by_charge = [entry for entry in self._by_charge if self._has_requests(entry[2])]
            heapq.heapify(self._by_charge)

    def _restore_passed(self) -> None:
        while self._passed:
            self._queue(self._passed.pop())

    def _has_requests(self, tenant: TenantQueue) -> bool:
        return self._tenants.get(tenant.name) is tenant

    def _forget_idle(self, name: str) -> None:
        tenant = self._tenants[name]
        if not tenant.num_waiting and not tenant.num_admitted:
            del self._tenants[name]

    def _trees(self, identity: CacheIdentity) -> Iterable[WaitingTree]:
        tenant = self._tenants.get(identity.tenant)
        return () if tenant is None else (tenant.short, tenant.long)


class TenantQueue:
    """A tenant's waiting requests, and its charge.

    - ``number``: increases from tenant to tenant.
    - ``used``: charged tokens, divided by its weight.
    - ``num_admitted``: requests that run. ``num_waiting``: requests that wait.
    - ``oldest``: its first admitted prompt in this step, which got ``oldest_tokens``; its other prompts got
      ``other_tokens``.
    - ``may_begin``: whether some waiting request may not be blocked.
    - ``current_group``: the task group of the request that was admitted last.
    - ``short``, ``long``: requests that were short, or not, when they arrived.
    """

    def __init__(
        self, name: str, number: int, token_budget: int, clock: Callable[[], float], used: float
    ) -> None:
        self.name = name
        self.number = number
        self._clock = clock
        self._short_tokens = SHORT_BATCHES * token_budget
        self.weight = 1.0
        self.used = used
        self.num_admitted = 0
        self.num_waiting = 0
        self.oldest: Request | None = None
        self.oldest_tokens = self.other_tokens = 0
        self.may_begin = True
        self.current_group: Hashable = None
        self.preempted = Preempted()
        self.arrivals = ArrivalQueue(OVERTAKEN_BATCHES * token_budget)
        self.short, self.long = WaitingTree(), WaitingTree()
        self._num_at: dict[int, int] = {}  # requests in the trees, by priority
        self._groups: dict[tuple[int, Hashable], Siblings] = {}  # by priority and task group
        self._deadlines = TimeHeaps(self.arrivals.waiting)
        self._patience_ends = TimeHeaps(self.arrivals.waiting)

    def add(self, request: Request, run: TokenRun, match: int) -> None:
        """Adds a request. ``run``: its tokens that may come from the cache, of which ``match`` are cached."""
        self.arrivals.add(request, max(1, request.num_tokens + request.num_nodes - match))
        tree = self.short if self._is_short(request, match) else self.long
        tree.add(request, run, match, _rank(request))
        priority = request.origin.priority
        self._num_at[priority] = self._num_at.get(priority, 0) + 1
        self._deadlines.add(request.deadline, request)
        self._patience_ends.add(request.patience_end, request)
        group = _group_of(request)
        if group is not None:
            self._groups.setdefault((priority, group), Siblings()).add(request)

    def remove(self, request: Request) -> None:
        """The request no longer waits."""
        if self.preempted.discard(request):
            return
        self.arrivals.remove(request)
        self._tree_of(request).remove(request)
        priority = request.origin.priority
        self._num_at[priority] -= 1
        if not self._num_at[priority]:
            del self._num_at[priority]
        self._deadlines.gone(request)
        self._patience_ends.gone(request)
        group = _group_of(request)
        if group is not None:
            key = priority, group
            self._groups[key].remove(request)
            if not len(self._groups[key]):
                del self._groups[key]

    def match_of(self, request: Request) -> int:
        """How many tokens of a waiting request are cached."""
        return self._tree_of(request).match_of(request)

    def next(self, prompts: Sequence[Request], is_blocked: IsBlocked | None) -> Request | None:
        """The request that gets the next chunk, in the order of the module's docstring."""
        self.oldest = prompts[0] if prompts else None
        if self.oldest is not None and OLDEST_PART * self.oldest_tokens < self.other_tokens:
            return self.oldest
        chosen: Request | None = None
        if is_blocked is not None and self.num_waiting and self.may_begin:
            due = self._first_due(is_blocked)
            if due is not None:
                return due
            if self.may_begin:
                chosen = self._first_waiting(is_blocked)
                self.may_begin = chosen is not None  # within a step requests only become blocked
        if prompts:
            first = min(prompts, key=self._urgency)
            if chosen is None or self._urgency(chosen) >= self._urgency(first):
                return first
        return chosen

    def charge(self, request: Request, num_tokens: int) -> None:
        """Charges for ``num_tokens`` tokens of the request."""
        self.used += num_tokens / self.weight
        if request is self.oldest:
            self.oldest_tokens += num_tokens
        else:
            self.other_tokens += num_tokens

    def start_step(self) -> None:
        """Forgets the tokens that prompts got in the last step."""
        self.oldest, self.oldest_tokens, self.other_tokens = None, 0, 0
        self.may_begin = True

    def _first_due(self, is_blocked: IsBlocked) -> Request | None:
        """A preempted request, or the oldest if it must not be overtaken further."""
        preempted = self.preempted.first(is_blocked)
        if preempted is not None:
            return preempted
        overdue = self.arrivals.overdue()
        if overdue is None:
            return None
        if overdue.is_held_back:
            self.may_begin = False  # no other may pass it
        elif not is_blocked(overdue, self.match_of(overdue)):
            return overdue
        return None

    def _first_waiting(self, is_blocked: IsBlocked) -> Request | None:
        """The first request that is not blocked, of the highest priority that has one: a preferred request,
        or the first in the trees."""
        highest = max(self._num_at, default=0)
        preferred = self._first_preferred(highest, is_blocked)
        if preferred is not None:
            return preferred
        found = self._first_in_trees(is_blocked)
        if found is None or found.origin.priority == highest:
            return found
        return self._first_preferred(found.origin.priority, is_blocked) or found

    def _first_preferred(self, priority: int, is_blocked: IsBlocked) -> Request | None:
        """Of the requests with this priority: the first deadline, then the first whose patience has ended,
        then a sibling in the task group that was admitted last."""
        for times, by in ((self._deadlines, math.inf), (self._patience_ends, self._clock())):
            urgent = times.first(priority, by)
            if urgent is not None and not is_blocked(urgent, self.match_of(urgent)):
                return urgent
        siblings = self._groups.get((priority, self.current_group))
        return None if siblings is None else siblings.first(self.match_of, is_blocked)

    def _first_in_trees(self, is_blocked: IsBlocked) -> Request | None:
        """The first request by rank, then short before long, then by match. A long request that the cache has
        made short since it arrived is short."""
        short, long = self.short.first(is_blocked), self.long.first(is_blocked)
        if short is None or long is None:
            found = short or long
        else:
            is_short = self._is_short(*long)
            long_is_first = (_rank(long[0]), not is_short, -long[1]) < (_rank(short[0]), False, -short[1])
            found = long if long_is_first else short
        return None if found is None else found[0]

    def _urgency(self, request: Request) -> tuple[int, float, bool, bool]:
        """Lower goes first."""
        to_compute = request.num_to_compute
        if request.status is Status.WAITING:
            to_compute -= self.match_of(request)
        elif not request.num_generated:  # a long prompt counts as long until it is computed
            to_compute += request.num_computed - request.num_shared
        priority, is_patient = _rank(request)
        return priority, request.deadline, is_patient, to_compute > self._short_tokens

    def _is_short(self, request: Request, match: int) -> bool:
        return request.num_tokens + request.num_nodes - match <= self._short_tokens

    def _tree_of(self, request: Request) -> WaitingTree:
        return self.short if request in self.short else self.long


_Charged = tuple[float, int, TenantQueue]  # charge, tie-break, tenant


def _charge_key(tenant: TenantQueue) -> tuple[float, int]:
    return tenant.used, tenant.number


def _rank(request: Request) -> tuple[int, bool]:
    """The priority and the objective. Lower goes first."""
    return -request.origin.priority, request.origin.objective != "latency"


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

    def __init__(self, min_overtaken: int) -> None:
        # Finds its first entry in constant time after many removals, which a dict does not guarantee.
        self.waiting: OrderedDict[int, Arrived] = OrderedDict()
        self._min_overtaken = min_overtaken
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


def _group_of(request: Request) -> Hashable:
    """The task group, of which only requests with equal identities are siblings here: they share KV."""
    group = request.origin.task_group
    return (group, request.extra_key) if group else None


class Siblings:
    """Waiting requests of one task group. Sorted by their tokens, siblings that need the same tokens next
    are neighbours, and one of them is asked for all."""

    def __init__(self) -> None:
        self._by_arrival: OrderedDict[int, Request] = OrderedDict()
        self._by_tokens: list[Request] = []

    def __len__(self) -> int:
        return len(self._by_arrival)

    def add(self, request: Request) -> None:
        """A sibling arrived."""
        self._by_arrival[request.id] = request
        insort(self._by_tokens, request, key=_tokens_and_id)

    def remove(self, request: Request) -> None:
        """The request no longer waits."""
        del self._by_arrival[request.id]
        del self._by_tokens[bisect_left(self._by_tokens, _tokens_and_id(request), key=_tokens_and_id)]

    def first(self, match_of: Callable[[Request], int], is_blocked: IsBlocked) -> Request | None:
        """The oldest, or if that is blocked, the first in the order of their tokens that is not."""
        oldest = next(iter(self._by_arrival.values()))
        if not is_blocked(oldest, match_of(oldest)):
            return oldest
        index = 0
        while index < len(self._by_tokens):
            request = self._by_tokens[index]
            if request.is_held_back:
                index += 1
                continue
            match = match_of(request)
            if not is_blocked(request, match):
                return request
            after_equals = request.run(match + 1) + AFTER_TOKENS
            index = bisect_left(self._by_tokens, after_equals, index + 1, key=Request.reusable_run)
        return None


def _tokens_and_id(request: Request) -> tuple[TokenRun, int]:
    return request.reusable_run(), request.id


class TimeHeaps:
    """Waiting requests by a time, the earliest first, for each priority. ``waiting``: the ids of the requests
    that still wait."""

    def __init__(self, waiting: Container[int]) -> None:
        self._heaps: dict[int, list[tuple[float, int, Request]]] = {}  # with old entries
        self._num_gone: Counter[int] = Counter()  # requests since old entries were dropped
        self._waiting = waiting

    def add(self, at: float, request: Request) -> None:
        """Adds a request; ignored for an infinite time."""
        if at < math.inf:
            heap = self._heaps.setdefault(request.origin.priority, [])
            heapq.heappush(heap, (at, request.id, request))

    def gone(self, request: Request) -> None:
        """The request, with a time or without, no longer waits. Drops old entries once they may be the
        most."""
        priority = request.origin.priority
        heap = self._heaps.get(priority)
        if heap is None:
            return
        self._num_gone[priority] += 1
        if self._num_gone[priority] > MIN_GONE and 2 * self._num_gone[priority] > len(heap):
            self._heaps[priority] = [entry for entry in heap if entry[1] in self._waiting]
            heapq.heapify(self._heaps[priority])
            self._num_gone[priority] = 0

    def first(self, priority: int, by: float) -> Request | None:
        """The earliest request, if its time is not after ``by``."""
        heap = self._heaps.get(priority)
        while heap and heap[0][1] not in self._waiting:
            heapq.heappop(heap)
        return heap[0][2] if heap and heap[0][0] <= by else None
