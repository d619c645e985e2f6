"""``fair-lpm``: the bound on overtaking that its docstring proves, the tenants' shares, and the order
within a tenant."""

import gc
import math
import random
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from support.engine.requests import request_of
from support.engine.scheduler_harness import Harness
from support.examples import examples
from support.faults import has_param

from agentflow.engine.request import MAX_WEIGHT, MIN_WEIGHT, Request, Status
from agentflow.engine.runner import run_batch
from agentflow.engine.scheduling.policies import arrival_queue, tenant_queue
from agentflow.engine.scheduling.policies.fair_policy import FairLongestPrefix
from agentflow.engine.scheduling.policies.policy import Preempted
from agentflow.engine.scheduling.policies.tenant_queue import Siblings, TenantQueue
from agentflow.engine.scheduling.policies.waiting_tree import WaitingTree
from agentflow.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from agentflow.engine.simulator.depth_first import SIMULATED_POLICIES
from agentflow.engine.simulator.fake_runner import FakeRunner
from agentflow.errors import BadArgument
from agentflow.protocol.sampling import SamplingParams


def free(request, match) -> bool:
    return False


def next_of(policy, is_blocked) -> Request | None:
    """The request that begins where no prompt runs."""
    policy.start_step()
    return policy.next([], is_blocked)


@dataclass
class Cache:
    """Replaces the radix cache: the first token of a prompt is the number of its cached tokens."""

    def peek(self, identity, run: bytes) -> int:
        return min(int(np.frombuffer(run, np.int32)[0]), len(run) // 4) if run else 0


def request(number: int, size: int, cached: int = 0, tenant: str = "", **kwargs) -> Request:
    tokens = np.full(size, number + 1000, dtype=np.int32)
    tokens[0] = cached
    made = request_of(number, tokens, 1, SamplingParams(), tenant=tenant, **kwargs)
    made.arrival = number
    return made


def work(made: Request) -> int:
    return max(1, made.num_tokens - Cache().peek(None, made.reusable_run()))


arrivals = st.tuples(
    st.just("arrive"),
    st.sampled_from([2, 10, 40]),
    st.integers(0, 8),
    st.sampled_from("aaab"),
    st.sampled_from([math.inf, math.inf, 1.0, 2.0]),
    st.sampled_from([0, 0, -1, 3]),
    st.sampled_from([0, 1, 2]),
)
# Mostly about as many come as go, so that some are passed over again and again.
steps = st.lists(
    st.one_of(
        arrivals,
        arrivals,
        st.tuples(st.just("admit"), st.integers(1, 2)),
        st.tuples(st.just("admit"), st.integers(1, 2)),
        st.tuples(st.just("cancel"), st.integers(0, 30)),
        st.tuples(st.just("hint"), st.integers(0, 30), st.integers(0, 2), st.integers(0, 2)),
    ),
    min_size=20,
    max_size=120,
)


@examples(300)
@given(plan=steps, least=st.sampled_from([0, 0, 10, 60]), share=st.sampled_from([0.0, 0.0, 0.25, 1.0]))
def test_no_request_is_overtaken_beyond_the_bound(plan, least, share):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrival_queue, "OVERTAKEN_BATCHES", least)
        patch.setattr(arrival_queue, "OVERTAKEN_FRACTION", share)
        policy = FairLongestPrefix(Cache().peek, 1)
        waiting: dict[int, Request] = {}
        limit: dict[int, float] = {}
        overtaken: Counter[int] = Counter()
        largest = 0
        for number, (kind, *args) in enumerate(plan):
            if kind == "arrive":
                size, cached, tenant, deadline, priority, program = args
                made = request(
                    number, size, cached, tenant, deadline=deadline, priority=priority, program=program
                )
                before = sum(work(r) for r in waiting.values() if r.tenant == tenant)
                limit[number] = least + share * before
                largest = max(largest, work(made))
                policy.add(made)
                waiting[number] = made
            for _ in range(args[0] if kind == "admit" else 0):
                chosen = next_of(policy, free)
                assert (chosen is None) == (not waiting)
                if chosen is None:
                    break
                del waiting[chosen.id]
                policy.admit(chosen)
                for other in waiting.values():
                    if other.tenant == chosen.tenant and other.arrival < chosen.arrival:
                        overtaken[other.id] += work(chosen)
                        assert overtaken[other.id] < limit[other.id] + largest
                policy.charge(chosen, chosen.num_tokens)
                policy.finish(chosen)
            if kind == "cancel" and args[0] in waiting:
                policy.remove(waiting.pop(args[0]))
            if kind == "hint" and args[0] in waiting:
                placed = waiting[args[0]]
                policy.update_origin(placed, replace(placed.origin, program=args[1], task_group=args[2]))
        assert len(policy) == len(waiting)
        assert {r.id for r in policy} == set(waiting)


shares = st.sampled_from([1.0, 1.0, 3.0, 0.25, 0.01, 100.0]) | st.floats(MIN_WEIGHT, MAX_WEIGHT)


