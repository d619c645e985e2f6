"""``fair-lpm``: the bound on overtaking that its docstring proves, the tenants' shares, and the order
within a tenant."""

import math
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentflow.sampling import SamplingParams
from agentflow.server.core import fair_policy
from agentflow.server.core.fair_policy import FairLongestPrefix
from agentflow.server.core.request import Request


def free(request, match) -> bool:
    return False


@dataclass
class Cache:
    """Stands in for the radix cache: how much of a prompt is cached is written in its first token."""

    def peek(self, identity, run: bytes) -> int:
        return min(int(np.frombuffer(run, np.int32)[0]), len(run) // 4) if run else 0


def request(number: int, size: int, cached: int = 0, tenant: str = "", **kwargs) -> Request:
    tokens = np.full(size, number + 1000, dtype=np.int32)
    tokens[0] = cached
    made = Request.create(number, tokens, 1, SamplingParams(), tenant=tenant, **kwargs)
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
)
# Mostly about as many come as go, so that some are passed over again and again.
steps = st.lists(
    st.one_of(
        arrivals,
        arrivals,
        st.tuples(st.just("admit"), st.integers(1, 2)),
        st.tuples(st.just("admit"), st.integers(1, 2)),
        st.tuples(st.just("cancel"), st.integers(0, 30)),
    ),
    min_size=20,
    max_size=120,
)


@settings(max_examples=300)
@given(plan=steps, least=st.sampled_from([0, 0, 10, 60]), share=st.sampled_from([0.0, 0.0, 0.25, 1.0]))
def test_nobody_is_overtaken_further_than_the_bound(plan, least, share):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fair_policy, "OVERTAKEN_BATCHES", least)
        patch.setattr(fair_policy, "OVERTAKEN_SHARE", share)
        policy = FairLongestPrefix(Cache().peek, 1)
        waiting: dict[int, Request] = {}
        limit: dict[int, float] = {}
        overtaken: Counter[int] = Counter()
        largest = 0
        for number, (kind, *args) in enumerate(plan):
            if kind == "arrive":
                size, cached, tenant, deadline = args
                made = request(number, size, cached, tenant, deadline=deadline)
                before = sum(work(r) for r in waiting.values() if r.tenant == tenant)
                limit[number] = least + share * before
                largest = max(largest, work(made))
                policy.add(made)
                waiting[number] = made
            for _ in range(args[0] if kind == "admit" else 0):
                chosen = policy.next(free)
                assert (chosen is None) == (not waiting)
                if chosen is None:
                    break
                del waiting[chosen.id]
                policy.admit(chosen, work(chosen))
                for other in waiting.values():
                    if other.tenant == chosen.tenant and other.arrival < chosen.arrival:
                        overtaken[other.id] += work(chosen)
                        assert overtaken[other.id] < limit[other.id] + largest
                policy.finish(chosen)
            if kind == "cancel" and args[0] in waiting:
                policy.remove(waiting.pop(args[0]))
        assert len(policy) == len(waiting)
        assert {r.id for r in policy} == set(waiting)


@given(
    sizes=st.lists(st.tuples(st.integers(1, 300), st.sampled_from("aab")), min_size=1, max_size=60),
    quantum=st.integers(1, 200),
)
def test_tenants_that_wait_get_equal_shares(sizes, quantum):
    """While two tenants both wait, what they were given differs by less than two turns and a request each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fair_policy, "TURN_BATCHES", quantum)
        policy = FairLongestPrefix(Cache().peek, 1)
        left: Counter[str] = Counter()
        for number, (size, tenant) in enumerate(sizes):
            policy.add(request(number, size + 1, 0, tenant))
            left[tenant] += 1
        given_to: Counter[str] = Counter()
        largest = max(size for size, _ in sizes) + 1
        while left["a"] and left["b"]:
            chosen = policy.next(free)
            assert chosen is not None
            policy.admit(chosen, chosen.num_tokens)
            left[chosen.tenant] -= 1
            given_to[chosen.tenant] += chosen.num_tokens
            assert abs(given_to["a"] - given_to["b"]) <= 2 * (quantum + largest)


def test_a_request_that_shares_nothing_is_not_passed_over_for_ever():
    policy = FairLongestPrefix(Cache().peek, token_budget=32)
    policy.add(request(0, 100))
    num_before = 0
    for number in range(1, 1000):
        policy.add(request(number, 120, 20))
        chosen = policy.next(free)
        assert chosen is not None
        policy.admit(chosen, work(chosen))
        if chosen.id == 0:
            break
        num_before += 1
    assert num_before == -(-fair_policy.OVERTAKEN_BATCHES * 32 // 100)


def order_of(policy: FairLongestPrefix) -> list[int]:
    order = []
    while (chosen := policy.next(free)) is not None:
        policy.admit(chosen, work(chosen))
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
    policy.add(request(1, 30, 0, task_group="g"))
    policy.add(request(2, 30, 5))
    policy.add(request(3, 30, 10, task_group="g"))
    policy.add(request(4, 30, 0, objective="throughput", task_group="g"))
    assert order_of(policy) == [3, 1, 4, 2, 0]


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


def test_who_lost_its_slots_goes_first_in_order_of_arrival():
    policy = FairLongestPrefix(Cache().peek, token_budget=256)
    requests = [request(number, 30, cached) for number, cached in enumerate([0, 5, 20])]
    for made in requests[:2]:
        policy.add(made)
        policy.admit(made, 30)
    policy.add(requests[2])
    policy.restore(requests[1])
    policy.restore(requests[0])
    assert order_of(policy) == [0, 1, 2]


def test_a_blocked_tenant_does_not_hold_up_another():
    policy = FairLongestPrefix(Cache().peek, token_budget=256)
    policy.add(request(0, 30, 0, "a"))
    policy.add(request(1, 30, 0, "b"))
    chosen = policy.next(lambda made, match: made.tenant == "a")
    assert chosen is not None
    assert chosen.id == 1
    assert policy.next(lambda made, match: True) is None


def test_idle_tenants_are_forgotten():
    policy = FairLongestPrefix(Cache().peek, token_budget=256)
    for number in range(50):
        made = request(number, 10, 0, str(number))
        policy.add(made)
        policy.admit(made, 10)
        policy.finish(made)
    assert not policy._tenants
    assert not policy._turns
