"""Replays a workload against the real scheduler and cache, in simulated time.

The cost model determines the time of a forward pass, and the workload the tokens that each request generates.
Everything else (admission, sharing, eviction, preemption) is the code of the real engine.
"""

from __future__ import annotations

import heapq
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from agentflow.engine.batch import BatchOutput
from agentflow.engine.generator.context import group_of_hint
from agentflow.engine.request import AWAITED_GROUPS, Origin, Request, Row, Submit
from agentflow.engine.scheduling.defaults import SIMULATED_CONTEXT
from agentflow.engine.scheduling.in_flight import Counters
from agentflow.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from agentflow.engine.simulator.cost_model import CostModel, default_cost
from agentflow.engine.simulator.depth_first import SIMULATED_POLICIES
from agentflow.engine.simulator.program_graphs import HintedState, ProgramGraphs
from agentflow.engine.simulator.published import PUBLISHED_ORDERS, ProgramOrder, Rules
from agentflow.engine.simulator.workload import Arrival, Workload, awaited_groups
from agentflow.errors import BadArgument, PromptTooLong
from agentflow.protocol.sampling import SamplingParams

_PARAMS = SamplingParams()
ReportCounts = Callable[[int, int], None]
"""Called with the number of finished requests and their total."""


@dataclass(slots=True)
class Served:
    """The result of one request. Times are in simulated seconds since the start."""

    arrival: Arrival
    arrived_s: float
    first_s: float = 0.0  # of the first token; if it generates none, of its end
    ended_s: float = 0.0
    num_cached: int = 0  # prompt tokens
    is_refused: bool = False  # it was rejected and never ran

    @property
    def ttft_s(self) -> float:
        """The time from arrival to the first token."""
        return self.first_s - self.arrived_s

    @property
    def tpot_s(self) -> float:
        """The mean time of the tokens after the first."""
        return (self.ended_s - self.first_s) / max(1, len(self.arrival.output) - 1)


@dataclass(slots=True)
class Simulated:
    """A finished simulation."""

    workload: str  # its name
    config: SchedulerConfig
    served: Sequence[Served]
    counters: Counters
    elapsed_s: float  # simulated time
    real_s: float  # the time that the simulation took
    scheduling_s: list[float] = field(default_factory=list)  # the real time of each step of the scheduler

    @property
    def hit_rate(self) -> float:
        """Cached prompt tokens / prompt tokens."""
        return self.counters.cached_tokens / max(1, self.counters.prompt_tokens)


class Origins:
    """The origins of requests as schedulers get them, with numbers for names. ``knows_programs``: requests
    that belong to a program get their hints from its graph; others get their hints from the workload."""

    def __init__(self, arrivals: Sequence[Arrival], *, knows_programs: bool) -> None:
        self._arrivals = arrivals
        self._knows_programs = knows_programs
        self._numbers: dict[str, int] = {}
        self._awaited_groups = awaited_groups(arrivals)
        self.graphs = ProgramGraphs(arrivals, self._number)
        # Requests that have not ended, by the number of their state.
        self._num_left = Counter([self._state(index) for index in range(len(arrivals))])

    def arrived(self, index: int, now_s: float) -> Sequence[HintedState]:
        """A request arrives. Returns the states that have another hint now."""
        return self.graphs.arrived(index, now_s) if self._has_graph(index) else ()

    def ended(self, index: int, now_s: float) -> tuple[Sequence[HintedState], int]:
        """The request has ended. Returns the states that have another hint now, and the number of its state
        if that is closed, or 0."""
        state = self._state(index)
        hints = self.graphs.ended(index, now_s) if self._has_graph(index) else ()
        self._num_left[state] -= 1
        is_closed = not self._num_left[state]
        if is_closed and self._has_graph(index):
            self.graphs.close(index)
        return hints, state if is_closed else 0

    def origin(self, index: int) -> Origin:
        """Returns the source of a request that has arrived."""
        arrival, state = self._arrivals[index], self._state(index)
        origin = Origin(
            tenant=arrival.tenant,
            cache_salt=arrival.salt,
            state=state,
            label=arrival.label,
            is_extra=arrival.is_extra,
        )
        if self._has_graph(index):
            hint = self.graphs.hint(index)
            return origin.at(hint.program, group_of_hint(hint), hint.objective)
        name = arrival.task_group
        group = self._number(name) + (AWAITED_GROUPS if name in self._awaited_groups else 0)
        return origin.at(0, group, arrival.objective)

    def _has_graph(self, index: int) -> bool:
        return self._knows_programs and bool(self._arrivals[index].program)

    def _state(self, index: int) -> int:
        return (
            self.graphs.state(index) if self._has_graph(index) else self._number(self._arrivals[index].state)
        )

    def _number(self, name: str) -> int:
        """Returns the number that stands for a name; 0 for none."""
        return self._numbers.setdefault(name, len(self._numbers) + 1) if name else 0


