"""Published rules for the order of programs and for the KV that is kept, for comparison in simulations.

Each applies its paper's rule to this scheduler and cache. None of them bounds how long a request waits, and
none distinguishes tenants.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field

from agentflow.engine.cache.nodes import PrefixMatch
from agentflow.engine.cache.radix_cache import RadixCache
from agentflow.engine.request import Request
from agentflow.engine.scheduling.kv_memory import KVMemory
from agentflow.engine.scheduling.liveness import Liveness, NewLiveness, ProgramKey, _End
from agentflow.engine.scheduling.policies.policy import Clock, FirstCome, PeekCache
from agentflow.engine.scheduling.scheduler import NewPolicy
from agentflow.engine.simulator.cost_model import CostModel

MAX_GAPS = 256
"""The most times of tools that Continuum remembers."""
_FAR_S = 1e9
"""After the end of any simulation."""


class LeastRecent(Liveness):
    """Keeps no states: the least recently used tokens are evicted first."""

    def refresh(self, state: Hashable, end: PrefixMatch, **_: object) -> None:
        """Ignored."""


class Clairvoyant(Liveness):
    """The simulation provides the time when each state continues, and the tokens that are needed last are
    evicted first (Belady, 1966)."""

    def _expected(self, end: _End, wait_s: float) -> _End:
        return end._replace(returns=self._clock() + wait_s)


class StepsToExecution(Liveness):
    """*KVFlow* (2507.07400): the tokens of the agent with the most steps until it runs are evicted first.
    Tokens that several agents share count for the agent that runs first. The simulation provides the
    steps."""

    def _expected(self, end: _End, wait_s: float) -> _End:
        return end._replace(returns=end.returns or 1.0)

    def expect(self, state: Hashable, steps: int | None, returns_s: float | None) -> None:
        """The state runs after ``steps`` other requests of its program."""
        end = self._ends.get(state)
        if end is not None and steps is not None:
            self._move(state, end._replace(returns=float(steps)))


class TimeToLive(Liveness):
    """*Continuum* (2511.02230): after a request the tokens of its program are pinned for a time. It is the
    time with the largest expected gain: the chance that the tool ends within it times the seconds to compute
    the tokens again and to queue, less the part of the pool that they take while pinned.
    """

    def __init__(self, cache: RadixCache, num_slots: int, clock: Clock, cost: CostModel) -> None:
        super().__init__(cache, num_slots, clock)
        self._cost, self._num_slots = cost, num_slots
        self._all_gaps: list[float] = []

    def arrived(self, state: Hashable) -> None:
        """Learns the time that the tool took."""
        end = self._ends.get(state)
        if end is not None:
            self._all_gaps = [*self._all_gaps[1 - MAX_GAPS :], self._clock() - end.ended]
        super().arrived(state)

    def _expected(self, end: _End, wait_s: float) -> _End:
        return end._replace(returns=0.0, due=end.ended + self._time_to_live(end.match.num_tokens))

    def _time_to_live(self, num_tokens: int) -> float:
        gaps = sorted(self._all_gaps)
        if not gaps:
            return math.inf
        saved_s = redo_s(self._cost, num_tokens) + self._request_s
        held = num_tokens / self._num_slots
        best, best_gain, passed_s = 0.0, 0.0, 0.0
        for number, gap in enumerate(gaps, 1):
            passed_s += gap
            pinned_s = passed_s + gap * (len(gaps) - number)
            gain = (number * saved_s - held * pinned_s) / len(gaps)
            if gain > best_gain:
                best, best_gain = gap, gain
        return best

    def _postpone(self) -> None:
        for state, end in [*self._ends.items()]:
            if end.is_kept and end.due <= self._clock() and state not in self._arrivals:
                self._cache.unkeep(end.match)
                self._ends[state] = end._replace(is_kept=False)


class WorkflowUnits(Liveness):
    """*SAGA* (2605.00528), eviction: a workflow is the unit. The least recently used workflow loses all its
    tokens before the next one loses any."""

    def _expected(self, end: _End, wait_s: float) -> _End:
        returns = _FAR_S - self._clock()
        if end.program is not None:
            program = self.programs.get(end.program[0], {}).get(end.program)
            for state in [] if program is None else [*program.states]:
                other = self._ends.get(state)
                if other is not None and state not in self._arrivals:
                    self._move(state, other._replace(returns=returns))
        return end._replace(returns=returns)


@dataclass
class _Known:
    """A program that a policy knows."""

    arrival: int
    num_tokens: int = 0  # its context
    num_running: int = 0
    is_active: bool = False
    waiting: dict[int, Request] = field(default_factory=dict)


class ProgramOrder(FirstCome):
    """First come, first served by the arrival of the program (*Continuum*). ``memory``: set after the
    scheduler is made."""

    memory: KVMemory

    def __init__(self, peek: PeekCache, token_budget: int, clock: Clock) -> None:
        super().__init__(peek, token_budget, clock)
        self._known: dict[ProgramKey, _Known] = {}

    def add(self, request: Request) -> None:
        super().add(request)
        known = self._known.setdefault(_key(request), _Known(request.arrival))
        known.waiting[request.id] = request
        known.num_tokens = max(known.num_tokens, request.num_tokens)

    def admit(self, request: Request) -> None:
        known = self._known[_key(request)]
        known.waiting.pop(request.id, None)
        known.num_running += 1
        super().admit(request)

    def finish(self, request: Request) -> None:
        known = self._known[_key(request)]
        known.num_running -= 1
        known.num_tokens = max(known.num_tokens, request.num_tokens)

    def _in_order(self) -> Iterator[Request]:
        for known in sorted(self._known.values(), key=lambda known: known.arrival):
            if self._may_run(known):
                yield from [*known.waiting.values()]

    def _may_run(self, known: _Known) -> bool:
        return True

    def _forget_ended(self) -> None:
        """Forgets programs without requests and open states."""
        open_programs = {key for programs in self.memory.liveness.programs.values() for key in programs}
        for key, known in [*self._known.items()]:
            if not known.waiting and not known.num_running and key not in open_programs:
                del self._known[key]

    def _num_active(self) -> int:
        return sum(known.num_tokens for known in self._known.values() if known.is_active)


class WholeWorkflows(ProgramOrder):
    """*SAGA*, admission: a workflow is admitted when its tokens fit next to the tokens of the admitted ones,
    and then runs to its end."""

    def start_step(self) -> None:
        self._forget_ended()
        used = self._num_active()
        for known in sorted(self._known.values(), key=lambda known: known.arrival):
            if not known.is_active:
                if used and used + known.num_tokens > self.memory.slots.total:
                    return
                known.is_active = True
                used += known.num_tokens

    def _may_run(self, known: _Known) -> bool:
        return known.is_active


class PausedPrograms(WholeWorkflows):
    """*ThunderAgent* (2602.13692): while the programs need more than the pool, the one with the shortest
    context is paused, and its tokens are evicted. Paused programs are resumed when they fit."""

    def start_step(self) -> None:
        self._forget_ended()
        idle = [(known.num_tokens, key) for key, known in self._known.items() if not known.num_running]
        active = sum(known.is_active for known in self._known.values())
        is_short = False
        for _, key in sorted(idle):
            if self._num_active() <= self.memory.slots.total or active < 2:
                break
            if self._known[key].is_active:
                self._known[key].is_active = False
                self.memory.liveness.pause(key)
                active, is_short = active - 1, True
        if is_short:
            return
        before = {key for key, known in self._known.items() if known.is_active}
        super().start_step()
        for key, known in self._known.items():
            if known.is_active and key not in before:
                self.memory.liveness.resume(key)


def _key(request: Request) -> ProgramKey:
    """The program of a request. A request without a program counts as one."""
    return request.tenant, request.origin.program or -1 - request.id


def redo_s(cost: CostModel, num_tokens: int) -> float:
    """The seconds to compute a prompt."""
    return cost.row_s * num_tokens + cost.pair_s * num_tokens**2 / 2


@dataclass(frozen=True)
class Rules:
    """The settings of a simulation. ``policy``: a name in ``PUBLISHED_ORDERS``, or the name of an engine's
    policy."""

    policy: str
    new_liveness: NewLiveness | None = None
    knows_returns: bool = False  # the simulation provides the times when states continue
    knows_steps: bool = False  # the simulation provides the number of steps that are left


PUBLISHED_ORDERS: Mapping[str, NewPolicy] = {
    "program-order": ProgramOrder,
    "whole-workflows": WholeWorkflows,
    "paused-programs": PausedPrograms,
}


def published_rules(cost: CostModel) -> Mapping[str, Rules]:
    """Returns the rules by name. ``cost``: of the simulated engine."""
    return {
        "lru-fcfs": Rules("fcfs", LeastRecent),
        "continuum": Rules(
            "program-order", lambda cache, num_slots, clock: TimeToLive(cache, num_slots, clock, cost)
        ),
        "kvflow": Rules("fcfs", StepsToExecution, knows_steps=True),
        "thunderagent": Rules("paused-programs"),
        "saga": Rules("whole-workflows", WorkflowUnits),
        "clairvoyant": Rules("fcfs", Clairvoyant, knows_returns=True),
    }
