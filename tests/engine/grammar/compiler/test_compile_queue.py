"""The queues of constraints to compile, and the cache of compiled ones, against plain lists."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from agentflow.engine.grammar.compiler.compiler import ENTRY_BYTES, CompileCache, CompileQueue
from agentflow.engine.grammar.compiler.messages import CompiledConstraint, CompileFailure
from agentflow.errors import Overloaded
from agentflow.protocol.constraint import Constraint
from agentflow.runtime.limits import tenant_part

TENANTS = st.sampled_from("abc")
ITEMS = st.integers(0, 9)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("push"), TENANTS, ITEMS),
        st.tuples(st.just("pop"), st.sampled_from([0.5, 1.0, 5.0]), st.none()),
        st.tuples(st.just("discard"), TENANTS, ITEMS),
    ),
    max_size=60,
)


@given(STEPS)
def test_the_queue_is_bounded_and_serves_each_tenant_in_order(steps):
    queue = CompileQueue[tuple[str, int]](max_waiting=5, max_waiting_per_tenant=3)
    waiting: list[tuple[str, tuple[str, int]]] = []  # in the order in which they came
    for step, first, item in steps:
        of_tenant = [entry for entry in waiting if entry[0] == first]
        if step == "push":
            is_full = len(of_tenant) == 3 or len(waiting) == 5
            entry = first, (first, item)
            try:
                queue.push(*entry)
                assert not is_full or entry in waiting
            except Overloaded:
                assert is_full
                assert entry not in waiting
            else:
                waiting += [] if entry in waiting else [entry]
        elif step == "pop" and waiting:
            tenant, popped = queue.pop()
            assert popped == next(other for name, other in waiting if name == tenant)
            waiting.remove((tenant, popped))
            queue.charge(tenant, first)
        elif step == "discard" and (first, (first, item)) in waiting:
            queue.discard((first, item))
            waiting.remove((first, (first, item)))
        assert len(queue) == len(waiting)
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


def test_idleness_gives_no_credit():
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


def outcome_of(number: int, size: int) -> CompiledConstraint | CompileFailure:
    if number % 4 == 0:
        return CompileFailure("not_supported", "x" * size)
    return CompiledConstraint(str(number), "dfa", bytes(size))


@given(
    st.lists(
        st.tuples(
            st.booleans(), st.sampled_from(["", "a", "b", "c"]), st.integers(0, 9), st.integers(0, 3_000)
        ),
        max_size=60,
    )
)
def test_the_cache_keeps_what_was_used_last_and_a_tenants_own_part(steps):
    cache = CompileCache(10_000)
    # The least recently used first.
    kept: list[tuple[str, int, CompiledConstraint | CompileFailure, int]] = []

    def held_by(name: str) -> int:
        return sum(entry[3] for entry in kept if entry[0] == name)

    for is_put, tenant, number, size in steps:
        constraint = Constraint("regex", f"pattern {number}")
        found = [entry for entry in kept if entry[:2] == (tenant, number)]
        if is_put:
            outcome = outcome_of(number, size)
            single = CompileCache(1_000_000)
            single.put(tenant, constraint, outcome)
            assert single.num_bytes > ENTRY_BYTES + size
            cache.put(tenant, constraint, outcome)
            kept = [entry for entry in kept if entry not in found]
            kept.append((tenant, number, outcome, single.num_bytes))
            while held_by(tenant) > tenant_part(10_000, tenant):
                kept.remove(next(entry for entry in kept if entry[0] == tenant))
            while sum(entry[3] for entry in kept) > 10_000:
                most = max(held_by(name) for name in {entry[0] for entry in kept})
                greedy = {name for name, *_ in kept if held_by(name) == most}
                assume(len(greedy) == 1)
                kept.remove(next(entry for entry in kept if entry[0] in greedy))
        else:
            got = cache.get(tenant, constraint)
            assert got is (found[0][2] if found else None)
            kept = [entry for entry in kept if entry not in found] + found
        assert (len(cache), cache.num_bytes) == (len(kept), sum(entry[3] for entry in kept))


@pytest.mark.parametrize(("tenant", "size"), [("", 10_000), ("ann", 5_000)])
def test_an_entry_too_large_for_the_cache_evicts_nothing(tenant, size):
    cache = CompileCache(10_000)
    small, large = Constraint("regex", "small"), Constraint("regex", "large")
    cache.put(tenant, small, outcome_of(1, 10))
    cache.put(tenant, large, outcome_of(2, size))
    assert cache.get(tenant, large) is None
    assert cache.get(tenant, small) == outcome_of(1, 10)
    assert len(cache) == 1


def test_a_tenant_that_fills_the_cache_leaves_another_what_it_has():
    cache = CompileCache(10_000)
    mine = Constraint("regex", "mine")
    cache.put("ann", mine, outcome_of(1, 10))
    for number in range(100):
        cache.put("mallory", Constraint("regex", f"{number}"), outcome_of(2, 100))
    assert cache.get("ann", mine) == outcome_of(1, 10)
