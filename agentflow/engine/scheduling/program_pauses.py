"""Pauses whole programs while the tokens of open states exceed the KV pool.

Agents leave their KV in the pool while their tools run. If the programs of a tenant need more than the pool
together, each one that continues evicts the tokens of another, which then computes them again: the engine
*thrashes*, and every program waits for the recomputation of all. It is faster to let some of them finish
first (ThunderAgent, 2026; the working sets of Denning, 1968).

**When.** A state is *costly* if computing its tokens again takes at least 1 / COSTLY_GAPS of the mean time
between its requests. Tokens of other states, such as chats with people who read, are evicted and computed
again. A tenant thrashes if more than THRASHING of the engine's time goes to computing tokens of its costly
states again.

**Who.** If it thrashes, and eviction would take tokens of a costly state, the cheapest of the tenant's
programs with the lowest priority is paused: the one with the fewest tokens, which are computed again the
fastest. It has a costly state and no running request, and was not resumed without a request since. The last
program of a tenant is never paused. The tokens of a paused program are evicted first, as room is needed, and
its requests wait aside.

**Until when.** The programs of a tenant are resumed by priority, and then in the order of their first
requests, as soon as the first of them has room, and GROWTH_PART of the pool is left for the others to grow.
It does not wait for programs that do not come back: if no request of the other programs waits or runs, and
all of their states are late, it is resumed. A state is late after LATE_AFTER times the mean time between its
requests (``liveness``). A program is resumed in any case after PAUSED_POOLS times the pool was charged to
its tenant, or after PAUSED_S. Its requests are then first in the tenant's queue, as preempted ones are.

**Bound.** Let r be a request whose program is paused, and c the token budget. While r waits aside, at most
PAUSED_POOLS * pool + c tokens are charged to its tenant, in at most PAUSED_S and a step. After that r goes
before all requests of its tenant that have not run, except older requests that were resumed before. Its
program is not paused again before one of its requests has ended, so r waits aside at most once if it is the
only request of its program. A pause takes nothing from other tenants: the tenant's own states cause it, it
changes no charge, and the room that it frees goes to the tenants that eviction favours, by their weights.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from agentflow.engine.cache.nodes import Node
from agentflow.engine.request import Request
from agentflow.engine.scheduling.kv_memory import KVMemory
from agentflow.engine.scheduling.liveness import LiveProgram, ProgramKey, program_key
from agentflow.engine.scheduling.policies.policy import Policy
from agentflow.engine.scheduling.step_limits import StepCost

COSTLY_GAPS = 8
THRASHING = 0.01
WINDOW_S = 10.0
"""Recomputation is averaged over about this time."""
GROWTH_PART = 0.1
MAX_TENANTS = 4096
"""At most this many tenants are remembered, the ones with the latest recomputation."""
PAUSED_POOLS = 2
PAUSED_S = 240.0


@dataclass(slots=True, order=True)
class _Paused:
    """A paused program."""

    rank: tuple[int, int]  # the order in which it is resumed
    key: ProgramKey = field(compare=False)
    need: int = field(compare=False)  # tokens
    until: int = field(compare=False)  # of the tenant's ``num_charged``
    until_s: float = field(compare=False)


@dataclass(slots=True)
class _TenantPauses:
    """A tenant with paused programs."""

    num_charged: int = 0  # tokens since the tenant has any
    by_pause: dict[ProgramKey, _Paused] = field(default_factory=dict)
    by_rank: list[_Paused] = field(default_factory=list)
    late_at: float = -math.inf  # the other programs are late no sooner than this
    num_left: int = -1  # of ``ProgramPauses`` when this was found


@dataclass(slots=True)
class _Candidates:
    """The programs of a tenant that a step may pause."""

    num_active: int  # programs that are not paused, also others
    cheapest: list[tuple[int, int, int, ProgramKey]]  # a heap of priority, tokens, -number and key


@dataclass(slots=True)
class _Lost:
    """Decayed seconds of recomputation, at a time."""

    lost_s: float = 0.0
    at: float = -math.inf


class ProgramPauses:
    """The paused programs of one model.

    ``is_used``: whether a program is paused, or could not be paused in this step. Otherwise ``resume`` and
    ``charge`` have nothing to do. ``resumed``: resumed programs of which no request has ended since.

    Args:
        memory: Has the open states, and stops keeping the tokens of paused programs.
        policy: Sets the requests of paused programs aside.
        cost: Estimates how long a recomputation takes.
        running: The running requests, by id.
        clock: Seconds.
    """

    def __init__(
        self,
        memory: KVMemory,
        policy: Policy,
        cost: StepCost,
        running: Mapping[int, Request],
        clock: Callable[[], float],
    ) -> None:
        self.is_used = False
        self._memory = memory
        self._policy = policy
        self._cost = cost
        self._running = running
        self._clock = clock
        self._tenants: dict[str, _TenantPauses] = {}
        self.resumed: set[ProgramKey] = set()
        self._candidates: dict[str, _Candidates] = {}  # by tenant, in this step
        self._num_left = 0  # requests that stopped or left the queue, and states that were closed
        self._lost: OrderedDict[str, _Lost] = OrderedDict()  # by tenant

    def recomputes(self, request: Request, num_tokens: int, context: int) -> None:
        """A request of a program starts to run for the first time, and computes tokens that its state had,
        after ``context`` cached ones."""
        if program_key(request) in self.resumed:
            return
        lost_s = self._cost.chunk_s(num_tokens, context, is_first=True)
        if self._is_costly(request.origin.state, lost_s):
            lost = self._decayed(request.tenant)
            lost.lost_s += lost_s
            self._lost[request.tenant] = lost
            self._lost.move_to_end(request.tenant)
            if len(self._lost) > MAX_TENANTS:
                self._lost.popitem(last=False)

    def stopped(self, request: Request, *, has_ended: bool) -> None:
        """A running request stopped: it ended or was preempted. Has nothing to do if no program is paused or
        ``resumed``."""
        key = program_key(request)
        if key is None:
            return
        if has_ended:
            self.resumed.discard(key)
        self.left()

    def left(self) -> None:
        """A request stopped or left the queue, or a state was closed: other programs may be late sooner."""
        self._num_left += 1
        self._candidates.clear()

    def charge(self, tenant: str, num_tokens: int) -> None:
        """Tokens are charged to a tenant."""
        pauses = self._tenants.get(tenant)
        if pauses is not None:
            pauses.num_charged += num_tokens

    def make_room(self, leaf: Node) -> bool:
        """Pauses a program if that is better than to evict the leaf (``MakeRoom`` of the cache)."""
        redo_s = self._redo_s(leaf.start + len(leaf.slots))
        tenant = str(leaf.account.owner)
        if leaf.returns - self._clock() > COSTLY_GAPS * redo_s:
            return False
        if self._decayed(tenant).lost_s <= THRASHING * WINDOW_S:
            return False
        candidates = self._candidates.get(tenant)
        if candidates is None:
            candidates = self._candidates[tenant] = self._find_candidates(tenant)
        self.is_used = True
        if candidates.num_active < 2 or not candidates.cheapest:
            return False
        priority, num_tokens, number, key = heapq.heappop(candidates.cheapest)
        candidates.num_active -= 1
        self._pause(key, (-priority, -number), num_tokens)  # the numbers of candidates are negative
        return True

    def _find_candidates(self, tenant: str) -> _Candidates:
        busy = {program_key(request) for request in self._running.values()}
        programs = self._memory.liveness.programs.get(tenant, {})
        active = {key: program for key, program in programs.items() if not program.is_paused}
        cheapest = [
            (program.priority, self._size(program), -program.number, key)
            for key, program in active.items()
            if key not in busy and self._may_pause(key, program)
        ]
        heapq.heapify(cheapest)
        return _Candidates(len(active), cheapest)

    def resume(self) -> None:
        """Begins a step: resumes programs that have room or that were paused long enough."""
        self._candidates.clear()
        running = self._find_running()
        for tenant, pauses in [*self._tenants.items()]:
            self._resume_some(tenant, pauses, is_running=tenant in running)
            if not pauses.by_pause:
                del self._tenants[tenant]
        if len(self.resumed) > self._memory.slots.total:
            self.resumed.clear()
        self.is_used = bool(self._tenants)

    def _resume_some(self, tenant: str, pauses: _TenantPauses, *, is_running: bool) -> None:
        """``is_running``: whether a request of a program of the tenant runs."""
        now, gap_s = self._clock(), math.nan
        while pauses.by_pause:
            longest, first = next(iter(pauses.by_pause.values())), pauses.by_rank[0]
            need = first.need + int(GROWTH_PART * self._memory.slots.total)
            if pauses.num_charged >= longest.until or now >= longest.until_s:
                first = longest
            elif self._memory.room_for(tenant) < need:
                if is_running or (now < pauses.late_at and pauses.num_left == self._num_left):
                    return
                if math.isnan(gap_s):
                    gap_s = self._gap_s(tenant)
                    pauses.late_at, pauses.num_left = self._late_at(tenant, gap_s), self._num_left
                if now < pauses.late_at:
                    return
            # After a fault here the program is still paused, and is resumed by a later step.
            self._memory.liveness.resume(first.key)
            self._policy.resume(*first.key)
            del pauses.by_pause[first.key]
            del pauses.by_rank[bisect_left(pauses.by_rank, first)]
            self.resumed.add(first.key)
            program = self._memory.liveness.programs.get(tenant, {}).get(first.key)
            if program is not None and not math.isnan(gap_s):
                pauses.late_at = max(pauses.late_at, self._last_late(program, gap_s))

    @property
    def paused(self) -> Sequence[ProgramKey]:
        """The paused programs."""
        return [key for pauses in self._tenants.values() for key in pauses.by_pause]

    @property
    def resumes_in_s(self) -> float:
        """Seconds until the first program is resumed in any case; infinite if none is paused."""
        running = self._find_running()
        ends = [next(iter(pauses.by_pause.values())).until_s for pauses in self._tenants.values()]
        late = [
            self._late_at(tenant, self._gap_s(tenant)) for tenant in self._tenants if tenant not in running
        ]
        return max(0.0, min(ends + late) - self._clock()) if ends else math.inf

    def _find_running(self) -> set[str]:
        """The tenants with running requests of programs."""
        return {one.tenant for one in self._running.values() if one.origin.program}

    def _gap_s(self, tenant: str) -> float:
        """The longest mean time between the requests of a state of the tenant, for states that have none
        yet."""
        liveness = self._memory.liveness
        programs = liveness.programs.get(tenant, {}).values()
        gaps = [liveness.gap(state) for program in programs for state in program.states]
        return max([gap for gap in gaps if gap is not None], default=math.inf)

    def _late_at(self, tenant: str, gap_s: float) -> float:
        """The time from which all states of the tenant's other programs are late; infinite while one of them
        has a request that waits."""
        programs = self._memory.liveness.programs.get(tenant, {}).values()
        others = [self._last_late(program, gap_s) for program in programs if not program.is_paused]
        return max(others, default=-math.inf)

    def _last_late(self, program: LiveProgram, gap_s: float) -> float:
        """The time from which all states of the program are late."""
        late_at = self._memory.liveness.late_at
        return max([late_at(state, gap_s) for state in program.states], default=-math.inf)

    def _pause(self, key: ProgramKey, rank: tuple[int, int], need: int) -> None:
        pauses = self._tenants.setdefault(key[0], _TenantPauses())
        until = pauses.num_charged + int(PAUSED_POOLS * self._memory.slots.total)
        paused = _Paused(rank, key, need, until, self._clock() + PAUSED_S)
        pauses.by_pause[key] = paused
        pauses.num_left = -1  # one program fewer that may be late
        insort(pauses.by_rank, paused)
        self._memory.liveness.pause(key)
        self._policy.pause(*key)

    def _may_pause(self, key: ProgramKey, program: LiveProgram) -> bool:
        if key in self.resumed:
            return False
        num_tokens = self._memory.liveness.num_tokens
        return any(self._is_costly(state, self._redo_s(num_tokens(state))) for state in program.states)

    def _is_costly(self, state: Hashable, redo_s: float) -> bool:
        gap_s = self._memory.liveness.gap(state)
        return gap_s is not None and gap_s <= COSTLY_GAPS * redo_s

    def _redo_s(self, num_tokens: int) -> float:
        return self._cost.chunk_s(num_tokens, 0, is_first=True)

    def _size(self, program: LiveProgram) -> int:
        return self._memory.liveness.num_tokens_together(program.states)

    def _decayed(self, tenant: str) -> _Lost:
        """The tenant's seconds of recomputation, decayed until now."""
        lost, now = self._lost.get(tenant, _Lost()), self._clock()
        lost.lost_s *= math.exp((lost.at - now) / WINDOW_S)
        lost.at = now
        return lost
