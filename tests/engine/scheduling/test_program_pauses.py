"""Whole programs are paused while the states of a tenant need more than the pool, and resumed in time."""

import itertools
import math
import random
from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from support.counted_lines import counted_lines
from support.engine.requests import request_of
from support.examples import examples

from agentflow.engine.request import Request, Status
from agentflow.engine.runner import run_batch
from agentflow.engine.scheduling import program_pauses
from agentflow.engine.scheduling.policies.fair_policy import FairLongestPrefix
from agentflow.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from agentflow.engine.simulator.cost_model import CostModel
from agentflow.engine.simulator.fake_runner import FakeRunner
from agentflow.engine.simulator.generators import agent_sessions
from agentflow.engine.simulator.simulation import Simulated, simulate
from agentflow.engine.simulator.summary import program_times
from agentflow.engine.simulator.workload import Arrival, Workload

SLOW = CostModel(base_s=5e-3, row_s=2e-4, logits_s=0, read_s=0, pair_s=1.2e-7)
"""Long prompts take seconds, about as long as the tools of ``sessions``."""
FULL = 14_000
"""Tokens of a session at its end."""


def sessions(num_sessions: int, **kwargs) -> list[Arrival]:
    return agent_sessions(num_sessions=num_sessions, turns=16, first=1200, last=FULL, output=100, **kwargs)


def run(arrivals: list[Arrival], pool: int, policy: str = "fair-lpm") -> Simulated:
    config = SchedulerConfig(max_running=8, token_budget=256, policy=policy)
    return simulate(Workload("w", arrivals, pool), config, cost=SLOW, max_context=2 * FULL)


def mean_s(done: Simulated) -> float:
    return float(np.mean([*program_times(done).values()]))


def num_paused(monkeypatch: pytest.MonkeyPatch) -> Counter:
    """Counts how often each program is paused from now on."""
    counter: Counter = Counter()
    pause = FairLongestPrefix.pause

    def counting(self, tenant: str, program: int) -> None:
        counter[tenant, program] += 1
        pause(self, tenant, program)

    monkeypatch.setattr(FairLongestPrefix, "pause", counting)
    return counter


class ByHand:
    """A scheduler with a pool of 64 tokens, whose requests run one after the other. A second passes at each
    look at the clock."""

    def __init__(self) -> None:
        times = itertools.count()
        config = SchedulerConfig(max_running=4)
        self.scheduler = Scheduler(
            num_slots=64, max_context=64, config=config, clock=lambda: float(next(times))
        )
        self.runner = FakeRunner(num_slots=64, max_context=64)
        self.num_requests = 0

    def run_request(
        self,
        size: int,
        state: int,
        program: int,
        *,
        moves_to: int | None = None,
        fill: int | None = None,
        **origin,
    ) -> None:
        """Runs a request whose tokens are ``fill``, or the number of the state."""
        prompt = np.full(size, state if fill is None else fill, dtype=np.int32)
        self.scheduler.add(request_of(self.num_requests, prompt, 2, state=state, program=program, **origin))
        self.num_requests += 1
        for _ in range(2):
            batch = self.scheduler.schedule()
            assert batch is not None
            if moves_to is not None:
                self.scheduler.update_hint(state, moves_to, 0, "latency")
            took_s = 0.01 + 0.001 * len(batch.token_ids)
            for row in self.scheduler.complete(run_batch(self.runner, batch), took_s):
                if row.request.num_generated == 2:
                    self.scheduler.finish(row.request)


def test_sessions_that_need_twice_the_pool_end_sooner(monkeypatch):
    arrivals = sessions(3, per_s=0.2)
    pool = 3 * FULL // 2
    first_come = run([replace(one, state="") for one in arrivals], pool, "fcfs")
    monkeypatch.setattr(program_pauses, "THRASHING", math.inf)
    unpaused = run(arrivals, pool)
    monkeypatch.undo()
    paused = num_paused(monkeypatch)
    ours = run(arrivals, pool)
    assert paused
    assert mean_s(ours) < mean_s(unpaused) / 1.2
    assert mean_s(ours) < mean_s(first_come) / 1.4
    assert ours.counters.computed_tokens < unpaused.counters.computed_tokens / 1.5
    assert len(ours.served) == len(arrivals)


