"""Simulated engines behind a router."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples

from agentflow.cluster.routing.load import EngineShape
from agentflow.cluster.routing.router import Router, RoutingPolicy
from agentflow.cluster.simulated.published import PUBLISHED_ROUTERS, LeastTokens
from agentflow.cluster.simulated.simulation import MODEL, Loss, SimulatedCluster
from agentflow.engine.scheduling.scheduler import SchedulerConfig
from agentflow.engine.simulator.cost_model import CostModel
from agentflow.engine.simulator.generators import agent_sessions, chains, chat, combined, map_reduce, unshared
from agentflow.engine.simulator.simulation import Simulated, simulate
from agentflow.engine.simulator.workload import Workload

COST = CostModel(base_s=5e-3, row_s=2e-5, logits_s=0.0, read_s=2e-8, pair_s=1e-9)
CONFIG = SchedulerConfig(max_running=4, token_budget=256)
WORKLOAD = Workload(
    "w",
    combined(
        unshared(num_requests=30, per_s=20.0, prompt=100, output=20),
        chains(num_chains=3, length=4, chunk=60, summary=5, round_trip_s=0.1),
        map_reduce(num_programs=2, width=5, chunk=50, summary=5),
    ),
    6000,
)


def times(simulated: Simulated) -> list[tuple[float, float, float, int]]:
    return sorted((one.arrived_s, one.first_s, one.ended_s, one.num_cached) for one in simulated.served)


def several(
    num_engines: int, *, policy: RoutingPolicy | None = None, knows_programs: bool = True
) -> Simulated:
    return SimulatedCluster(
        WORKLOAD,
        CONFIG,
        policy or LeastTokens(),
        num_engines=num_engines,
        cost=COST,
        max_context=1000,
        knows_programs=knows_programs,
    ).run()


@pytest.mark.parametrize("knows_programs", [True, False])
def test_one_engine_is_the_simulator(knows_programs: bool) -> None:
    alone = simulate(WORKLOAD, CONFIG, cost=COST, max_context=1000, knows_programs=knows_programs)
    one = several(1, knows_programs=knows_programs)
    for mine, theirs in zip(times(one), times(alone), strict=True):
        assert mine == pytest.approx(theirs)
    assert one.elapsed_s == pytest.approx(alone.elapsed_s)
    assert one.counters.computed_tokens == alone.counters.computed_tokens


def test_more_engines_serve_the_same_requests_sooner() -> None:
    one, three = several(1), several(3)
    assert len(three.served) == len(one.served) == len(WORKLOAD.arrivals)
    assert three.elapsed_s < one.elapsed_s
    assert three.counters.prompt_tokens == one.counters.prompt_tokens


@pytest.mark.parametrize("name", ["router", *PUBLISHED_ROUTERS])
def test_every_router_serves_all_requests(name: str) -> None:
    shape = EngineShape(COST, CONFIG.max_running, WORKLOAD.kv_tokens)
    policy = Router(shape, MODEL) if name == "router" else PUBLISHED_ROUTERS[name]()
    simulated = several(3, policy=policy)
    assert len(simulated.served) == len(WORKLOAD.arrivals)
    assert simulated.counters.generated_tokens == sum(len(one.output) for one in WORKLOAD.arrivals)


def test_the_router_finds_more_of_the_chains_in_caches_than_round_robin() -> None:
    shape = EngineShape(COST, CONFIG.max_running, WORKLOAD.kv_tokens)
    rates = [
        several(3, policy=one).hit_rate for one in (Router(shape, MODEL), PUBLISHED_ROUTERS["round-robin"]())
    ]
    assert rates[0] > rates[1]


def test_a_simulation_that_is_cut_has_the_same_past() -> None:
    whole = several(3)
    cut_s = whole.elapsed_s / 2
    cluster = SimulatedCluster(WORKLOAD, CONFIG, LeastTokens(), num_engines=3, cost=COST, max_context=1000)
    cut = cluster.run(cut_s)
    ended = sorted(one.ended_s for one in cut.served if one.ended_s < math.inf)
    assert ended == sorted(one.ended_s for one in whole.served if one.ended_s <= cut_s)
    assert all(one.first_s <= cut_s or one.first_s == math.inf for one in cut.served)
    assert any(one.ended_s == math.inf for one in cut.served)


@examples(60)
@given(
    seed=st.integers(0, 1000),
    per_s=st.sampled_from([5.0, 20.0, 80.0]),
    kv_tokens=st.sampled_from([900, 2000, 20_000]),
    max_running=st.integers(1, 6),
    limit=st.sampled_from([0, 200]),
)
def test_counted_requests_are_as_requests_one_by_one(
    seed: int, per_s: float, kv_tokens: int, max_running: int, limit: int
) -> None:
    arrivals = combined(
        unshared(num_requests=12, per_s=per_s, prompt=60, output=90, limit=limit, num_tenants=2, seed=seed),
        chat(num_chats=4, per_s=per_s / 4, turns=3, system=80, message=20, reply=70, pause_s=0.2, seed=seed),
        agent_sessions(
            num_sessions=2, per_s=per_s, turns=3, first=100, last=400, output=90, least_gap_s=0.1,
            most_gap_s=0.5, seed=seed,
        ),
        map_reduce(num_programs=2, width=3, chunk=80, summary=40, per_s=per_s / 5, seed=seed),
    )  # fmt: skip
    workload = Workload("w", arrivals, kv_tokens)
    shape = EngineShape(COST, max_running, kv_tokens)

    def run(losses: Sequence[Loss]) -> Simulated:
        return SimulatedCluster(
            workload,
            SchedulerConfig(max_running=max_running, token_budget=64),
            Router(shape, MODEL),
            num_engines=2,
            cost=COST,
            max_context=800,
            losses=losses,
        ).run()

    # With losses, steps handle their requests one by one; no replica has this number.
    counted, single = run([]), run([Loss(0.0, 99, 0.0)])
    assert times(counted) == times(single)
    assert counted.counters == single.counters
    assert counted.elapsed_s == single.elapsed_s
