"""The batch that is built while the one before it runs, against a scheduler that builds each batch later."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.engine.scheduler_harness import Harness, UnpenalizedRunner, expected_output

from agentflow.engine.batch import Batch, TokenMasks
from agentflow.engine.request import Status
from agentflow.engine.scheduling.rows.batch_builder import NextDecode
from agentflow.protocol.sampling import SamplingParams


def assert_equal(found: object, expected: object, name: str) -> None:
    """Two batches, or parts of them, have the same values."""
    assert type(found) is type(expected), name
    if is_dataclass(found):
        # The numbers of changes are unique, and the table is compared below.
        left_out = ("changes", "req_to_token") if isinstance(found, Batch) else ()
        for field in fields(found):
            if field.name not in left_out:
                of_both = getattr(found, field.name), getattr(expected, field.name)
                assert_equal(*of_both, f"{name}.{field.name}")
    elif isinstance(found, np.ndarray):
        assert found.dtype == expected.dtype, name
        np.testing.assert_array_equal(found, expected, err_msg=name)
    elif isinstance(found, TokenMasks):
        np.testing.assert_array_equal(found.rows, expected.rows, err_msg=name)
    elif isinstance(found, (list, tuple)):
        assert len(found) == len(expected), name
        for one, other in zip(found, expected, strict=True):
            assert_equal(one, other, name)
    else:
        assert found == expected, name


def assert_same_batch(found: Batch, expected: Batch) -> None:
    assert_equal(found, expected, "batch")
    for row, length in zip(found.req_rows.tolist(), found.kv_lens.tolist(), strict=True):
        np.testing.assert_array_equal(found.req_to_token[row, :length], expected.req_to_token[row, :length])


@dataclass(frozen=True)
class Job:
    prompt: list[int]
    count: int
    params: SamplingParams
    tenant: str
    arrives: int
    aborts_at: int | None
    choices: list[list[int]]
    jumps: list[tuple[int, int, list[int]]]  # the step, the tokens to drop, and the forced ones


jobs = st.lists(
    st.builds(
        Job,
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=3).map(lambda ids: ids * 6),
        count=st.integers(1, 100),
        params=st.sampled_from(
            [
                SamplingParams(),
                SamplingParams(temperature=0.5, top_p=0.9),
                SamplingParams(logprobs=True, top_logprobs=2),
                SamplingParams(frequency_penalty=1.0),
            ]
        ),
        tenant=st.sampled_from(["", "a", "b"]),
        arrives=st.integers(0, 20),
        aborts_at=st.none() | st.integers(0, 40),
        choices=st.just([]) | st.just([]) | st.just([[1, 2], [1, 3, 4]]),
        jumps=st.lists(
            st.tuples(
                *(st.integers(0, 60), st.integers(0, 2), st.lists(st.integers(0, 9), min_size=1, max_size=2))
            ),
            max_size=4,
        ),
    ),
    min_size=1,
    max_size=8,
)


def act(harness: Harness, jobs: list[Job], now: int, preempts: set[int], fails: set[int]) -> None:
    """The actions of the jobs before step ``now``."""
    scheduler = harness.scheduler
    for index, job in enumerate(jobs):
        if job.arrives == now:
            count = 0 if job.choices else job.count
            harness.add(index, job.prompt, count, params=job.params, choices=job.choices, tenant=job.tenant)
        request = harness.requests.get(index)
        if request is None or request.status is Status.FINISHED:
            continue
        for at, num_dropped, token_ids in job.jumps:
            num_kept = request.num_generated - num_dropped
            room = request.max_new_tokens - num_kept
            if at == now and num_kept >= 0 and len(token_ids) < room:
                scheduler.replace_output(request, num_kept, token_ids)
        if job.aborts_at == now:
            scheduler.release(request)
    if now in preempts and scheduler.running:
        scheduler.preempt(min(scheduler.running.values(), key=lambda request: request.id))
    if now in fails:
        for request in harness.fail():
            scheduler.release(request)


@given(
    jobs=jobs,
    num_slots=st.integers(128, 500),
    max_running=st.integers(1, 6),
    use_cache=st.booleans(),
    preempts=st.sets(st.integers(5, 40), max_size=2),
    fails=st.sets(st.integers(5, 40), max_size=1),
)
def test_batches_that_were_built_ahead_are_those_built_after_the_step(
    jobs, num_slots, max_running, use_cache, preempts, fails
):
    config = {"token_budget": 16, "max_running": max_running, "use_cache": use_cache}
    ahead, after = Harness(num_slots, prepares=True, **config), Harness(num_slots, **config)
    for harness in (ahead, after):
        harness.runner = UnpenalizedRunner(num_slots=num_slots, max_context=128)
    for now in range(1000):
        for harness in (ahead, after):
            act(harness, jobs, now, preempts, fails)
        found = [harness.step() for harness in (ahead, after)]
        assert found[0] == found[1]
        assert len(ahead.batches) == len(after.batches)
        if ahead.batches:
            assert_same_batch(ahead.batches[-1], after.batches[-1])
        if not found[0] and now > 40:
            break
    assert ahead.scheduler.counters == after.scheduler.counters
    for index in ahead.requests:
        assert ahead.output(index) == after.output(index)
        assert ahead.requests[index].num_charged == after.requests[index].num_charged
    ahead.scheduler.check_idle()


@pytest.mark.parametrize("num_slots", [64, 256], ids=["evicting", "free"])
def test_steps_that_only_decode_were_built_ahead(num_slots):
    harness = Harness(num_slots, prepares=True, token_budget=16, max_running=4)
    for number in range(12):
        harness.add(number, [number] * 10, 0 if number < 8 else 20)
        if number < 8:
            harness.run()
    num_before = harness.num_prepared
    harness.run()
    assert harness.num_prepared - num_before >= 15
    for number in range(8, 12):
        assert harness.output(number) == expected_output([number] * 10, 20)


def test_f37_a_fault_in_a_batch_that_was_built_ahead_loses_no_slots(monkeypatch):
    class Fault(Exception):
        """Raised in place of the batch's last part."""

    def fault(*args):
        raise Fault

    monkeypatch.setattr(NextDecode, "fill", fault)
    harness = Harness(prepares=True, token_budget=16, max_running=4)
    for number in range(4):
        harness.add(number, [number] * 10, 20)
    harness.run()
    assert harness.num_prepared == 0
    for number in range(4):
        assert harness.output(number) == expected_output([number] * 10, 20)
    harness.scheduler.check_idle()


def test_a_request_that_leaves_during_the_step_is_not_in_the_next_batch():
    harness = Harness(token_budget=16, max_running=3)
    prompt = [*range(10)]
    harness.add(0, prompt, 0)
    harness.run()
    harness.add(1, [10], 9)
    harness.step()
    cost = harness.scheduler.cost
    for num_tokens in range(1, 16):  # a step has time for one token of a prompt
        cost.observe(lambda count=num_tokens: np.array([1.0, count, 1.0, count, 0.0]), float(num_tokens))
    for number in (2, 3):
        harness.add(number, prompt, 4)
    assert harness.launch()
    assert [row.request.id for row in harness.scheduler._in_flight.launched[0].rows] == [1, 2]
    assert len(harness.scheduler.running) == 3
    harness.scheduler.release(harness.requests[1])
    assert harness.scheduler.prepare() is None
    harness.scheduler.complete(harness.runner.collect(harness.in_flight.popleft()))
    harness.run()
    for number in (2, 3):
        assert harness.output(number) == expected_output(prompt, 4)
    harness.scheduler.check_idle()
