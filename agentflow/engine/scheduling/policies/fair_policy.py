"""``fair-lpm``: longest prefix match, with a weight for each tenant. This module takes turns between tenants;
``tenant_queue`` orders the requests of one.

Each token that a step computes for a tenant is charged to it when it is computed, prompt tokens and generated
ones alike. Cached tokens are free, and so are tokens computed again after a preemption (the virtual token
counter of Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024, with uncached tokens as the
cost). Prompt tokens are scheduled in chunks of at most c tokens. Each chunk goes to the tenant with the
lowest charge for its weight among the tenants that can use it. A tenant that returns after being idle starts
at the lowest charge of the active tenants: idle time earns no credit. If several engines serve the model, the
tokens that the others compute are charged too (``charges``).

**Weights.** Let tenants a and b with weights s(a) and s(b) start at equal charges, and let both be able to
use every chunk from then on: each has a running prompt with tokens left, or a waiting request that is not
blocked and may start by the rules of ``admission``. Let C(x) be the charge of x since then, and G the most
tokens that the requests of one tenant which run together generate from one moment on. Then::

    | C(a) / s(a) - C(b) / s(b) |  <=  (c + G) / min(s(a), s(b))

Proof. Take the last chunk that went to a. Before it, C(a) / s(a) <= C(b) / s(b). The chunk adds at most c to
C(a), and after it a is charged only for generated tokens of requests that run at that moment, at most G. C(b)
never decreases. So C(a) / s(a) - C(b) / s(b) <= (c + G) / s(a); without any chunk for a it is at most G /
s(a). The same holds with a and b exchanged. ∎

**Paused programs.** The requests of a paused program (``program_pauses``) wait aside, where they count as
departed. When it is resumed, they count as preempted. A tenant all of whose requests wait aside is idle.
"""

from __future__ import annotations

import heapq
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

from agentflow.engine.cache.token_run import TokenRun
from agentflow.engine.request import CacheKey, Origin, Request
from agentflow.engine.scheduling.policies.charges import Absent
from agentflow.engine.scheduling.policies.policy import Clock, PeekCache, Policy
from agentflow.engine.scheduling.policies.tenant_queue import TenantProgram, TenantQueue
from agentflow.engine.scheduling.policies.waiting_tree import IsBlocked

MAX_PROGRAMS = 16_384
"""At most this many programs are remembered, the ones with the latest requests."""