def tell_hints(scheduler: Scheduler, hints: Sequence[HintedState]) -> None:
    """Passes the hints of states to a scheduler, which ignores unknown states."""
    for state, hint in hints:
        group = group_of_hint(hint)
        scheduler.update_hint(state, hint.program, group, hint.objective, hint.steps, hint.returns_s)


class _Run:
    """One replay."""

    def __init__(
        self,
        workload: Workload,
        scheduler: Scheduler,
        cost: CostModel,
        *,
        knows_programs: bool,
        knows_returns: bool,
        knows_steps: bool,
        tells_hints: bool,
    ) -> None:
        self.workload = workload
        self._tells_hints = tells_hints
        self._knows_returns = knows_returns
        self._knows_steps = knows_steps
        self._ended: set[int] = set()
        self._of_program: dict[str, list[int]] = {}
        self._origins = Origins(workload.arrivals, knows_programs=knows_programs)
        self.scheduler = scheduler
        self.cost = cost
        self.now_s = 0.0
        self.served: list[Served] = []
        self.followers: dict[int, list[int]] = {}
        self._num_missing: dict[int, int] = {}  # by index: how many requests must end before it arrives
        self.due: list[tuple[float, int]] = []
        self.served_of: dict[int, Served] = {}
        for index, arrival in enumerate(workload.arrivals):
            self._of_program.setdefault(arrival.program, []).append(index)
            if arrival.after is None:
                self.due.append((arrival.at_s, index))
                continue
            before = {arrival.after, *arrival.joins}
            self._num_missing[index] = len(before)
            for earlier in before:
                self.followers.setdefault(earlier, []).append(index)
        heapq.heapify(self.due)

    def step(self) -> float | None:
        """Simulates one forward pass. Returns the real time of the scheduler, or None at the end."""
        start = time.perf_counter()
        while self.due and self.due[0][0] <= self.now_s:
            self._arrive(*heapq.heappop(self.due))
        batch = self.scheduler.schedule()
        took_s = time.perf_counter() - start
        if batch is None:
            wakes_s = self.now_s + self.scheduler.resumes_in_s if len(self.scheduler.waiting) else math.inf
            if self.due:
                wakes_s = min(wakes_s, self.due[0][0])
            if wakes_s == math.inf:
                return None
            self.now_s = wakes_s
            return took_s
        step_s = self.cost.step_s(batch)
        self.now_s += step_s
        tokens = np.zeros(len(batch.sampled.rows), dtype=np.int64)
        start = time.perf_counter()
        for row in self.scheduler.complete(BatchOutput(tokens, None), step_s):
            self._advance(row)
        return took_s + time.perf_counter() - start

    def _tell_hints(self, hints: Sequence[HintedState]) -> None:
        if self._tells_hints:
            tell_hints(self.scheduler, hints)

    def _tell_return(self, index: int, returns_s: float) -> None:
        origin = self._origins.origin(index)
        hint = origin.state, origin.program, origin.task_group, origin.objective
        self.scheduler.update_hint(*hint, None, returns_s)

    def _tell_steps(self, program: str) -> None:
        """Passes to the scheduler, for each state of a program, the length of the longest chain of unfinished
        requests up to its next one."""
        steps: dict[int, int] = {}
        told: set[str] = set()
        for index in self._of_program[program]:
            if index in self._ended:
                continue
            arrival = self.workload.arrivals[index]
            before = [] if arrival.after is None else [arrival.after, *arrival.joins]
            steps[index] = 1 + max([steps[one] for one in before if one in steps], default=0)
            if arrival.state and arrival.state not in told:
                told.add(arrival.state)
                origin = self._origins.origin(index)
                hint = origin.state, origin.program, origin.task_group, origin.objective
                self.scheduler.update_hint(*hint, steps[index])

    def _arrive(self, at_s: float, index: int) -> None:
        arrival = self.workload.arrivals[index]
        served = Served(arrival, at_s)
        self.served.append(served)
        self._tell_hints(self._origins.arrived(index, self.now_s))
        submit = Submit(index, [], _PARAMS, origin=self._origins.origin(index))
        limit = min(arrival.max_new_tokens, self.scheduler.max_total_tokens)
        request = Request.of(submit, arrival.prompt, limit)
        try:
            self.scheduler.add(request)
        except PromptTooLong:
            served.is_refused = True
            self._end(index, served)
            return
        self.served_of[index] = served

    def _advance(self, row: Row) -> None:
        request, has_token = row.request, bool(row.token_ids)
        served = self.served_of[request.id]
        output = served.arrival.output
        if has_token:
            if request.num_generated <= len(output):  # an output may be empty
                request.tokens[request.num_tokens - 1] = output[request.num_generated - 1]
            if request.num_generated == 1:
                served.first_s = self.now_s
        if request.num_generated < min(len(output), request.max_new_tokens):
            return
        if has_token or row.is_last:
            served.num_cached = request.num_cached
            served.first_s = served.first_s or self.now_s
            self.scheduler.finish(request)
            self._end(request.id, self.served_of.pop(request.id))

    def _end(self, index: int, served: Served) -> None:
        served.ended_s = self.now_s
        state = served.arrival.state
        hints, closed = self._origins.ended(index, self.now_s)
        self._tell_hints(hints)
        if closed:
            self.scheduler.close_state(closed)
        self._ended.add(index)
        if self._knows_steps and served.arrival.program:
            self._tell_steps(served.arrival.program)
        for follower in self.followers.pop(index, ()):
            self._num_missing[follower] -= 1
            if self._num_missing[follower]:
                continue
            delay_s = self.workload.arrivals[follower].at_s
            if self._knows_returns and state == self.workload.arrivals[follower].state:
                self._tell_return(index, delay_s)
            heapq.heappush(self.due, (self.now_s + delay_s, follower))


