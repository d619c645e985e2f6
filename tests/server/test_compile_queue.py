"""The queues of what is to be compiled, and the cache of what was, against plain twins."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agentflow.constraint import Constraint
from agentflow.errors import Overloaded
from agentflow.server.compile_cache import ENTRY_BYTES, CompileCache
from agentflow.server.compile_frames import Refusal
from agentflow.server.compile_queue import CompileQueue
from agentflow.server.compiled_constraint import CompiledConstraint

TENANTS = st.sampled_from("abc")
ITEMS = st.integers(0, 9)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("push"), TENANTS, ITEMS),
        st.tuples(st.just("pop"), st.sampled_from([0.5, 1.0, 5.0]), st.none()),
        st.tuples(st.just("discard"), st.none(), ITEMS),
    ),
    max_size=60,
)


@given(STEPS)
def test_what_waits_is_bounded_and_each_is_served_once_in_its_tenants_order(steps):
    queue = CompileQueue[int](max_waiting=5, max_waiting_per_tenant=3)
    waiting: list[tuple[str, int]] = []  # in the order in which they came
    for step, first, item in steps:
        of_tenant = [entry for entry in waiting if entry[0] == first]
        if step == "push":
            is_new = item not in {other for _, other in waiting}
            is_full = len(of_tenant) == 3 or (is_new and len({other for _, other in waiting}) == 5)
            try:
                queue.push(first, item)
                assert not is_full or (first, item) in waiting
            except Overloaded:
                assert is_full
                assert (first, item) not in waiting
            else:
                waiting += [] if (first, item) in waiting else [(first, item)]
        elif step == "pop" and waiting:
            tenant, popped = queue.pop()
            assert popped == next(other for name, other in waiting if name == tenant)
            waiting = [entry for entry in waiting if entry[1] != popped]
            queue.charge(tenant, first)
        elif step == "discard":
            queue.discard(item)
            waiting = [entry for entry in waiting if entry[1] != item]
        assert len(queue) == len({other for _, other in waiting})
        assert len(queue._used) <= 3


@given(st.lists(st.tuples(TENANTS, st.floats(0.1, 2.0)), min_size=1, max_size=40))
def test_tenants_that_always_wait_get_the_same_time(costs):
    """None is ahead of another by more than one constraint takes at most."""
    queue = CompileQueue[tuple[str, int]](max_waiting=100, max_waiting_per_tenant=50)
    for number in range(50):
        for tenant in "ab":
            queue.push(tenant, (tenant, number))
    used = {"a": 0.0, "b": 0.0}
    for _, cost in costs:
        tenant, _ = queue.pop()
        queue.charge(tenant, cost)
        used[tenant] += cost
        assert abs(used["a"] - used["b"]) <= 2.0 + 1e-9


def test_with_equal_costs_it_is_round_robin():
    queue = CompileQueue[str](max_waiting=100, max_waiting_per_tenant=50)
    for item in ("a1", "a2", "a3", "b1", "b2", "c1"):
        queue.push(item[0], item)
    served = []
    while queue:
        tenant, item = queue.pop()
        queue.charge(tenant, 1.0)
        served.append(item)
    assert served == ["a1", "b1", "c1", "a2", "b2", "a3"]


def test_having_asked_for_nothing_is_no_credit():
    queue = CompileQueue[str](max_waiting=100, max_waiting_per_tenant=50)
    served = []
    for number in range(9):
        queue.push("a", f"a{number}")
    for number in range(6):
        if number == 3:
            for item in ("b1", "b2", "b3", "b4"):
                queue.push("b", item)
        tenant, item = queue.pop()
        queue.charge(tenant, 1.0)
        served.append(item)
    assert served == ["a0", "a1", "a2", "b1", "a3", "b2"]


def test_an_item_that_waits_for_two_comes_when_the_first_has_its_turn():
    queue = CompileQueue[str](max_waiting=100, max_waiting_per_tenant=50)
    for item in ("a1", "a2", "shared", "a3"):
        queue.push("a", item)
    queue.push("b", "shared")
    served = []
    while queue:
        tenant, item = queue.pop()
        queue.charge(tenant, 1.0)
        served.append((tenant, item))
    assert served == [("a", "a1"), ("b", "shared"), ("a", "a2"), ("a", "a3")]


def test_tenants_that_come_and_go_are_forgotten():
    queue = CompileQueue[int](max_waiting=10, max_waiting_per_tenant=5)
    queue.push("stays", -1)
    queue.push("stays", -2)
    queue.charge("stays", 1e9)
    for number in range(1000):
        queue.push(str(number), number)
        tenant, _ = queue.pop()
        queue.charge(tenant, 1.0)
        assert len(queue._used) <= 2 * 10 + 2


def outcome_of(number: int, size: int) -> CompiledConstraint | Refusal:
    if number % 4 == 0:
        return Refusal("not_supported", "x" * size)
    return CompiledConstraint(str(number), "fsm", bytes(size))


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 12), st.integers(0, 3_000)), max_size=60))
def test_the_cache_keeps_what_was_used_last(steps):
    cache = CompileCache(10_000)
    kept: list[tuple[int, CompiledConstraint | Refusal, int]] = []  # the least recently used first
    for is_put, number, size in steps:
        constraint = Constraint("regex", f"pattern {number}")
        found = [entry for entry in kept if entry[0] == number]
        if is_put:
            outcome = outcome_of(number, size)
            single = CompileCache(1_000_000)
            single.put(constraint, outcome)
            assert single.num_bytes > ENTRY_BYTES + size
            cache.put(constraint, outcome)
            kept = [entry for entry in kept if entry not in found] + [(number, outcome, single.num_bytes)]
            while sum(entry[2] for entry in kept) > 10_000:
                del kept[0]
        else:
            got = cache.get(constraint)
            assert got is (found[0][1] if found else None)
            kept = [entry for entry in kept if entry not in found] + found
        assert (len(cache), cache.num_bytes) == (len(kept), sum(entry[2] for entry in kept))


def test_one_too_large_for_the_cache_drops_nothing():
    cache = CompileCache(10_000)
    small, large = Constraint("regex", "small"), Constraint("regex", "large")
    cache.put(small, outcome_of(1, 10))
    cache.put(large, outcome_of(2, 10_000))
    assert cache.get(large) is None
    assert cache.get(small) == outcome_of(1, 10)
    assert len(cache) == 1