@examples(200)
@given(
    sizes=st.lists(
        st.tuples(st.integers(1, 300), st.sampled_from("aab"), st.integers(0, 20)), min_size=1, max_size=60
    ),
    chunk=st.integers(1, 200),
    num_chunks=st.integers(1, 8),
    share=st.fixed_dictionaries({"a": shares, "b": shares}),
)
def test_tenants_that_wait_get_tokens_within_the_bound_of_their_weights(sizes, chunk, num_chunks, share):
    """While two tenants can both use every chunk, their charges per unit of weight differ
    by no more than the bound of the docstring."""
    policy = FairLongestPrefix(Cache().peek, 1)
    left: dict[int, int] = {}
    generates: dict[int, int] = {}
    waiting: Counter[str] = Counter()
    for number, (size, tenant, output) in enumerate(sizes):
        made = request(number, size + 1, 0, tenant, weight=share[tenant])
        policy.add(made)
        waiting[tenant] += 1
        left[number], generates[number] = made.num_tokens, output
    charged: Counter[str] = Counter()
    prompts: list[Request] = []
    decoding: list[Request] = []
    most_to_generate = 0

    def both_can_use_a_chunk() -> bool:
        return all(waiting[name] or any(p.tenant == name for p in prompts) for name in "ab")

    while both_can_use_a_chunk():
        for made in decoding[:]:
            policy.charge(made, 1)
            charged[made.tenant] += 1
            generates[made.id] -= 1
            if not generates[made.id]:
                decoding.remove(made)
        policy.start_step()
        for _ in range(num_chunks):
            if not both_can_use_a_chunk():
                break
            chosen = policy.next(prompts, free)
            if chosen not in prompts:
                policy.admit(chosen)
                chosen.status = Status.RUNNING
                waiting[chosen.tenant] -= 1
                prompts.append(chosen)
            num_tokens = min(chunk, left[chosen.id])
            policy.charge(chosen, num_tokens)
            charged[chosen.tenant] += num_tokens
            left[chosen.id] -= num_tokens
            if not left[chosen.id]:
                prompts.remove(chosen)
                if generates[chosen.id]:
                    decoding.append(chosen)
            running: Counter[str] = Counter()
            for made in (*prompts, *decoding):
                running[made.tenant] += generates[made.id]
            most_to_generate = max(most_to_generate, *running.values(), 0)
            difference = abs(charged["a"] / share["a"] - charged["b"] / share["b"])
            bound = (chunk + most_to_generate) / min(share.values())
            assert difference <= bound * (1 + 1e-9)


def test_tenants_that_flood_get_tokens_in_proportion_to_their_weights():
    """The whole scheduler, until one of them has no waiting request."""
    token_budget, size, output = 16, 40, 4
    config = SchedulerConfig(max_running=8, token_budget=token_budget)
    scheduler = Scheduler(num_slots=2000, max_context=256, config=config)
    runner = FakeRunner(num_slots=2000, max_context=256)
    share = {"one": 1.0, "three": 3.0}
    for number in range(400):
        tenant = "one" if number % 2 else "three"
        tokens = np.arange(number * size, (number + 1) * size, dtype=np.int32) % 20_000
        scheduler.add(
            request_of(number, tokens, output, SamplingParams(), tenant=tenant, weight=share[tenant])
        )
    charged: Counter[str] = Counter()
    finished: Counter[str] = Counter()
    while finished["three"] < 190:
        batch = scheduler.schedule()
        assert batch is not None
        for result in scheduler.complete(run_batch(runner, batch)):
            if result.request.num_generated == output:
                scheduler.release(result.request)
                finished[result.request.tenant] += 1
                charged[result.request.tenant] += size + output
    in_flight = config.max_running * (size + output)  # charged, and not in these sums
    assert abs(charged["one"] - charged["three"] / 3) <= token_budget + 8 * output + in_flight
    assert 2.5 < charged["three"] / charged["one"] < 3.5


@pytest.mark.parametrize("share", [0.0, -1.0, math.nan, math.inf, 0.001, 1e9])
def test_a_weight_out_of_range_is_rejected(share):
    with pytest.raises(BadArgument, check=has_param("weight")):
        request(0, 10, weight=share)


@pytest.mark.parametrize("priority", [-11, 11])
def test_a_priority_out_of_range_is_rejected(priority):
    with pytest.raises(BadArgument, check=has_param("priority")):
        request(0, 10, priority=priority)


waiting_requests = st.lists(
    st.tuples(
        st.integers(2, 40),
        st.integers(0, 30),
        st.integers(-10, 10),
        st.sampled_from(["latency", "throughput"]),
        st.sampled_from([0, 0, 1, 2]),
        st.sampled_from([math.inf, math.inf, 1.0, 2.0]),
    ),
    min_size=1,
    max_size=30,
)


def policy_with(given_requests, priorities) -> FairLongestPrefix:
    policy = FairLongestPrefix(Cache().peek, token_budget=10_000)  # no request is overtaken that far
    for number, (size, cached, _, objective, group, deadline) in enumerate(given_requests):
        made = request(number, size, cached, objective=objective, task_group=group, deadline=deadline)
        made.origin = replace(made.origin, priority=priorities[number])
        policy.add(made)
    return policy


