"""The batch that is written while the one before it runs, against a scheduler that writes none ahead."""

from dataclasses import fields

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from scheduler_harness import Harness, Job, expected_output, jobs

from agentflow.sampling import SamplingParams
from agentflow.server.core.batch import Batch
from agentflow.server.core.policies import POLICIES
from agentflow.server.core.request import Status
from agentflow.server.core.token_tree import token_tree

PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=0.7, top_p=0.9, top_k=20, min_p=0.01),
    SamplingParams(logprobs=True),
]


def assert_equal_but_for_slots(batch: Batch, twin: Batch) -> None:
    """The slots' contents are the fake runner's business."""
    for name in ("token_ids", "positions", "page_rows", "query_lens", "kv_lens", "num_decode"):
        assert np.array_equal(getattr(batch, name), getattr(twin, name)), name
    assert batch.branches is None
    assert twin.branches is None
    for field in fields(batch.sampled):
        mine, other = getattr(batch.sampled, field.name), getattr(twin.sampled, field.name)
        assert np.array_equal(mine, other), field.name


@given(
    jobs=jobs,
    params=st.lists(st.sampled_from(PARAMS), min_size=12, max_size=12),
    num_slots=st.integers(64, 160),
    token_budget=st.integers(1, 48),
    max_running=st.integers(1, 8),
    policy=st.sampled_from(sorted(POLICIES)),
    use_cache=st.booleans(),
)
@example(  # a full pool, in which some give way
    jobs=[Job([index] * 8, 40) for index in range(6)],
    params=PARAMS[:1] * 6,
    num_slots=64,
    token_budget=32,
    max_running=8,
    policy="fcfs",
    use_cache=False,
)
def test_every_batch_is_the_one_that_is_written_without_foresight(
    jobs, params, num_slots, token_budget, max_running, policy, use_cache
):
    config = {"token_budget": token_budget, "max_running": max_running}
    twins = [
        Harness(num_slots, foresees=foresees, policy=policy, use_cache=use_cache, **config)
        for foresees in (True, False)
    ]
    for now in range(2000):
        for harness in twins:
            for index, job in enumerate(jobs):
                if job.arrives == now:
                    harness.add(index, job.prompt, job.count, job.extra, params[index], seed=index)
                if job.aborts_at == now and index in harness.requests:
                    harness.scheduler.release(harness.requests[index])
        went_on = [harness.step() for harness in twins]
        assert went_on[0] == went_on[1]
        if went_on[0]:
            assert_equal_but_for_slots(*(harness.batches[-1] for harness in twins))
        elif now > 20:
            break
    else:
        pytest.fail("the scheduler did not finish")
    assert twins[0].scheduler.counters == twins[1].scheduler.counters
    for harness in twins:
        harness.scheduler.check_idle()
        assert harness.scheduler.memory.num_ahead == 0


def steps(harness: Harness) -> list[bool]:
    """Runs until nothing is left: of each batch, whether it was foreseen."""
    foreseen: list[bool] = []
    while True:
        prepared = harness.runner.prepared
        if not harness.step():
            return foreseen
        foreseen.append(harness.batches[-1] is prepared)


def test_while_all_go_on_decoding_every_batch_was_foreseen():
    harness = Harness()
    for index in range(4):
        harness.add(index, [index] * 5, 6)
    # The prompts have more than one row each; what follows them is not foreseen.
    assert steps(harness) == [False, False, True, True, True, True]
    for index in range(4):
        assert harness.output(index) == expected_output([index] * 5, 6)


def test_who_reaches_the_limit_of_its_length_is_foreseen_to_end():
    harness = Harness()
    for index in range(4):
        harness.add(index, [index] * 5, 4 + index)
    assert steps(harness) == [False, False, True, True, True, True, True]


def test_who_ends_before_costs_the_foreseen_batch_and_no_slot():
    harness = Harness()
    for index in range(4):
        harness.add(index, [index] * 5, 20)
    for _ in range(4):
        harness.step()
    assert harness.scheduler.memory.num_ahead == 4
    prepared = harness.runner.prepared
    harness.scheduler.release(harness.requests[2])
    harness.step()
    assert harness.batches[-1] is not prepared
    assert len(harness.batches[-1].token_ids) == 3
    assert all(steps(harness))
    harness.scheduler.check_idle()
    assert harness.scheduler.memory.num_ahead == 0


def test_who_begins_costs_the_foreseen_batch():
    harness = Harness()
    harness.add(1, [1] * 5, 8)
    for _ in range(4):
        harness.step()
    harness.add(2, [2] * 5, 3)
    assert steps(harness) == [False, False, True, True]
    assert harness.output(1) == expected_output([1] * 5, 8)
    assert harness.output(2) == expected_output([2] * 5, 3)


def test_who_waits_for_room_costs_nothing():
    harness = Harness(max_running=2)
    for index in range(3):
        harness.add(index, [index] * 5, 6)
    assert steps(harness)[:6] == [False, False, True, True, True, True]


