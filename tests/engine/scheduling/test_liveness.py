"""The tokens of open states are evicted last, are not given to new requests shortly before their use (if
there are many, or the batch is well filled), and are ordinary cache when the states end or are forgotten."""

import itertools
import math
import time
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.counted_lines import counted_lines
from support.engine.requests import request_of

from agentflow.engine.cache.nodes import PrefixMatch
from agentflow.engine.cache.radix_cache import RadixCache
from agentflow.engine.cache.token_run import token_run
from agentflow.engine.request import Request, Status
from agentflow.engine.runner import run_batch
from agentflow.engine.scheduling import liveness
from agentflow.engine.scheduling.liveness import Liveness
from agentflow.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from agentflow.engine.simulator.fake_runner import FakeRunner
from agentflow.protocol.sampling import SamplingParams


def insert(cache: RadixCache, tokens: list[int], slots: list[int]) -> PrefixMatch:
    run = token_run(np.array(tokens, dtype=np.int32))
    match, _ = cache.extend(cache.match(None, b""), None, run, np.array(slots, dtype=np.int32))
    return match


def test_tokens_of_an_open_state_are_evicted_last_until_it_closes():
    cache = RadixCache()
    live = Liveness(cache, num_slots=100)
    live.refresh("state", insert(cache, [1, 1], [0, 1]), num_computed=2, step=1)
    insert(cache, [2, 2], [2, 3])
    assert cache.evict(2).tolist() == [2, 3]  # though it was used later
    insert(cache, [3, 3], [4, 5])
    live.close("state")
    live.close("state")
    assert cache.evict(2).tolist() == [0, 1]


