"""The scheduler on the deterministic runner, against a plain loop that computes every request alone."""

import pytest
from support.engine.scheduler_harness import Harness, expected_output, hash_token
from support.faults import has_param

from agentflow.engine import request as requests
from agentflow.engine.cache.radix_cache import RadixCache
from agentflow.engine.request import Status
from agentflow.engine.scheduling.in_flight import InFlight
from agentflow.engine.scheduling.kv_memory import KVMemory
from agentflow.engine.scheduling.liveness import Liveness
from agentflow.engine.scheduling.policies.fair_policy import FairLongestPrefix
from agentflow.engine.scheduling.scheduler import RequestFault, Scheduler
from agentflow.engine.simulator.depth_first import SIMULATED_POLICIES
from agentflow.errors import BadArgument, PromptTooLong


def test_a_generated_continuation_is_a_cache_hit():
    harness = Harness()
    harness.add(1, [1, 2, 3], 5)
    harness.run()
    second = harness.add(2, [1, 2, 3, *harness.output(1), 7], 1)
    harness.run()
    # The last generated token was never fed to the model, so its KV does not exist.
    assert second.num_cached == 3 + 5 - 1


def test_requests_that_share_an_uncached_prefix_compute_it_once():
    harness = Harness(token_budget=64, max_running=8)
    prefix = [5] * 50
    for index in range(6):
        harness.add(index, [*prefix, 10 + index], 2)
    harness.run()
    computed = harness.scheduler.counters.computed_tokens
    assert computed == len(prefix) + 6 * 1 + 6 * 1  # prefix once, six ends, six second tokens
    for index in range(6):
        assert harness.output(index) == expected_output([*prefix, 10 + index], 2)


def test_waiting_for_a_shared_prefix_does_not_hold_up_others():
    harness = Harness(token_budget=8, max_running=8)
    harness.add(1, [1] * 60, 1)
    harness.add(2, [1] * 60 + [2], 1)
    other = harness.add(3, [9, 9, 9], 1)
    harness.step()
    harness.step()
    while other.status is not Status.FINISHED:
        assert harness.step()
    assert harness.requests[2].status is Status.WAITING or harness.requests[2].num_cached > 0


@pytest.mark.parametrize("budget", [1, 3, 7, 64])
def test_prefill_stays_within_the_token_budget(budget):
    harness = Harness(token_budget=budget, max_running=2)
    harness.add(1, list(range(50)), 3)
    harness.add(2, list(range(100, 140)), 3)
    harness.run()
    # Decoding never waits for the budget.
    assert max(harness.token_counts) <= budget + 1
    assert harness.output(1) == expected_output(list(range(50)), 3)


def test_scoring_gives_one_logprob_per_scored_token():
    harness = Harness(token_budget=8)
    tokens = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
    first = harness.add(1, tokens, 0, score_from=6)
    harness.run()
    again = harness.add(2, tokens, 0, score_from=6)
    harness.run()
    assert len(first.logprobs) == len(tokens) - 6
    assert again.num_cached == 5
    assert again.logprobs == first.logprobs


@pytest.mark.parametrize("num_steps", [1, 2])
def test_a_preempted_scoring_goes_on_where_it_was(num_steps):
    tokens = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
    harness, alone = Harness(token_budget=3), Harness(token_budget=64)
    whole = alone.add(1, tokens, 0, score_from=1)
    alone.run()
    scored = harness.add(1, tokens, 0, score_from=1)
    for _ in range(num_steps):
        harness.step()
    harness.scheduler.preempt(scored)
    harness.run()
    assert scored.logprobs == whole.logprobs
    assert len(scored.logprobs) == len(tokens) - 1
    assert sum(harness.token_counts) < len(tokens) + 3


@pytest.mark.parametrize("with_scoring", [False, True])
def test_each_token_goes_to_the_request_that_it_was_sampled_for(with_scoring):
    """Next to prompts without outputs, chunks that end within a prompt, and scorings."""
    harness = Harness(token_budget=12)
    prompts = {number: [number] * (number % 4 + 1) for number in range(9)}
    for number, prompt in prompts.items():
        harness.add(number, prompt, number % 3 and 4)
    if with_scoring:
        scored = harness.add(20, [7, 8, 9, 10, 11], 0, score_from=2)
    harness.add(21, [5] * 40, 3)
    harness.run()
    for number, prompt in prompts.items():
        assert harness.output(number) == expected_output(prompt, number % 3 and 4)
    assert harness.output(21) == expected_output([5] * 40, 3)
    if with_scoring:
        assert len(scored.logprobs) == 3
    harness.scheduler.check_idle()


