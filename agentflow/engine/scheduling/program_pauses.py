"""Pauses whole programs while the tokens of open states exceed the KV pool.

Agents leave their KV in the pool while their tools run. If the programs of a tenant need more than the pool
together, each one that continues evicts the tokens of another, which then computes them again: the engine
*thrashes*, and every program waits for the recomputation of all. It is faster to let some of them finish
first (ThunderAgent, 2026; the working sets of Denning, 1968).

**When.** A state is *dear* if computing its tokens again takes at least 1 / DEAR_GAPS of the mean time
between its requests. Tokens of other states, such as those of people who read, are evicted and computed
again. The engine thrashes if it spends more than THRASHING of its time on computing tokens of dear states
again.

**Who.** If it thrashes, and eviction would take tokens of a dear state, the cheapest program of the same
tenant is paused: the one with the fewest tokens, which are computed again the fastest. It has a dear state
and no running request, and was not resumed without a request since. The last program of a tenant is never
paused. The tokens of a paused program are evicted first, as room is needed, and its requests wait aside.

**Until when.** The programs of a tenant are resumed in the order of their first requests, as soon as the
first of them has room. A program is resumed in any case after PAUSED_POOLS times the pool was charged to its
tenant, or after PAUSED_S. Its requests are then first in the tenant's queue, as preempted ones are.

**Bound.** Let r be a request whose program is paused, and c the token budget. While r waits aside, at most
PAUSED_POOLS * pool + c tokens are charged to its tenant, in at most PAUSED_S and a step. After that r goes
before all requests of its tenant that have not run, except those that were resumed before and are older. Its
program is not paused again before one of its requests has ended, so r waits aside at most once if it is the
only request of its program. A pause takes nothing from other tenants: the tenant's own states cause it, it
changes no charge, and the room that it gives goes to those that eviction favours, by their weights.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from agentflow.engine.cache.radix_cache import Node
from agentflow.engine.request import Request
from agentflow.engine.scheduling.kv_memory import KVMemory, LiveProgram, ProgramKey, program_key
from agentflow.engine.scheduling.policies import Policy
from agentflow.engine.scheduling.step_limits import StepCost

DEAR_GAPS = 8
THRASHING = 0.1
WINDOW_S = 10.0
"""Recomputation is averaged over about this time."""
PAUSED_POOLS = 1
PAUSED_S = 120.0


@dataclass(slots=True, order=True)
class _Paused:
    """A paused program."""

    number: int  # the order in which it is resumed
    key: ProgramKey = field(compare=False)
    need: int = field(compare=False)  # tokens
    until: int = field(compare=False)  # of the tenant's ``num_charged``
    until_s: float = field(compare=False)


@dataclass(slots=True)
class _TenantPauses:
    """A tenant with paused programs."""

    num_charged: int = 0  # tokens since the tenant has any
    by_pause: dict[ProgramKey, _Paused] = field(default_factory=dict)
    by_number: list[_Paused] = field(default_factory=list)


class ProgramPauses:
    """The paused programs of one model. ``policy``: sets the requests of paused programs aside. ``clock``:
    seconds."""

    def __init__(self, memory: KVMemory, policy: Policy, cost: StepCost, clock: Callable[[], float]) -> None:
        self._memory = memory
        self._policy = policy
        self._cost = cost
        self._clock = clock
        self._tenants: dict[str, _TenantPauses] = {}
        self._resumed: set[ProgramKey] = set()  # without a request that ended since
        self._started: dict[int, ProgramKey] = {}  # running requests, by id, with their programs at the start
        self._num_running: dict[ProgramKey, int] = {}
        self._without: set[str] = set()  # tenants in which nothing more can be paused in this step
        self._lost_s = 0.0  # decayed seconds of recomputation
        self._decayed_at = -math.inf

    def started(self, request: Request, match: int) -> None:
        """A request starts to run, with ``match`` cached tokens."""
        key, state = program_key(request), request.origin.state
        if key is None:
            return
        self._started[request.id] = key
        self._num_running[key] = self._num_running.get(key, 0) + 1
        if request.was_admitted or key in self._resumed:
            return
        num_lost = self._memory.liveness.num_tokens(state) - match
        if num_lost > 0:
            lost_s = self._cost.chunk_s(num_lost, match, is_first=True)
            if self._is_dear(state, lost_s):
                self._decay()
                self._lost_s += lost_s

    def stopped(self, request: Request, *, has_ended: bool) -> None:
        """A running request stopped: it ended or was preempted."""
        key = self._started.pop(request.id, None)
        if key is None:
            return
        self._num_running[key] -= 1
        if not self._num_running[key]:
            del self._num_running[key]
        if has_ended:
            self._resumed.discard(key)

    def charge(self, tenant: str, num_tokens: int) -> None:
        """Tokens are charged to a tenant."""
        pauses = self._tenants.get(tenant)
        if pauses is not None:
            pauses.num_charged += num_tokens

    def make_room(self, leaf: Node) -> bool:
        """As ``MakeRoom`` of the cache: pauses a program if that is better than to evict the leaf."""
        now = self._decay()
        redo_s = self._redo_s(leaf.start + len(leaf.slots))
        if self._lost_s <= THRASHING * WINDOW_S or leaf.returns - now > DEAR_GAPS * redo_s:
            return False
        tenant = str(leaf.account.owner)
        if tenant in self._without:
            return False
        active = {
            key: program
            for key, program in self._memory.liveness.programs.get(tenant, {}).items()
            if not program.is_paused
        }
        sizes = {key: self._size(program) for key, program in active.items() if self._may_pause(key, program)}
        if len(active) < 2 or not sizes:
            self._without.add(tenant)
            return False
        self._pause(min(sizes, key=lambda key: (sizes[key], -active[key].number)), active, sizes)
        return True

    def resume(self) -> None:
        """Begins a step: resumes the programs that have room, and those that were paused long enough."""
        self._without.clear()
        for tenant, pauses in [*self._tenants.items()]:
            while pauses.by_pause and (paused := self._next(tenant, pauses)) is not None:
                del pauses.by_pause[paused.key]
                pauses.by_number.remove(paused)
                self._resumed.add(paused.key)
                self._memory.liveness.resume(paused.key)
                self._policy.resume(*paused.key)
            if not pauses.by_pause:
                del self._tenants[tenant]
        if len(self._resumed) > self._memory.slots.total:
            self._resumed.clear()

    @property
    def paused(self) -> Sequence[ProgramKey]:
        """The paused programs."""
        return [key for pauses in self._tenants.values() for key in pauses.by_pause]

    @property
    def resumes_in_s(self) -> float:
        """Seconds until the first program is resumed in any case; infinite if none is paused."""
        ends = [next(iter(pauses.by_pause.values())).until_s for pauses in self._tenants.values()]
        return max(0.0, min(ends) - self._clock()) if ends else math.inf

    def _next(self, tenant: str, pauses: _TenantPauses) -> _Paused | None:
        longest, first = next(iter(pauses.by_pause.values())), pauses.by_number[0]
        if pauses.num_charged >= longest.until or self._clock() >= longest.until_s:
            return longest
        programs = self._memory.liveness.programs.get(tenant, {})
        none_is_active = all(program.is_paused for program in programs.values())
        return first if none_is_active or self._memory.room_for(tenant) >= first.need else None

    def _pause(
        self, key: ProgramKey, active: dict[ProgramKey, LiveProgram], sizes: dict[ProgramKey, int]
    ) -> None:
        pauses = self._tenants.setdefault(key[0], _TenantPauses())
        until = pauses.num_charged + int(PAUSED_POOLS * self._memory.slots.total)
        paused = _Paused(active[key].number, key, sizes[key], until, self._clock() + PAUSED_S)
        pauses.by_pause[key] = paused
        insort(pauses.by_number, paused)
        self._memory.liveness.pause(key)
        self._policy.pause(*key)

    def _may_pause(self, key: ProgramKey, program: LiveProgram) -> bool:
        if key in self._num_running or key in self._resumed:
            return False
        num_tokens = self._memory.liveness.num_tokens
        return any(self._is_dear(state, self._redo_s(num_tokens(state))) for state in program.states)

    def _is_dear(self, state: Hashable, redo_s: float) -> bool:
        gap_s = self._memory.liveness.gap(state)
        return gap_s is not None and gap_s <= DEAR_GAPS * redo_s

    def _redo_s(self, num_tokens: int) -> float:
        return self._cost.chunk_s(num_tokens, 0, is_first=True)

    def _size(self, program: LiveProgram) -> int:
        return sum(map(self._memory.liveness.num_tokens, program.states))

    def _decay(self) -> float:
        now = self._clock()
        self._lost_s *= math.exp((self._decayed_at - now) / WINDOW_S)
        self._decayed_at = now
        return now
