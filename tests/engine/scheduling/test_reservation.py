"""A prompt that does not fit into memory yet: who may pass it, for how long, and when it starts."""

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from support.engine.requests import request_of
from support.examples import examples

from agentflow.engine.batch import BatchOutput
from agentflow.engine.request import Request, Status
from agentflow.engine.scheduling.policies import arrival_queue
from agentflow.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from agentflow.engine.simulator.depth_first import SIMULATED_POLICIES
from agentflow.protocol.sampling import SamplingParams

CONTEXT = 512
BUDGET = 4096
"""Computes all prompts of a test in one step."""


@dataclass
class Job:
    """A request with ``output`` tokens, of which its program says ``hint``."""

    size: int
    output: int
    hint: int = 0
    tenant: str = "a"

    def request(self, number: int) -> Request:
        tokens = np.full(self.size, 1000 + number, dtype=np.int32)
        hint = self.hint or self.output
        return request_of(
            number, tokens, self.output, SamplingParams(), tenant=self.tenant, output_tokens=hint
        )


def has_started(request: Request) -> bool:
    return request.status is not Status.WAITING or request.num_preemptions > 0


class Steps:
    """A scheduler whose model writes zeros. ``started``: when each request was first admitted, in steps."""

    def __init__(self, num_slots: int, policy: str = "fcfs", budget: int = BUDGET) -> None:
        config = SchedulerConfig(policy=policy, token_budget=budget)
        self.scheduler = Scheduler(
            num_slots=num_slots, max_context=CONTEXT, config=config, policies=SIMULATED_POLICIES
        )
        self.requests: list[Request] = []
        self.started: dict[int, int] = {}
        self.now = 0

    def add(self, job: Job) -> Request:
        request = job.request(len(self.requests))
        self.requests.append(request)
        self.scheduler.add(request)
        return request

    def step(self) -> bool:
        batch = self.scheduler.schedule()
        for request in self.requests:
            if has_started(request):
                self.started.setdefault(request.id, self.now)
        if batch is None:
            return False
        output = BatchOutput(np.zeros(len(batch.sampled.rows), dtype=np.int64), None)
        for result in self.scheduler.complete(output):
            if result.request.num_generated == result.request.max_new_tokens:
                self.scheduler.finish(result.request)
        self.now += 1
        return True

    def finish(self) -> None:
        while self.step():
            pass
        self.scheduler.check_idle()
        assert all(request.status is Status.FINISHED for request in self.requests)


def steps_left(request: Request) -> int:
    """The tokens that it is expected to generate: at least 8, as far as its limit allows."""
    left = request.max_new_tokens - request.num_generated
    return min(left, max(8, request.origin.output_tokens - request.num_generated))


def earliest_start(head: Request, running: list[Request], num_slots: int) -> int:
    """The reference: the number of steps after which ``head`` fits until its end next to the requests that
    still run, if each generates as many tokens as expected. One of them ends then."""
    ends = {r.id: steps_left(r) for r in running}

    def fits(start: int) -> bool:
        if start >= max(ends.values()):
            return True
        for step in range(start + 1, start + head.max_new_tokens + 1):
            beside = sum(r.num_tokens + step for r in running if ends[r.id] >= step)
            if beside + head.num_tokens + step - start > num_slots:
                return False
        return True

    return next(step for step in sorted(set(ends.values())) if fits(step))


long_jobs = st.builds(Job, size=st.integers(60, 200), output=st.integers(1, 60))
jobs = st.lists(st.builds(Job, size=st.integers(1, 60), output=st.integers(1, 60)), min_size=1, max_size=8)
later_jobs = st.lists(
    st.tuples(st.integers(0, 40), st.builds(Job, size=st.integers(1, 80), output=st.integers(1, 80))),
    max_size=16,
)
hinted_jobs = st.builds(
    Job, size=st.integers(1, 60), output=st.integers(1, 60), hint=st.sampled_from([0, 1, 10, 100])
)


def run_blocked(steps: Steps, first: list[Job], head_job: Job, later: list[tuple[int, Job]]):
    """Runs ``first``, then the head, then the others as many steps after it as they say. Returns the head,
    the step in which it was first tried, and how many it waits by the reference (0: it does not wait)."""
    for job in first:
        steps.add(job)
    steps.step()
    head = steps.add(head_job)
    arrived, expected = steps.now, 0
    for number in range(2000):
        for after, job in later:
            if after == number:
                steps.add(job)
        if number == 0 and all(has_started(request) for request in steps.requests[: head.id]):
            running = [*steps.scheduler.running.values()]
            expected = earliest_start(head, running, steps.scheduler.memory.slots.total) if running else 0
        if not steps.step() and number > 40:
            break
        if number == 0 and has_started(head):
            expected = 0
    return head, arrived, expected


@examples(40)
@given(first=jobs, head=long_jobs, later=later_jobs)
def test_f6a_requests_that_pass_a_blocked_prompt_do_not_delay_it(first, head, later):
    """All lengths are known. The prompt starts when it would at the latest without the others."""
    steps = Steps(300)
    request, arrived, expected = run_blocked(steps, first, head, later)
    if not expected:
        return
    assert steps.started[request.id] <= arrived + expected