def test_a_state_that_did_nothing_for_long_is_forgotten():
    cache = RadixCache()
    live = Liveness(cache, num_slots=100)
    live.refresh("old", insert(cache, [1], [0]), num_computed=0, step=1)
    live.refresh("new", insert(cache, [2], [1]), num_computed=300, step=2)
    live.expire(100 * liveness.EXPIRES_AFTER_POOLS)
    assert len(live) == 2
    live.expire(100 * liveness.EXPIRES_AFTER_POOLS + 1)
    assert len(live) == 1
    assert cache.evict(1).tolist() == [0]


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("is_forgotten", [False, True])
def test_f37_a_step_handles_some_of_many_states_that_are_overdue_or_forgotten(is_forgotten):
    num_lines = {}
    for num_states in (600, 2400):
        clock, cache = Clock(), RadixCache()
        live = Liveness(cache, num_slots=10_000, clock=clock)
        for state in range(num_states):
            live.refresh(state, insert(cache, [state], [state]), num_computed=0, step=1)
        clock.now += 1000.0
        num_computed = 10_000 * liveness.EXPIRES_AFTER_POOLS + 1 if is_forgotten else 0
        with counted_lines() as lines:
            live.expire(num_computed)
        num_lines[num_states] = lines.num
        for _ in range(num_states // liveness.MAX_EXPIRED):
            live.expire(num_computed)
        assert len(live) == (0 if is_forgotten else num_states)
        with counted_lines() as lines:
            live.expire(num_computed)
        assert lines.num < 20  # all are expected later, or gone
    assert num_lines[2400] < 1.5 * num_lines[600]


class Ends:
    """States a, b, …, each with one cached token, whose slot is the number of the letter."""

    def __init__(self, states: str) -> None:
        self.states = states
        self.cache, self.clock = RadixCache(), Clock()
        self.live = Liveness(self.cache, num_slots=100, clock=self.clock)
        self.ends = {state: insert(self.cache, [number], [number]) for number, state in enumerate(states)}
        for state in states:
            self.end(state)

    def end(self, state: str) -> None:
        self.live.refresh(state, self.ends[state], num_computed=0, step=1)

    def turn(self, state: str, gap_s: float) -> None:
        """The client takes its time, and another request runs in no time."""
        self.clock.now += gap_s
        self.live.arrived(state)
        self.end(state)

    def evicted(self) -> str:
        """The states in the order in which they lose their tokens."""
        self.live.expire(0)
        order = [self.cache.evict(1).tolist()[0] for _ in self.states]
        return "".join(self.states[number] for number in order)


def test_the_state_that_continues_last_loses_its_tokens_first():
    ends = Ends("abcd")
    ends.live.expect("a", None, 7.0)
    ends.live.expect("b", None, 9.0)
    ends.live.expect("c", None, 0.5)
    ends.live.arrived("d")
    ends.live.expect("unknown", None, 1.0)
    assert ends.evicted() == "bacd"


def test_a_turn_that_is_written_in_another_way_goes_first():
    cache, clock = RadixCache(), Clock()
    live = Liveness(cache, num_slots=100, clock=clock)
    insert(cache, [9], [9])
    live.refresh("state", insert(cache, [1, 2, 3], [1, 2, 3]), num_computed=3, step=1)
    live.arrived("state")
    live.refresh("state", insert(cache, [1, 4], [1, 4]), num_computed=4, step=2)
    assert cache.evict(3).tolist() == [2, 3, 9]
    cache.check()


def test_the_answers_of_a_state_to_requests_at_the_same_time_are_all_kept():
    cache, clock = RadixCache(), Clock()
    live = Liveness(cache, num_slots=100, clock=clock)
    insert(cache, [9], [9])
    for _ in range(2):
        live.arrived("state")
    for number in (2, 3):
        clock.now += 1.0
        live.refresh("state", insert(cache, [1, number], [1, number]), num_computed=2, step=1)
    assert cache.evict(2).tolist() == [9, 2]


@pytest.mark.parametrize(("is_dropped", "evicted"), [(True, [2, 3, 0]), (False, [0, 2, 3])])
def test_a_dropped_branch_goes_first_up_to_what_others_need(is_dropped: bool, evicted: list[int]):
    cache = RadixCache()
    live = Liveness(cache, num_slots=100)
    insert(cache, [0], [0])
    live.refresh("parent", insert(cache, [1], [1]), num_computed=1, step=1)
    live.refresh("branch", insert(cache, [1, 2], [1, 2]), num_computed=2, step=2)
    live.refresh("branch", insert(cache, [1, 2, 3], [1, 2, 3]), num_computed=3, step=3)
    live.close("branch", is_dropped=is_dropped)
    freed = [cache.evict(1).tolist()[0] for _ in range(3)]
    assert (sorted(freed[:2]) + freed[2:]) == evicted if is_dropped else freed[:1] == evicted[:1]
    cache.check()


def test_a_dropped_branch_that_is_used_again_is_ordinary_cache():
    cache = RadixCache()
    live = Liveness(cache, num_slots=100)
    live.refresh("branch", insert(cache, [1, 2], [1, 2]), num_computed=2, step=2)
    insert(cache, [0], [0])
    live.close("branch", is_dropped=True)
    insert(cache, [1, 2], [1, 2])
    assert cache.evict(1).tolist() == [0]


def test_a_state_with_more_steps_to_go_loses_its_tokens_first():
    ends = Ends("abc")
    ends.live.arrived("c")
    ends.clock.now += 2.0
    ends.end("c")  # a request takes some time
    ends.live.expect("a", 2, None)
    ends.live.expect("b", 3, None)
    ends.live.expect("c", 1, None)
    assert ends.evicted() == "bac"


def test_the_earlier_times_of_a_client_are_expected_again():
    ends = Ends("abc")
    for state, gap_s in (("c", 2.0), ("a", 6.0), ("b", 22.0)):
        ends.turn(state, gap_s)
    for state in "abc":
        ends.live.expect(state, None, None)
    assert ends.evicted() == "bac"


def test_two_requests_of_a_state_at_the_same_time_count_once_for_the_time_of_requests():
    ends = Ends("ab")
    ends.live.arrived("a")
    ends.clock.now += 10.0
    ends.live.arrived("a")
    ends.end("a")
    ends.end("a")
    ends.live.expect("a", 2, None)
    ends.live.expect("b", None, 4.5)
    assert ends.evicted() == "ab"


def test_a_request_next_to_another_one_of_its_state_does_not_count_for_the_time_between_requests():
    ends = Ends("ab")
    ends.turn("a", 9.0)
    ends.turn("b", 9.0)
    ends.live.arrived("a")
    ends.clock.now += 50.0
    ends.live.arrived("a")
    ends.end("a")
    ends.live.expect("a", None, None)
    ends.live.expect("b", None, 20.0)
    assert ends.evicted() == "ba"


def test_a_state_that_joins_a_paused_program_loses_its_tokens_first():
    ends = Ends("abc")
    ends.live.pause(("", 1))
    ends.live.refresh("c", ends.ends["c"], num_computed=0, step=1, program=("", 1))
    assert ends.evicted() == "cab"


def test_a_state_that_is_long_overdue_comes_after_others():
    ends = Ends("ab")
    ends.live.expect("a", None, 1.0)
    ends.clock.now += 300.0
    ends.end("b")
    ends.live.expect("b", None, 100.0)
    assert ends.evicted() == "ab"


def test_a_request_that_leaves_the_queue_no_longer_protects_its_state():
    ends = Ends("ab")
    ends.turn("b", 5.0)
    ends.turn("a", 50.0)
    ends.turn("b", 1.0)
    ends.live.arrived("a")
    ends.live.departed("a")
    ends.live.departed("b")
    assert ends.evicted() == "ab"


def test_states_are_bounded_by_the_pool():
    cache = RadixCache()
    live = Liveness(cache, num_slots=3)
    for number in range(10):
        live.refresh(number, insert(cache, [number], [number]), num_computed=0, step=1)
    assert len(live) == 3
    assert sum(node.keeps for node in cache.nodes()) == 3


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abc"),
            st.lists(st.integers(0, 1), min_size=1, max_size=6),
            st.integers(0, 3),
            st.booleans(),
        ),
        max_size=20,
    )
)
def test_tokens_that_will_be_needed_are_counted_once_each(plan):
    cache = RadixCache()
    live = Liveness(cache, num_slots=1000)
    slot = 0
    recent: dict[str, tuple[int, tuple[int, ...]]] = {}
    for step, (state, tokens, evicted, is_closed) in enumerate(plan, 1):
        match = insert(cache, tokens, list(range(slot, slot + len(tokens))))
        slot += len(tokens)
        live.refresh(state, match, num_computed=0, step=step)
        recent[state] = step, tuple(tokens)
        if is_closed:
            live.close(state)
            del recent[state]
        cache.evict(evicted)
        needed = set()
        for at, run in recent.values():
            if step - at < liveness.EXPECTED_STEPS:
                still = cache.peek(None, token_run(np.array(run, dtype=np.int32)))
                needed |= {run[:length] for length in range(1, still + 1)}
        # A state whose end was evicted expects at most its tokens that are still cached.
        assert live.num_expected(step) <= len(needed)
        if not evicted and all(not other[2] for other in plan):
            assert live.num_expected(step) == len(needed)


