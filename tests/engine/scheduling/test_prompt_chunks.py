"""Which requests get the tokens of a step: short prompts next to long ones, streams next to prompts; and the
charges of each tenant."""

from collections import Counter
from functools import partial
from math import ceil

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.engine.requests import request_of
from support.examples import examples

from agentflow.engine.batch import Batch, BatchOutput
from agentflow.engine.request import Request, Status
from agentflow.engine.runner import run_batch
from agentflow.engine.scheduling import step_limits
from agentflow.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from agentflow.engine.scheduling.step_limits import MAX_STRETCH, MIN_CHUNK, StepCost, batch_features
from agentflow.engine.simulator.cost_model import CostModel
from agentflow.engine.simulator.fake_runner import FakeRunner
from agentflow.protocol.sampling import SamplingParams

BUDGET = 64


class Steps:
    """A scheduler on the fake runner, stepped by hand; prompts share nothing. ``cost``: seconds of a batch,
    which the scheduler learns from."""

    def __init__(self, *, num_slots: int = 100_000, cost: CostModel | None = None, **config) -> None:
        config = {"token_budget": BUDGET, **config}
        self.scheduler = Scheduler(num_slots=num_slots, max_context=50_000, config=SchedulerConfig(**config))
        self.runner = FakeRunner(num_slots=num_slots, max_context=50_000)
        self.cost = cost
        self.requests: list[Request] = []
        self.batches: list[Batch] = []

    def add(self, num_tokens: int, num_output: int = 1, **kwargs) -> Request:
        number = len(self.requests)
        tokens = np.full(num_tokens, number + 1, dtype=np.int32)
        request = request_of(number, tokens, num_output, SamplingParams(), **kwargs)
        self.scheduler.add(request)
        self.requests.append(request)
        return request

    def step(self) -> bool:
        batch = self.scheduler.schedule()
        if batch is None:
            return False
        self.batches.append(batch)
        took_s = self.cost.step_s(batch) if self.cost is not None else 0.0
        for result in self.scheduler.complete(run_batch(self.runner, batch), took_s):
            is_over = result.request.num_generated == result.request.max_new_tokens
            if is_over and (result.token_ids or not result.request.num_to_compute):
                self.scheduler.release(result.request)
        return True

    def steps_to_first_token(self, request: Request) -> int:
        for number in range(1, 10_000):
            assert self.step()
            if request.num_generated:
                return number
        raise AssertionError("it has no token after 10,000 steps")


@pytest.mark.parametrize(("kwargs", "most"), [({}, 2), ({"priority": 10}, 1), ({"tenant": "b"}, 2)])
def test_a_short_prompt_does_not_wait_for_a_prompt_of_a_hundred_budgets(kwargs, most):
    steps = Steps()
    long = steps.add(100 * BUDGET, tenant="a")
    for _ in range(3):
        steps.step()
    short = steps.add(10, **{"tenant": "a", **kwargs})
    assert steps.steps_to_first_token(short) <= most
    assert long.num_computed >= 3 * BUDGET


def test_a_request_does_not_wait_for_tokens_that_are_computed_ahead():
    steps = Steps()
    prompt = np.full(40 * BUDGET, 9)
    steps.scheduler.add(request_of(100, prompt, 0, is_ahead=True, priority=-10, objective="throughput"))
    steps.step()
    steps.add(600 * BUDGET)  # has most tokens of each step
    request = request_of(101, prompt, 1, priority=5)
    steps.scheduler.add(request)
    assert steps.steps_to_first_token(request) <= ceil(4 * 40 / 3) + 1


@pytest.mark.parametrize("task_group", [0, 3])
def test_tokens_are_computed_ahead_once_also_beside_requests_of_the_same_rank(task_group):
    steps = Steps()
    ahead, also_ahead, request = (
        request_of(
            number,
            np.full(40 * BUDGET, 9),
            0,
            is_ahead=number < 102,
            priority=-10,
            objective="throughput",
            task_group=task_group,
        )
        for number in (100, 101, 102)
    )
    steps.scheduler.add(ahead)
    steps.step()
    steps.scheduler.add(also_ahead)
    steps.scheduler.add(request)
    steps.step()
    assert (also_ahead.status, request.status) == (Status.WAITING, Status.RUNNING)