def test_sessions_that_fit_are_not_paused(monkeypatch):
    paused = num_paused(monkeypatch)
    run(sessions(4), 5 * FULL)
    assert not paused


def test_sessions_of_people_are_not_paused(monkeypatch):
    """Their tokens are computed again faster than they read."""
    paused = num_paused(monkeypatch)
    done = run(sessions(4, least_gap_s=300.0, most_gap_s=600.0), 2 * FULL)
    assert done.counters.evicted_tokens > FULL
    assert not paused


def test_requests_without_a_program_are_not_paused(monkeypatch):
    paused = num_paused(monkeypatch)
    done = run([replace(one, program="") for one in sessions(4, per_s=0.5)], 2 * FULL)
    assert done.counters.evicted_tokens > FULL
    assert not paused


def test_a_program_is_resumed_in_time_if_nothing_else_happens(monkeypatch):
    """The tool of the other session takes an hour."""
    monkeypatch.setattr(program_pauses, "PAUSED_S", 20.0)
    paused = num_paused(monkeypatch)
    arrivals = sessions(2, per_s=0.5)
    last = max(index for index, one in enumerate(arrivals) if one.program == "agent 0")
    arrivals[last] = replace(arrivals[last], at_s=3600.0)
    done = run(arrivals, FULL + 1000)
    assert paused
    waits = [one.first_s - one.arrived_s for one in done.served]
    assert 15 < max(waits) < 40
    assert program_times(done)["agent 1"] < 1000


def test_a_program_does_not_wait_for_another_one_that_does_not_come_back(monkeypatch):
    """The tool of the other session takes an hour. Tools take at most 10 s before."""
    monkeypatch.setattr(program_pauses, "PAUSED_S", math.inf)
    paused = num_paused(monkeypatch)
    arrivals = sessions(2, per_s=0.5)
    last = max(index for index, one in enumerate(arrivals) if one.program == "agent 0")
    arrivals[last] = replace(arrivals[last], at_s=3600.0)
    done = run(arrivals, FULL + 1000)
    assert paused
    assert program_times(done)["agent 1"] < 1000


def test_f37_a_program_does_not_wait_for_one_whose_request_was_cancelled_in_the_queue(monkeypatch):
    """The paused one has no room with a tenth of the pool, and nothing else ever runs."""
    monkeypatch.setattr(program_pauses, "THRASHING", -1.0)
    monkeypatch.setattr(program_pauses, "COSTLY_GAPS", math.inf)
    steps, now = ByHand(), 0.0
    scheduler = steps.scheduler = Scheduler(
        num_slots=64, max_context=64, config=SchedulerConfig(max_running=1), clock=lambda: now
    )
    for _ in range(2):
        for size, state in [(58, 1), (20, 2)]:
            now += 1.0
            steps.run_request(size, state=state, program=state)
    assert scheduler.pauses.paused == [("", 1)]
    other = request_of(90, [9] * 3, 4)
    scheduler.add(other)
    scheduler.complete(run_batch(steps.runner, scheduler.schedule()))
    aside, waiting = (request_of(90 + n, [n] * 5, 2, state=n, program=n) for n in (1, 2))
    scheduler.add(aside)
    scheduler.add(waiting)
    now += 50.0
    assert scheduler.schedule() is not None
    assert waiting.status is Status.WAITING
    scheduler.discard()
    scheduler.release(waiting)
    scheduler.close_state(2)
    scheduler.release(other)
    assert scheduler.resumes_in_s == 0.0
    scheduler.schedule()
    assert aside.status is Status.RUNNING


def test_f37_a_program_of_a_lower_priority_is_paused_first(monkeypatch):
    """Requests that compute ahead have the lowest priority, but not their program."""
    monkeypatch.setattr(program_pauses, "THRASHING", -1.0)
    monkeypatch.setattr(program_pauses, "COSTLY_GAPS", math.inf)
    steps = ByHand()
    for _ in range(2):
        steps.run_request(10, state=1, program=1, priority=1)
        steps.run_request(20, state=2, program=2)
    steps.run_request(11, state=1, program=1, priority=-10, is_ahead=True)
    steps.run_request(50, state=4, program=0)
    assert steps.scheduler.pauses.paused == [("", 2)]