@given(plan=waiting_requests, blocked=st.sets(st.integers(0, 30)))
def test_the_highest_priority_that_is_not_blocked_goes_first(plan, blocked):
    policy = policy_with(plan, [priority for _, _, priority, *_ in plan])

    def is_blocked(made: Request, match: int | None = None) -> bool:
        return made.tokens[0] in blocked and Cache().peek(None, made.reusable_run()) < made.num_reusable

    waiting = {made.id: made for made in policy}
    while (chosen := next_of(policy, is_blocked)) is not None:
        assert not is_blocked(chosen)
        assert chosen.origin.priority == max(
            made.origin.priority for made in waiting.values() if not is_blocked(made)
        )
        policy.admit(chosen)
        del waiting[chosen.id]
    assert all(is_blocked(made) for made in waiting.values())


@given(plan=waiting_requests, priority=st.integers(-10, 10))
def test_priorities_that_are_all_equal_change_nothing(plan, priority):
    without = order_of(policy_with(plan, [0] * len(plan)))
    assert order_of(policy_with(plan, [priority] * len(plan))) == without


@given(plan=waiting_requests)
def test_within_a_priority_the_order_is_that_of_requests_which_wait_alone(plan):
    plan = [(*rest, 0, deadline) for *rest, _, deadline in plan]  # earlier admissions change groups
    priorities = [priority for _, _, priority, *_ in plan]
    order = order_of(policy_with(plan, priorities))
    for priority in set(priorities):
        alone = FairLongestPrefix(Cache().peek, token_budget=10_000)
        for made in sorted(policy_with(plan, priorities), key=lambda made: made.arrival):
            if made.origin.priority == priority:
                alone.add(made)
        assert order_of(alone) == [number for number in order if priorities[number] == priority]


