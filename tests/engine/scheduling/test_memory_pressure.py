"""A full pool: how much is reserved, which request is preempted, and that no token is lost or repeated."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from support.engine.requests import request_of

from agentflow.engine.request import Request, Status
from agentflow.engine.runner import run_batch
from agentflow.engine.scheduling import admission
from agentflow.engine.scheduling.admission import (
    GOLDEN_RATIO,
    MIN_RESERVED,
    OutputLengths,
    OutputReserve,
    need_at_peak,
)
from agentflow.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from agentflow.engine.simulator.fake_runner import FakeRunner
from agentflow.engine.simulator.generators import unshared
from agentflow.engine.simulator.simulation import simulate
from agentflow.engine.simulator.workload import Arrival, Workload
from agentflow.protocol.sampling import SamplingParams


def request(number: int, size: int, count: int, **kwargs) -> Request:
    tokens = np.full(size, number, dtype=np.int32)
    return request_of(number, tokens, count, SamplingParams(), **kwargs)


running = st.lists(
    st.tuples(st.integers(1, 30), st.integers(0, 30), st.integers(1, 40), st.integers(0, 29)),
    min_size=1,
    max_size=8,
)


@given(running)
def test_the_need_at_the_worst_moment_is_that_of_a_replay(rows):
    """The reference: all requests take one slot in each step and free theirs at their end."""
    reserve = OutputReserve()
    reserve.caution = 1.0
    requests = []
    for number, (size, computed, count, generated) in enumerate(rows):
        made = request(number, size, count)
        made.num_tokens += min(generated, count - 1)
        made.num_computed = min(computed, made.num_tokens)
        made.num_shared = made.num_computed // 2
        requests.append(made)
    left = {r.id: r.max_new_tokens - r.num_generated for r in requests}
    own = {r.id: r.num_tokens - r.num_shared for r in requests}
    taken = sum(r.num_computed - r.num_shared for r in requests)
    worst = sum(own.values()) - taken
    alive = set(left)
    for _ in range(100):
        for number in alive:
            own[number] += 1
            left[number] -= 1
        worst = max(worst, sum(own[number] for number in alive) - taken)
        alive = {number for number in alive if left[number]}
    outlooks = np.array([reserve.outlook(r, token_budget=64) for r in requests])
    assert need_at_peak(outlooks) == max(0, worst)
    assert need_at_peak(outlooks) <= sum(map(reserve.need, requests))


def ended(number: int, length: int, limit: int, **kwargs) -> Request:
    made = request(number, 5, limit, **kwargs)
    made.num_tokens += length
    return made


def test_the_lengths_of_outputs_are_learned():
    reserve = OutputReserve()
    for number in range(200):
        reserve.finished(ended(number, 90 + number % 21, 1000))
    assert 90 <= reserve.expected(request(1, 5, 1000)) <= 110
    likely = reserve.expected(request(2, 5, 1000))
    reserve.preempted()
    assert likely < reserve.expected(request(2, 5, 1000)) <= 110  # careful for a while
    for _ in range(1000):
        reserve.stepped()
    assert reserve.expected(request(2, 5, 1000)) == likely


learned = st.lists(
    st.tuples(st.sampled_from("ab"), st.sampled_from("xyz"), st.integers(9, 70), st.integers(0, 70)),
    max_size=60,
)


@given(
    rows=learned,
    ring=st.integers(2, 12),
    min_lengths=st.integers(1, 4),
    max_kinds=st.integers(3, 12),
    asked=st.tuples(st.sampled_from("ab"), st.sampled_from("xyz"), st.integers(9, 70), st.integers(0, 60)),
    arrival=st.integers(0, 1000),
    caution=st.sampled_from([0.0, 0.0, 0.3, 1.0]),
)
def test_f5a_the_expected_length_is_a_quantile_of_the_greater_lengths(
    rows, ring, min_lengths, max_kinds, asked, arrival, caution
):
    """Against plain lists of all that ended, by every kind, the narrowest first."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(admission, "RING", ring)
        patch.setattr(admission, "MIN_LENGTHS", min_lengths)
        patch.setattr(admission, "MAX_KINDS", max_kinds)
        lengths = OutputLengths()
        known: dict[tuple, list[int]] = {}
        for number, (tenant, label, limit, length) in enumerate(rows):
            lengths.learn(ended(number, min(length, limit), limit, tenant=tenant, label=label))
            size = len(f"{limit:b}")
            for kind in ((tenant, label, size), (tenant, size), (size,)):
                known[kind] = [*known.pop(kind, []), length if length < limit else math.inf][-ring:]
            known = dict([*known.items()][-max_kinds:])
        tenant, label, limit, generated = asked
        made = ended(0, min(generated, limit - 1), limit, tenant=tenant, label=label)
        made.arrival = arrival
        quantile = arrival * GOLDEN_RATIO % 1.0
        quantile += caution * (1 - quantile)
        size = len(f"{limit:b}")
        expected = made.num_generated + int((0.5 + caution / 2) * (limit - made.num_generated))
        for kind in ((size,), (tenant, size), (tenant, label, size)):
            above = sorted(length for length in known.get(kind, []) if length > made.num_generated)
            if len(above) >= min_lengths:
                expected = min(limit, above[min(int(quantile * len(above)), len(above) - 1)])
        assert lengths.expected(made, caution) == expected


