"""Theorem 3.1 of the SGLang paper: with one request at a time and room for the longest, longest prefix
first (and depth first) computes every token of the requests' tree exactly once. Prompts that enter the cache
in runs of several chunks are shared like prompts that do after each chunk."""

from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.engine.requests import request_of
from support.engine.scheduler_harness import Harness

from agentflow.engine.cache.radix_cache import RadixCache
from agentflow.engine.runner import run_batch
from agentflow.engine.scheduling import in_flight
from agentflow.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from agentflow.engine.simulator.depth_first import SIMULATED_POLICIES
from agentflow.engine.simulator.fake_runner import FakeRunner
from agentflow.protocol.sampling import SamplingParams


@st.composite
def request_trees(draw) -> list[list[int]]:
    """Prompts that grow from one another: each continues a prefix of an earlier one. The last token of
    each is its own, as the token whose logits are needed is computed in any case."""
    prompts: list[list[int]] = []
    for number in range(draw(st.integers(1, 14))):
        stem: list[int] = []
        if prompts and draw(st.booleans()):
            parent = draw(st.sampled_from(prompts))
            stem = parent[: draw(st.integers(0, len(parent) - 1))]
        growth = draw(st.lists(st.integers(0, 2), max_size=8))
        prompts.append([*stem, *growth, 100 + number])
    return draw(st.permutations(prompts))


def optimum(prompts: list[list[int]]) -> int:
    """Tokens that any order has to compute: each node of the tree once."""
    return len({tuple(prompt[:length]) for prompt in prompts for length in range(1, len(prompt) + 1)})


def computed(prompts: list[list[int]], policy: str, num_slots: int, token_budget: int) -> int:
    config = SchedulerConfig(max_running=1, token_budget=token_budget, policy=policy)
    scheduler = Scheduler(num_slots=num_slots, max_context=256, config=config, policies=SIMULATED_POLICIES)
    runner = FakeRunner(num_slots=num_slots, max_context=256)
    for number, prompt in enumerate(prompts):
        tokens = np.array(prompt, dtype=np.int32)
        scheduler.add(request_of(number, tokens, 1, SamplingParams()))
    while (batch := scheduler.schedule()) is not None:
        for result in scheduler.complete(run_batch(runner, batch)):
            if result.token_ids:
                scheduler.release(result.request)
    scheduler.check_idle()
    return scheduler.counters.computed_tokens


@pytest.mark.parametrize("policy", ["lpm", "dfs-weight"])
@given(prompts=request_trees(), more_slots=st.integers(0, 20), token_budget=st.integers(1, 40))
def test_the_best_possible_hit_rate_is_reached(policy, prompts, more_slots, token_budget):
    num_slots = max(map(len, prompts)) + 1 + more_slots  # and the one token that each generates
    assert computed(prompts, policy, num_slots, token_budget) == optimum(prompts)


def test_first_come_does_not_reach_it():
    """The theorem's test can fail: another order computes more on a tree that alternates."""
    prompts = [[branch] * 10 + [100 + number] for number, branch in enumerate([1, 2] * 4)]
    assert computed(prompts, "fcfs", 12, 64) > optimum(prompts)
    assert computed(prompts, "random", 12, 64) > optimum(prompts)


@pytest.mark.parametrize("policy", ["fair-lpm", "lpm", "fcfs", "random"])
@given(
    prompts=request_trees(),
    arrivals=st.lists(st.integers(0, 15), min_size=14, max_size=14),
    token_budget=st.sampled_from([4, 8, 32, 100]),
    max_running=st.integers(1, 6),
    ahead=st.booleans(),
)
def test_each_token_is_computed_once_whenever_its_prompts_arrive(
    policy, prompts, arrivals, token_budget, max_running, ahead
):
    """While there is room for all, also if a batch is launched before the one before it is collected."""
    config = {"policy": policy, "token_budget": token_budget, "max_running": max_running}
    harness = Harness(4096, ahead=ahead, prepares=not ahead, **config)
    for step in range(16):
        for number, (prompt, arrival) in enumerate(zip(prompts, arrivals, strict=False)):
            if arrival == step:
                harness.add(number, prompt, 1)
        harness.step()
    harness.run()
    assert harness.scheduler.counters.computed_tokens == optimum(prompts)


def computed_in_turn(
    prompts: list[list[int]], arrivals: list[int], config: SchedulerConfig, num_output: int = 1
) -> int:
    """Tokens that are computed if each prompt arrives before the step of its number."""
    scheduler = Scheduler(num_slots=20_000, max_context=4096, config=config)
    runner = FakeRunner(num_slots=20_000, max_context=4096)
    late = sorted(range(len(prompts)), key=lambda number: -arrivals[number])
    step = 0
    while late or scheduler.running or scheduler.waiting.num_waiting:
        while late and arrivals[late[-1]] <= step:
            number = late.pop()
            tokens = np.array(prompts[number], dtype=np.int32)
            scheduler.add(request_of(number, tokens, num_output, SamplingParams()))
        step += 1
        batch = scheduler.schedule()
        for result in [] if batch is None else scheduler.complete(run_batch(runner, batch)):
            if result.request.num_generated == num_output:
                scheduler.release(result.request)
    scheduler.check_idle()
    return scheduler.counters.computed_tokens


@pytest.mark.parametrize("policy", ["fair-lpm", "lpm", "fcfs"])
@given(
    stems=request_trees(),
    arrivals=st.lists(st.integers(0, 30), min_size=14, max_size=14),
    token_budget=st.sampled_from([8, 16, 32, 100]),
    max_running=st.integers(1, 6),
)
def test_prompts_that_enter_the_cache_in_runs_are_shared_as_far(
    policy, stems, arrivals, token_budget, max_running
):
    prompts = [[token for token in stem for _ in range(17 if token < 100 else 1)] for stem in stems]
    config = SchedulerConfig(max_running=max_running, token_budget=token_budget, policy=policy)
    with patch.object(in_flight, "COMMIT_RUN", 1):
        least = computed_in_turn(prompts, arrivals, config, 6)
    assert computed_in_turn(prompts, arrivals, config, 6) == least


def test_a_prompt_enters_the_cache_in_runs_and_after_each_chunk_while_another_one_waits_for_it(monkeypatch):
    calls = []
    extend = RadixCache.extend

    def counted(cache, match, *args, **kwargs):
        calls.append(match)
        return extend(cache, match, *args, **kwargs)

    monkeypatch.setattr(RadixCache, "extend", counted)
    config = SchedulerConfig(token_budget=16)
    long = [*range(1, 641)]
    assert computed_in_turn([long], [0], config) == 640
    assert len(calls) == 640 // in_flight.COMMIT_RUN
    calls.clear()
    assert computed_in_turn([long, long], [0, 0], config) == 641
    assert len(calls) >= 640 // 16
