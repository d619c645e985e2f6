"""Prefixes that clients asked to keep: a rank among the tokens of one owner, for a time, and no lock."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentflow.engine.cache.nodes import PrefixMatch
from agentflow.engine.cache.prefix_marks import MAX_ENDED, MIN_REBUILT, PrefixMarks
from agentflow.engine.cache.radix_cache import RadixCache
from agentflow.engine.cache.token_run import token_run


class Marked:
    """A cache of several owners whose slots are handed out in order, with marks in it."""

    def __init__(self) -> None:
        self.cache = RadixCache(owner_of=lambda key: key)
        self.marks = PrefixMarks(self.cache)
        self.slots = itertools.count()
        self.prefixes = itertools.count()

    def add(self, tokens: list[int], owner: str = "") -> PrefixMatch:
        run = token_run(np.array(tokens, dtype=np.int32))
        slots = np.array([next(self.slots) for _ in tokens], dtype=np.int32)
        match, _ = self.cache.extend(self.cache.match(owner, b""), owner, run, slots)
        return match

    def add_new(self, num_tokens: int, owner: str) -> PrefixMatch:
        """A prefix that shares no tokens with others."""
        return self.add([next(self.prefixes)] * num_tokens, owner)

    def evicted(self, count: int) -> list[int]:
        return self.cache.evict(count).tolist()


def test_a_marked_prefix_outlasts_ordinary_ones_but_not_open_states() -> None:
    cache = Marked()
    cache.marks.mark(cache.add([1, 1]).node, until=10.0)
    cache.cache.keep(cache.add([2, 2]))
    cache.add([3, 3])
    assert [cache.evicted(2) for _ in range(3)] == [[4, 5], [0, 1], [2, 3]]


def test_a_mark_ends() -> None:
    cache = Marked()
    node = cache.add([1, 1]).node
    cache.marks.mark(node, until=10.0)
    cache.add([2, 2])
    cache.marks.expire(9.0)
    assert cache.evicted(2) == [2, 3]
    cache.add([3, 3])
    cache.marks.mark(node, until=20.0)  # marked again before it ends
    cache.marks.expire(10.0)
    assert cache.evicted(2) == [4, 5]
    cache.add([4, 4])
    cache.marks.expire(20.0)
    assert cache.evicted(2) == [0, 1]
    assert len(cache.marks) == 0


def test_f37_a_step_ends_some_of_many_marks() -> None:
    num_marks = 3 * MAX_ENDED
    cache = Marked()
    for number in range(num_marks):
        cache.marks.mark(cache.add([number]).node, until=10.0)
    for num_left in (2 * MAX_ENDED, MAX_ENDED, 0, 0):
        cache.marks.expire(10.0)
        assert len(cache.marks) == num_left


def test_of_marked_prefixes_the_least_recently_used_goes_first() -> None:
    cache = Marked()
    for number, seconds in enumerate([3600.0, 300.0, 1800.0]):
        cache.marks.mark(cache.add([number]).node, seconds)
    cache.cache.match("", token_run(np.array([0], dtype=np.int32)))
    assert [cache.evicted(1)[0] for _ in range(3)] == [1, 2, 0]


def test_the_part_of_a_marked_prefix_that_is_left_stays_marked() -> None:
    cache = Marked()
    shared = cache.add([1, 1])
    cache.marks.mark(cache.add([1, 1, 2, 2]).node, until=10.0)
    assert shared.node.marked_until == 0
    cache.add([9] * 3)
    assert cache.evicted(3) == [6, 7, 8]
    assert cache.evicted(3) == [4, 5, 1]  # its own two, and one of the part above
    cache.add([8])
    assert cache.evicted(1) == [9]
    cache.marks.expire(10.0)
    assert shared.node.marked_until == 0


def test_the_rest_of_a_prefix_is_marked() -> None:
    cache = Marked()
    shared = cache.add([1, 1]).node
    longer = cache.add([1, 1, 2]).node
    assert cache.evicted(1) == [4]
    cache.marks.mark(longer, until=10.0)
    assert shared.marked_until == 10.0
    assert len(cache.evicted(2)) == 2
    cache.marks.mark(longer, until=20.0)  # nothing is left
    cache.marks.expire(10.0)
    assert len(cache.marks) == 0


def test_memory_for_marks_is_bounded_by_the_prefixes_that_are_cached() -> None:
    cache = Marked()
    for number in range(5000):
        cache.marks.mark(cache.add([number]).node, until=3600.0 + number)
        if number >= 10:
            cache.evicted(1)
        assert len(cache.marks) <= MIN_REBUILT + 30
    kept = cache.add([0, 1]).node
    for number in range(5000):
        cache.marks.mark(kept, until=1e4 + number)
    assert len(cache.marks) <= MIN_REBUILT + 30


Step = tuple[str, str, int, bool]
steps = st.lists(
    st.tuples(st.sampled_from(["add", "evict"]), st.sampled_from("abc"), st.integers(1, 40), st.booleans()),
    max_size=40,
)


@given(steps=steps, weights=st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=3, max_size=3))
def test_no_owner_holds_more_than_its_share_by_marks(steps: list[Step], weights: list[float]) -> None:
    """An owner's marks do not change the number of tokens that each owner holds."""
    marked, plain = Marked(), Marked()
    for kind, owner, count, is_marked in steps:
        for cache in (marked, plain):
            if kind == "evict":
                cache.cache.evict(count)
                continue
            match = cache.add_new(count, owner)
            cache.cache.weigh(owner, weights["abc".index(owner)])
            if is_marked and cache is marked:
                cache.marks.mark(match.node, until=1e9)
        held = [
            {account.owner: account.num_cached for account in cache.cache.accounts()}
            for cache in (marked, plain)
        ]
        assert held[0] == held[1]
        assert not marked.cache.num_locked  # no mark is a lock
        marked.cache.check()


@pytest.mark.parametrize("count", [1, 7, 100])
def test_marks_never_keep_tokens_from_those_who_need_room(count: int) -> None:
    cache = Marked()
    for number in range(count):
        cache.marks.mark(cache.add([number, number]).node, until=1e9)
    assert len(cache.evicted(2 * count)) == 2 * count
    assert cache.cache.num_cached == 0