@given(
    longs=st.lists(st.integers(2 * BUDGET, 40 * BUDGET), max_size=6),
    shorts=st.lists(st.integers(1, BUDGET), min_size=1, max_size=6),
    streams=st.integers(0, 8),
    steps_before=st.integers(0, 30),
)
def test_short_prompts_next_to_long_ones_are_computed_within_the_bound(longs, shorts, streams, steps_before):
    steps = Steps()
    for _ in range(streams):
        steps.add(1, 10_000)
    for size in longs:
        steps.add(size)
    for _ in range(steps_before):
        steps.step()
    added = [steps.add(size) for size in shorts]
    prompt_tokens, chunk = BUDGET - streams - len(shorts), MIN_CHUNK  # finished prompts decode
    bound = ceil(4 * (sum(shorts) + chunk) / (3 * (prompt_tokens - chunk)))
    for _ in range(bound):
        steps.step()
    assert all(request.num_generated for request in added)


@given(sizes=st.lists(st.integers(1, 20 * BUDGET), min_size=1, max_size=5))
def test_long_prompts_alone_fill_every_step(sizes):
    """Until the last one, which has the rest."""
    steps = Steps()
    for size in sizes:
        steps.add(size, num_output=0)
    while steps.step():
        pass
    counts = [len(batch.token_ids) for batch in steps.batches]
    assert counts[:-1] == [BUDGET] * (len(counts) - 1)
    assert sum(counts) == sum(sizes)


def test_the_first_admitted_prompt_always_advances():
    """Under a stream of short prompts, and of prompts with a higher priority."""
    steps = Steps(max_running=16)
    long = steps.add(30 * BUDGET)
    steps.step()
    for number in range(200):
        steps.add(BUDGET, priority=number % 2)
        before = long.num_computed
        steps.step()
        if long.num_generated:
            break
        assert long.num_computed - before >= MIN_CHUNK
    assert long.num_generated


class NotingCharges:
    """A policy, and how many tokens of each request it was charged."""

    def __init__(self, policy) -> None:
        self._policy = policy
        self.charged: Counter[int] = Counter()

    def charge(self, request: Request, num_tokens: int) -> None:
        self.charged[request.id] += num_tokens
        self._policy.charge(request, num_tokens)

    def __getattr__(self, name: str) -> object:
        return getattr(self._policy, name)

    def __len__(self) -> int:
        return len(self._policy)

    def __contains__(self, request: Request) -> bool:
        return request in self._policy


@given(
    plan=st.lists(
        st.tuples(st.integers(1, 60), st.integers(1, 20), st.sampled_from("ab"), st.integers(0, 10)),
        min_size=1,
        max_size=12,
    ),
    num_slots=st.sampled_from([128, 200, 1000]),
)
def test_each_token_is_charged_once_however_often_it_is_computed(plan, num_slots):
    steps = Steps(num_slots=num_slots, max_running=8)
    steps.scheduler.waiting = noting = NotingCharges(steps.scheduler.waiting)
    plan = sorted(plan, key=lambda one: one[3])
    now = 0
    while plan or steps.scheduler.running or len(steps.scheduler.waiting):
        while plan and plan[0][3] <= now:
            size, output, tenant, _ = plan.pop(0)
            steps.add(size, output, tenant=tenant)
        steps.step()
        now += 1
    # The last token of an output is never computed.
    assert noting.charged == {r.id: r.num_prompt + r.num_generated - 1 for r in steps.requests}


def test_cached_tokens_are_not_charged():
    steps = Steps()
    first = steps.add(50)
    while steps.step():
        pass
    again = request_of(9, first.tokens[: first.num_prompt], 1, SamplingParams())
    steps.scheduler.waiting = noting = NotingCharges(steps.scheduler.waiting)
    steps.scheduler.add(again)
    steps.step()
    assert noting.charged == {9: 1}


