"""Several simulated engines, among which requests are placed by their objective, or by the least work."""

from __future__ import annotations

import heapq
import itertools
import time
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from agentflow.engine.batch import Batch, BatchOutput
from agentflow.engine.request import Request
from agentflow.engine.scheduling.in_flight import Counters
from agentflow.engine.scheduling.row import Row
from agentflow.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from agentflow.engine.simulator.cost_model import CostModel
from agentflow.engine.simulator.placement import EngineLoad, Placement
from agentflow.engine.simulator.simulation import Served, Simulated
from agentflow.engine.simulator.workload import Workload, awaited_groups
from agentflow.engine.submit import AWAITED_GROUPS, Origin, Submit
from agentflow.protocol.sampling import SamplingParams

# The events of one moment, in their order.
_END, _ARRIVAL, _BEGIN = range(3)


@dataclass(slots=True)
class _Engine:
    """One engine, and the batch that it runs."""

    scheduler: Scheduler
    load: EngineLoad
    batch: Batch | None = None
    took_s: float = 0.0
    is_busy: bool = False  # a batch ends or begins later


@dataclass(slots=True)
class _Cluster:
    """The engines, and the events to come."""

    workload: Workload
    engines: list[_Engine]
    cost: CostModel
    knows_programs: bool
    placement: Placement
    awaited_groups: frozenset[str]
    now_s: float = 0.0
    served: list[Served] = field(default_factory=list)
    # Time, kind, tie-break, and the index of the engine or the request.
    _events: list[tuple[float, int, int, int]] = field(default_factory=list)
    _ties: itertools.count[int] = field(default_factory=itertools.count)
    _numbers: dict[str, int] = field(default_factory=dict)
    _followers: dict[int, list[int]] = field(default_factory=dict)
    _num_missing: Counter[int] = field(default_factory=Counter)
    _served_of: dict[int, Served] = field(default_factory=dict)

    def run(self) -> None:
        """Runs the workload to its end."""
        for index, arrival in enumerate(self.workload.arrivals):
            if arrival.after is None:
                self._push(arrival.at_s, _ARRIVAL, index)
            else:
                before = {arrival.after, *arrival.joins}
                self._num_missing[index] = len(before)
                for earlier in before:
                    self._followers.setdefault(earlier, []).append(index)
        while self._events:
            self.now_s, kind, _, index = heapq.heappop(self._events)
            if kind == _ARRIVAL:
                self._arrive(index)
            elif kind == _BEGIN:
                self._begin(index)
            else:
                self._end(index)

    def _push(self, at_s: float, kind: int, index: int) -> None:
        heapq.heappush(self._events, (at_s, kind, next(self._ties), index))

    def _number(self, name: str) -> int:
        return self._numbers.setdefault(name, len(self._numbers) + 1) if name else 0

    def _arrive(self, index: int) -> None:
        arrival = self.workload.arrivals[index]
        served = self._served_of[index] = Served(arrival, self.now_s)
        self.served.append(served)
        number = self.placement.choose(arrival.objective, len(arrival.tokens), self.now_s)
        engine = self.engines[number]
        origin = Origin(
            objective=arrival.objective,
            task_group=self._number(arrival.task_group)
            + (AWAITED_GROUPS if arrival.task_group in self.awaited_groups else 0),
            program=self._number(f"program {arrival.program}")
            if self.knows_programs and arrival.program
            else 0,
        )
        submit = Submit(index, [], SamplingParams(), origin=origin)
        engine.scheduler.add(Request.of(submit, arrival.prompt, arrival.max_new_tokens))
        engine.load.add(arrival.objective, len(arrival.tokens))
        if not engine.is_busy:
            engine.is_busy = True
            self._push(self.now_s, _BEGIN, number)

    def _begin(self, number: int) -> None:
        """The engine's next batch begins, if it has any work."""
        engine = self.engines[number]
        engine.batch = engine.scheduler.schedule()
        engine.is_busy = engine.batch is not None
        if engine.batch is not None:
            engine.took_s = self.cost.step_s(engine.batch)
            self._push(self.now_s + engine.took_s, _END, number)

    def _end(self, number: int) -> None:
        """The engine's batch ends."""
        engine = self.engines[number]
        assert engine.batch is not None
        tokens = np.zeros(len(engine.batch.sampled.rows), dtype=np.int64)
        for row in engine.scheduler.complete(BatchOutput(tokens, None), engine.took_s):
            self._advance(engine, row)
        self._push(self.now_s, _BEGIN, number)

    def _advance(self, engine: _Engine, row: Row) -> None:
        request = row.request
        served = self._served_of[request.id]
        output = served.arrival.output
        if not row.token_ids:
            return
        request.tokens[request.num_tokens - 1] = output[request.num_generated - 1]
        if request.num_generated == 1:
            served.first_s = self.now_s
        if request.num_generated < len(output):
            return
        served.num_cached, served.ended_s = request.num_cached, self.now_s
        engine.scheduler.finish(request)
        engine.load.remove(served.arrival.objective, len(served.arrival.tokens))
        for follower in self._followers.get(request.id, ()):
            self._num_missing[follower] -= 1
            if not self._num_missing[follower]:
                self._push(self.now_s + self.workload.arrivals[follower].at_s, _ARRIVAL, follower)


def simulate_several(
    workload: Workload,
    config: SchedulerConfig,
    *,
    num_engines: int,
    cost: CostModel,
    max_context: int,
    knows_programs: bool,
) -> Simulated:
    """Replays a workload whose requests have outputs, as ``simulate`` does, on several engines, each with a
    pool of the workload's size."""

    def new_engine() -> _Engine:
        scheduler = Scheduler(
            num_slots=workload.kv_tokens,
            max_context=max_context,
            config=config,
            clock=lambda: cluster.now_s,
        )
        return _Engine(scheduler, EngineLoad(scheduler.cost, config.max_running))

    engines = [new_engine() for _ in range(num_engines)]
    target_s = None if config.tpot_target_ms is None else config.tpot_target_ms / 1e3
    placement = Placement([engine.load for engine in engines], target_s)
    groups = awaited_groups(workload.arrivals)
    cluster = _Cluster(workload, engines, cost, knows_programs, placement, groups)
    start = time.perf_counter()
    cluster.run()
    totals = Counters()
    for engine in engines:
        engine.scheduler.check_idle()
        counters = engine.scheduler.counters
        totals.prompt_tokens += counters.prompt_tokens
        totals.cached_tokens += counters.cached_tokens
        totals.computed_tokens += counters.computed_tokens
    real_s = time.perf_counter() - start
    return Simulated(workload.name, config, cluster.served, totals, cluster.now_s, real_s)