class FairLongestPrefix(Policy):
    """The policy ``fair-lpm``. ``clock``: seconds.

    Tenants with requests stay in a heap between steps, by their charges, which only grow: an outdated one is
    corrected when it comes first. A step touches the tenants that it computes tokens for, and no others.
    """

    pauses_programs = True

    def __init__(self, peek: PeekCache, token_budget: int, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._peek = peek
        self._token_budget = token_budget
        self._tenants: dict[str, TenantQueue] = {}
        self._num_made = 0
        self._by_charge: list[_Charged] = []  # a heap with old entries
        self._passed: list[TenantQueue] = []  # not in the heap, as they cannot use a chunk of this step
        self._in_step: dict[TenantQueue, None] = {}  # tenants that this step touched
        self._holds_back_unencoded = False  # in this step
        # By tenant and number, the one with the latest request last.
        self._programs: OrderedDict[tuple[str, int], TenantProgram] = OrderedDict()
        self._paused: set[tuple[str, int]] = set()  # programs, by tenant and number
        self._absent: Absent | None = None  # tenants without requests here, if there are other engines

    def __iter__(self) -> Iterator[Request]:
        for tenant in self._tenants.values():
            yield from tenant.preempted.values()
            yield from tenant.aside.values()
            for waiting in tenant.arrivals.waiting.values():
                yield waiting.request

    @property
    def num_tenants(self) -> int:
        return len(self._tenants)

    def __contains__(self, request: Request) -> bool:
        tenant = self._tenants.get(request.tenant)
        return tenant is not None and request in tenant

    def add(self, request: Request) -> None:
        if self._is_paused(request):
            self._arrived(request).wait_aside(request)
            return
        run = request.reusable_run()
        match, program = self._peek(request.cache_key, run), self._find_program(request)
        self._arrived(request).add(request, run, match, program)  # nothing is counted before a fault

    def update_origin(self, request: Request, origin: Origin, patience_end: float = math.inf) -> None:
        tenant = self._tenants.get(request.tenant)
        is_paused = (request.tenant, origin.program) in self._paused
        if tenant is not None and (request.id in tenant.aside or (is_paused and request in tenant)):
            tenant.move_aside(request, origin)
            if not is_paused:
                self._bring_back(tenant, [request])
            return
        if tenant is None or request.id not in tenant.arrivals.waiting:
            request.origin = origin
            if tenant is not None:
                tenant.origin_changed()
            return
        match, run = tenant.count_match(request), request.reusable_run()
        tenant.take_out(request)
        request.origin = origin
        tenant.put_in(request, run, match, self._find_program(request))
        if patience_end < request.patience_end:
            tenant.lose_patience(request, patience_end)

    def restore(self, request: Request) -> None:
        tenant = self._tenants[request.tenant]
        if self._is_paused(request):
            tenant.wait_aside(request)
        else:
            tenant.preempted.add(request)
        self._arrived(request)
        tenant.num_admitted -= 1

    def pause(self, tenant: str, program: int) -> None:
        self._paused.add((tenant, program))
        queue = self._tenants.get(tenant)
        if queue is not None:
            queue.put_aside(program)

    def resume(self, tenant: str, program: int) -> None:
        self._paused.discard((tenant, program))
        queue = self._tenants.get(tenant)
        back = [] if queue is None else queue.requests_aside(program)
        if queue is not None and back:
            self._bring_back(queue, back)

    def _bring_back(self, tenant: TenantQueue, requests: Sequence[Request]) -> None:
        """Requests that no longer need to wait aside go first in their tenant's queue."""
        if tenant.is_aside:
            self._catch_up(tenant)
        tenant.bring_back(requests)

    def _is_paused(self, request: Request) -> bool:
        return (request.tenant, request.origin.program) in self._paused

    def start_step(self) -> None:
        for tenant in self._in_step:
            tenant.start_step()
        self._in_step.clear()
        self._holds_back_unencoded = False
        self._restore_passed()

    def hold_back_paced(self, tenant: str) -> None:
        self._tenants[tenant].by_match.hold_back_paced()

    def set_unencoded(self, request: Request, is_unencoded: bool) -> None:
        tenant = self._tenants.get(request.tenant)
        if tenant is not None and request.id in tenant.arrivals.waiting:
            tenant.set_unencoded(request, is_unencoded)
        else:
            request.is_unencoded = is_unencoded

    def hold_back_unencoded(self) -> None:
        self._holds_back_unencoded = True

    def next(self, prompts: Sequence[Request], is_blocked: IsBlocked | None) -> Request | None:
        """A request of the tenant with the lowest charge that can use a chunk. Within a step charges only
        grow, and a tenant that cannot use one cannot use a later one either."""
        if is_blocked is None and len(prompts) == 1:
            return self._next_from(self._tenants[prompts[0].tenant], prompts, None)
        if is_blocked is None:  # only a tenant with a running prompt can use it
            names = {request.tenant for request in prompts}
            tenant = min([self._tenants[name] for name in names], key=_charge_key, default=None)
            return None if tenant is None else self._next_from(tenant, prompts, None)
        while (tenant := self._lowest()) is not None:
            if not self._holds_back_unencoded or not tenant.is_unencoded:
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
        tenant.by_match.holds_back_unencoded = self._holds_back_unencoded
        if len(self._tenants) > 1:
            prompts = [request for request in prompts if request.tenant == tenant.name]
        return tenant.next(prompts, is_blocked)

    def charge(self, request: Request, num_tokens: int) -> None:
        name, number = request.cache_key.tenant, request.origin.program
        tenant = self._tenants[name]
        self._in_step[tenant] = None
        tenant.charge(request, num_tokens)
        if self.charged is not None:
            self.charged.add(name, tenant.weight, number, num_tokens)
        program = self._programs.get((name, number)) if number else None
        if program is not None:
            program.num_tokens += num_tokens

    def charge_elsewhere(self, tenant: str, used: float) -> None:
        queue = self._tenants.get(tenant)
        if queue is not None:
            queue.used += used
        else:
            absent = self._absent = self._absent or Absent(self._clock)
            absent.set(tenant, max(absent.pop(tenant), self._least_used()) + used)

    def program_elsewhere(self, tenant: str, program: int, num_tokens: int) -> None:
        known = self._programs.get((tenant, program))
        if known is not None:
            known.num_tokens += num_tokens

    def remove(self, request: Request) -> None:
        tenant = self._tenants[request.tenant]
        tenant.remove(request)
        tenant.num_waiting -= 1
        self.num_waiting -= 1
        self._forget_idle(request.tenant)

    def admit(self, request: Request) -> None:
        tenant = self._tenants[request.tenant]
        tenant.remove(request)
        tenant.num_waiting -= 1
        self.num_waiting -= 1
        tenant.num_admitted += 1
        tenant.open_group(request)
        number = request.origin.program
        program = self._programs.get((request.tenant, number)) if number else None
        if program is not None:
            program.has_begun = True

    def finish(self, request: Request) -> None:
        tenant = self._tenants[request.tenant]
        tenant.num_admitted -= 1
        self._forget_idle(request.tenant)

    def tokens_cached(self, cache_key: CacheKey, run: TokenRun) -> None:
        tenant = self._tenants.get(cache_key.tenant)
        if tenant is not None and tenant.by_match.tokens_cached(cache_key, run):
            tenant.match_changed()

    def tokens_evicted(self, cache_key: CacheKey, run: Callable[[], TokenRun], kept: int) -> None:
        tenant = self._tenants.get(cache_key.tenant)
        if tenant is not None and tenant.by_match.tokens_evicted(cache_key, run, kept):
            tenant.match_changed()

    def _arrived(self, request: Request) -> TenantQueue:
        tenant = self._tenants.get(request.tenant)
        if tenant is None:
            used = 0.0 if self._absent is None else self._absent.pop(request.tenant)
            used = max(used, self._least_used())
            self._num_made += 1
            tenant = TenantQueue(request.tenant, self._num_made, self._token_budget, self._clock, used)
            self._tenants[tenant.name] = tenant
            self._queue(tenant)
        elif tenant.is_aside and not self._is_paused(request):
            self._catch_up(tenant)
        tenant.num_waiting += 1
        tenant.weight = request.origin.weight
        self.num_waiting += 1
        return tenant

    def _catch_up(self, tenant: TenantQueue) -> None:
        """The tenant returns after all of its requests waited aside, which earns no credit."""
        tenant.used = max(tenant.used, self._least_used())

    def _find_program(self, request: Request) -> TenantProgram | None:
        """The request's program, which has a request now."""
        if not request.origin.program:
            return None
        key = request.tenant, request.origin.program
        program = self._programs.get(key)
        if program is None:
            program = self._programs[key] = TenantProgram(request.arrival)
            if len(self._programs) > MAX_PROGRAMS:
                self._programs.popitem(last=False)
        else:
            self._programs.move_to_end(key)
        return program

    def _least_used(self) -> float:
        """The lowest charge of the tenants that are not idle, here or on another engine; 0 if all are."""
        self._restore_passed()
        while (lowest := self._lowest()) is not None and lowest.is_aside:
            heapq.heappop(self._by_charge)
            self._passed.append(lowest)
        least = math.inf if lowest is None else lowest.used
        if self._absent is not None:
            least = min(self._absent.least(), least)
        return 0.0 if least == math.inf else least

    def _lowest(self) -> TenantQueue | None:
        """The tenant with the lowest charge that was not passed, at the top of the heap."""
        while self._by_charge:
            used, _, tenant = self._by_charge[0]
            if not self._has_requests(tenant):
                heapq.heappop(self._by_charge)
            elif used != tenant.used and len(self._by_charge) > 1:
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
            if self.charged is not None:
                self._absent = self._absent or Absent(self._clock)
                self._absent.set(name, tenant.used)


_Charged = tuple[float, int, TenantQueue]  # charge, tie-break, tenant


def _charge_key(tenant: TenantQueue) -> tuple[float, int]:
    return tenant.used, tenant.number