@pytest.mark.parametrize(
    ("first", "later"),
    [((100, 0, -10), (100, 0, 10)), ((100, 0, 0), (120, 20, 0))],
    ids=["priority", "prefix"],
)
def test_a_request_is_overtaken_as_far_as_the_bound_lets_it(first, later):
    """For a flood of requests with a higher priority, or with a prefix in the cache."""
    policy = FairLongestPrefix(Cache().peek, token_budget=32)
    policy.add(request(0, *first[:2], priority=first[2]))
    num_before = 0
    for number in range(1, 1000):
        policy.add(request(number, *later[:2], priority=later[2]))
        chosen = next_of(policy, free)
        assert chosen is not None
        policy.admit(chosen)
        if chosen.id == 0:
            break
        num_before += 1
    assert num_before == -(-arrival_queue.OVERTAKEN_BATCHES * 32 // 100)


def test_higher_priorities_get_a_bounded_part_before_many_of_a_lower_one():
    """A fixed number of tokens, plus half as many as the lower priority gets."""
    policy = FairLongestPrefix(Cache().peek, token_budget=32)
    for number in range(2000):
        policy.add(request(number, 100))
    done: Counter[int] = Counter()
    for number in range(2000, 3500):
        policy.add(request(number, 100, priority=1))
        chosen = next_of(policy, free)
        assert chosen is not None
        policy.admit(chosen)
        done[chosen.origin.priority] += 100
        at_once = arrival_queue.OVERTAKEN_BATCHES * 32
        assert done[1] <= at_once + arrival_queue.OVERTAKEN_FRACTION * done[0] + 100
        assert done[0] == 0 or done[1] >= at_once + arrival_queue.OVERTAKEN_FRACTION * (done[0] - 100) - 100
    assert done[0] > 80_000


@pytest.mark.parametrize(
    ("choices", "order"), [([[1], [2]], [1, 2, 0]), ([[*range(40)], [*range(1, 40)]], [1, 0, 2])]
)
def test_the_nodes_of_a_select_overtake_like_tokens(choices, order, monkeypatch):
    monkeypatch.setattr(arrival_queue, "OVERTAKEN_BATCHES", 1)
    policy = FairLongestPrefix(Cache().peek, token_budget=16)
    policy.add(request(0, 50))
    policy.add(request(1, 20, 12, choices=choices))
    first = next_of(policy, free)
    assert first is not None
    policy.admit(first)
    policy.add(request(2, 20, 13))
    assert [first.id, *order_of(policy)] == order


def order_of(policy: FairLongestPrefix) -> list[int]:
    order = []
    while (chosen := next_of(policy, free)) is not None:
        policy.admit(chosen)
        order.append(chosen.id)
    return order


def test_within_a_tenant_the_longest_match_goes_first():
    policy = FairLongestPrefix(Cache().peek, token_budget=256)
    for number, cached in enumerate([0, 5, 20, 10]):
        policy.add(request(number, 30, cached))
    assert order_of(policy) == [2, 3, 1, 0]


def test_latency_goes_before_throughput_and_siblings_follow_each_other():
    policy = FairLongestPrefix(Cache().peek, token_budget=256)
    policy.add(request(0, 30, 20, objective="throughput"))
    policy.add(request(1, 30, 0, task_group=1))
    policy.add(request(2, 30, 5))
    policy.add(request(3, 30, 10, task_group=1))
    policy.add(request(4, 30, 0, objective="throughput", task_group=1))
    assert order_of(policy) == [3, 1, 4, 2, 0]


def test_the_objective_counts_before_the_length():
    policy = FairLongestPrefix(Cache().peek, token_budget=16)
    policy.add(request(0, 10, objective="throughput"))
    policy.add(request(1, 100))
    policy.add(request(2, 100, 10, objective="throughput"))
    assert order_of(policy) == [1, 0, 2]


@pytest.mark.parametrize(("cached", "order"), [(86, [0, 1]), (95, [1, 0])])
def test_a_prompt_that_the_cache_has_made_short_is_short(cached, order):
    policy = FairLongestPrefix(Cache().peek, token_budget=16)
    made = request(0, 100)
    policy.add(made)
    policy.tokens_cached(made.cache_key, made.run(50))
    assert policy._tenants[""].count_match(made) == 50
    policy.add(request(1, 100, cached))
    policy.tokens_cached(made.cache_key, made.run(90))
    assert order_of(policy) == order


def test_the_first_deadline_goes_first():
    policy = FairLongestPrefix(Cache().peek, token_budget=256)
    policy.add(request(0, 30, 20))
    policy.add(request(1, 30, 0, deadline=9.0))
    policy.add(request(2, 30, 0, deadline=5.0, objective="throughput"))
    policy.add(request(3, 30, 10, deadline=7.0))
    gone = request(4, 30, 0, deadline=1.0)
    policy.add(gone)
    policy.remove(gone)
    assert order_of(policy) == [2, 3, 1, 0]


@given(
    plan=st.lists(
        st.tuples(
            st.integers(0, 30),
            st.integers(-1, 1),
            st.sampled_from([math.inf, 1.0, 2.0, 3.0]),
            st.integers(0, 3),
        ),
        min_size=1,
        max_size=20,
    )
)
def test_among_equal_priorities_expired_deadlines_go_first(plan):
    """Against a plain list. The plan has the seconds before each admission."""
    now = 0.0
    policy = FairLongestPrefix(Cache().peek, token_budget=10_000, clock=lambda: now)
    waiting: dict[int, Request] = {}
    for number, (cached, priority, patience_end, _) in enumerate(plan):
        made = request(number, 40, cached, priority=priority, patience_end=patience_end)
        policy.add(made)
        waiting[number] = made
    for *_, passes_s in plan:
        now += passes_s / 4
        chosen = next_of(policy, free)
        assert chosen is not None
        highest = max(one.origin.priority for one in waiting.values())
        equals = [one for one in waiting.values() if one.origin.priority == highest]
        impatient = [r for r in equals if r.patience_end <= now]
        if impatient:
            assert chosen is min(impatient, key=lambda r: (r.patience_end, r.id))
        else:
            assert chosen in equals
            assert chosen.tokens[0] == max(r.tokens[0] for r in equals)
        policy.admit(chosen)
        del waiting[chosen.id]


def test_a_tenant_that_leaves_without_a_turn_is_forgotten():
    policy = FairLongestPrefix(Cache().peek, token_budget=10_000)
    policy.add(request(0, 30, 0, priority=1))  # first; the times of others are never read
    for number in range(1, 5_000):
        made = request(number, 30, 0, patience_end=float(number))
        policy.add(made)
        if number > 20:
            policy.remove(made)
        assert next_of(policy, free).id == 0
    assert len(policy._tenants[""]._patience_ends.heaps[0]) < 200
    policy.admit(next_of(policy, free))
    assert order_of(policy) == [*range(1, 21)]


def test_times_stay_in_order_when_old_entries_are_dropped():
    waiting: dict[int, Request] = {}
    heaps = tenant_queue.TimeHeaps(waiting)
    for number in random.Random(1).sample(range(400), 400):
        waiting[number] = request(number, 10)
        heaps.add(float(number), waiting[number])
    for number in random.Random(2).sample(range(400), 300):
        heaps.gone(waiting.pop(number))
    for number in range(400, 500):
        heaps.gone(request(number, 10, priority=1))  # of a priority that never had a time
    found = []
    while (made := heaps.first(0, math.inf)) is not None:
        found.append(made.id)
        heaps.gone(waiting.pop(made.id))
    assert len(found) == 100
    assert found == sorted(found)


def test_f37_requests_with_times_are_forgotten_with_the_last_of_their_tenant():
    """They may have long prompts. Many tenants come and go while others wait."""

    def num_alive() -> int:
        gc.collect()
        return sum([type(one) is Request for one in gc.get_objects()])

    before = num_alive()
    policy = FairLongestPrefix(Cache().peek, token_budget=256)
    for number in range(10):
        policy.add(request(number, 10, 0, "waits"))
    for number in range(10, 400):
        tenant = str(number // 40)
        made = request(number, 10, 0, tenant, deadline=1e9, patience_end=1e9, priority=number % 2)
        policy.add(made)
        if number % 3 and number % 40 < 39:
            policy.remove(made)
        if number % 40 == 39:
            for one in [one for one in policy if one.tenant == tenant]:
                policy.remove(one)
    del made, one
    assert len(policy) == 10
    assert num_alive() - before == 10


def test_a_deadline_goes_before_ended_patience():
    policy = FairLongestPrefix(Cache().peek, token_budget=256, clock=lambda: 10.0)
    policy.add(request(0, 30, 0, patience_end=1.0))
    policy.add(request(1, 30, 0, deadline=99.0))
    assert order_of(policy) == [1, 0]


def test_preempted_requests_go_first_in_order_of_arrival():
    policy = FairLongestPrefix(Cache().peek, token_budget=256)
    requests = [request(number, 30, cached) for number, cached in enumerate([0, 5, 20])]
    for made in requests[:2]:
        policy.add(made)
        policy.admit(made)
    policy.add(requests[2])
    policy.restore(requests[1])
    policy.restore(requests[0])
    assert order_of(policy) == [0, 1, 2]


def test_a_preempted_request_waits_again():
    policy = FairLongestPrefix(Cache().peek, token_budget=256)
    made, other = request(0, 30, 0, "a"), request(1, 30, 0, "b")
    policy.add(made)
    assert made in policy
    assert other not in policy
    policy.admit(made)
    assert made not in policy
    policy.restore(made)
    assert made in policy
    assert [*policy] == [made]
    policy.admit(made)
    policy.finish(made)
    assert not policy._tenants


def running(policy: FairLongestPrefix, *requests: Request) -> list[Request]:
    """The requests, which run."""
    for made in requests:
        policy.add(made)
        policy.admit(made)
        made.status = Status.RUNNING
    return [*requests]


def test_the_oldest_prompt_gets_a_third_of_what_the_others_get():
    policy = FairLongestPrefix(Cache().peek, token_budget=16)
    prompts = running(policy, request(0, 100), request(1, 10))
    for _ in range(2):
        policy.start_step()
        order = []
        for num_tokens in (1, 4, 11, 1, 1):
            chosen = policy.next(prompts, None)
            assert chosen is not None
            order.append(chosen.id)
            policy.charge(chosen, num_tokens)
        assert order == [1, 0, 1, 1, 0]


def test_tokens_of_a_step_do_not_count_in_the_next():
    policy = FairLongestPrefix(Cache().peek, token_budget=16)
    oldest, short, decoding = running(policy, request(0, 100), request(1, 10), request(2, 10))
    policy.start_step()
    policy.charge(decoding, 10)
    policy.start_step()
    assert policy.next([oldest, short], None) is short


def test_cached_tokens_make_a_request_short():
    policy = FairLongestPrefix(Cache().peek, token_budget=16)
    prompts = running(policy, request(0, 100))
    policy.add(request(1, 100, 50))
    policy.add(request(2, 30, 20))
    policy.start_step()
    assert policy.next(prompts, free).id == 2


def test_a_request_with_one_full_batch_to_compute_is_short():
    policy = FairLongestPrefix(Cache().peek, token_budget=16)
    policy.add(request(0, 16))
    policy.add(request(1, 100, 20))
    assert order_of(policy) == [0, 1]
    prompts = running(policy, request(2, 100), request(3, 16))
    policy.start_step()
    assert policy.next(prompts, None).id == 3


def test_the_nodes_of_a_select_make_it_long():
    policy = FairLongestPrefix(Cache().peek, token_budget=16)
    policy.add(request(0, 20, 12, choices=[[*range(40)], [*range(1, 40)]]))
    policy.add(request(1, 20, 5))
    assert order_of(policy) == [1, 0]


@pytest.mark.parametrize(("num_shared", "num_generated", "first"), [(0, 0, 1), (95, 0, 0), (0, 1, 0)])
def test_a_long_prompt_is_long_until_it_is_computed(num_shared, num_generated, first):
    policy = FairLongestPrefix(Cache().peek, token_budget=16)
    [prompt] = running(policy, request(0, 100))
    prompt.num_computed, prompt.num_shared = 95, num_shared
    prompt.num_prompt -= num_generated  # it was preempted
    policy.add(request(1, 10))
    policy.start_step()
    assert policy.next([prompt], free).id == first


def test_while_higher_priorities_are_blocked_the_first_deadline_of_a_lower_one_goes_first():
    policy = FairLongestPrefix(Cache().peek, token_budget=256)
    policy.add(request(0, 30, 1, priority=1))
    policy.add(request(1, 30, 20))
    policy.add(request(2, 30, 0, deadline=5.0))
    chosen = next_of(policy, lambda made, match: made.id == 0)
    assert chosen is not None
    assert chosen.id == 2


def test_no_request_passes_an_overdue_one_that_waits_for_memory(monkeypatch):
    monkeypatch.setattr(arrival_queue, "OVERTAKEN_BATCHES", 0)
    policy = FairLongestPrefix(Cache().peek, token_budget=16)
    overdue = request(0, 30)
    policy.add(overdue)
    policy.add(request(1, 30, 1))
    overdue.is_held_back = True
    assert next_of(policy, lambda made, match: made is overdue) is None
    overdue.is_held_back = False
    assert next_of(policy, lambda made, match: made is overdue).id == 1


def test_of_tenants_with_equal_charges_the_first_to_come_goes_first():
    policy = FairLongestPrefix(Cache().peek, token_budget=256)
    for number in range(3):
        policy.add(request(number, 30, 0, str(number)))
    assert order_of(policy) == [0, 1, 2]


def test_a_blocked_tenant_does_not_hold_up_another():
    policy = FairLongestPrefix(Cache().peek, token_budget=256)
    policy.add(request(0, 30, 0, "a"))
    policy.add(request(1, 30, 0, "b"))
    chosen = next_of(policy, lambda made, match: made.tenant == "a")
    assert chosen is not None
    assert chosen.id == 1
    assert next_of(policy, lambda made, match: True) is None


def test_idle_tenants_are_forgotten():
    policy = FairLongestPrefix(Cache().peek, token_budget=256)
    policy.add(request(0, 10, 0, "first"))
    policy.add(request(1, 10, 0, "second"))
    for number in range(2, 300):
        made = request(number, 10, 0, str(number))
        policy.add(made)
        policy.admit(made)
        policy.finish(made)
    assert policy._tenants.keys() == {"first", "second"}
    assert len(policy._by_charge) < 100
    assert order_of(policy) == [0, 1]


def test_tenants_stay_in_order_when_old_entries_are_dropped():
    policy = FairLongestPrefix(Cache().peek, token_budget=256)
    draw = random.Random(1)
    running_requests = [request(1000 + number, 10, 0, str(number)) for number in range(200)]
    waiting = [request(number, 10, 0, str(number)) for number in range(200)]
    for number, made in enumerate(running_requests):
        policy.add(made)
        policy.admit(made)
        policy.add(waiting[number])
        policy.charge(made, draw.randrange(10_000))
    assert next_of(policy, lambda made, match: True) is None
    policy.start_step()  # all tenants enter the heap again, the highest charge first
    for number in draw.sample(range(200), 150):
        policy.remove(waiting[number])
        policy.finish(running_requests[number])
    policy.add(request(2000, 10, 0, "new"))
    assert len(policy._by_charge) < 100
    charges = {int(name): tenant.used for name, tenant in policy._tenants.items() if name != "new"}
    order = [number for number in order_of(policy) if number < 2000]
    assert order == sorted(charges, key=lambda number: charges[number])


def test_a_new_tenant_begins_at_the_charge_of_one_that_could_not_use_the_step():
    policy = FairLongestPrefix(Cache().peek, token_budget=256)
    for number, tenant in enumerate("abb"):
        policy.add(request(number, 10, 0, tenant))
    chosen = next_of(policy, lambda made, match: made.tenant == "a")
    assert chosen is not None
    policy.admit(chosen)
    policy.charge(chosen, 50)
    policy.add(request(3, 10, 0, "c"))
    assert next_of(policy, lambda made, match: made.tenant == "a").tenant == "c"


tenant_steps = st.lists(
    st.tuples(
        st.lists(st.tuples(st.integers(0, 7), st.integers(1, 40)), max_size=3),  # arrivals: tenant and size
        st.integers(0, 4),  # chunks
        st.integers(0, 3),  # how many of the chunks may admit
        st.sets(st.integers(0, 7), max_size=3),  # tenants whose waiting requests are blocked
        st.integers(0, 3),  # requests that end
    ),
    min_size=3,
    max_size=30,
)


@given(plan=tenant_steps)
def test_f7c_each_chunk_goes_to_the_lowest_charge_that_can_use_it(plan):
    """Against a list of all tenants, over steps in which tenants come, are blocked, and go."""
    policy = FairLongestPrefix(Cache().peek, 1000)
    used: dict[str, float] = {}
    waiting: dict[int, Request] = {}
    admitted: dict[int, Request] = {}
    prompts: list[Request] = []

    def forget(tenant: str) -> None:
        if not any(r.tenant == tenant for r in (*waiting.values(), *admitted.values())):
            used.pop(tenant, None)

    for number, (arriving, num_chunks, num_admitting, blocked, num_ending) in enumerate(plan):
        for index, (tenant, size) in enumerate(arriving):
            made = request(10 * number + index, size + 1, 0, str(tenant))
            used.setdefault(made.tenant, min(used.values(), default=0.0))
            waiting[made.id] = made
            policy.add(made)
        for made in [r for r in admitted.values() if r not in prompts]:
            policy.charge(made, 1)
            used[made.tenant] += 1
        policy.start_step()
        for chunk in range(num_chunks):
            may_admit = chunk < num_admitting
            able = {r.tenant for r in prompts}
            able |= {r.tenant for r in waiting.values() if may_admit and int(r.tenant) not in blocked}
            is_blocked = (lambda r, match: int(r.tenant) in blocked) if may_admit else None  # noqa: B023
            chosen = policy.next(prompts, is_blocked)
            assert (chosen is None) == (not able)
            if chosen is None:
                break
            assert used[chosen.tenant] == min(used[tenant] for tenant in able)
            if chosen.id in waiting:
                policy.admit(chosen)
                chosen.status = Status.RUNNING
                admitted[chosen.id] = waiting.pop(chosen.id)
                prompts.append(chosen)
            policy.charge(chosen, 5)
            used[chosen.tenant] += 5
            if chosen.id % 2:
                prompts.remove(chosen)
        for made in [*admitted.values()][:num_ending]:
            policy.finish(made)
            del admitted[made.id]
            prompts = [r for r in prompts if r is not made]
            forget(made.tenant)
    assert {r.id for r in policy} == set(waiting)


@pytest.mark.parametrize("num_tenants", [20, 600])
def test_f7d_a_step_does_not_look_at_all_tenants_that_wait(num_tenants, monkeypatch):
    num_looked_at = 0
    for name in ("start_step", "next", "charge"):
        method = getattr(tenant_queue.TenantQueue, name)

        def noted(self, *args, method=method):
            nonlocal num_looked_at
            num_looked_at += 1
            return method(self, *args)

        monkeypatch.setattr(tenant_queue.TenantQueue, name, noted)
    policy = FairLongestPrefix(Cache().peek, 1000)
    for number in range(num_tenants):
        policy.add(request(number, 10, 0, str(number)))
    for step in range(30):
        num_looked_at = 0
        policy.start_step()
        for chunk in range(6):
            # After two chunks no request fits into memory.
            chosen = policy.next([], free if chunk < 2 else None)
            assert (chosen is None) == (chunk >= 2 or 2 * step + chunk >= num_tenants)
            if chosen is not None:
                policy.admit(chosen)
                policy.charge(chosen, 10)
                policy.finish(chosen)
        assert num_looked_at <= 8


branches = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), min_size=1, max_size=12)