@pytest.mark.parametrize("ends", ["complete", "fail", "preempt"])
def test_a_row_may_have_several_sampled_tokens(monkeypatch, ends):
    """Rows that verify drafts would have several. If a batch fails or the request leaves, it has none."""
    harness = Harness()
    prompt = [3, 1, 4, 1, 5]
    sampled = ((2, -1), (3, -1), (4, -1))
    monkeypatch.setattr(requests, "_targets", lambda request, num_tokens: sampled)
    request = harness.add(1, prompt, 10)
    assert harness.launch()
    assert (request.num_pending, request.num_computed) == (3, 5)
    if ends == "complete":
        [row] = harness.scheduler.complete(harness.runner.collect(harness.in_flight.popleft()))
        assert row.token_ids == [hash_token(prompt[:end]) for end in (3, 4, 5)]
        assert request.tokens[5 : request.num_tokens].tolist() == row.token_ids
    elif ends == "fail":
        assert harness.fail() == [request]
    else:
        harness.scheduler.preempt(request)
        assert harness.scheduler.complete(harness.runner.collect(harness.in_flight.popleft())) == []
    assert request.num_pending == 0
    assert request.num_generated == (3 if ends == "complete" else 0)
    assert request.num_computed == (5 if ends == "complete" else 0)
    harness.check()
    monkeypatch.undo()
    harness.scheduler.release(request)
    harness.scheduler.check_idle()


def test_a_request_that_can_never_run_is_rejected():
    harness = Harness(64)
    with pytest.raises(PromptTooLong, check=has_param("prompt")):
        harness.add(1, [1] * 64, 1)
    longest = harness.add(2, [1] * 60, 1000)
    harness.run()
    assert longest.num_generated == 4  # the rest of the pool


@pytest.mark.parametrize("policy", ["lpm", "fair-lpm"])
def test_longest_prefix_first_runs_the_cached_one_before_the_earlier_one(policy):
    harness = Harness(policy=policy, max_running=1)
    harness.add(1, [1] * 20, 1)
    harness.run()
    cold = harness.add(2, [2] * 20, 1)
    warm = harness.add(3, [1] * 20, 1)
    harness.step()
    assert warm.status is Status.FINISHED
    assert cold.status is Status.WAITING


def test_an_unknown_policy_is_rejected_with_the_known_ones():
    with pytest.raises(BadArgument, check=has_param("policy")) as caught:
        Harness(policy="best")
    assert all(name in str(caught.value) for name in SIMULATED_POLICIES)


class Fault(Exception):
    """Raised in place of a part of an admission or of a departure."""


@pytest.mark.parametrize(
    ("owner", "name", "is_kept"),
    [
        (FairLongestPrefix, "admit", False),
        (RadixCache, "write_slots", False),
        (Scheduler, "_fits", False),
        (InFlight, "launch", False),
        (KVMemory, "_mark_prefixes", True),
        (Liveness, "refresh", True),
    ],
)
def test_f37_a_fault_where_a_request_starts_or_leaves_locks_no_tokens(monkeypatch, owner, name, is_kept):
    """It fails to start, or it leaves with its whole result (``is_kept``)."""
    harness = Harness(max_running=1)
    harness.add(1, [1] * 20, 1)
    harness.run()

    def fault(*args, **kwargs):
        raise Fault

    last = harness.add(2, [1] * 20 + [2], 4, state=1, kept_prefixes=[(8, 60.0)])
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, fault)
        if is_kept:
            harness.run()
            assert harness.output(2) == expected_output([1] * 20 + [2], 4)
        else:
            with pytest.raises(RequestFault) as caught:
                harness.step()
            assert caught.value.requests == [last]
            harness.scheduler.release(last)
    harness.scheduler.check_idle()
    harness.add(3, [1] * 20 + [3], 4)
    harness.run()
    assert harness.output(3) == expected_output([1] * 20 + [3], 4)
    harness.scheduler.check_idle()


@pytest.mark.parametrize("name", ["on_evict", "make_room"])
def test_f37_a_fault_while_tokens_are_evicted_loses_no_slots(monkeypatch, name):
    """The fault is in the policy's handler, or in the pause of a program that would save an open state."""
    harness = Harness(num_slots=64, token_budget=64)
    for number in range(3):
        harness.add(number, [number] * 20, 1, state=number + 1)
        harness.run()

    def fault(*args):
        raise Fault

    last = harness.add(3, [3] * 50, 4)
    with monkeypatch.context() as patched:
        patched.setattr(harness.scheduler.memory, name, fault)
        if name == "on_evict":
            with pytest.raises(RequestFault) as caught:
                harness.step()
            assert caught.value.requests == [last]
            harness.scheduler.release(last)
        else:
            harness.run()
            assert harness.output(3) == expected_output([3] * 50, 4)
    harness.scheduler.check_idle()
    harness.add(4, [4] * 50, 4)
    harness.run()
    assert harness.output(4) == expected_output([4] * 50, 4)
    harness.scheduler.check_idle()