@given(lengths=st.lists(st.integers(1, 999), min_size=8, max_size=64), first=st.integers(0, 10_000))
def test_f5b_requests_that_run_together_are_expected_to_end_as_past_ones_did(lengths, first):
    """Not all at one length: early and late ends, in the proportions that were seen."""
    reserve = OutputReserve()
    for number, length in enumerate(lengths):
        reserve.finished(ended(number, length, 1000))
    expected = []
    for arrival in range(first, first + 200):
        made = request(arrival, 5, 1000)
        made.arrival = arrival
        expected.append(reserve.lengths.expected(made, 0.0))
    for length in lengths:
        seen = sum(other <= length for other in lengths) / len(lengths)
        assert abs(sum(other <= length for other in expected) / 200 - seen) < 0.02


def test_f5c_requests_of_one_kind_do_not_teach_another_kind():
    reserve = OutputReserve()
    for number in range(100):
        reserve.finished(ended(number, 4, 4, label="classify"))
        reserve.finished(ended(number, 300, 4000, label="chat"))
        reserve.finished(ended(number, 3000, 4000, label="novel"))
        reserve.finished(ended(number, 20, 4000, label="chat", tenant="terse"))
    assert reserve.expected(request(1, 5, 4000, label="chat")) == 300
    assert reserve.expected(request(1, 5, 4000, label="novel")) == 3000
    assert reserve.expected(request(1, 5, 4000, label="chat", tenant="terse")) == 20
    assert reserve.expected(ended(1, 400, 4000, label="chat")) == 2600  # as long as some of its tenant's


def test_f5d_cancelled_requests_teach_nothing():
    requests = [request(number, 5, 100) for number in range(40)]
    scheduler, runner = scheduler_with(requests, 4000)
    while (batch := scheduler.schedule()) is not None:
        for result in scheduler.complete(run_batch(runner, batch)):
            made = result.request
            if made.id % 2 and made.num_generated == 20:
                scheduler.finish(made)
            elif not made.id % 2 and made.num_generated == 2:
                scheduler.release(made)
    assert scheduler._reserve.expected(request(50, 5, 100)) == 20


def test_f5e_short_requests_do_not_keep_long_limits_from_running():
    """A pool of 40,000 slots. Half of the requests are classifications, the others chats that use a twentieth
    of their limit."""
    numbers = np.random.default_rng(0)
    arrivals = []
    for number in range(300):
        prompt = numbers.integers(10, 49_000, 300, dtype=np.int32)
        is_chat = number % 2
        output = numbers.integers(
            10, 49_000, int(numbers.integers(200, 600)) if is_chat else 4, dtype=np.int32
        )
        limit, label = (8000, "chat") if is_chat else (4, "classify")
        arrivals.append(Arrival(prompt, output, max_new_tokens=limit, label=label))
    done = simulate(Workload("half short", arrivals, 40_000), SchedulerConfig(max_running=50))
    num_running = sum(served.ended_s - served.first_s for served in done.served) / done.elapsed_s
    assert num_running > 25
    assert done.counters.preemptions < 10