@given(
    prompts=branches,
    cached=st.integers(0, 4),
    computing=st.lists(st.integers(0, 2), min_size=1, max_size=5),
    held_back=st.sets(st.integers(0, 11)),
)
def test_f7e_siblings_are_passed_over_only_if_they_are_blocked(prompts, cached, computing, held_back):
    """A running request computes the token that some need next, as the scheduler asks; some do not fit."""

    def is_blocked(made: Request, match: int) -> bool:
        if made.is_held_back:
            return True
        needed = made.tokens[: match + 1].tolist()
        return match < made.num_reusable and computing[: match + 1] == needed

    siblings = tenant_queue.Siblings()
    waiting: list[Request] = []
    for number, prompt in enumerate(prompts):
        tokens = np.array([*prompt, 9], dtype=np.int32)
        waiting.append(request_of(number, tokens, 1, SamplingParams(), task_group=1))
        waiting[-1].is_held_back = number in held_back
        siblings.add(waiting[-1])

    def count_match(made: Request) -> int:
        common = 0
        while (
            common < min(cached, made.num_reusable, len(computing))
            and made.tokens[common] == computing[common]
        ):
            common += 1
        return common

    while waiting:
        chosen = siblings.first(count_match, is_blocked)
        free_ones = [made for made in waiting if not is_blocked(made, count_match(made))]
        assert (chosen is None) == (not free_ones)
        if chosen is None:
            break
        assert chosen in free_ones
        if waiting[0] in free_ones:
            assert chosen is waiting[0]
        siblings.remove(chosen)
        waiting.remove(chosen)
    assert len(siblings) == len(waiting)