COST = CostModel(base_s=0.010, row_s=0.0005, logits_s=0.0002, read_s=2e-7, pair_s=1e-7)


def test_a_cost_of_pairs_alone_limits_chunks():
    """As after a short prompt in a slow first step: the fit may find any of the features to be the cause."""
    cost = StepCost()
    cost._pair_s = 1e-3
    assert cost.tokens_within(0.05, 0, is_first=True) == 10
    steps = Steps(cost=CostModel(base_s=0, row_s=0, logits_s=0, read_s=0, pair_s=1.0))
    steps.add(4)
    steps.step()
    steps.add(20)
    while steps.step():
        pass
    assert [request.num_generated for request in steps.requests] == [1, 1]


def test_streams_keep_their_time_per_token_beside_prompts():
    """After a few steps of each kind a step takes no longer than the stated multiple of its decoding."""
    steps = Steps(cost=COST, token_budget=256)
    steps.add(10, 100_000 - 20_000)
    for _ in range(20):
        steps.step()
    steps.add(600)
    while steps.requests[-1].num_generated == 0:
        steps.step()
    num_before = len(steps.batches)
    steps.add(8_000)
    while steps.requests[-1].num_generated == 0:
        steps.step()
    for batch in steps.batches[num_before:]:
        stream = batch.kv_lens[0]
        alone_s = COST.base_s + COST.row_s + COST.logits_s + COST.read_s * stream
        assert COST.step_s(batch) <= MAX_STRETCH * alone_s * 1.1
        assert len(batch.token_ids) >= 1 + MIN_CHUNK or batch is steps.batches[-1]


@pytest.mark.parametrize(("num_prompts", "limit"), [(2, "PROMPT_STEP_S"), (1, "LONE_PROMPT_STEP_S")])
def test_a_step_of_prompts_takes_no_longer_than_stated(num_prompts, limit):
    limit_s = getattr(step_limits, limit)
    steps = Steps(cost=COST, token_budget=4096, num_slots=60_000)
    for _ in range(num_prompts):
        steps.add(12_000)
    while not steps.requests[0].num_generated:
        steps.step()
    for batch in steps.batches[5:]:  # the cost is learned from the first ones
        assert COST.step_s(batch) <= COST.base_s + limit_s * 1.1


def test_for_throughput_alone_streams_do_not_hold_prompts_back():
    steps = Steps(cost=COST, token_budget=256)
    steps.add(10, 5_000, objective="throughput")
    for _ in range(20):
        steps.step()
    steps.add(1_200)
    for _ in range(3):
        steps.step()
    alone_s = COST.base_s + COST.row_s + COST.logits_s
    assert all(COST.step_s(batch) > 1.2 * MAX_STRETCH * alone_s for batch in steps.batches[-2:])


@given(
    token_s=st.just(0.0) | st.floats(1e-9, 1e-2),
    pair_s=st.just(0.0) | st.floats(1e-12, 1e-5),
    read_s=st.floats(0, 1e-6),
    context=st.just(0) | st.integers(0, 10_000),
)
@example(token_s=0.0, pair_s=1e-7, read_s=0.0, context=0)
@example(token_s=0.0, pair_s=5e-324, read_s=0.0, context=0)
def test_the_tokens_that_fit_take_the_time_there_is(token_s, pair_s, read_s, context):
    """Also where all the time of noisy steps was put down to the pairs of their chunks."""
    cost = StepCost()
    cost._token_s, cost._pair_s, cost._read_s = token_s, pair_s, read_s
    for seconds in (0.001, 0.05, 1.0):
        num_tokens = cost.tokens_within(seconds, context, is_first=True)
        if num_tokens:
            assert cost.chunk_s(num_tokens, context, is_first=True) <= seconds * (1 + 1e-6)
        if num_tokens < 2**31:
            assert cost.chunk_s(num_tokens + 1, context, is_first=True) > seconds * (1 - 1e-6)