def scheduler_with(requests: list[Request], num_slots: int) -> tuple[Scheduler, FakeRunner]:
    config = SchedulerConfig(max_running=8, token_budget=256, policy="fcfs")
    scheduler = Scheduler(num_slots=num_slots, max_context=256, config=config)
    for made in requests:
        scheduler.add(made)
    return scheduler, FakeRunner(num_slots=num_slots, max_context=256)


def test_the_request_that_frees_enough_and_costs_least_to_redo_is_preempted():
    long, shared, short = request(1, 60, 8), request(2, 70, 8), request(3, 20, 8)
    shared.tokens[:60] = 1  # almost all of it is the first one's too
    scheduler, runner = scheduler_with([long, shared, short], 200)
    for _ in range(3):
        batch = scheduler.schedule()
        assert batch is not None
        scheduler.complete(run_batch(runner, batch))
    assert all(r.status is Status.RUNNING for r in (long, shared, short))
    assert [scheduler.memory.redo_tokens(r) for r in (long, shared, short)] == [
        2,
        11,
        22,
    ]  # it waited for the first one
    scheduler._preempt_one(missing=5)
    assert shared.status is Status.WAITING
    assert [scheduler.memory.redo_tokens(r) for r in (long, short)] == [62, 22]
    scheduler._preempt_one(missing=1000)
    assert long.status is Status.WAITING  # it frees most
    assert short.status is Status.RUNNING


def test_a_preempted_request_keeps_its_tokens_forced_tokens_and_place():
    first, second, third = (request(number, 20, 30) for number in (1, 2, 3))
    scheduler, runner = scheduler_with([first, second, third], 200)
    for _ in range(4):
        batch = scheduler.schedule()
        assert batch is not None
        scheduler.complete(run_batch(runner, batch))
    scheduler.replace_output(second, second.num_generated, [5, 6])  # a grammar forces them
    streamed = second.tokens[: second.num_tokens].tolist()
    scheduler.preempt(third)
    scheduler.preempt(second)
    late = request(4, 20, 30)
    scheduler.add(late)
    assert second.tokens[: second.num_tokens].tolist() == streamed
    batch = scheduler.schedule()
    assert batch is not None
    assert list(scheduler.running) == [1, 2, 3, 4]  # in order of arrival, before who came later
    assert second.num_shared == len(streamed) - 3  # all computed tokens are still there
    assert batch.query_lens[batch.req_rows.tolist().index(second.req_row)] == 3


def test_a_pool_of_half_the_needed_size_costs_little_and_loses_nothing():
    arrivals = unshared(num_requests=100, prompt=60, output=120)
    pool = 16 * 180
    once, twice, often = (
        simulate(Workload("w", arrivals, pool), SchedulerConfig(max_running=16 * times))
        for times in (1, 2, 8)
    )
    for result in (once, twice, often):
        assert result.counters.generated_tokens == sum(len(a.output) for a in arrivals)
    # Simulated time, the same everywhere.
    assert twice.elapsed_s < once.elapsed_s / 0.8
    assert often.elapsed_s < once.elapsed_s / 0.8
    # No thrashing: recomputation is a small part of the work.
    assert often.counters.preemptions < len(arrivals)
    assert often.counters.computed_tokens < 1.1 * once.counters.computed_tokens


def test_a_hint_on_output_goes_before_the_lengths_of_other_requests():
    reserve = OutputReserve()
    hinted, unhinted = request(1, 10, 100), request(2, 10, 100)
    hinted.origin = replace(hinted.origin, output_tokens=20)
    assert (reserve.expected(hinted), reserve.expected(unhinted)) == (20, 50)
    hinted.num_tokens += 15
    assert reserve.expected(hinted) == MIN_RESERVED  # a little is left for a request beyond its hint
    hinted.origin = replace(hinted.origin, output_tokens=1000)
    assert reserve.expected(hinted) == 85