@pytest.mark.parametrize("policy", ["fair-lpm", "lpm", "dfs-weight"])
@pytest.mark.parametrize("num_siblings", [10, 400])
def test_f7f_siblings_that_wait_for_one_prefix_are_asked_about_together(num_siblings, policy, monkeypatch):
    config = SchedulerConfig(max_running=8, token_budget=64, policy=policy)
    scheduler = Scheduler(num_slots=4096, max_context=256, config=config, policies=SIMULATED_POLICIES)
    runner = FakeRunner(num_slots=4096, max_context=256)
    for number in range(num_siblings):
        tokens = np.array([*range(200), number, 0], dtype=np.int32)
        scheduler.add(request_of(number, tokens, 1, SamplingParams(), task_group=1))
    num_asked = 0
    will_compute = scheduler._prefills.will_compute

    def counted(made: Request, match: int) -> bool:
        nonlocal num_asked
        num_asked += 1
        return will_compute(made, match)

    monkeypatch.setattr(scheduler._prefills, "will_compute", counted)
    for _ in range(4):  # the first one computes the prefix; the last step has room for others
        num_asked = 0
        batch = scheduler.schedule()
        assert batch is not None
        scheduler.complete(run_batch(runner, batch))
        assert len(scheduler.running) == 1
        assert num_asked <= 12


