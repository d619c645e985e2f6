"""Published policies for programs in small settings: each has the effect that its paper reports, and ours
comes close to the best of them."""

import functools
from collections.abc import Callable

import numpy as np
import pytest

from agentflow.engine.scheduling.scheduler import SchedulerConfig
from agentflow.engine.simulator.cost_model import CostModel
from agentflow.engine.simulator.generators import agent_sessions
from agentflow.engine.simulator.published import published_rules
from agentflow.engine.simulator.simulation import simulate
from agentflow.engine.simulator.summary import program_times
from agentflow.engine.simulator.workload import Arrival, Workload

COST = CostModel(base_s=5e-3, row_s=2e-4, logits_s=0, read_s=0, pair_s=1.2e-7)
RULES = published_rules(COST)


@functools.cache
def run(arrivals: Callable[[], list[Arrival]], pool: int, name: str) -> tuple[float, int]:
    """The mean time of a program, and the computed tokens. ``name``: empty for our scheduler."""
    config = SchedulerConfig(max_running=8, token_budget=256)
    workload = Workload("w", arrivals(), pool)
    done = simulate(workload, config, cost=COST, max_context=30_000, rules=RULES[name] if name else None)
    assert len(done.served) == len(workload.arrivals)
    return float(np.mean([*program_times(done).values()])), done.counters.computed_tokens


def short_tools() -> list[Arrival]:
    """Agents whose tools take less time than it takes to compute their contexts again."""
    return agent_sessions(
        num_sessions=4,
        turns=12,
        first=400,
        last=6000,
        output=60,
        per_s=1.0,
        least_gap_s=0.2,
        most_gap_s=1.0,
    )


def long_contexts() -> list[Arrival]:
    return agent_sessions(num_sessions=3, turns=16, first=1200, last=14_000, output=100, per_s=0.2)


def turns_of_agents() -> list[Arrival]:
    """Two programs in which four agents with long prompts take turns."""
    numbers = np.random.default_rng(0)

    def tokens(count: int) -> np.ndarray:
        return numbers.integers(10, 49_000, count, dtype=np.int32)

    arrivals: list[Arrival] = []
    for program in range(2):
        prompts, after = [tokens(1000) for _ in range(4)], None
        for turn in range(20):
            prompt = np.concatenate((prompts[turn % 4], tokens(20)))
            state = f"{program}/{turn % 4}"
            arrivals.append(
                Arrival(prompt, tokens(5), after=after, state=state, program=f"program {program}")
            )
            after = len(arrivals) - 1
    return arrivals


@pytest.mark.parametrize(
    ("name", "arrivals", "pool", "gain"),
    [
        ("continuum", short_tools, 12_000, 2.0),
        ("kvflow", turns_of_agents, 5000, 1.7),
        ("thunderagent", short_tools, 12_000, 2.5),
        ("thunderagent", long_contexts, 21_000, 1.3),
        ("saga", short_tools, 12_000, 2.0),
        ("clairvoyant", turns_of_agents, 5000, 1.6),
        ("", short_tools, 12_000, 2.0),
        ("", turns_of_agents, 5000, 1.6),
        ("", long_contexts, 21_000, 1.4),
    ],
)
def test_programs_end_sooner_than_with_lru_and_fcfs(
    name: str, arrivals: Callable[[], list[Arrival]], pool: int, gain: float
):
    mean_s, computed = run(arrivals, pool, name)
    plain_s, plain_computed = run(arrivals, pool, "lru-fcfs")
    assert mean_s < plain_s / gain
    assert computed < plain_computed


@pytest.mark.parametrize("name", ["continuum", "kvflow", "thunderagent", "saga"])
def test_sessions_with_long_contexts_end_as_soon_as_with_a_published_policy(name: str):
    ours_s, _ = run(long_contexts, 21_000, "")
    theirs_s, _ = run(long_contexts, 21_000, name)
    assert ours_s < 1.03 * theirs_s


@pytest.mark.parametrize("name", RULES)
def test_programs_that_fit_are_computed_once(name: str):
    _, computed = run(long_contexts, 60_000, name)
    unique = sum({one.program: len(one.tokens) for one in long_contexts()}.values())
    assert computed <= unique
