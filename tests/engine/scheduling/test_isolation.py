"""A tenant cannot learn about another tenant's prompts, neither from hits nor from times."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from agentflow.engine.scheduling.scheduler import SchedulerConfig
from agentflow.engine.simulator.depth_first import SIMULATED_POLICIES
from agentflow.engine.simulator.simulation import simulate
from agentflow.engine.simulator.workload import Arrival, Workload


def as_tokens(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.int32)


prompts = st.lists(st.integers(0, 3), min_size=1, max_size=30)
OUTPUT = as_tokens([7, 8])


def seen_by_the_prober(
    secrets: list[list[int]], probes: list[list[int]], policy: str, other: tuple[str, str]
) -> list[tuple[float, float, int]]:
    """The observations of the second tenant about its requests, when the first has sent ``secrets``."""
    arrivals = [
        Arrival(as_tokens(secret), OUTPUT, at_s=i / 4, tenant="a") for i, secret in enumerate(secrets)
    ]
    arrivals += [
        Arrival(as_tokens(probe), OUTPUT, at_s=1.1 + i / 3, tenant=other[0], salt=other[1], label="probe")
        for i, probe in enumerate(probes)
    ]
    config = SchedulerConfig(max_running=8, token_budget=16, policy=policy)
    served = simulate(Workload("probe", arrivals, kv_tokens=4096), config).served
    return [(s.first_s, s.ended_s, s.num_cached) for s in served if s.arrival.label == "probe"]


@given(
    secrets=st.lists(prompts, min_size=1, max_size=3),
    probes=st.lists(prompts, min_size=1, max_size=3),
    policy=st.sampled_from(sorted(SIMULATED_POLICIES)),
    other=st.sampled_from([("b", ""), ("a", "salt"), ("b", "salt")]),
)
def test_hits_and_times_do_not_depend_on_the_prompts_of_another_tenant(secrets, probes, policy, other):
    """The same load from the other tenant, once with the very prompts that are probed and once with
    prompts that have nothing in common with them: the prober sees the same, to the microsecond."""
    guessed = [(probes[i % len(probes)] * 31)[: len(secret)] for i, secret in enumerate(secrets)]
    # Nothing shared among themselves either: that the other tenant's own requests share shows as load.
    guessed = [[100 + i, *prompt[1:]] for i, prompt in enumerate(guessed[1:])]
    right = [(probes[0] * 31)[: len(secrets[0])], *guessed]
    wrong = [[99, *right[0][1:]], *guessed]
    assert seen_by_the_prober(right, probes, policy, other) == seen_by_the_prober(
        wrong, probes, policy, other
    )


def test_the_test_would_see_a_hit_under_one_identity():
    probe = [1, 2, 3, 4, 5, 6]
    assert seen_by_the_prober([probe], [probe], "fcfs", ("a", ""))[0][2] == 5
    assert seen_by_the_prober([probe], [probe], "fcfs", ("b", ""))[0][2] == 0