@pytest.mark.parametrize(("now", "chosen"), [(10.0, 1), (30.0, 0)])
def test_the_patience_of_requests_is_on_the_clock_of_the_scheduler(now, chosen):
    config = SchedulerConfig(max_running=1, token_budget=64)
    scheduler = Scheduler(num_slots=4096, max_context=256, config=config, clock=lambda: now)
    runner = FakeRunner(num_slots=4096, max_context=256)
    prefix = np.arange(64, dtype=np.int32)
    first = request_of(9, prefix, 1, SamplingParams())
    scheduler.add(first)
    batch = scheduler.schedule()
    assert batch is not None
    scheduler.complete(run_batch(runner, batch))
    scheduler.finish(first)
    cold = request_of(0, np.full(10, 200, dtype=np.int32), 1, SamplingParams(), patience_end=20.0)
    scheduler.add(cold)
    scheduler.add(request_of(1, np.append(prefix, 7).astype(np.int32), 1, SamplingParams()))
    assert scheduler.schedule() is not None
    assert [*scheduler.running] == [chosen]


plain = st.tuples(
    st.sampled_from([0, 20, 50]),  # tokens that the prompts share
    st.integers(1, 60),  # others
    st.sampled_from("aaab"),
    st.sampled_from([0, 0, 0, 1]),  # priority
    st.sampled_from(["latency", "latency", "throughput"]),
    st.integers(1, 4),  # outputs
    st.integers(0, 3),  # steps until the next one
)
times_and_groups = st.tuples(st.sampled_from([math.inf, math.inf, 1.0]), st.integers(0, 1), st.integers(0, 1))


