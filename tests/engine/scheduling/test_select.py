"""Selects in the scheduler against a plain scoring of each choice, in any batch and under memory pressure.

The fake runner hashes all tokens that a scheduled token sees, in the order of their positions, and raises
where a slot holds another position: a wrong ancestor, another request's slot or a wrong order would show.
"""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.engine.scheduler_harness import GREEDY, Harness, expected_output
from support.faults import has_param
from support.plain_model import alone

from agentflow.engine.request import Request, Status
from agentflow.engine.simulator.depth_first import SIMULATED_POLICIES
from agentflow.engine.token_tree import token_tree
from agentflow.errors import PromptTooLong

choices_to_score = st.lists(
    st.lists(st.integers(0, 2), min_size=1, max_size=5) | st.just([0, 1, 0, 1, 0, 1, 0, 1]),
    min_size=1,
    max_size=8,
)


def add_select(
    harness: Harness, number: int, prompt: list[int], choices: list[list[int]], extra: str = ""
) -> Request:
    return harness.add(number, prompt, 0, extra, choices=choices)


def scores(request: Request) -> list[list[float]]:
    assert request.tree is not None
    return request.tree.by_choice(request.target_logprobs)


def plain_scores(prompt: list[int], choices: list[list[int]]) -> list[list[float]]:
    """The plain engine's, which scores each choice by itself."""
    return [*alone(prompt, GREEDY, choices=choices).choice_logprobs]


def finish(harness: Harness) -> None:
    harness.run()
    harness.scheduler.check_idle()


@dataclass
class Job:
    """A select (``choices``) or a generation of ``count`` tokens."""

    prompt: list[int]
    choices: list[list[int]] | None
    count: int
    extra: str
    arrives: int
    aborts_at: int | None


jobs = st.lists(
    st.builds(
        Job,
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=30)
        | st.tuples(st.integers(2, 99), st.integers(1, 30)).map(lambda pair: [pair[0]] * pair[1]),
        choices=st.one_of(choices_to_score, choices_to_score, st.none()),
        count=st.integers(0, 30),
        extra=st.sampled_from(["", "", "x"]),
        arrives=st.integers(0, 12),
        aborts_at=st.one_of(st.none(), st.none(), st.integers(0, 20)),
    ),
    min_size=1,
    max_size=12,
)


@given(
    jobs=jobs,
    num_slots=st.integers(64, 120),
    token_budget=st.integers(1, 48),
    max_running=st.integers(1, 8),
    policy=st.sampled_from(sorted(SIMULATED_POLICIES)),
    use_cache=st.booleans(),
    fails_at=st.none() | st.integers(0, 12),
    ahead=st.booleans(),
)
def test_any_mix_gives_what_each_gives_alone(
    jobs, num_slots, token_budget, max_running, policy, use_cache, fails_at, ahead
):
    """Under eviction, preemption and aborts, on cached prefixes, and after a forward pass that failed."""
    harness = Harness(
        num_slots,
        ahead=ahead,
        token_budget=token_budget,
        max_running=max_running,
        policy=policy,
        use_cache=use_cache,
    )
    scheduler = harness.scheduler
    failed: set[int] = set()
    for now in range(2000):
        for index, job in enumerate(jobs):
            if job.arrives == now and job.choices is not None:
                add_select(harness, index, job.prompt, job.choices, job.extra)
            elif job.arrives == now:
                harness.add(index, job.prompt, job.count, job.extra)
            if job.aborts_at == now and index in harness.requests:
                scheduler.release(harness.requests[index])
                scheduler.release(harness.requests[index])
                harness.check()
        if now == fails_at:
            dropped = harness.fail()
            assert len({request.id for request in dropped}) == len(dropped)
            for request in dropped:
                scheduler.release(request)
                failed.add(request.id)
            harness.check()
        if not harness.step() and now > 20:
            break
    else:
        pytest.fail("the scheduler did not finish")
    for index, job in enumerate(jobs):
        request = harness.requests[index]
        is_whole = job.aborts_at is None and index not in failed
        if job.choices is None:
            output = harness.output(index)
            assert output == expected_output(job.prompt, job.count)[: len(output)]
            assert not is_whole or len(output) == job.count
        elif is_whole:
            assert scores(request) == plain_scores(job.prompt, job.choices)
        assert request.status is Status.FINISHED
    scheduler.check_idle()


@given(choices_to_score, st.lists(st.integers(0, 9), min_size=1, max_size=30))
def test_all_that_fits_is_one_forward_pass(choices, prompt):
    harness = Harness(token_budget=256)
    harness.add(1, prompt, 0)
    finish(harness)
    request = add_select(harness, 2, prompt, choices)
    harness.batches.clear()
    finish(harness)
    assert harness.token_counts == [1 + token_tree(choices).num_nodes]  # the last token, and each node once
    assert request.num_cached == len(prompt) - 1
    assert scores(request) == plain_scores(prompt, choices)