def test_shared_tokens_of_states_count_once_in_the_size_of_a_program(monkeypatch):
    """Program 1 has two states of 20 tokens, of which 18 are the same. Program 2 has 24."""
    monkeypatch.setattr(program_pauses, "THRASHING", -1.0)
    monkeypatch.setattr(program_pauses, "COSTLY_GAPS", math.inf)
    steps = ByHand()
    for _ in range(2):
        steps.run_request(18, state=11, program=1, fill=1)
        steps.run_request(18, state=12, program=1, fill=1)
        steps.run_request(24, state=2, program=2)
    steps.run_request(40, state=4, program=0)
    assert steps.scheduler.pauses.paused == [("", 1)]


def test_recomputation_of_one_tenant_pauses_no_program_of_another(monkeypatch):
    monkeypatch.setattr(program_pauses, "COSTLY_GAPS", math.inf)
    paused = num_paused(monkeypatch)
    greedy = [replace(one, tenant="greedy") for one in sessions(3, per_s=0.5)]
    people = [
        replace(one, tenant="people", after=None if one.after is None else one.after + len(greedy))
        for one in sessions(2, seed=9, least_gap_s=60.0, most_gap_s=120.0)
    ]
    run([*greedy, *people], 4 * FULL)
    assert {tenant for tenant, _ in paused} <= {"greedy"}


def test_a_tenant_pauses_its_own_programs_only(monkeypatch):
    paused = num_paused(monkeypatch)
    greedy = [replace(one, tenant="greedy") for one in sessions(4, per_s=0.5)]
    other = [
        replace(one, tenant="other", after=None if one.after is None else one.after + len(greedy))
        for one in sessions(1, seed=9)
    ]
    done = run([*greedy, *other], 3 * FULL)
    assert {tenant for tenant, _ in paused} == {"greedy"}
    alone = run(sessions(1, seed=9), 3 * FULL)
    of_other = [one for one in done.served if one.arrival.tenant == "other"]
    took_s = of_other[-1].ended_s - of_other[0].arrived_s
    assert took_s < 1.5 * next(iter(program_times(alone).values()))


def test_f37_a_paused_program_that_ends_slows_down_no_later_step(monkeypatch):
    """The next step is prepared during a step again, although no request of the program comes back."""
    monkeypatch.setattr(program_pauses, "THRASHING", -1.0)
    monkeypatch.setattr(program_pauses, "COSTLY_GAPS", math.inf)
    steps = ByHand()
    scheduler, run_request = steps.scheduler, steps.run_request
    for size, state in [(10, 1), (20, 2), (10, 1), (20, 2), (50, 4)]:
        run_request(size, state=state, program=state % 4)
    assert scheduler.pauses.paused
    for state in (1, 2, 4):
        scheduler.close_state(state)
    run_request(1, state=0, program=0)
    assert not scheduler.pauses.paused
    scheduler.add(request_of(99, [1], 8))
    assert scheduler.schedule() is not None
    assert scheduler.prepare() is not None


def test_a_program_is_not_busy_with_a_request_that_moved_to_another_one(monkeypatch):
    monkeypatch.setattr(program_pauses, "THRASHING", -1.0)
    monkeypatch.setattr(program_pauses, "COSTLY_GAPS", math.inf)
    steps = ByHand()
    scheduler, run_request = steps.scheduler, steps.run_request
    run_request(4, state=9, program=1, moves_to=3)
    scheduler.close_state(9)
    for size, state in [(10, 1), (20, 2), (10, 1), (20, 2)]:
        run_request(size, state=state, program=state)
    run_request(50, state=4, program=0)
    assert scheduler.pauses.paused == [("", 1)]