@examples(160)
@given(
    plan=st.lists(st.tuples(plain, st.just((math.inf, 0, 0))), min_size=2, max_size=20)
    | st.lists(st.tuples(plain, times_and_groups), min_size=2, max_size=20),
    num_slots=st.sampled_from([130, 200, 1000]),
    max_running=st.integers(2, 6),
    places=st.dictionaries(st.integers(0, 30), st.tuples(st.integers(1, 3), st.integers(0, 1)), max_size=2),
)
def test_a_search_that_is_not_repeated_has_the_same_result(plan, num_slots, max_running, places):
    """Against a policy that searches each time that it is asked for the next request."""
    kept, searching = harnesses = [
        Harness(num_slots, clock=lambda: 0.0, token_budget=16, max_running=max_running) for _ in range(2)
    ]
    next_of_queue = tenant_queue.TenantQueue.next

    def searched(queue, prompts, is_blocked):
        if queue in searching.scheduler.waiting._tenants.values():
            queue._chosen, queue._has_searched = None, True
        return next_of_queue(queue, prompts, is_blocked)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tenant_queue.TenantQueue, "next", searched)
        for harness in harnesses:
            num_steps = 0
            for number, (one, (deadline, group, program)) in enumerate(plan):
                shared, size, tenant, priority, objective, count, steps = one
                prompt = [*range(1, shared + 1), *range(100 * number + 100, 100 * number + 100 + size)]
                origin = {"tenant": tenant, "priority": priority, "objective": objective}
                origin |= {"task_group": group, "program": program, "state": number % 3 + 1}
                harness.add(number, prompt, count, deadline=deadline, **origin)
                for _ in range(steps):
                    if num_steps in places:
                        state, program = places[num_steps]
                        harness.scheduler.update_hint(state, program, 0, "latency")
                    harness.step()
                    num_steps += 1
            harness.run()
    for ours, theirs in zip(kept.batches, searching.batches, strict=True):
        assert ours.req_rows.tolist() == theirs.req_rows.tolist()
        assert ours.token_ids.tolist() == theirs.token_ids.tolist()
        assert ours.positions.tolist() == theirs.positions.tolist()


class Fault(Exception):
    """Raised in place of a part of a move."""


def fault(*args, **kwargs):
    raise Fault


@pytest.mark.parametrize("num_requests", [2, 8])
@pytest.mark.parametrize(
    ("move", "owner", "name"),
    [
        ("add", Cache, "peek"),
        ("add", WaitingTree, "add"),
        ("add", Siblings, "add"),
        ("pause", TenantQueue, "take_out"),
        ("pause", TenantQueue, "wait_aside"),
        ("resume", Preempted, "add"),
        ("resume", TenantQueue, "_leave_aside"),
        ("update_origin", TenantQueue, "put_in"),
        ("update_origin", WaitingTree, "add"),
        ("join a paused program", TenantQueue, "take_out"),
        ("join a paused program", TenantQueue, "wait_aside"),
        ("admit", WaitingTree, "remove"),
        ("admit", TenantQueue, "take_out"),
        ("restore", Preempted, "add"),
        ("set_unencoded", WaitingTree, "add"),
        ("set_unencoded", WaitingTree, "remove"),
        ("set_unencoded", Siblings, "add"),
        ("set_unencoded", Siblings, "remove"),
    ],
)
def test_f37_a_fault_in_a_move_loses_no_request(monkeypatch, move, owner, name, num_requests):
    """Each request is in the policy or is not, and can be removed; nothing is counted that is not there."""
    policy = FairLongestPrefix(Cache().peek, 64, clock=lambda: 0.0)
    requests = [request(number, 10, task_group=1, program=1) for number in range(num_requests)]
    last = requests[-1]
    if move == "add":
        requests.pop()
    for one in requests:
        policy.add(one)
    if move == "restore":
        policy.admit(last)
    if move == "resume":
        policy.pause("", 1)
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, fault)
        with suppress(Fault):
            match move:
                case "add":
                    policy.add(last)
                case "pause" | "resume":
                    getattr(policy, move)("", 1)
                case "update_origin":
                    policy.update_origin(last, replace(last.origin, objective="throughput"))
                case "set_unencoded":
                    policy.set_unencoded(last, True)
                case "join a paused program":
                    policy.pause("", 2)
                    policy.update_origin(last, replace(last.origin, program=2))
                case _:
                    getattr(policy, move)(last)
    for one in requests:
        assert one in policy or (one is last and move in ("admit", "restore"))
    for one in [*{other.id: other for other in [*requests, last]}.values()]:
        if one in policy:
            policy.remove(one)
        elif move != "add":
            policy.finish(one)  # it runs: it was admitted, or could not be preempted
    assert [*policy] == []
    assert (policy.num_waiting, policy.num_tenants) == (0, 0)