def simulate(
    workload: Workload,
    config: SchedulerConfig,
    *,
    cost: CostModel | None = None,
    kv_tokens: int | None = None,
    max_context: int = SIMULATED_CONTEXT,
    on_progress: ReportCounts | None = None,
    knows_programs: bool = True,
    knows_returns: bool = False,
    rules: Rules | None = None,
) -> Simulated:
    """Replays the workload to its end.

    Args:
        workload: the requests.
        config: the scheduler's options.
        cost: the time of forward passes; None: ``default_cost``.
        kv_tokens: the size of the KV pool, in tokens; None: the size in the workload.
        max_context: the longest sequence, in tokens.
        on_progress: called with the number of finished requests and their total.
        knows_programs: the scheduler learns which program each request belongs to.
        knows_returns: the scheduler learns when each state continues, as if it saw the future.
        rules: the rules of a published scheduler; their policy replaces the policy of ``config``.

    Raises:
        BadArgument: the policy is unknown, or the pool and the batch do not fit into memory.
    """
    if rules is not None:
        config = replace(config, policy=rules.policy)
    num_slots = kv_tokens or workload.kv_tokens
    try:
        scheduler = Scheduler(
            num_slots=num_slots,
            max_context=max_context,
            config=config,
            policies={**SIMULATED_POLICIES, **PUBLISHED_ORDERS},
            clock=lambda: run.now_s,
            new_liveness=None if rules is None else rules.new_liveness,
        )
    except (MemoryError, OverflowError, ValueError) as error:
        if isinstance(error, BadArgument):
            raise
        raise BadArgument(
            f"the tables of {config.max_running:,} running requests and {num_slots:,} KV tokens do not fit "
            "into memory",
            param="kv_tokens",
        ) from error
    if isinstance(scheduler.waiting, ProgramOrder):
        scheduler.waiting.memory = scheduler.memory
    run = _Run(
        workload,
        scheduler,
        cost or default_cost(),
        knows_programs=knows_programs,
        knows_returns=knows_returns or (rules is not None and rules.knows_returns),
        knows_steps=rules is not None and rules.knows_steps,
        tells_hints=rules is None,
    )
    steps: list[float] = []
    start = time.perf_counter()
    while (took_s := run.step()) is not None:
        steps.append(took_s)
        if on_progress is not None and len(steps) % 100 == 0:
            on_progress(len(run.served) - len(run.served_of), len(workload.arrivals))
    scheduler.check_idle()
    return Simulated(
        workload.name,
        config,
        run.served,
        scheduler.counters,
        run.now_s,
        time.perf_counter() - start,
        steps,
    )