@examples(40)
@given(
    first=st.lists(hinted_jobs, min_size=1, max_size=8),
    head=long_jobs,
    later=st.lists(st.tuples(st.integers(0, 60), hinted_jobs), max_size=16),
)
def test_f6b_nobody_passes_a_blocked_prompt_after_the_expected_time(first, head, later):
    """Even if outputs are longer than the programs' estimates: the prompt waits only for earlier requests."""
    steps = Steps(300)
    request, arrived, expected = run_blocked(steps, first, head, later)
    if not expected:
        return
    for other in steps.requests[request.id + 1 :]:
        if steps.started[other.id] < steps.started[request.id]:
            assert steps.started[other.id] < arrived + expected


@pytest.mark.parametrize("policy", sorted(SIMULATED_POLICIES))
@pytest.mark.parametrize("tenant", ["a", "b"])
def test_f6c_short_requests_run_while_a_long_prompt_waits_for_memory(policy, tenant):
    steps = Steps(300, policy)
    steps.add(Job(100, 100))
    steps.step()
    long = steps.add(Job(200, 10, tenant="c"))
    steps.step()
    short = [steps.add(Job(10, 10, tenant=tenant)) for _ in range(4)]
    steps.step()
    assert [request.status for request in short] == [Status.RUNNING] * 4
    assert long.status is Status.WAITING
    steps.finish()
    assert steps.started[long.id] == 100


@pytest.mark.parametrize("policy", ["fcfs", "lpm", "fair-lpm"])
def test_f6d_a_request_that_would_delay_the_blocked_prompt_waits_behind_it(policy):
    steps = Steps(300, policy)
    steps.add(Job(100, 100))
    steps.step()
    long = steps.add(Job(285, 10))
    steps.step()
    late = steps.add(Job(20, 150))
    beside = steps.add(Job(10, 20))
    steps.finish()
    assert steps.started[beside.id] < steps.started[long.id] == 100
    assert steps.started[late.id] > steps.started[long.id]


def test_f6e_a_request_that_fits_beside_the_blocked_prompt_may_last_longer_than_it_waits():
    steps = Steps(300)
    steps.add(Job(150, 50))
    steps.step()
    long = steps.add(Job(150, 10))
    steps.step()
    beside = steps.add(Job(10, 80))
    steps.finish()
    assert steps.started[beside.id] < steps.started[long.id] == 50


def test_f6f_of_requests_with_the_same_beginning_a_short_one_runs_while_a_long_one_waits():
    """Their common prefix is not cached."""
    steps = Steps(400, "fair-lpm")
    steps.add(Job(200, 100))
    steps.step()
    made = []
    for number, size in enumerate([250, 10]):
        tokens = np.array([*[7] * 10, *[number] * size], dtype=np.int32)
        made.append(request_of(10 + number, tokens, 10, SamplingParams(), output_tokens=10))
        steps.scheduler.add(made[-1])
    steps.requests += made
    steps.step()
    assert [request.status for request in made] == [Status.WAITING, Status.RUNNING]


def test_f6g_nobody_passes_a_preempted_request():
    steps = Steps(300)
    first, second = (steps.add(Job(100, 100, hint=1)) for _ in range(2))
    while not first.num_preemptions + second.num_preemptions:
        steps.step()
    preempted = first if first.num_preemptions else second
    small = steps.add(Job(5, 5, tenant="b"))
    while not has_started(small):
        steps.step()
    assert preempted.status is not Status.WAITING
    steps.finish()


tenants_jobs = st.builds(
    Job, size=st.integers(1, 120), output=st.integers(1, 30), tenant=st.sampled_from("aab")
)


@examples(30)
@given(
    plan=st.lists(
        st.tuples(
            st.integers(0, 120),
            st.builds(
                Job, size=st.integers(1, 120), output=st.integers(1, 30), tenant=st.sampled_from("aab")
            ),
            st.integers(-1, 1),
        ),
        min_size=1,
        max_size=40,
    ),
    least=st.sampled_from([0, 0, 1]),
    share=st.sampled_from([0.0, 0.25]),
)
def test_f6h_the_bound_on_overtaking_holds_in_a_full_pool(plan, least, share):
    """The bound of the policy's docstring, with the whole scheduler: memory decides who may start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrival_queue, "OVERTAKEN_BATCHES", least)
        patch.setattr(arrival_queue, "OVERTAKEN_FRACTION", share)
        steps = Steps(160, "fair-lpm", budget=64)
        limit: dict[int, float] = {}
        overtaken: Counter[int] = Counter()
        largest = 0
        waiting: dict[int, Request] = {}
        for now in range(3000):
            for at, job, priority in plan:
                if at != now:
                    continue
                request = job.request(len(steps.requests))
                request.origin = replace(request.origin, priority=priority)
                before = [r for r in waiting.values() if r.tenant == request.tenant]
                limit[request.id] = 64 * least + share * sum(r.num_tokens for r in before)
                largest = max(largest, request.num_tokens)
                steps.requests.append(request)
                steps.scheduler.add(request)
                waiting[request.id] = request
            if not steps.step() and now > 120:
                break
            for chosen in [waiting.pop(n) for n, r in [*waiting.items()] if has_started(r)]:
                for other in waiting.values():
                    if other.tenant == chosen.tenant and other.arrival < chosen.arrival:
                        overtaken[other.id] += chosen.num_prompt
                        assert overtaken[other.id] < limit[other.id] + largest
        steps.scheduler.check_idle()
        assert not waiting