@pytest.mark.parametrize("paused_s", [50.0, math.inf])
def test_f37_many_programs_are_paused_and_resumed_with_few_looks_at_each(monkeypatch, paused_s):
    """In one step each. All programs but one are paused, because the whole pool is needed. They are resumed
    because the time is over, or because the other one does not come back."""
    monkeypatch.setattr(program_pauses, "THRASHING", -1.0)
    monkeypatch.setattr(program_pauses, "COSTLY_GAPS", math.inf)
    monkeypatch.setattr(program_pauses, "PAUSED_S", paused_s)

    def work(num_programs: int) -> tuple[int, int]:
        now, pool = 0.0, 16 * num_programs
        steps = ByHand()
        config = SchedulerConfig(max_running=4)
        steps.runner = FakeRunner(num_slots=pool, max_context=pool)
        scheduler = steps.scheduler = Scheduler(
            num_slots=pool, max_context=pool, config=config, clock=lambda: now
        )
        for _ in range(2):
            for program in range(1, num_programs + 1):
                now += 0.01
                steps.run_request(4 + program % 7, state=program, program=program)
        memory = scheduler.memory
        with counted_lines() as lines:
            slots = memory.allocate(pool)
        num_lines = lines.num
        assert len(scheduler.pauses.paused) == num_programs - 1
        now += 100.0
        with counted_lines() as lines:
            scheduler.pauses.resume()
        assert not scheduler.pauses.paused
        memory.slots.release(slots)
        return num_lines, lines.num

    (paused, resumed), (paused_more, resumed_more) = work(100), work(400)
    assert paused_more < 6 * paused
    assert resumed_more < 6 * resumed


def free(request: Request, match: int) -> bool:
    return False


def queued(number: int, size: int = 10, **origin) -> Request:
    made = request_of(number, np.full(size, number, dtype=np.int32), 1, **origin)
    made.arrival = number
    return made


def admit_next(policy: FairLongestPrefix) -> int | None:
    policy.start_step()
    chosen = policy.next([], free)
    if chosen is None:
        return None
    policy.admit(chosen)
    policy.charge(chosen, chosen.num_tokens)
    policy.finish(chosen)
    return chosen.id


def test_requests_of_a_paused_program_wait_aside_and_then_go_first():
    policy = FairLongestPrefix(lambda identity, run: 0, 64)
    for number, program in enumerate((1, 2, 1)):
        policy.add(queued(number, program=program))
    policy.pause("", 1)
    policy.add(queued(3, program=1))
    policy.add(queued(4, program=3))
    assert len(policy) == 5
    assert {request.id for request in policy} == set(range(5))
    assert admit_next(policy) == 1
    policy.resume("", 1)
    assert sorted(request.id for request in policy) == [0, 2, 3, 4]
    assert [admit_next(policy) for _ in range(5)] == [0, 2, 3, 4, None]
    assert not len(policy)


def work_of_a_pause(num: int) -> int:
    """The lines that the policy executes to pause a program with this many requests, to resume it, and to
    look for one of them that may start, while a running one computes the tokens that all need."""
    policy = FairLongestPrefix(lambda identity, run: 0, 64)
    policy.add(queued(0, program=2))
    policy.admit(next(iter(policy)))
    with counted_lines() as lines:
        policy.pause("", 1)
        for number in range(1, num + 1):
            policy.add(queued(number, program=1))
        policy.resume("", 1)
        policy.start_step()
        assert policy.next([], lambda request, match: True) is None
    return lines.num


def test_the_work_of_a_pause_grows_with_the_requests_not_with_their_square():
    assert work_of_a_pause(1_000) < 3 * work_of_a_pause(500)


@pytest.mark.parametrize("is_hinted", [True, False])
@pytest.mark.parametrize("order", [1, -1])
def test_f37_requests_aside_come_back_without_a_look_at_the_others(is_hinted, order):
    """One after the other, because they get another hint or their programs are resumed, the oldest first or
    last."""

    def work(num: int) -> int:
        policy = FairLongestPrefix(lambda identity, run: 0, 64)
        waiting = [queued(number, program=number + 1) for number in range(num)]
        for one in waiting:
            policy.add(one)
            policy.pause("", one.origin.program)
        with counted_lines() as lines:
            for one in waiting[::order]:
                if is_hinted:
                    policy.update_origin(one, structs.replace(one.origin, program=0))
                else:
                    policy.resume("", one.origin.program)
        assert [admit_next(policy) for _ in range(num)] == [*range(num)]
        return lines.num

    assert work(200) < 3 * work(100)


