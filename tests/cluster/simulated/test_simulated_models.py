"""Simulated models on devices that they share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples

from agentflow.cluster.routing.devices import SharedDevices
from agentflow.cluster.routing.load import EngineShape
from agentflow.cluster.routing.router import Router
from agentflow.cluster.simulated.several_models import SimulatedModel, SimulatedModels
from agentflow.cluster.simulated.simulation import MODEL, SimulatedCluster
from agentflow.engine.scheduling.scheduler import SchedulerConfig
from agentflow.engine.simulator.cost_model import CostModel
from agentflow.engine.simulator.generators import chat, combined, two_models, unshared
from agentflow.engine.simulator.simulation import Simulated
from agentflow.engine.simulator.workload import Arrival, Workload

LARGE = CostModel(base_s=5e-3, row_s=2e-5, logits_s=0.0, read_s=2e-8, pair_s=1e-9)
SMALL = CostModel(base_s=2e-3, row_s=6e-6, logits_s=0.0, read_s=1e-8, pair_s=0.0)
CONFIG = SchedulerConfig(max_running=4, token_budget=256)
COSTS = {"small": SMALL, "large": LARGE}


def models(devices: Mapping[str, Sequence[str]]) -> dict[str, SimulatedModel]:
    return {
        name: SimulatedModel(
            Router(EngineShape(COSTS[name], CONFIG.max_running, 6000), MODEL), COSTS[name], CONFIG, 6000, its
        )
        for name, its in devices.items()
    }


def of(model: str, arrivals: Sequence[Arrival]) -> list[Arrival]:
    return [replace(arrival, model=model) for arrival in arrivals]


def simulated(
    arrivals: Sequence[Arrival], devices: Mapping[str, Sequence[str]], *, knows: bool = True
) -> Simulated:
    shared = SharedDevices() if knows else None
    workload = Workload("w", arrivals, 6000)
    return SimulatedModels(workload, models(devices), max_context=3000, shared=shared).run()


def times(result: Simulated) -> list[tuple[float, float, float, int]]:
    return sorted((one.arrived_s, one.first_s, one.ended_s, one.num_cached) for one in result.served)


def mean_s(result: Simulated) -> float:
    return sum(one.ended_s - one.arrived_s for one in result.served) / len(result.served)


CHATS = chat(num_chats=12, per_s=6.0, turns=3, system=80, message=20, reply=60, pause_s=0.2)
QUESTIONS = unshared(num_requests=40, per_s=20.0, prompt=100, output=20)


def test_models_on_devices_that_they_have_alone_are_separate_clusters() -> None:
    both = combined(of("large", CHATS), of("small", QUESTIONS))
    together = simulated(both, {"large": ["a", "b"], "small": ["c", "d"]})
    separate = []
    for name, arrivals in (("large", CHATS), ("small", QUESTIONS)):
        router = Router(EngineShape(COSTS[name], CONFIG.max_running, 6000), MODEL)
        workload, cost = Workload("w", arrivals, 6000), COSTS[name]
        cluster = SimulatedCluster(workload, CONFIG, router, num_engines=2, cost=cost, max_context=3000)
        separate += times(cluster.run())
    for mine, theirs in zip(times(together), sorted(separate), strict=True):
        assert mine == pytest.approx(theirs)


def test_two_engines_on_a_device_take_twice_as_long() -> None:
    """Two models of one cost, each with one request, which begin and end together."""
    [one] = unshared(num_requests=1, prompt=100, output=30)
    alone = simulated(of("large", [one]), {"large": ["a"]})
    devices = {"large": ["a"], "small": ["a"]}
    twins = {name: replace(model, cost=LARGE) for name, model in models(devices).items()}
    workload = Workload("w", [*of("large", [one]), *of("small", [one])], 6000)
    result = SimulatedModels(workload, twins, max_context=3000).run()
    assert [served.ended_s for served in result.served] == pytest.approx([2 * alone.elapsed_s] * 2)


def test_a_router_that_knows_the_other_models_serves_sooner() -> None:
    """On three devices, a busy model has one, which the other one should leave alone."""
    arrivals = combined(of("large", CHATS), of("small", QUESTIONS))
    devices = {"large": ["a"], "small": ["a", "b", "c"]}
    known, unknown = (simulated(arrivals, devices, knows=knows) for knows in (True, False))
    assert mean_s(known) < mean_s(unknown)


def test_programs_over_two_models_are_served() -> None:
    arrivals = two_models(num_programs=6, per_s=2.0, rounds=2, width=3, draft=30, verdict=20)
    result = simulated(arrivals, {"small": ["a", "b"], "large": ["a", "b"]})
    assert Counter(one.arrival.label for one in result.served) == {"draft": 36, "verdict": 12}
    ended = {one.arrival.program: [] for one in result.served}
    for one in sorted(result.served, key=lambda one: one.arrived_s):
        ended[one.arrival.program].append(one.arrival.model)
    assert all(models == (["small"] * 3 + ["large"]) * 2 for models in ended.values())


@examples(60)
@given(
    seed=st.integers(0, 1000),
    devices=st.fixed_dictionaries(
        {
            name: st.lists(st.sampled_from("abc"), min_size=1, max_size=3, unique=True)
            for name in ("small", "large")
        }
    ),
    knows=st.booleans(),
)
def test_no_work_is_lost_whatever_shares_a_device(
    seed: int, devices: dict[str, list[str]], knows: bool
) -> None:
    arrivals = combined(
        two_models(num_programs=3, per_s=5.0, rounds=2, width=3, draft=30, verdict=20, seed=seed),
        of("small", unshared(num_requests=10, per_s=20.0, prompt=100, output=20, seed=seed)),
    )
    result = simulated(arrivals, devices, knows=knows)
    assert len(result.served) == len(arrivals)
    assert result.counters.generated_tokens == sum(len(one.output) for one in arrivals)
    assert simulated(arrivals, devices, knows=knows).elapsed_s == result.elapsed_s
