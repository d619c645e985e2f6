"""The radix cache against a brute-force twin: a plain list of sequences with their times of use."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from agentflow.server.core.kv_slots import KVSlots
from agentflow.server.core.radix_cache import PrefixMatch, RadixCache, common_prefix_len

# Few token ids and short sequences, so that prefixes collide often.
sequences = st.lists(st.integers(0, 2), min_size=1, max_size=10)
extra_keys = st.sampled_from(["", "other tenant"])


def as_tokens(sequence: list[int] | tuple[int, ...]) -> np.ndarray:
    return np.array(sequence, dtype=np.int32)


class PrefixList:
    """The twin. Knows every cached prefix of every inserted sequence (one entry for each token that
    is cached, named by the whole sequence up to it), its slot, its locks and its last use."""

    def __init__(self) -> None:
        self.slots: dict[tuple, int] = {}
        self.locks: dict[tuple, int] = {}
        self.used: dict[tuple, int] = {}
        self.clock = 0

    def match(self, extra: str, sequence: list[int]) -> list[int]:
        self.clock += 1
        slots = []
        for length in range(1, len(sequence) + 1):
            prefix = (extra, *sequence[:length])
            if prefix not in self.slots:
                break
            slots.append(self.slots[prefix])
            self.used[prefix] = self.clock
        return slots

    def insert(self, extra: str, sequence: list[int], slots: list[int]) -> int:
        existing = len(self.match(extra, sequence))
        for length in range(existing + 1, len(sequence) + 1):
            prefix = (extra, *sequence[:length])
            self.slots[prefix] = slots[length - 1]
            self.used[prefix] = self.clock
            self.locks[prefix] = 0
        return existing

    def lock(self, extra: str, sequence: list[int], by: int) -> None:
        for length in range(1, len(sequence) + 1):
            self.locks[(extra, *sequence[:length])] += by

    def leaf_ends(self) -> list[tuple]:
        inner = {prefix[:-1] for prefix in self.slots}
        return [prefix for prefix in self.slots if prefix not in inner]

    def evictable_leaf_ends(self) -> list[tuple]:
        return [prefix for prefix in self.leaf_ends() if self.locks[prefix] == 0]


class RadixCacheMachine(RuleBasedStateMachine):
    """Random matches, inserts, locks and evictions; the same on both sides."""

    locked = Bundle("locked")

    def __init__(self) -> None:
        super().__init__()
        self.cache = RadixCache()
        self.twin = PrefixList()
        self.free = KVSlots(400)

    @rule(extra=extra_keys, sequence=sequences)
    def match(self, extra, sequence):
        match = self.cache.match(extra, as_tokens(sequence))
        assert match.slots.tolist() == self.twin.match(extra, sequence)
        assert match.num_tokens == len(match.slots)

    @rule(extra=extra_keys, sequence=sequences)
    def insert(self, extra, sequence):
        if self.free.num_free < len(sequence):
            return
        slots = self.free.allocate(len(sequence))
        match, existing = self.cache.insert(extra, as_tokens(sequence), slots)
        assert existing == self.twin.insert(extra, sequence, slots.tolist())
        self.free.release(slots[:existing])
        assert match.num_tokens == len(sequence)
        assert match.slots.tolist() == self.twin.match(extra, sequence)
        self.cache.match(extra, as_tokens(sequence))  # the twin's clock has ticked once more

    @rule(target=locked, extra=extra_keys, sequence=sequences)
    def lock(self, extra, sequence):
        match = self.cache.match(extra, as_tokens(sequence))
        self.twin.match(extra, sequence)
        self.cache.lock(match)
        self.twin.lock(extra, sequence[: match.num_tokens], +1)
        return extra, sequence[: match.num_tokens], match

    @rule(held=consumes(locked))
    def unlock(self, held):
        extra, sequence, match = held
        self.cache.unlock(match)
        self.twin.lock(extra, sequence, -1)

    @rule(count=st.integers(1, 12))
    def evict(self, count):
        before = dict(self.twin.slots)
        freed = self.cache.evict(count).tolist()
        gone = {prefix for prefix, slot in before.items() if slot in set(freed)}
        assert len(gone) == len(freed)
        # Leaf by leaf, least recently used first. A prefix is used whenever what follows it is, so
        # token by token comes to the same.
        while gone:
            evictable = self.twin.evictable_leaf_ends()
            candidates = [end for end in evictable if end in gone]
            assert candidates, "something was evicted that was locked, or not at the end of its sequence"
            end = min(candidates, key=self.twin.used.__getitem__)
            assert self.twin.used[end] == min(self.twin.used[other] for other in evictable)
            gone.remove(end)
            del self.twin.slots[end]
        self.free.release(np.array(freed, dtype=np.int32))
        if len(freed) < count:
            assert not self.twin.evictable_leaf_ends(), "evict gave up though there was more to evict"

    @invariant()
    def counts_agree(self):
        self.cache.check()
        assert self.cache.num_cached == len(self.twin.slots)
        assert self.cache.num_locked == sum(count > 0 for count in self.twin.locks.values())
        assert self.free.num_free + self.cache.num_cached == self.free.total


TestRadixCache = RadixCacheMachine.TestCase


@given(st.lists(st.integers(0, 1), max_size=20), st.lists(st.integers(0, 1), max_size=20))
def test_common_prefix_len(a, b):
    expected = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
    assert common_prefix_len(as_tokens(a), as_tokens(b)) == expected


def test_unlock_without_lock_is_refused():
    cache = RadixCache()
    match, _ = cache.insert(None, as_tokens([1, 2]), as_tokens([0, 1]))
    cache.lock(match)
    cache.unlock(match)
    with pytest.raises(ValueError, match="unlock without lock"):
        cache.unlock(match)


def test_a_lock_survives_a_split():
    cache = RadixCache()
    whole, _ = cache.insert(None, as_tokens([1, 2, 3, 4]), as_tokens([0, 1, 2, 3]))
    cache.lock(whole)
    half = cache.match(None, as_tokens([1, 2]))  # splits the edge
    assert half.num_tokens == 2
    assert len(cache.evict(4)) == 0
    cache.unlock(whole)
    assert sorted(cache.evict(4).tolist()) == [0, 1, 2, 3]


def test_trees_of_unused_extra_keys_do_not_stay():
    cache = RadixCache()
    for tenant in range(100):
        cache.insert(tenant, as_tokens([1]), as_tokens([tenant]))
        cache.match(f"only asked {tenant}", as_tokens([1]))
    cache.evict(100)
    assert not cache._roots


def test_the_heap_of_leaves_stays_small_under_many_matches():
    cache = RadixCache()
    cache.insert(None, as_tokens([1, 2, 3]), as_tokens([0, 1, 2]))
    for _ in range(10_000):
        cache.match(None, as_tokens([1, 2, 3]))
    assert len(cache._leaves) < 200
    assert isinstance(cache.match(None, as_tokens([1])), PrefixMatch)
