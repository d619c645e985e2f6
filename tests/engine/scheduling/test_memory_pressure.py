"""A full pool: how much is reserved, which request is preempted, and that no token is lost or repeated."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from agentflow.engine.fake_runner import FakeRunner
from agentflow.engine.request import Request, Status
from agentflow.engine.scheduling.admission import MIN_RESERVED, OutputReserve
from agentflow.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from agentflow.engine.simulator.simulation import simulate
from agentflow.engine.simulator.workload import Workload, unshared
from agentflow.protocol.sampling import SamplingParams


def request(number: int, size: int, count: int, **kwargs) -> Request:
    tokens = np.full(size, number, dtype=np.int32)
    return Request.create(number, tokens, count, SamplingParams(), **kwargs)


running = st.lists(
    st.tuples(st.integers(1, 30), st.integers(0, 30), st.integers(1, 40), st.integers(0, 29)), max_size=8
)


@given(running)
def test_the_need_at_the_worst_moment_is_that_of_a_replay(rows):
    """The reference: all requests take one slot in each step and free theirs at their end."""
    reserve = OutputReserve()
    reserve.used_fraction = 1.0
    reserve._update()
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
    worst = sum(own.values()) - taken if requests else 0
    alive = set(left)
    for _ in range(100):
        for number in alive:
            own[number] += 1
            left[number] -= 1
        worst = max(worst, sum(own[number] for number in alive) - taken)
        alive = {number for number in alive if left[number]}
    assert reserve.need_at_peak(requests) == max(0, worst)
    assert reserve.need_at_peak(requests) <= sum(map(reserve.need, requests))


def test_the_share_of_the_limit_that_is_used_is_learned():
    reserve = OutputReserve()
    for number in range(200):
        short = request(number, 5, 100)
        short.num_tokens += 10
        reserve.finished(short)
    assert 0.09 < reserve.used_fraction < 0.12
    assert reserve.expected(request(1, 5, 1000)) < 130
    reserve.retracted()
    assert reserve.expected(request(1, 5, 1000)) > 300  # careful for a while
    for _ in range(1000):
        reserve.stepped()
    assert reserve.expected(request(1, 5, 1000)) < 130


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
        scheduler.complete(runner.run(batch))
    assert all(r.status is Status.RUNNING for r in (long, shared, short))
    assert [scheduler.memory.redo_tokens(r) for r in (long, shared, short)] == [
        2,
        11,
        22,
    ]  # it waited for the first one
    scheduler._retract_one(missing=5)
    assert shared.status is Status.WAITING
    assert [scheduler.memory.redo_tokens(r) for r in (long, short)] == [62, 22]
    scheduler._retract_one(missing=1000)
    assert long.status is Status.WAITING  # it frees most
    assert short.status is Status.RUNNING


def test_a_preempted_request_keeps_its_tokens_forced_tokens_and_place():
    first, second, third = (request(number, 20, 30) for number in (1, 2, 3))
    scheduler, runner = scheduler_with([first, second, third], 200)
    for _ in range(4):
        batch = scheduler.schedule()
        assert batch is not None
        scheduler.complete(runner.run(batch))
    scheduler.replace_output(second, second.num_generated, [5, 6])  # a grammar forces them
    streamed = second.tokens[: second.num_tokens].tolist()
    scheduler.retract(third)
    scheduler.retract(second)
    late = request(4, 20, 30)
    scheduler.add(late)
    assert second.tokens[: second.num_tokens].tolist() == streamed
    batch = scheduler.schedule()
    assert batch is not None
    assert list(scheduler.running) == [1, 2, 3, 4]  # in order of arrival, before who came later
    assert second.num_shared == len(streamed) - 3  # what was computed is all still there
    assert batch.query_lens[batch.req_rows.tolist().index(second.req_row)] == 3


def test_a_pool_of_half_the_needed_size_costs_little_and_loses_nothing():
    arrivals = unshared(num_requests=200, prompt=60, output=120)
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
    # No thrash: what is redone is a small part of the work.
    assert often.counters.retractions < len(arrivals)
    assert often.counters.computed_tokens < 1.1 * once.counters.computed_tokens


def test_what_a_program_expects_goes_before_what_others_used():
    reserve = OutputReserve()
    hinted, unhinted = request(1, 10, 100), request(2, 10, 100)
    hinted.expected_output = 20
    assert (reserve.expected(hinted), reserve.expected(unhinted)) == (20, 50)
    hinted.num_tokens += 15
    assert reserve.expected(hinted) == MIN_RESERVED  # a little is left for a request beyond its hint
    hinted.expected_output = 1000
    assert reserve.expected(hinted) == 85