def test_a_program_of_a_tenant_without_requests_is_paused():
    policy = FairLongestPrefix(lambda identity, run: 0, 64)
    policy.pause("", 1)
    policy.add(queued(0, program=1))
    assert admit_next(policy) is None
    policy.resume("", 1)
    policy.resume("other", 1)
    assert admit_next(policy) == 0


@pytest.mark.parametrize("is_paused_first", [True, False])
def test_a_request_that_is_preempted_while_its_program_is_paused_waits_aside(is_paused_first):
    policy = FairLongestPrefix(lambda identity, run: 0, 64)
    running, other = queued(0, program=1), queued(1, program=2)
    for made in (running, other):
        policy.add(made)
    policy.admit(running)
    if is_paused_first:
        policy.pause("", 1)
    policy.restore(running)
    policy.pause("", 1)
    assert running in policy
    assert [admit_next(policy), admit_next(policy)] == [1, None]
    policy.remove(running)
    assert running not in policy


def test_a_request_that_leaves_a_paused_program_no_longer_waits_aside():
    policy = FairLongestPrefix(lambda identity, run: 0, 64)
    made = queued(0, program=1)
    policy.add(made)
    policy.pause("", 1)
    assert admit_next(policy) is None
    policy.update_origin(made, made.origin.at(2, 0, "latency"))
    assert admit_next(policy) == 0


@pytest.mark.parametrize("is_preempted", [True, False])
def test_f37_a_request_that_joins_a_paused_program_waits_aside(is_preempted):
    policy = FairLongestPrefix(lambda identity, run: 0, 64)
    made = queued(0, program=1)
    policy.add(made)
    if is_preempted:
        policy.admit(made)
        policy.restore(made)
    policy.pause("", 2)
    policy.update_origin(made, made.origin.at(2, 0, "latency"))
    assert admit_next(policy) is None
    policy.resume("", 2)
    assert admit_next(policy) == 0


MOVES = ["add", "add", "pause", "resume", "admit", "restore", "remove", "hint", "hint"]


@examples(100)
@given(seed=st.integers(0, 2**32))
def test_f37_requests_of_paused_programs_wait_aside_whatever_moves(seed):
    chance = random.Random(seed)
    policy = FairLongestPrefix(lambda identity, run: 0, 64)
    waiting: list[Request] = []
    running: list[Request] = []
    paused: set[int] = set()
    num_made = 0
    for _ in range(60):
        program, number = chance.randrange(3), chance.randrange(100)
        match chance.choice(MOVES):
            case "add":
                waiting.append(queued(num_made, program=program, task_group=num_made % 3))
                policy.add(waiting[-1])
                num_made += 1
            case "pause" if program:
                paused.add(program)
                policy.pause("", program)
            case "resume":
                paused.discard(program)
                policy.resume("", program)
            case "admit":
                policy.start_step()
                chosen = policy.next([], free)
                if chosen is not None:
                    waiting.remove(chosen)
                    running.append(chosen)
                    policy.admit(chosen)
            case "restore" if running:
                waiting.append(running.pop(number % len(running)))
                policy.restore(waiting[-1])
            case "remove" if waiting:
                policy.remove(waiting.pop(number % len(waiting)))
            case "hint" if waiting or running:
                one = [*waiting, *running][number % (len(waiting) + len(running))]
                policy.update_origin(one, one.origin.at(program, one.origin.task_group, "latency"))
        ready = [one for one in waiting if one.origin.program not in paused]
        assert {one.id for one in policy} == {one.id for one in waiting}
        assert policy.num_waiting == len(waiting)
        asked: list[Request] = []
        policy.start_step()
        policy.next([], lambda request, match, asked=asked: bool(asked.append(request)) or True)
        assert all(one in ready for one in asked)
        policy.start_step()
        assert (policy.next([], free) is not None) == bool(ready)
    for one in waiting:
        policy.remove(one)
    for one in running:
        policy.finish(one)
    assert ([*policy], policy.num_waiting, policy.num_tenants) == ([], 0, 0)