@pytest.mark.parametrize("budget", [1, 5, 16, 200])
def test_a_large_tree_is_computed_in_as_few_passes_as_the_budget_allows(budget):
    """A generation next to it goes on in each of them."""
    harness = Harness(token_budget=budget)
    beside = harness.add(1, [7], 100)
    for _ in range(3):
        harness.step()
    prompt, choices = list(range(20)), [[a, b, c, 1] for a in range(4) for b in range(3) for c in range(2)]
    request = add_select(harness, 2, prompt, choices)
    before = harness.scheduler.counters.steps
    while request.status is not Status.FINISHED:
        generated = beside.num_generated
        assert harness.step()
        assert beside.num_generated == generated + 1
    num_tokens = len(prompt) + 4 + 4 * 3 + 4 * 3 * 2
    assert harness.scheduler.counters.steps - before == -(-num_tokens // max(1, budget - 1))
    assert scores(request) == plain_scores(prompt, choices)


def test_a_thousand_choices_that_part_at_once_need_the_logits_of_one_row():
    harness = Harness(token_budget=64)
    rows: list[int] = []
    harness.runner._on_step = lambda batch: rows.append(len(batch.sampled.rows))
    choices = [[number] for number in range(1000)]
    request = add_select(harness, 1, [1, 2, 3], choices)
    finish(harness)
    assert rows == [1]
    assert harness.token_counts == [3]
    assert scores(request) == plain_scores([1, 2, 3], choices)


def test_the_prefix_stays_cached_and_the_nodes_do_not():
    harness = Harness()
    add_select(harness, 1, [1, 2, 3, 4], [[5, 6, 7], [5, 8]])
    finish(harness)
    memory = harness.scheduler.memory
    assert memory.cache.num_cached == 4
    assert memory.slots.num_free == memory.slots.total - 4
    follower = harness.add(2, [1, 2, 3, 4, 5, 6], 1)
    finish(harness)
    assert follower.num_cached == 4


def test_a_select_preempted_within_its_tree_restarts_the_tree():
    harness = Harness(token_budget=6)
    prompt, choices = [1, 2, 3], [[a, b, 0] for a in range(3) for b in range(3)]
    request = add_select(harness, 1, prompt, choices)
    harness.step()
    assert request.num_nodes_computed == len(request.node_slots) == 3
    assert harness.scheduler.memory.redo_tokens(request) == 3 + 3
    harness.scheduler.preempt(request)
    harness.check()
    assert (request.num_nodes_computed, len(request.node_slots)) == (0, 0)
    finish(harness)
    assert scores(request) == plain_scores(prompt, choices)


@given(st.integers(70, 110), st.integers(8, 64), st.integers(0, 3))
def test_a_full_pool_preempts_selects_and_still_finishes_everything(num_slots, token_budget, same):
    """Twelve prompts that share ``same`` tokens, six of them of selects, in a pool for two or three."""
    harness = Harness(num_slots, token_budget=token_budget, max_running=12)
    choices = [[a, b, c] for a in range(3) for b in range(3) for c in range(2)]
    prompts = {number: [5] * same + [100 + number] * 18 for number in range(12)}
    for number, prompt in prompts.items():
        if number % 2:
            harness.add(number, prompt, 30)
        else:
            add_select(harness, number, prompt, choices)
    finish(harness)
    for number, prompt in prompts.items():
        if number % 2:
            assert harness.output(number) == expected_output(prompt, 30)
        else:
            assert scores(harness.requests[number]) == plain_scores(prompt, choices)


def test_a_tree_that_can_never_fit_is_rejected():
    harness = Harness(64)
    with pytest.raises(PromptTooLong, check=has_param("prompt")):
        add_select(harness, 1, [1] * 60, [[1], [1, 2, 3, 4, 5]])
    with pytest.raises(PromptTooLong, check=has_param("choices")):
        add_select(harness, 1, [1] * 50, [[a, 0] for a in range(20)])
    request = add_select(harness, 2, [1] * 50, [[a, 0] for a in range(14)])
    finish(harness)
    assert scores(request) == plain_scores([1] * 50, [[a, 0] for a in range(14)])


def test_requests_wait_for_the_prompt_of_a_select_and_not_for_its_nodes():
    """The nodes of a select do not enter the cache."""
    harness = Harness(token_budget=4)
    prompt = [1, 2, 3, 4, 5, 6]
    request = add_select(harness, 1, prompt, [[a, b, 0] for a in range(4) for b in range(4)])
    harness.step()
    follower = harness.add(2, [*prompt, 0, 0, 0], 1)
    assert harness.scheduler._is_blocked(follower, None)
    harness.step()
    assert request.num_nodes_left == 4 + 4 * 4 - 2
    assert not harness.scheduler._is_blocked(follower, None)
    finish(harness)
    assert follower.num_cached == len(prompt)
