"""The programs of a workload in the live graph: the scheduler and the graph together, on random programs."""

from __future__ import annotations

import numpy as np
import pytest

from agentflow.engine.request import AWAITED_GROUPS, PATIENT_GROUPS
from agentflow.engine.scheduling.scheduler import SchedulerConfig
from agentflow.engine.simulator.cost_model import CostModel
from agentflow.engine.simulator.generators import agent_sessions, map_reduce, multi_agent
from agentflow.engine.simulator.simulation import Origins, Simulated, simulate
from agentflow.engine.simulator.workload import Arrival, Workload

COST = CostModel(base_s=5e-3, row_s=2e-5, logits_s=0.0, read_s=2e-8, pair_s=0.0)


def test_a_map_is_a_task_group_whose_consumer_counts_by_its_latency() -> None:
    arrivals = map_reduce(num_programs=2, width=3, chunk=20, summary=2)
    origins = Origins(arrivals, knows_programs=True)
    maps, reduce = [0, 1, 2, 4, 5, 6], 3
    for index in maps:
        origins.arrived(index, 0.0)
    found = [origins.origin(index) for index in maps]
    assert {origin.objective for origin in found} == {"throughput"}
    assert len({origin.task_group for origin in found[:3]}) == 1
    assert len({origin.task_group for origin in found}) == len({origin.program for origin in found}) == 2
    assert all(AWAITED_GROUPS <= origin.task_group < PATIENT_GROUPS for origin in found)
    for index in maps[:3]:
        origins.ended(index, 1.0)
    origins.arrived(reduce, 1.0)
    last = origins.origin(reduce)
    assert (last.objective, last.task_group, last.program) == ("latency", 0, found[0].program)
    origins.ended(reduce, 2.0)
    assert origins.graphs.num_open == 1


def test_each_stage_of_agents_that_work_on_all_files_is_a_task_group() -> None:
    arrivals = multi_agent(num_programs=1, num_files=2, rounds=1)
    origins = Origins(arrivals, knows_programs=True)
    found = []
    for stage in ([0], [1, 2], [3, 4]):  # the architect, the coders, the reviewers
        for index in stage:
            origins.arrived(index, 0.0)
        found.append([origins.origin(index) for index in stage])
        for index in stage:
            origins.ended(index, 0.0)
    assert [(origin.objective, origin.task_group) for origin in found[0]] == [("latency", 0)]
    groups = [{origin.task_group for origin in stage} for stage in found[1:]]
    assert [len(group) for group in groups] == [1, 1]
    assert groups[0] != groups[1]
    for origin in found[1] + found[2]:
        assert origin.objective == "throughput"
        assert AWAITED_GROUPS <= origin.task_group < PATIENT_GROUPS


def test_turns_of_an_agent_are_in_the_graph_when_they_are_sent() -> None:
    arrivals = agent_sessions(num_sessions=1, turns=3, first=50, last=200, output=6)
    origins = Origins(arrivals, knows_programs=True)
    programs = set()
    for index in range(3):
        origins.arrived(index, float(index))
        programs.add(origins.origin(index).program)
        state = origins.graphs.state(index)
        hint = dict(origins.graphs.ended(index, index + 0.25))[state]
        assert hint.steps is None  # its client is next
        assert hint.returns_s == (None if index == 0 else pytest.approx(0.75))
    assert len(programs) == 1


def random_programs(count: int, per_s: float, seed: int) -> list[Arrival]:
    """Programs of one to five requests. Each request continues some earlier ones, or a tool comes before
    it."""
    random = np.random.default_rng(seed)
    tokens = random.integers(10, 49_000, 4000, dtype=np.int32)
    arrivals: list[Arrival] = []
    for number, at_s in enumerate(np.cumsum(random.exponential(1 / per_s, count)).tolist()):
        first = len(arrivals)
        for index in range(first, first + int(random.integers(1, 6))):
            before = (
                sorted({int(one) for one in random.integers(first, index, random.integers(1, 3))})
                if (index > first)
                else []
            )
            start, length = random.integers(0, 3900), random.integers(8, 60)
            arrivals.append(
                Arrival(
                    tokens[start : start + length],
                    tokens[: int(random.integers(1, 6))],
                    0.0 if before else at_s,
                    before[0] if before else None,
                    joins=before[1:],
                    program=f"program {number}",
                    tenant=f"tenant {number % 3}",
                )
            )
            if before and random.random() < 0.2:
                arrivals[-1].at_s = float(random.uniform(0.1, 2.0))
    return arrivals


def run(arrivals: list[Arrival]) -> Simulated:
    config = SchedulerConfig(max_running=64, token_budget=1024)
    return simulate(Workload("w", arrivals, 4000), config, cost=COST, max_context=1000)


def times(simulated: Simulated) -> list[tuple[float, float, float]]:
    return [(one.arrived_s, one.first_s, one.ended_s) for one in simulated.served]


@pytest.mark.parametrize(
    "count", [300, pytest.param(10_000, marks=[pytest.mark.full, pytest.mark.timeout(600)])]
)
def test_programs_end_with_all_their_tokens_and_leave_nothing(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Origins] = []
    init = Origins.__init__

    def remember(self: Origins, *args: object, **rest: object) -> None:
        init(self, *args, **rest)  # type: ignore[arg-type]
        made.append(self)

    monkeypatch.setattr(Origins, "__init__", remember)
    arrivals = random_programs(count, 150.0, seed=1)
    done = run(arrivals)
    assert len(done.served) == len(arrivals)
    assert done.counters.generated_tokens == sum(len(one.output) for one in arrivals)
    assert made[0].graphs.num_open == 0
    for one in done.served:
        assert one.arrived_s <= one.first_s <= one.ended_s


def test_the_same_programs_run_alike_each_time() -> None:
    arrivals = random_programs(150, 150.0, seed=2)
    first, second = run(arrivals), run(arrivals)
    assert times(first) == times(second)
