"""Which of several engines takes a request."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples

from agentflow.engine.scheduling.step_limits import StepCost
from agentflow.engine.simulator import placement
from agentflow.engine.simulator.placement import EngineLoad, Placement

TARGET_S = 0.010


@pytest.fixture(scope="module")
def cost() -> StepCost:
    """5 ms for a step, and 20 µs for a token."""
    cost = StepCost()
    random = np.random.default_rng(0)
    for _ in range(64):
        tokens, pairs = int(random.integers(1, 200)), float(random.integers(0, 2))
        cost.observe(np.array([1.0, tokens, 0.0, 0.0, pairs]), 5e-3 + 20e-6 * tokens)
    return cost


def loads(cost: StepCost, num_engines: int, max_running: int = 64) -> list[EngineLoad]:
    return [EngineLoad(cost, max_running) for _ in range(num_engines)]


def place(
    engines: list[EngineLoad], chosen: Placement, objective, num_tokens: int, now_s: float = 0.0
) -> int:
    index = chosen.choose(objective, num_tokens, now_s)
    engines[index].add(objective, num_tokens)
    return index


@examples(100)
@given(
    sizes=st.lists(st.integers(1, 2000), min_size=1, max_size=30),
    kind=st.sampled_from(["no target", "costs unknown", "no throughput work"]),
)
def test_without_a_bound_that_throughput_work_feels_the_least_work_decides(sizes, kind, cost):
    engines = loads(StepCost() if kind == "costs unknown" else cost, 3)
    chosen = Placement(engines, None if kind == "no target" else TARGET_S)
    objectives = ["latency"] if kind == "no throughput work" else ["latency", "throughput"]
    for number, size in enumerate(sizes):
        least = min(engine.num_tokens for engine in engines)
        index = chosen.choose(objectives[number % len(objectives)], size, 0.0)
        assert engines[index].num_tokens == least
        engines[index].add(objectives[number % len(objectives)], size)


def test_latency_work_shares_engines_while_there_is_throughput_work(cost):
    engines = loads(cost, 4)
    chosen = Placement(engines, TARGET_S)
    place(engines, chosen, "throughput", 1000)
    assert len({place(engines, chosen, "latency", 500) for _ in range(64)}) == 1
    documents = {place(engines, chosen, "throughput", 1000) for _ in range(30)}
    assert not documents & {index for index, engine in enumerate(engines) if engine.num_urgent}
    assert len({place(engines, chosen, "latency", 500, now_s=11.0) for _ in range(30)}) == 3


def test_latency_work_that_would_wait_long_takes_another_engine(cost):
    engines = loads(cost, 2, max_running=20)
    chosen = Placement(engines, TARGET_S)
    place(engines, chosen, "throughput", 100)
    first = [place(engines, chosen, "latency", 500) for _ in range(40)]
    assert first[: 20 + round(20 * placement.OTHERS_LOST)] == first[:1] * 25
    assert len({*first}) == 2


def test_throughput_work_fills_the_time_that_a_bound_leaves(cost):
    engines = loads(cost, 2)
    chosen = Placement(engines, TARGET_S)
    engines[0].add("latency", 500)
    given_to = [place(engines, chosen, "throughput", 1000) for _ in range(100)]
    rest_s = 0.9 * TARGET_S - 5e-3
    assert given_to.count(0) / given_to.count(1) == pytest.approx(rest_s / (0.9 * TARGET_S), rel=0.1)


def test_an_engine_without_a_free_row_gets_no_throughput_work(cost):
    engines = loads(cost, 2, max_running=4)
    chosen = Placement(engines, TARGET_S)
    for _ in range(4):
        engines[0].add("latency", 500)
    assert {place(engines, chosen, "throughput", 1000) for _ in range(50)} == {1}


def test_an_engine_whose_requests_have_ended_has_no_load(cost):
    (engine,) = loads(cost, 1)
    for objective in ("latency", "throughput"):
        engine.add(objective, 10)
        engine.remove(objective, 10)
    assert engine == EngineLoad(cost, 64)
