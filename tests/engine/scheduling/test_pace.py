"""Bounds on the time per output token: which requests start and decode next to requests of the objective
latency, and that nothing starves."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.counted_lines import counted_lines
from support.engine.requests import request_of
from support.examples import examples

from agentflow.engine.request import AWAITED_GROUPS, Request, Status
from agentflow.engine.runner import run_batch
from agentflow.engine.scheduling import pace
from agentflow.engine.scheduling.policies import arrival_queue
from agentflow.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from agentflow.engine.scheduling.step_limits import StepCost
from agentflow.engine.simulator.cost_model import CostModel
from agentflow.engine.simulator.depth_first import SIMULATED_POLICIES
from agentflow.engine.simulator.fake_runner import FakeRunner
from agentflow.engine.simulator.generators import combined, unshared
from agentflow.engine.simulator.simulation import Simulated, simulate
from agentflow.engine.simulator.workload import Arrival, Workload

GPU = CostModel(base_s=5e-3, row_s=20e-6, logits_s=0.0, read_s=2.5e-8, pair_s=1.2e-9)
FINE = CostModel(base_s=4e-3, row_s=1e-4, logits_s=0.0, read_s=0.0, pair_s=0.0)
DYADIC = CostModel(base_s=2**-8, row_s=2**-11, logits_s=0.0, read_s=0.0, pair_s=0.0)  # sums are exact
ROWS = CostModel(base_s=4e-3, row_s=1e-3, logits_s=0.0, read_s=0.0, pair_s=0.0)


def bulk(num_requests: int) -> list[Arrival]:
    arrivals = unshared(num_requests=num_requests, prompt=3000, output=100, seed=7)
    return [replace(arrival, objective="throughput", label="bulk") for arrival in arrivals]


def simulated(arrivals: list[Arrival], target_ms: int | None) -> Simulated:
    config = SchedulerConfig(max_running=64, token_budget=4096, tpot_target_ms=target_ms)
    return simulate(Workload("w", arrivals, 600_000), config, cost=GPU, max_context=32_768)


def test_chats_keep_the_target_beside_throughput_work_that_breaks_it_without():
    chats = unshared(num_requests=80, prompt=800, output=100, per_s=8.0, seed=5)
    arrivals = combined(chats, bulk(60))
    p95_ms, ended_s = {}, {}
    for target_ms in (None, 20, 12):
        served = simulated(arrivals, target_ms).served
        tpot = [one.tpot_s for one in served if one.arrival.label != "bulk"]
        p95_ms[target_ms] = 1e3 * float(np.percentile(tpot, 95))
        ended_s[target_ms] = max(one.ended_s for one in served if one.arrival.label == "bulk")
    assert p95_ms[20] <= 20 < p95_ms[None]
    assert p95_ms[12] <= 12
    assert ended_s[20] <= 1.3 * ended_s[None]


def test_with_throughput_work_alone_the_target_changes_nothing():
    without, under = (simulated(bulk(60), target_ms) for target_ms in (None, 12))
    assert [one.ended_s for one in under.served] == [one.ended_s for one in without.served]


class Paced:
    """A scheduler on the fake runner, stepped by hand. ``learns``: it knows the cost of varied steps."""

    def __init__(
        self,
        cost: CostModel,
        *,
        learns: bool = True,
        max_running: int = 16,
        token_budget: int = 64,
        **config,
    ) -> None:
        self.scheduler = Scheduler(
            num_slots=100_000,
            max_context=50_000,
            config=SchedulerConfig(max_running=max_running, token_budget=token_budget, **config),
            policies=SIMULATED_POLICIES,
        )
        self.runner = FakeRunner(num_slots=100_000, max_context=50_000)
        self.cost = cost
        self.requests: list[Request] = []
        self.took_s: list[float] = []
        if learns:
            self._learn()

    def _learn(self) -> None:
        warm = [self.add(20 + 3 * number, 8, state=100 + number) for number in range(6)]
        for _ in range(200):
            self.step()
        assert all(request.status is Status.FINISHED for request in warm)
        self.took_s.clear()

    def add(self, num_tokens: int, num_output: int, **origin) -> Request:
        number = len(self.requests)
        request = request_of(number, np.full(num_tokens, number + 1), num_output, **origin)
        self.scheduler.add(request)
        self.requests.append(request)
        return request

    def step(self) -> list[Request]:
        """The requests of the step, in which each generates a token or computes a part of its prompt."""
        batch = self.scheduler.schedule()
        if batch is None:
            return []
        self.took_s.append(self.cost.step_s(batch))
        rows = self.scheduler.complete(run_batch(self.runner, batch), self.took_s[-1])
        for row in rows:
            if row.request.num_generated == row.request.max_new_tokens:
                self.scheduler.finish(row.request)
        return [row.request for row in rows]

    @property
    def running(self) -> set[Request]:
        return {*self.scheduler.running.values()}


def test_throughput_requests_start_only_while_the_bound_holds():
    steps = Paced(ROWS, tpot_target_ms=20)
    chat = steps.add(4, 60)
    steps.step()
    work = [steps.add(4, 30, objective="throughput", task_group=1) for _ in range(12)]
    for _ in range(20):
        steps.step()
    # 4 ms, and ten rows in 0.75 of the other 14, of which one is the chat's.
    assert steps.running == {chat, *work[:9]}
    late = steps.add(4, 5)  # passes the group of requests that may not start
    steps.step()
    assert late.status is Status.RUNNING
    while chat.status is Status.RUNNING:
        steps.step()
    assert np.mean(steps.took_s) <= 0.020 < max(steps.took_s) <= pace.MOST_PART * 0.020
    for _ in range(100):
        steps.step()
    assert all(request.status is Status.FINISHED for request in work)


def test_running_throughput_requests_take_turns_when_chats_come():
    steps = Paced(ROWS, tpot_target_ms=20)
    work = [steps.add(4, 60, objective="throughput") for _ in range(10)]
    for _ in range(3):
        steps.step()
    chats = [steps.add(4, 40) for _ in range(6)]
    while not all(chat.num_generated for chat in chats):
        steps.step()
    steps.took_s.clear()
    before = {request: request.num_generated for request in [*work, *chats]}
    for _ in range(20):
        steps.step()
    assert max(steps.took_s) <= 0.020
    assert {chat.num_generated - before[chat] for chat in chats} == {20}
    gained = {request.num_generated - before[request] for request in work}
    assert min(gained) > 0
    assert min(gained) >= 20 * 4 // 10 - 2


def test_a_readers_bound_holds_while_its_request_has_it():
    steps = Paced(FINE, token_budget=256)
    steps.add(4, 100, state=1)
    steps.step()
    steps.add(3000, 1, objective="throughput")

    def mean_s() -> float:
        steps.took_s.clear()
        for _ in range(3):
            steps.step()
        assert max(steps.took_s) <= pace.MOST_PART * 0.009 or not is_bound
        return float(np.mean(steps.took_s))

    is_bound = False
    without_s = mean_s()
    steps.scheduler.update_hint(1, 0, 0, "latency", tpot_s=0.009)
    is_bound = True
    assert mean_s() <= 0.009 < without_s
    steps.scheduler.update_hint(1, 0, 0, "latency", tpot_s=1e-9)
    least_s = 1.5 * FINE.base_s
    assert least_s <= mean_s() <= 0.009  # prompts go on
    steps.scheduler.update_hint(1, 0, 0, "latency")
    is_bound = False
    assert mean_s() > 0.009


@pytest.mark.parametrize("others_bound", [None, 0.5])
def test_a_bound_that_comes_late_is_for_the_tokens_after_it(others_bound):
    """Its reader has no use for the time that earlier tokens saved."""
    steps = Paced(FINE, token_budget=256)
    steps.add(4, 400, state=1)
    steps.add(4, 400, state=2, tpot_s=others_bound)
    for _ in range(200):
        steps.step()
    steps.add(30_000, 1, objective="throughput")
    steps.scheduler.update_hint(1, 0, 0, "latency", tpot_s=0.009)
    steps.took_s.clear()
    for _ in range(40):
        steps.step()
    assert np.mean(steps.took_s) <= 0.009


def test_requests_start_together_after_a_long_time_with_one():
    """From steps with one row, the scheduler cannot tell the cost of a row from the cost of the step."""
    steps = Paced(FINE, learns=False, tpot_target_ms=8)
    for _ in range(5):
        alone = steps.add(4, 100)
        while alone.status is not Status.FINISHED:
            steps.step()
    chats = [steps.add(4, 100) for _ in range(10)]
    for _ in range(20):
        steps.step()
    assert steps.running == {*chats}


def test_a_chat_has_its_time_per_token_after_steps_that_were_all_full():
    """From full steps, the scheduler cannot tell the cost of a token from the cost of the step."""
    steps = Paced(FINE, learns=False, tpot_target_ms=8)
    for _ in range(5):
        steps.add(2000, 1, objective="throughput")
    for _ in range(50):
        steps.step()
    chat = steps.add(4, 100)
    while chat.num_generated < 10:
        steps.step()
    steps.took_s.clear()
    for _ in range(20):
        steps.step()
    assert np.mean(steps.took_s) <= 0.008
    assert max(steps.took_s) <= pace.MOST_PART * 0.008


@pytest.mark.parametrize("policy", ["fair-lpm", "lpm"])
@pytest.mark.parametrize("task_group", [0, 1])
def test_a_step_asks_about_one_of_the_requests_that_are_held_back_together(task_group, policy):
    """For any number of them, with any common prefix."""
    num_lines = {}
    for num_waiting in (100, 1000):
        steps = Paced(ROWS, tpot_target_ms=20, policy=policy)
        steps.add(4, 1000, tenant="a")
        steps.step()
        for _ in range(num_waiting):
            steps.add(4, 1000, objective="throughput", tenant="b", weight=100.0, task_group=task_group)
        for _ in range(12):  # as many start as the target allows
            steps.step()
        steps.add(4, 5, tenant="a")
        steps.step()  # the first step that holds some back counts the others
        chat = steps.add(4, 5, tenant="a")
        with counted_lines() as lines:
            steps.step()
        assert chat.status is Status.RUNNING
        assert {request.tenant for request in steps.scheduler._held_back} == {"b"}
        num_lines[num_waiting] = lines.num
    assert num_lines[1000] < 1.2 * num_lines[100]


@pytest.mark.parametrize("policy", ["fair-lpm", "lpm"])
@pytest.mark.parametrize("num_shared", [0, 1, 3])
def test_f37_a_step_asks_about_no_request_that_is_held_back_with_others_of_the_rank_of_chats(
    num_shared, policy
):
    """Chats wait for their group, and others may not start yet. Of the three tokens of each prompt, the first
    are equal. The step that holds some back for the first time looks at each of them."""
    first = {}
    num_lines = {}
    for num_waiting in (100, 1000):
        steps = Paced(ROWS, max_running=64, tpot_target_ms=20, policy=policy)
        for _ in range(10):
            steps.add(4, 1000)
            steps.step()
        for number in range(num_waiting + 5):
            objective, group = ("throughput", AWAITED_GROUPS + 1) if number < num_waiting else ("latency", 0)
            prompt = [*[99] * num_shared, *[100 + number] * 3][:3]
            steps.scheduler.add(
                request_of(1000 + number, prompt, 1000, objective=objective, task_group=group)
            )
        with counted_lines() as lines:
            steps.step()
        first[num_waiting] = lines.num
        for _ in range(4):
            steps.step()
        with counted_lines() as lines:
            steps.step()
        assert len(steps.running) == 10
        num_lines[num_waiting] = lines.num
    assert first[1000] < 11 * first[100]
    assert num_lines[1000] < 1.2 * num_lines[100]


@pytest.mark.parametrize("policy", SIMULATED_POLICIES)
@pytest.mark.parametrize("objective", ["latency", "throughput"])
def test_f37_a_hint_decides_whether_a_request_is_held_back_with_others(policy, objective):
    """Another hint than when it arrived. Many wait, so that they have trees."""
    steps = Paced(ROWS, max_running=32, tpot_target_ms=20, policy=policy)
    steps.add(4, 60, priority=1)
    steps.step()
    for _ in range(20):
        steps.add(4, 60, objective="throughput")
    for _ in range(12):
        steps.step()
    other = "throughput" if objective == "latency" else "latency"
    request = steps.add(4, 60, state=7, objective=other)
    steps.scheduler.update_hint(7, 0, 0, objective)
    steps.step()
    assert request.status is (Status.RUNNING if objective == "latency" else Status.WAITING)


waiting_work = st.tuples(
    st.lists(st.sampled_from([98, 99]), min_size=1, max_size=4),
    st.sampled_from([0, 1, AWAITED_GROUPS + 1]),
    st.sampled_from("ab"),
    st.booleans(),
)


@pytest.mark.parametrize("policy", SIMULATED_POLICIES)
@examples(40)
@given(plan=st.lists(waiting_work, min_size=1, max_size=12))
@example(plan=[([99], AWAITED_GROUPS + 1, "", False)] * 6 + [([99], 0, "", True)])
def test_f37_chats_pass_requests_that_are_held_back_and_need_the_same_token_next(policy, plan):
    """These may be of the same rank, because a chat waits for their group."""
    steps = Paced(ROWS, max_running=32, tpot_target_ms=20, policy=policy)
    steps.add(4, 60, priority=1)
    steps.step()
    for _ in range(9):  # as many as the target allows
        steps.add(4, 60, objective="throughput", task_group=1, priority=1)
    for _ in range(12):
        steps.step()
    chats: list[Request] = []
    work: list[Request] = []
    for number, (prompt, task_group, tenant, is_chat) in enumerate(plan, start=100):
        is_chat = is_chat and len(chats) < 6
        objective = "latency" if is_chat else "throughput"
        made = request_of(
            number, [*prompt, number], 60, objective=objective, task_group=task_group, tenant=tenant
        )
        steps.scheduler.add(made)
        (chats if is_chat else work).append(made)
    firsts = [prompt[0] for prompt, _, _, is_chat in plan if is_chat][: len(chats)]
    # A chat waits only for another that computes tokens which both begin with.
    for _ in range(1 if len(set(firsts)) == len(chats) else len(chats)):
        steps.step()
    assert all(chat.status is Status.RUNNING for chat in chats)
    assert all(request.status is Status.WAITING for request in work)


@pytest.mark.parametrize("policy", ["fair-lpm", "fcfs", "lpm", "random"])
def test_a_target_that_cannot_be_kept_ends_nothing(policy):
    steps = Paced(ROWS, tpot_target_ms=1, policy=policy)
    requests = [
        steps.add(40, 10, objective=objective) for objective in ("latency", "throughput") for _ in range(6)
    ]
    while steps.step():
        pass
    assert all(request.status is Status.FINISHED for request in requests)


@pytest.mark.parametrize("tenant", ["", "b"])
def test_throughput_work_does_not_starve_beside_a_flood_of_chats(monkeypatch, tenant):
    """Before it starts, only the work that may pass it is computed, and requests that ran then."""
    monkeypatch.setattr(pace, "PASSED_BATCHES", 4)
    monkeypatch.setattr(arrival_queue, "OVERTAKEN_BATCHES", 4)
    steps = Paced(ROWS, tpot_target_ms=20)
    for _ in range(20):
        steps.add(8, 20)
    for _ in range(4):
        steps.step()
    work = steps.add(8, 20, objective="throughput", tenant=tenant)
    before = steps.scheduler.counters.computed_tokens
    while work.status is Status.WAITING:
        steps.step()
        steps.add(8, 20)
    passed = 4 * 64.0
    if not tenant:  # the policy counts the 8 tokens of each prompt alone
        passed = (passed + arrival_queue.OVERTAKEN_FRACTION * 20 * 8 + 8) * 28 / 8
    assert steps.scheduler.counters.computed_tokens - before <= passed + 9 * 28 + 64
    while work.status is Status.RUNNING:
        steps.step()
        steps.add(8, 20)
    assert work.status is Status.FINISHED


arrivals = st.tuples(
    st.integers(0, 6),  # steps before it
    st.sampled_from([1, 20, 100]),
    st.sampled_from([0, 1, 5, 20]),
    st.sampled_from(["latency", "throughput", "throughput"]),
    st.sampled_from("aab"),
    st.sampled_from([0, 1]),
    st.sampled_from([None, None, 1e-9, 0.012]),
)


@examples(60)
@given(
    plan=st.lists(arrivals, min_size=1, max_size=40),
    target_ms=st.sampled_from([None, 1, 8, 15, 30]),
    cost=st.sampled_from([ROWS, GPU]),
)
def test_every_request_ends_and_none_is_overtaken_beyond_the_bound(plan, target_ms, cost):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrival_queue, "OVERTAKEN_BATCHES", 1)
        patch.setattr(pace, "PASSED_BATCHES", 1)
        steps = Paced(cost, max_running=6, tpot_target_ms=target_ms)
        limits: dict[Request, float] = {}
        overtaken: Counter[Request] = Counter()
        waiting: dict[Request, int] = {}
        turns: Counter[Request] = Counter()

        def step() -> bool:
            before = steps.running
            in_step = steps.step()
            admitted = [request for request in waiting if request.status is not Status.WAITING]
            for request in admitted:
                work = waiting.pop(request)
                for other in waiting:
                    if other.tenant == request.tenant and other.arrival < request.arrival:
                        overtaken[other] += work
                        assert overtaken[other] < limits[other] + 100
            decoding = [request for request in before if request.num_generated]
            for request in decoding:
                turns[request] = 0 if request in in_step else turns[request] + 1
                assert turns[request] < 6
            return bool(in_step)

        for num_steps, size, output, objective, tenant, group, tpot_s in plan:
            for _ in range(num_steps):
                step()
            ahead = sum(work for request, work in waiting.items() if request.tenant == tenant)
            made = steps.add(
                size, output, objective=objective, tenant=tenant, task_group=group, tpot_s=tpot_s
            )
            limits[made] = 64 + arrival_queue.OVERTAKEN_FRACTION * ahead
            waiting[made] = size
        while step():
            pass
        assert not waiting
        assert not steps.running


@examples(200)
@given(
    plan=st.lists(
        st.tuples(st.sampled_from(["none", "new", "end"]), st.floats(0.0, 1.0), st.floats(-1.0, 1.0)),
        min_size=1,
        max_size=80,
    ),
    readers_ms=st.lists(st.sampled_from([None, 8, 15]), min_size=1, max_size=5),
)
def test_the_time_of_every_requests_tokens_stays_within_its_bound(plan, readers_ms):
    """Steps take a part of the longest time that they may, and an error more or less."""
    cost = StepCost()
    cost.observe(lambda: np.array([1.0, 1.0, 1.0, 0.0, 0.0]), 1e-6)
    target_s = 0.010
    paced = pace.Pace(cost, target_s, 64)
    largest_s = (pace.MEAN_PART - pace.PLANNED_PART) * 0.008
    running: list[tuple[Request, float]] = []
    spent: dict[int, tuple[int, float]] = {}
    for number, (event, part, error) in enumerate(plan):
        if event == "new" or not running:
            reader_ms = readers_ms[number % len(readers_ms)]
            reader_s = None if reader_ms is None else reader_ms / 1e3
            running.append((request_of(number, np.full(4, 1), 1000, tpot_s=reader_s), reader_s or target_s))
        elif event == "end":
            running.pop(0)
        longest_s = paced.bound_s([request for request, _ in running])
        if not running:
            continue
        took_s = max(0.0, part * longest_s + error * largest_s)
        paced.ran(took_s)
        for request, reader_s in running:
            request.num_tokens += 1
            num_tokens, so_far_s = spent.get(request.id, (0, 0.0))
            spent[request.id] = num_tokens + 1, so_far_s + took_s
            bound_s = min(target_s, reader_s)
            assert so_far_s + took_s <= pace.MEAN_PART * bound_s * (num_tokens + 1) + largest_s + 1e-9


@examples(30)
@given(
    plan=st.lists(
        st.tuples(
            st.integers(1, 80),
            st.integers(1, 12),
            st.sampled_from(["latency", "throughput"]),
            st.sampled_from([None, None, 0.01, 0.03]),
            st.integers(0, 12),
        ),
        min_size=1,
        max_size=12,
    )
)
def test_steps_are_the_same_whether_the_pace_is_kept_from_the_beginning_or_from_the_first_bound(plan):
    took_s = []
    for is_first in (False, True):
        paced = Paced(DYADIC)
        if is_first:
            paced.scheduler._pace = paced.scheduler._new_pace()
        for now in range(13):
            for num_tokens, num_output, objective, tpot_s, at in plan:
                if at == now:
                    paced.add(num_tokens, num_output, objective=objective, tpot_s=tpot_s)
            paced.step()
        while paced.step():
            pass
        took_s.append(paced.took_s)
    assert took_s[0] == took_s[1]