@pytest.mark.parametrize(("returns", "tenant"), [("resume", "a"), ("arrive", "a"), ("arrive", "c")])
def test_f37_no_tenant_gains_credit_while_requests_wait_aside(returns, tenant):
    """Neither the tenant whose requests wait aside nor a new one."""
    policy = FairLongestPrefix(lambda identity, run: 0, 64)
    policy.add(queued(0, tenant="a", program=1))
    policy.pause("a", 1)
    for number in range(1, 30):
        policy.add(queued(number, tenant="b"))
    for _ in range(20):
        admit_next(policy)
    policy.resume("a", 1) if returns == "resume" else None
    for number in range(30, 40):
        policy.add(queued(number, tenant=tenant))
    order = [admit_next(policy) for _ in range(10)]
    assert sum(number in range(1, 30) for number in order if number is not None) >= 4


@dataclass
class Session:
    """A program that continues its text after each request, when its tool has run."""

    number: int
    tenant: str
    sizes: list[tuple[int, int]]  # new tokens, and steps of the tool before them
    tokens: list[int]
    due: int = 0


plans = st.lists(
    st.tuples(
        st.sampled_from("aab"),
        st.lists(st.tuples(st.integers(15, 29), st.integers(0, 6)), min_size=4, max_size=8),
    ),
    min_size=4,
    max_size=8,
)


@examples(100)
@given(
    plan=plans,
    pool=st.integers(260, 360),
    pools=st.sampled_from([0.1, 0.3, 1]),
    paused_s=st.sampled_from([5.0, 30.0, math.inf]),
)
def test_no_program_is_paused_beyond_the_bound(plan, pool, pools, paused_s):
    """With much pausing: all programs end, none is paused for more than the docstring says, and none twice
    without a request between."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program_pauses, "THRASHING", -1.0)
        patch.setattr(program_pauses, "COSTLY_GAPS", math.inf)
        patch.setattr(program_pauses, "PAUSED_POOLS", pools)
        patch.setattr(program_pauses, "PAUSED_S", paused_s)
        now = 0.0
        config = SchedulerConfig(max_running=4, token_budget=32)
        scheduler = Scheduler(num_slots=pool, max_context=256, config=config, clock=lambda: now)
        runner = FakeRunner(num_slots=pool, max_context=256)
        found = [Session(n + 1, tenant, sizes, [n] * 4) for n, (tenant, sizes) in enumerate(plan)]
        left = {session.number: session for session in found}
        charged: Counter = Counter()  # tokens by tenant
        paused: dict[tuple, tuple[int, float]] = {}
        resumed: set[tuple] = set()
        step = 0
        while left:
            for session in [one for one in left.values() if one.due == step]:
                session.tokens += [session.number] * session.sizes.pop(0)[0]
                made = request_of(
                    session.number,
                    np.array(session.tokens, dtype=np.int32),
                    2,
                    tenant=session.tenant,
                    program=session.number,
                    state=session.number,
                )
                scheduler.add(made)
            step += 1
            now += 1.0
            batch = scheduler.schedule()
            keys = set(scheduler.pauses.paused)
            for key in paused.keys() - keys:
                del paused[key]
                resumed.add(key)
            for key in keys - paused.keys():
                assert key not in resumed
                paused[key] = charged[key[0]], now
            for _, since_s in paused.values():
                assert now - since_s <= paused_s + 1
            for key, (before, _) in paused.items():
                assert charged[key[0]] - before <= pools * pool + config.token_budget
            if batch is None:
                assert step < 10_000
                continue
            for row in scheduler.complete(run_batch(runner, batch), 1.0):
                request = row.request
                charged[request.tenant] += row.num_tokens
                if request.num_generated == request.max_new_tokens:
                    session = left[request.id]
                    session.tokens = request.tokens[: request.num_tokens].tolist()
                    scheduler.finish(request)
                    resumed.discard((request.tenant, session.number))
                    if session.sizes:
                        session.due = step + session.sizes[0][1]
                    else:
                        scheduler.close_state(session.number)
                        del left[session.number]
        scheduler.check_idle()
