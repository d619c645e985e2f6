"""``fair-lpm`` with programs: the place that a program's requests keep, levels, groups, and requests that get
another hint while they wait."""

import sys
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from support.engine.requests import request_of
from support.examples import examples

from agentflow.engine.request import AWAITED_GROUPS, PATIENT_GROUPS, Request, Status
from agentflow.engine.runner import run_batch
from agentflow.engine.scheduling.policies import fair_policy, tenant_queue
from agentflow.engine.scheduling.policies.fair_policy import FairLongestPrefix
from agentflow.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from agentflow.engine.simulator.fake_runner import FakeRunner

TOKEN_BUDGET = 256
LEVEL_TOKENS = tenant_queue.LEVEL_BATCHES * TOKEN_BUDGET


def free(request, match) -> bool:
    return False


def peek(identity, run: bytes) -> int:
    """The first token of a prompt is the number of its cached tokens."""
    return min(int(np.frombuffer(run, np.int32)[0]), len(run) // 4) if run else 0


def policy() -> FairLongestPrefix:
    return FairLongestPrefix(peek, TOKEN_BUDGET)


def request(number: int, cached: int = 0, size: int = 100, **origin) -> Request:
    tokens = np.full(size, number + 1000, dtype=np.int32)
    tokens[0] = cached
    made = request_of(number, tokens, 1, **origin)
    made.arrival = number
    return made


def admit_next(policy: FairLongestPrefix) -> Request | None:
    policy.start_step()
    chosen = policy.next([], free)
    if chosen is not None:
        policy.admit(chosen)
        policy.finish(chosen)
    return chosen


def order_of(policy: FairLongestPrefix) -> list[int]:
    order = []
    while (chosen := admit_next(policy)) is not None:
        order.append(chosen.id)
    return order


def begin(policy: FairLongestPrefix, made: Request) -> None:
    """The only waiting request runs to its end."""
    policy.add(made)
    assert admit_next(policy) is made


def test_a_dependent_request_has_the_place_of_its_program():
    queue = policy()
    anchor = request(0)
    queue.add(anchor)
    queue.admit(anchor)  # a tenant without requests is forgotten
    begin(queue, request(1, program=7))
    queue.add(request(2, 50))
    queue.add(request(3, 0, program=7))
    queue.add(request(4, 90, program=8))
    assert order_of(queue) == [3, 4, 2]


def test_a_dependent_request_with_much_to_compute_has_no_such_place():
    queue = policy()
    begin(queue, request(1, program=7))
    queue.add(request(2, 50))
    queue.add(request(3, 0, size=TOKEN_BUDGET + 1, program=7))
    queue.add(request(4, 2, size=TOKEN_BUDGET + 1, program=7))
    assert order_of(queue) == [4, 2, 3]


def test_dependent_requests_of_many_programs_follow_the_arrivals_of_the_programs():
    queue = policy()
    for program in (1, 2, 3):
        begin(queue, request(program, program=program))
    for number, program in ((4, 3), (5, 1), (6, 2)):
        queue.add(request(number, program=program))
    assert order_of(queue) == [5, 6, 4]


def test_a_request_that_leaves_takes_no_other_from_its_place():
    queue = policy()
    early, first = request(0, program=2), request(1, program=1)
    for made in (early, first):
        queue.add(made)
    queue.admit(first)
    queue.add(request(2, program=1))
    queue.add(request(3, 90))
    queue.remove(early)  # in front of request 2, but it did not continue its program
    assert order_of(queue) == [2, 3]


def test_a_program_that_had_much_goes_after_others():
    queue = policy()
    early, late = request(0, program=1), request(1, program=2)
    for made in (early, late):
        queue.add(made)
        queue.admit(made)
    queue.charge(early, LEVEL_TOKENS)
    queue.charge(late, LEVEL_TOKENS - 1)
    queue.add(request(2, 90, program=1))
    queue.add(request(3, program=2))
    queue.add(request(4, 10))
    assert order_of(queue) == [3, 4, 2]


def test_a_program_rises_by_a_level_with_each_multiple_of_its_tokens():
    queue = tenant_queue.TenantQueue("", 1, TOKEN_BUDGET, float, 0.0)
    for level in range(tenant_queue.MAX_LEVEL + 2):
        limit = LEVEL_TOKENS * tenant_queue.LEVEL_FACTOR**level
        found = [queue._level(tenant_queue.TenantProgram(0, num_tokens)) for num_tokens in (limit - 1, limit)]
        assert found == [min(level, tenant_queue.MAX_LEVEL), min(level + 1, tenant_queue.MAX_LEVEL)]


def test_a_program_keeps_its_place_in_its_tenant_only():
    queue = policy()
    begin(queue, request(0, program=1, tenant="a"))
    queue.add(request(1, 50, tenant="b"))
    queue.add(request(2, program=1, tenant="b"))
    assert order_of(queue) == [1, 2]


def test_the_programs_with_the_latest_requests_are_known(monkeypatch):
    monkeypatch.setattr(fair_policy, "MAX_PROGRAMS", 2)
    queue = policy()
    for number, program in enumerate((1, 2, 1, 3)):
        begin(queue, request(number, program=program))
    assert [program for _, program in queue._programs] == [1, 3]


def test_a_group_that_another_request_interrupts_goes_on():
    queue = policy()
    for number in range(3):
        queue.add(request(number, task_group=5))
    assert admit_next(queue).id == 0
    urgent = request(3, task_group=6)
    urgent.deadline = 1.0
    queue.add(urgent)
    queue.add(request(4, 90))
    assert order_of(queue) == [3, 1, 2, 4]


@pytest.mark.parametrize(("other_group", "order"), [(0, [0, 3, 1, 2]), (6, [0, 3, 2, 1])])
def test_the_groups_opened_last_go_on(other_group, order, monkeypatch):
    monkeypatch.setattr(tenant_queue, "MAX_PASSED_BY", 1)
    queue = policy()
    for number, cached, group in ((0, 90, 5), (1, 0, 5), (2, 80, 0)):
        queue.add(request(number, cached, task_group=group))
    assert admit_next(queue).id == 0
    queue.add(request(3, task_group=other_group, deadline=1.0))
    assert [0, *order_of(queue)] == order


def test_a_group_whose_consumer_is_patient_goes_on_after_latency_work():
    queue = policy()
    for number in range(3):
        queue.add(request(number, objective="throughput", task_group=PATIENT_GROUPS + 5))
    assert admit_next(queue).id == 0
    queue.add(request(3, 90, objective="throughput"))
    queue.add(request(4))
    assert order_of(queue) == [4, 1, 2, 3]


def test_a_group_that_a_latency_request_waits_for_takes_its_turn_among_latency_work():
    queue = policy()
    for number in (1, 2):
        queue.add(request(number, objective="throughput", task_group=AWAITED_GROUPS + 1))
    queue.add(request(3))
    queue.add(request(4, objective="throughput", task_group=5))
    assert order_of(queue) == [1, 2, 3, 4]


def test_the_prompts_of_an_awaited_group_go_after_those_of_latency_requests():
    queue = policy()
    sibling, chat = request(1, objective="throughput", task_group=AWAITED_GROUPS + 1), request(2)
    for made in (sibling, chat):
        queue.add(made)
        queue.admit(made)
        made.status = Status.RUNNING
    assert queue.next([sibling, chat], None) is chat


def test_a_waiting_request_gets_another_hint():
    queue = policy()
    begin(queue, request(0, program=1))
    waiting = [request(number, 10 * number) for number in range(1, 4)]
    for made in waiting:
        queue.add(made)
    queue.update_origin(waiting[0], replace(waiting[0].origin, program=1))
    queue.update_origin(waiting[2], replace(waiting[2].origin, objective="throughput"))
    assert order_of(queue) == [1, 2, 3]


def test_a_request_that_often_gets_another_hint_takes_no_more_memory():
    queue = policy()
    begin(queue, request(0, program=1))
    made = request(1)
    made.deadline, made.patience_end = 50.0, 60.0
    queue.add(made)
    origins = [replace(made.origin, program=program) for program in (1, 2)]
    for origin in origins:
        queue.update_origin(made, origin)
    before = sys.getrefcount(made)
    for number in range(1000):
        queue.update_origin(made, origins[number % 2])
    assert sys.getrefcount(made) <= before + 20
    assert len(queue._tenants[""]._of_program) == 1
    assert made.patience_end == 60.0
    queue.add(request(2, 90))
    assert order_of(queue) == [1, 2]


@dataclass
class Known:
    arrival: int
    num_tokens: int = 0
    has_begun: bool = False


@dataclass
class Reference:
    """The order by its definition, over plain lists."""

    waiting: list[Request] = field(default_factory=list)
    programs: dict[int, Known] = field(default_factory=dict)
    places: dict[int, tuple] = field(default_factory=dict)
    continuing: set[int] = field(default_factory=set)
    groups: list = field(default_factory=list)
    joined: dict[int, int] = field(default_factory=dict)  # when each request got its present place

    def put_in(self, made: Request) -> None:
        number = made.origin.program
        self.continuing.discard(made.id)
        known = self.programs.setdefault(number, Known(made.arrival)) if number else Known(made.arrival)
        levels = [LEVEL_TOKENS * tenant_queue.LEVEL_FACTOR**n for n in range(tenant_queue.MAX_LEVEL)]
        level = sum(known.num_tokens >= limit for limit in levels)
        is_late = made.origin.objective != "latency" and made.origin.task_group < AWAITED_GROUPS
        self.places[made.id] = (is_late, level), known.arrival, made.id
        if known.has_begun:
            self.continuing.add(made.id)

    def next(self) -> Request:
        by_place = sorted(self.waiting, key=lambda made: self.places[made.id])
        end = min(self.waiting, key=lambda made: (self.places[made.id][0], -made.tokens[0]))
        for group in reversed(self.groups):
            siblings = [made for made in self.waiting if group and made.origin.task_group == group]
            if siblings:
                end = min(siblings, key=lambda made: self.joined[made.id])
                break
        for made in by_place:
            if made.id in self.continuing and self.places[made.id] < self.places[end.id]:
                return made
        return end

    def admit(self, made: Request, num_tokens: int) -> None:
        self.waiting.remove(made)
        group, number = made.origin.task_group, made.origin.program
        if group in self.groups:
            self.groups.remove(group)
        self.groups.append(group)
        if number:
            self.programs[number].has_begun = True
            self.programs[number].num_tokens += num_tokens


groups = st.sampled_from([0, 1, 2, AWAITED_GROUPS + 1])
events = st.lists(
    st.one_of(
        st.tuples(
            st.just("arrive"),
            st.integers(0, 3),
            groups,
            st.sampled_from(["latency", "latency", "throughput"]),
        ),
        st.tuples(st.just("admit"), st.sampled_from([1, LEVEL_TOKENS // 2, 5 * LEVEL_TOKENS])),
        st.tuples(
            st.just("hint"),
            st.integers(0, 30),
            st.integers(0, 3),
            groups,
            st.sampled_from(["latency", "throughput"]),
        ),
    ),
    min_size=5,
    max_size=60,
)


@examples(300)
@given(plan=events, matches=st.permutations(range(60)))
def test_the_order_is_the_one_of_the_definition(plan, matches):
    queue = FairLongestPrefix(peek, TOKEN_BUDGET)
    anchor = request(1000, tenant="")
    queue.add(anchor)
    queue.admit(anchor)
    reference = Reference()
    origins = {}
    for number, (kind, *args) in enumerate(plan):
        if kind == "arrive":
            program, group, objective = args
            made = request(number, matches[number], program=program, task_group=group, objective=objective)
            queue.add(made)
            reference.waiting.append(made)
            reference.joined[number] = number
            reference.put_in(made)
            origins[number] = made
        elif kind == "hint":
            placed, program, group, objective = args
            made = origins.get(placed)
            if made in reference.waiting:
                origin = replace(made.origin, program=program, task_group=group, objective=objective)
                queue.update_origin(made, origin)
                reference.joined[made.id] = number
                reference.put_in(made)
        elif reference.waiting:
            expected = reference.next()
            queue.start_step()
            chosen = queue.next([], free)
            assert chosen is expected
            queue.admit(chosen)
            queue.charge(chosen, args[0])
            reference.admit(chosen, args[0])


def test_dependent_requests_run_back_to_back_in_the_scheduler():
    """Two programs of three requests each, and requests without a program, one at a time."""
    config = SchedulerConfig(max_running=1, token_budget=64)
    scheduler = Scheduler(num_slots=4000, max_context=256, config=config)
    runner = FakeRunner(num_slots=4000, max_context=256)
    numbers = iter(range(100))
    left = {1: 3, 2: 3}
    order = []

    def submit(program: int) -> None:
        number = next(numbers)
        tokens = np.arange(40 * number, 40 * number + 40, dtype=np.int32)
        scheduler.add(request_of(number, tokens, 1, program=program, state=number + 1))

    for program in (1, 0, 2, 0):
        submit(program)
    while (batch := scheduler.schedule()) is not None:
        for row in scheduler.complete(run_batch(runner, batch)):
            if row.request.num_generated:
                program = row.request.origin.program
                scheduler.finish(row.request)
                order.append(program)
                left[program] = left.get(program, 1) - 1
                if left[program] > 0:
                    submit(program)
    scheduler.check_idle()
    assert order[:3] == [1, 1, 1]
    runs = [program for at, program in enumerate(order) if at == 0 or order[at - 1] != program]
    assert runs.count(2) == 1


def test_a_hint_reaches_its_waiting_and_running_requests():
    scheduler = Scheduler(num_slots=400, max_context=100, config=SchedulerConfig(max_running=1))
    runner = FakeRunner(num_slots=400, max_context=100)
    running, waiting, other = (
        request_of(number, [number + 1] * 9, 2, state=state) for number, state in ((0, 5), (1, 5), (2, 6))
    )
    for made in (running, waiting, other):
        scheduler.add(made)
    scheduler.complete(run_batch(runner, scheduler.schedule()))
    scheduler.update_hint(5, 7, 8, "throughput")
    for made in (running, waiting):
        assert (made.origin.program, made.origin.task_group) == (7, 8)
        assert made.origin.objective == "throughput"
    assert other.origin.program == 0
    scheduler.update_hint(99, 1, 1, "latency")
    for made in (running, waiting, other):
        scheduler.release(made)
    scheduler.check_idle()


def test_a_request_whose_first_token_is_wanted_soon_goes_first():
    now = 100.0
    config = SchedulerConfig(max_running=1, token_budget=TOKEN_BUDGET)
    scheduler = Scheduler(num_slots=4096, max_context=4096, config=config, clock=lambda: now)
    runner = FakeRunner(num_slots=4096, max_context=4096)
    made = {
        "first": request(0),
        "later": request(1, state=1),
        "soon": request(2, ttft_s=5.0),
        "placed": request(3, state=3),
        "ahead": request(4, ttft_s=0.0, is_ahead=True),
    }
    for one in made.values():
        scheduler.add(one)
    scheduler.update_hint(1, 0, 0, "latency", ttft_s=1e9)
    scheduler.update_hint(3, 0, 0, "latency", ttft_s=0.0)
    now += 5.0
    order = []
    while (batch := scheduler.schedule()) is not None:
        for row in scheduler.complete(run_batch(runner, batch), 1.0):
            if row.token_ids:
                order.append(row.request)
                scheduler.finish(row.request)
    names = [name for one in order for name in made if made[name] is one]
    assert names == ["placed", "soon", "first", "later", "ahead"]