def random_batch(rng: np.random.Generator) -> Batch:
    steps = Steps(token_budget=int(rng.integers(20, 300)))
    for _ in range(int(rng.integers(1, 6))):
        steps.add(int(rng.integers(1, 400)), 10)
    for _ in range(int(rng.integers(1, 6))):
        batch = steps.scheduler.schedule()
        steps.scheduler.complete(BatchOutput(np.zeros(len(batch.sampled.rows), dtype=np.int64), None))
    return batch


def test_the_cost_of_steps_is_learned():
    rng = np.random.default_rng(0)
    true = np.array([0.01, 0.0005, 0.0002, 3e-7, 1e-7])
    cost = StepCost()
    for _ in range(150):
        features = batch_features(random_batch(rng))
        cost.observe(partial(np.copy, features), float(features @ true))
    assert cost.decode_s(8, 8, 4000) == pytest.approx(0.01 + 8 * 0.0007 + 4000 * 3e-7, rel=0.05)
    expected = 100 * 0.0005 + 100 * 1050 * 1e-7 + 1000 * 3e-7
    assert cost.chunk_s(100, 1000, is_first=True) == pytest.approx(expected, rel=0.1)


def test_a_long_stretch_of_decoding_does_not_erase_the_cost_of_prompts():
    cost = StepCost()
    true = np.array([0.01, 0.0005, 0.0002, 3e-7, 1e-7])
    rng = np.random.default_rng(1)
    for _ in range(60):
        features = batch_features(random_batch(rng))
        cost.observe(partial(np.copy, features), float(features @ true))
    before = cost.chunk_s(200, 500, is_first=True)
    for length in range(5000):
        features = np.array([1.0, 4.0, 4.0, 400.0 + length, 0.0])
        cost.observe(partial(np.copy, features), float(features @ true))
    assert cost.chunk_s(200, 500, is_first=True) == pytest.approx(before, rel=0.1)


def random_features(rng: np.random.Generator) -> np.ndarray:
    """The features of a step that decodes, sometimes with a chunk of a prompt."""
    num_rows, chunk = int(rng.integers(1, 32)), int(rng.integers(0, 2) and rng.integers(16, 256))
    num_read = num_rows * int(rng.integers(50, 500)) + chunk
    return np.array([1.0, num_rows + chunk, num_rows, num_read, chunk * chunk / 2])


@examples(30)
@given(seed=st.integers(0, 1000), num_before=st.integers(60, 200), stall_s=st.floats(0.001, 100.0))
def test_f37_a_stall_that_delays_the_end_of_two_steps_changes_their_cost_little(seed, num_before, stall_s):
    """The first one seems to take the time of the stall, and the second one none."""
    cost, rng = StepCost(), np.random.default_rng(seed)
    true = np.array([0.01, 0.0005, 0.0002, 3e-7, 1e-7])
    for number in range(num_before + 8):
        features = random_features(rng)
        took_s = {num_before: stall_s, num_before + 1: 1e-4}.get(number, float(features @ true))
        cost.observe(partial(np.copy, features), took_s)
    assert cost.decode_s(16, 16, 4000) == pytest.approx(0.01 + 16 * 0.0007 + 4000 * 3e-7, rel=0.25)
    assert cost.chunk_s(100, 0, is_first=True) == pytest.approx(100 * 0.0005 + 5000 * 1e-7, rel=0.25)


def test_steps_that_become_much_faster_are_learned():
    """Steps become faster if another process has ended."""
    cost, rng = StepCost(), np.random.default_rng(2)
    true = np.array([0.1, 0.005, 0.002, 3e-6, 1e-6])
    for number in range(400):
        features = random_features(rng)
        cost.observe(partial(np.copy, features), float(features @ true) / (10 if number >= 200 else 1))
    assert cost.decode_s(16, 16, 4000) == pytest.approx(0.01 + 16 * 0.0007 + 4000 * 3e-7, rel=0.1)