def test_who_gave_way_and_runs_again_is_not_taken_for_the_one_foreseen():
    """All that they computed is cached, so that the work is the same; the rows of the page table are not."""
    harness = Harness()
    for index in range(2):
        harness.add(index, [index] * 5, 9)
    for _ in range(4):
        harness.step()
    prepared = harness.runner.prepared
    for index in range(2):
        harness.scheduler.retract(harness.requests[index])
    harness.step()
    assert harness.batches[-1] is not prepared
    assert harness.batches[-1].num_decode == 2
    assert all(steps(harness))
    for index in range(2):
        assert harness.output(index) == expected_output([index] * 5, 9)


def test_a_batch_that_failed_is_not_followed_by_the_one_foreseen():
    harness = Harness()
    harness.add(1, [1] * 5, 9)
    for _ in range(4):
        harness.step()
    assert harness.scheduler.schedule() is harness.runner.prepared
    assert harness.scheduler.foresee() is not None
    for request in harness.scheduler.discard():
        harness.scheduler.release(request)
    assert harness.scheduler.schedule() is None
    harness.scheduler.check_idle()
    assert harness.scheduler.memory.num_ahead == 0


def test_nothing_is_evicted_for_a_batch_that_may_not_run():
    harness = Harness(64)
    harness.add(1, [1] * 30, 1)
    while harness.step():
        pass
    harness.add(2, [2] * 20, 30)
    memory = harness.scheduler.memory
    while memory.num_free:
        assert harness.step()
    assert memory.num_evicted == 0
    assert harness.step()
    assert memory.num_evicted > 0
    while harness.step():
        pass
    assert harness.output(2) == expected_output([2] * 20, 30)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(frequency_penalty=1.0),
        SamplingParams(logit_bias=((3, 1.0),)),
        SamplingParams(min_tokens=4),
        SamplingParams(logprobs=True),
    ],
    ids=repr,
)
def test_where_more_than_numbers_says_how_tokens_are_chosen_nothing_is_foreseen(params):
    harness = Harness()
    harness.add(1, [1], 9)
    harness.add(2, [2], 9, params=params)
    assert harness.scheduler.schedule() is not None
    assert harness.scheduler.foresee() is None


@pytest.mark.parametrize("is_constrained", [False, True])
def test_under_a_grammar_nothing_is_foreseen(is_constrained):
    harness = Harness()
    request = harness.add(1, [1], 9)
    if is_constrained:
        request.token_mask = np.full(32, 2**32 - 1, dtype=np.uint32)
    assert harness.scheduler.schedule() is not None
    assert (harness.scheduler.foresee() is None) == is_constrained


def test_whose_prompt_is_only_computed_is_foreseen_to_end():
    harness = Harness()
    harness.add(1, [1], 9)
    harness.add(2, [2], 0)
    assert steps(harness) == [False, *8 * [True]]


def test_beside_a_select_nothing_is_foreseen():
    """Its nodes are computed step by step, some of them without a row of its own."""
    harness = Harness(token_budget=3)
    harness.add(1, [1], 40)
    choices = [[a, b, 0] for a in range(3) for b in range(3)]
    select = harness.add(2, [2, 3], 0, tree=token_tree(choices))
    while select.status is not Status.FINISHED:
        prepared = harness.runner.prepared
        harness.step()
        assert harness.runner.prepared is prepared
    while harness.step():
        pass
    assert harness.output(1) == expected_output([1], 40)


def test_what_was_computed_twice_may_move_under_a_foreseen_batch():
    """One prompt three times, cached but for its last token: the first copy stays, the others' slots go back
    while the next batch is foreseen already."""
    harness = Harness(token_budget=64)
    prompt = list(range(10))
    harness.add(1, prompt, 1)
    while harness.step():
        pass
    for index in range(2, 5):
        harness.add(index, prompt, 6, params=PARAMS[1], seed=index)
    harness.step()
    table, rows = harness.scheduler.memory.page_table, harness.batches[-1].page_rows
    assert len(set(table[rows, len(prompt) - 1].tolist())) == 1
    assert len(set(harness.batches[-1].write_slots.tolist())) == 3
    assert all(steps(harness))


def test_a_batch_is_written_anew_where_the_one_before_was_discarded_or_rolled_back():
    harness = Harness()
    request = harness.add(1, [1], 9)
    for _ in range(3):
        assert harness.scheduler.schedule() is not None
        assert harness.scheduler.foresee() is not None
        harness.scheduler.discard()
    harness.step()
    harness.step()
    prepared = harness.runner.prepared
    harness.scheduler.replace_output(request, 0, [request.tokens[1]])
    harness.step()
    assert harness.batches[-1] is not prepared
    while harness.step():
        pass
    assert harness.output(1) == expected_output([1], 9)