class Scheduled:
    """A scheduler with a runner."""

    def __init__(
        self,
        *,
        num_slots: int,
        max_context: int,
        max_running: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        config = SchedulerConfig(max_running=max_running)
        self.scheduler = Scheduler(num_slots=num_slots, max_context=max_context, config=config, clock=clock)
        self._runner = FakeRunner(num_slots=num_slots, max_context=max_context)

    def request(self, number: int, tokens: list[int], count: int, **kwargs) -> Request:
        made = request_of(number, np.array(tokens, dtype=np.int32), count, SamplingParams(), **kwargs)
        self.scheduler.add(made)
        return made

    def step(self) -> None:
        """Runs a batch. Requests with all of their tokens are finished."""
        batch = self.scheduler.schedule()
        assert batch is not None
        for result in self.scheduler.complete(run_batch(self._runner, batch)):
            if result.request.num_generated == result.request.max_new_tokens:
                self.scheduler.finish(result.request)


def test_f37_the_tokens_of_a_preempted_request_are_needed_soon():
    """The pauses of its state before do not matter. Other states continue in ten seconds."""
    clock = Clock()
    scheduled = Scheduled(num_slots=64, max_context=64, max_running=3, clock=clock)
    scheduler = scheduled.scheduler
    for _ in range(2):
        clock.now += 100.0
        scheduled.request(1, [1] * 20, 1, state=1)
        scheduled.step()
    scheduled.request(2, [2] * 20, 1, state=2)
    scheduled.step()
    scheduler.update_hint(2, 0, 0, "latency", None, 10.0)
    again = scheduled.request(3, [1] * 20 + [3], 4, state=1)
    scheduled.step()
    scheduler.preempt(again)
    scheduler.memory.cache.evict(20)
    assert scheduler.memory.peek(again.cache_key, again.reusable_run()) == 21
    assert scheduler.memory.liveness.late_at(1, 0.0) == math.inf
    scheduler.release(again)
    assert scheduler.memory.liveness.late_at(1, 0.0) < math.inf


@pytest.mark.parametrize("num_running", [1, 2])
def test_a_new_request_waits_for_the_next_turn_of_an_open_state_where_the_batch_is_filled(num_running):
    scheduled = Scheduled(num_slots=64, max_context=64, max_running=3)
    request, step = scheduled.request, scheduled.step
    of_state = request(1, [1] * 30, 1, state="talk")
    running = [request(number, [number] * 4, 8) for number in range(2, 2 + num_running)]
    step()
    assert of_state.status is Status.FINISHED
    new = request(9, [9] * 28, 1)
    for _ in range(liveness.EXPECTED_STEPS):
        assert new.status is Status.WAITING or num_running == 1
        step()
    step()
    assert new.status is not Status.WAITING  # the state's tokens had to go
    assert all(one.status is Status.RUNNING for one in running)


@pytest.mark.parametrize(("size", "waits"), [(240, True), (60, False)])
def test_f46a_a_long_prompt_does_not_evict_tokens_that_an_open_state_is_about_to_need(size, waits):
    """The batch has room. A short prompt, which costs the state few tokens, starts all the same."""
    scheduled = Scheduled(num_slots=320, max_context=512, max_running=8)
    request, step = scheduled.request, scheduled.step
    other = request(1, [1] * 4, 30)
    prefix = request(2, [2] * 250, 0, state="program")
    step()
    scheduled.scheduler.release(prefix)
    other_program = request(3, [3] * size, 1)
    step()
    assert (other_program.status is Status.WAITING) == waits
    thought = request(4, [2] * 250 + [4], 4, state="thought")
    step()
    assert thought.status is Status.RUNNING
    assert not waits or thought.num_cached == 250
    while other.status is not Status.FINISHED:
        step()
    assert other_program.status is Status.FINISHED


class Turns:
    """Two states, 1 and 2, with four cached tokens each in a pool of ten."""

    def __init__(self) -> None:
        self._clock = Clock()
        self._scheduled = Scheduled(num_slots=10, max_context=64, max_running=3, clock=self._clock)
        self._numbers = itertools.count(1)

    def run(self, state: int, after_s: float = 0.0, *, queued_s: float = 0.0, is_ahead: bool = False) -> None:
        """A request of the state comes after some time, and then waits in the queue."""
        self._clock.now += after_s
        tokens = [state] * 4
        self._scheduled.request(next(self._numbers), tokens, 0, state=state, is_ahead=is_ahead)
        self._clock.now += queued_s
        self._scheduled.step()

    def expect(self, state: int, steps: int | None = None, returns_s: float | None = None) -> None:
        self._scheduled.scheduler.update_hint(state, 0, 0, "latency", steps, returns_s)

    def first_evicted(self) -> int:
        """The state that loses its tokens to other requests."""
        self._scheduled.request(next(self._numbers), [9] * 6, 0)
        self._scheduled.step()
        returned = self._scheduled.request(next(self._numbers), [1] * 5, 0)
        self._scheduled.step()
        return 2 if returned.num_cached else 1


def test_a_request_that_computes_ahead_does_not_continue_its_state():
    turns = Turns()
    turns.run(1)
    for _ in range(3):
        turns.run(1, 20.0)
        turns.run(1, queued_s=1.0, is_ahead=True)
    turns.run(2)
    turns.run(2, 15.0)
    for state in (1, 2):
        turns.expect(state)
    assert turns.first_evicted() == 1


def test_the_time_of_requests_that_compute_ahead_does_not_count():
    turns = Turns()
    turns.run(1)
    turns.run(2)
    turns.run(1, queued_s=10.0, is_ahead=True)
    turns.expect(1, steps=2)
    turns.expect(2, returns_s=3.0)
    assert turns.first_evicted() == 2


def test_the_time_from_tokens_computed_ahead_to_the_first_request_is_not_one_between_requests():
    turns = Turns()
    turns.run(1, is_ahead=True)
    turns.run(1, 30.0)
    turns.run(2)
    turns.run(2, 15.0)
    for state in (1, 2):
        turns.expect(state)
    assert turns.first_evicted() == 2


def test_a_state_is_expected_when_it_was_before_its_tokens_were_computed_ahead():
    turns = Turns()
    turns.run(1)
    turns.run(2)
    turns.expect(1, returns_s=50.0)
    turns.expect(2, returns_s=40.0)
    turns.run(1, is_ahead=True)
    assert turns.first_evicted() == 1


def test_f37_the_tokens_that_states_need_next_are_counted_once_for_a_step_with_room() -> None:
    """The number of requests that end or start in the step does not matter."""

    def work(num: int) -> int:
        config = SchedulerConfig(max_running=2 * num, token_budget=200 * num)
        scheduler = Scheduler(num_slots=200 * num, max_context=100, config=config)
        runner = FakeRunner(num_slots=200 * num, max_context=100)
        scheduler.add(request_of(10 * num, [10 * num] * 5, 50, state=10 * num))
        for number in range(num):
            scheduler.add(request_of(number, [number] * 8, 2, state=number + 1))
        for _ in range(2):
            for row in scheduler.complete(run_batch(runner, scheduler.schedule())):
                if row.request.num_generated == row.request.max_new_tokens:
                    scheduler.finish(row.request)
        for number in range(num, 2 * num):
            scheduler.add(request_of(number, [number] * 8, 2, state=number + 1))
        assert len(scheduler.running) == 1
        with counted_lines() as lines:
            scheduler.schedule()
        assert len(scheduler.running) == num + 1
        return lines.num

    assert work(200) < 3 * work(100)


def test_f37_tokens_that_states_need_next_count_also_after_a_request_of_one_was_held_back() -> None:
    """Its own state's tokens do not count for it, but for the next request."""
    config = SchedulerConfig(max_running=3, token_budget=1000)
    scheduler = Scheduler(num_slots=200, max_context=190, config=config)
    runner = FakeRunner(num_slots=200, max_context=190)
    scheduler.add(request_of(1, [1] * 4, 8))
    scheduler.add(request_of(2, [2] * 4, 8))
    for number, num_tokens in (3, 41), (4, 29):
        scheduler.add(request_of(number, [number] * num_tokens, 1, state=number))
        for row in scheduler.complete(run_batch(runner, scheduler.schedule())):
            if row.request.num_generated == row.request.max_new_tokens:
                scheduler.finish(row.request)
    scheduler.add(request_of(5, [3] * 41 + [5] * 126, 2, state=3))  # would evict tokens of state 4
    scheduler.add(request_of(6, [6] * 140, 2))  # would evict tokens of one of the states
    scheduler.schedule()
    assert [*scheduler.running] == [1, 2]
    assert scheduler.memory.num_evicted == 0
