"""The radix cache against a brute-force reference model: a plain list of sequences with their times of
use."""

import collections
import hashlib
import itertools
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule
from support.counted_lines import counted_lines

from agentflow.engine.cache import blocks, nodes, radix_cache
from agentflow.engine.cache.blocks import BlocksRemoved
from agentflow.engine.cache.nodes import PrefixMatch
from agentflow.engine.cache.prefix_marks import PrefixMarks
from agentflow.engine.cache.radix_cache import RadixCache
from agentflow.engine.cache.token_run import INNER_IDS, common_prefix_len, prefix_end, token_run
from agentflow.engine.scheduling.kv_memory import KVSlots

# Few token ids and short sequences, so that prefixes collide often.
sequences = st.lists(st.integers(0, 1), min_size=1, max_size=10)
extra_keys = st.sampled_from(["", "other tenant"])


def as_array(sequence: list[int] | tuple[int, ...]) -> np.ndarray:
    return np.array(sequence, dtype=np.int32)


def as_run(sequence: list[int] | tuple[int, ...]) -> bytes:
    return token_run(as_array(sequence))


def insert(cache: RadixCache, extra, sequence: list[int], slots: list[int], **kwargs):
    """Inserts a sequence from the root on."""
    return cache.extend(cache.match(extra, b""), extra, as_run(sequence), as_array(slots), **kwargs)


class PrefixList:
    """The reference model. It knows every cached prefix of every inserted sequence (one entry for each token
    that is cached, named by the whole sequence up to it), its slot, its locks and its last use."""

    def __init__(self) -> None:
        self.slots: dict[tuple, int] = {}
        self.locks: dict[tuple, int] = {}
        self.used: dict[tuple, int] = {}
        self.keeps: dict[tuple, int] = collections.Counter()
        self.returns: dict[tuple, float] = {}  # with keeps: the earliest time of a state that continues
        self.marked: dict[tuple, float] = {}  # until then a client wants the prefix
        self.generated: set[tuple] = set()
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

    def num_output(self, extra: str, sequence: list[int]) -> int:
        return sum((extra, *sequence[:length]) in self.generated for length in range(1, len(sequence) + 1))

    def insert(self, extra: str, sequence: list[int], slots: list[int], num_prompt: int) -> int:
        existing = len(self.match(extra, sequence))
        for length in range(existing + 1, len(sequence) + 1):
            prefix = (extra, *sequence[:length])
            if length > num_prompt:
                self.generated.add(prefix)
            self.slots[prefix] = slots[length - 1]
            self.used[prefix] = self.clock
            self.locks[prefix] = 0
        return existing

    def lock(self, extra: str, sequence: list[int], by: int) -> None:
        for length in range(1, len(sequence) + 1):
            self.locks[(extra, *sequence[:length])] += by

    def use(self, extra: str, sequence: list[int]) -> None:
        self.clock += 1
        for length in range(1, len(sequence) + 1):
            self.used[(extra, *sequence[:length])] = self.clock

    def keep(self, prefix: tuple, num_states: int, returns: float) -> None:
        if num_states:
            known = self.returns[prefix] if self.keeps[prefix] else returns
            self.returns[prefix] = min(known, returns)
            self.keeps[prefix] += num_states

    def mark(self, prefix: tuple, until: float) -> None:
        if until and len(prefix) > 1:
            self.marked[prefix] = max(until, self.marked.get(prefix, 0.0))

    def supersede(self, prefix: tuple) -> None:
        """Up to the first prefix that something else continues, locks or needs."""
        below: list[tuple] = []
        while len(prefix) > 1 and not self.locks[prefix] and prefix not in self.marked:
            is_needed = any(self.keeps[one] for one in self.slots if one[: len(prefix)] == prefix)
            if is_needed or [one for one in self.slots if one[:-1] == prefix] != below:
                return
            self.used[prefix] = 0
            below, prefix = [prefix], prefix[:-1]

    def rank(self, prefix: tuple) -> tuple[int, float, int]:
        is_kept = self.keeps[prefix] > 0
        needed_by = 2 if is_kept else int(prefix in self.marked)
        return needed_by, -self.returns[prefix] if is_kept else 0.0, self.used[prefix]

    def evict(self, prefix: tuple) -> None:
        del self.slots[prefix]
        self.generated.discard(prefix)
        self.keep(prefix[:-1], self.keeps.pop(prefix, 0), self.returns.pop(prefix, 0.0))
        self.mark(prefix[:-1], self.marked.pop(prefix, 0.0))

    def leaf_ends(self) -> list[tuple]:
        inner = {prefix[:-1] for prefix in self.slots}
        return [prefix for prefix in self.slots if prefix not in inner]

    def evictable_leaf_ends(self) -> list[tuple]:
        return [prefix for prefix in self.leaf_ends() if self.locks[prefix] == 0]


class RadixCacheMachine(RuleBasedStateMachine):
    """Random matches, inserts, locks and evictions of a cache that has some sequences; the same on both
    sides."""

    locked = Bundle("locked")
    kept = Bundle("kept")

    def __init__(self) -> None:
        super().__init__()
        self.stored: dict[bytes, list[int]] = {}
        """The blocks that were reported as stored and not as removed, with their tokens."""
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(blocks, "BLOCK_TOKENS", 3)
        self.cache = RadixCache(model="m", on_blocks=self.report)
        self.marks = PrefixMarks(self.cache)
        self.now = 1.0
        self.reference = PrefixList()
        self.free = KVSlots(400)

    def teardown(self):
        self.patch.undo()

    def report(self, report):
        assert report.digests
        if isinstance(report, BlocksRemoved):
            for digest in report.digests:
                del self.stored[digest]
            return
        parent = report.parent
        assert parent in self.stored or parent == blocks.root_digest("m", report.cache_key)
        tokens = np.frombuffer(report.run, np.int32).reshape(len(report.digests), 3).tolist()
        for digest, block in zip(report.digests, tokens, strict=True):
            assert digest not in self.stored
            self.stored[digest] = block

    def slots_of(self, match):
        row = np.full(match.num_tokens + 2, -1, dtype=np.int32)
        self.cache.write_slots(match, row)
        assert row[match.num_tokens :].tolist() == [-1, -1]
        return row[: match.num_tokens].tolist()

    @initialize(first=st.lists(st.tuples(extra_keys, sequences, st.integers(0, 10)), min_size=4, max_size=8))
    def fill(self, first):
        for extra, sequence, num_prompt in first:
            self.extend(extra, sequence, 0, num_prompt)

    @rule(extra=extra_keys, sequence=sequences)
    def match(self, extra, sequence):
        assert self.cache.peek(extra, as_run(sequence)) == len(self.reference.match(extra, sequence))
        match = self.cache.match(extra, as_run(sequence))
        assert self.slots_of(match) == self.reference.match(extra, sequence)
        assert match.num_output == self.reference.num_output(extra, sequence)

    @rule(extra=extra_keys, sequence=sequences, known=st.integers(0, 10), num_prompt=st.integers(0, 10))
    def extend(self, extra, sequence, known, num_prompt):
        if self.free.num_free < len(sequence):
            return
        slots = self.free.allocate(len(sequence))
        self.reference.match(extra, sequence[:known])
        start = self.cache.match(extra, as_run(sequence[:known]))
        self.cache.lock(start)
        match, existing = self.cache.extend(start, extra, as_run(sequence), slots, num_prompt=num_prompt)
        self.cache.unlock(start)
        assert existing == self.reference.insert(extra, sequence, slots.tolist(), num_prompt)
        self.free.release(slots[:existing])
        assert match.num_tokens == len(sequence)
        assert match.num_output == self.reference.num_output(extra, sequence)
        assert self.slots_of(match) == self.reference.match(extra, sequence)
        self.cache.match(extra, as_run(sequence))  # the clock of the reference has ticked once more

    @rule(target=locked, extra=extra_keys, sequence=sequences)
    def lock(self, extra, sequence):
        match = self.cache.match(extra, as_run(sequence), lock=True)
        self.reference.match(extra, sequence)
        self.reference.lock(extra, sequence[: match.num_tokens], +1)
        return extra, sequence[: match.num_tokens], match

    @rule(target=locked, held=consumes(locked), more=sequences)
    def move_lock(self, held, more):
        extra, sequence, old = held
        new = self.cache.match(extra, as_run(sequence + more))
        self.reference.match(extra, sequence + more)
        self.cache.move_lock(old, new)
        longer = (sequence + more)[: new.num_tokens]
        self.reference.lock(extra, longer, +1)
        self.reference.lock(extra, sequence, -1)
        return extra, longer, new

    @rule(held=consumes(locked))
    def unlock(self, held):
        extra, sequence, match = held
        self.cache.unlock(match)
        self.reference.lock(extra, sequence, -1)
        self.reference.use(extra, sequence)

    @rule(target=kept, extra=extra_keys, sequence=sequences, returns=st.sampled_from([0.0, 0.0, 1.0, 2.0]))
    def keep(self, extra, sequence, returns):
        match = self.cache.match(extra, as_run(sequence))
        self.reference.match(extra, sequence)
        self.cache.keep(match, returns)
        self.reference.keep((extra, *sequence[: match.num_tokens]), 1, returns)
        return extra, sequence[: match.num_tokens], match

    @rule(kept=consumes(kept))
    def unkeep(self, kept):
        extra, sequence, match = kept
        self.cache.unkeep(match)
        prefix = (extra, *sequence)
        while len(prefix) > 1 and prefix not in self.reference.slots:
            prefix = prefix[:-1]
        self.reference.keeps[prefix] -= 1

    @rule(extra=extra_keys, sequence=sequences, seconds=st.integers(1, 4))
    def mark(self, extra, sequence, seconds):
        match = self.cache.match(extra, as_run(sequence))
        self.reference.match(extra, sequence)
        self.marks.mark(match.node, self.now + seconds)
        self.reference.mark((extra, *sequence[: match.num_tokens]), self.now + seconds)

    @rule(seconds=st.integers(1, 3))
    def wait(self, seconds):
        self.now += seconds
        self.marks.expire(self.now)
        marked = self.reference.marked
        self.reference.marked = {prefix: until for prefix, until in marked.items() if until > self.now}

    @rule(extra=extra_keys, sequence=sequences)
    def supersede(self, extra, sequence):
        match = self.cache.match(extra, as_run(sequence))
        self.reference.match(extra, sequence)
        self.cache.supersede(match)
        self.reference.supersede((extra, *sequence[: match.num_tokens]))

    @rule(count=st.sampled_from([1, 2, 3, 12]))
    def evict(self, count):
        before = dict(self.reference.slots)
        reported: list[tuple] = []

        def on_evict(extra, run, num_left):
            tokens = np.frombuffer(run(), np.int32).tolist()
            reported.extend((extra, *tokens[:length]) for length in range(num_left + 1, len(tokens) + 1))

        freed = self.cache.evict(count, on_evict).tolist()
        gone = {prefix for prefix, slot in before.items() if slot in set(freed)}
        assert len(gone) == len(freed)
        assert sorted(reported) == sorted(gone)
        # Leaf by leaf: first the leaves that no state needs, the least recently used first. A prefix is
        # used whenever its continuation is, so evicting token by token gives the same.
        while gone:
            evictable = self.reference.evictable_leaf_ends()
            candidates = [end for end in evictable if end in gone]
            assert candidates, "something was evicted that was locked, or not at the end of its sequence"
            end = min(candidates, key=self.reference.rank)
            assert self.reference.rank(end) == min(self.reference.rank(other) for other in evictable)
            gone.remove(end)
            self.reference.evict(end)
        self.free.release(np.array(freed, dtype=np.int32))
        if len(freed) < count:
            assert not self.reference.evictable_leaf_ends(), "evict gave up though there was more to evict"
        assert len(freed) <= count, "more was evicted than was missing"

    @invariant()
    def counts_agree(self):
        self.cache.check()
        assert self.cache.num_cached == len(self.reference.slots)
        num_locked = sum(count > 0 for count in self.reference.locks.values())
        assert self.cache.num_locked == num_locked
        assert self.free.num_free + self.cache.num_cached == self.free.total

    @invariant()
    def the_reported_blocks_are_those_that_are_cached(self):
        expected = {}
        for extra, *tokens in self.reference.slots:
            if len(tokens) % 3 == 0:
                digest = hashlib.sha256(repr(("m", extra)).encode()).digest()
                for start in range(0, len(tokens), 3):
                    block = tokens[start : start + 3]
                    digest = hashlib.sha256(digest + np.array(block, dtype=np.int32).tobytes()).digest()
                expected[digest] = block
        assert self.stored == expected


TestRadixCache = RadixCacheMachine.TestCase


@given(st.lists(st.integers(0, 1), max_size=20), st.lists(st.integers(0, 1), max_size=20))
def test_common_prefix_len(a, b):
    expected = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
    assert common_prefix_len(as_run(a), as_run(b)) == expected


def test_no_prefix_ends_after_an_inner_token():
    values = [5, INNER_IDS.start - 1, INNER_IDS.start, INNER_IDS.stop - 1, INNER_IDS.stop]
    for tokens in itertools.chain.from_iterable(itertools.product(values, repeat=size) for size in range(4)):
        for count in range(len(tokens) + 1):
            ends = [end for end in range(1, count + 1) if tokens[end - 1] not in INNER_IDS]
            assert prefix_end(as_run(tokens), count) == max(ends, default=0)


def test_unlock_without_lock_is_refused():
    cache = RadixCache()
    match, _ = insert(cache, None, [1, 2], [0, 1])
    cache.lock(match)
    cache.unlock(match)
    with pytest.raises(ValueError, match="unlock without lock"):
        cache.unlock(match)


def test_trees_of_unused_extra_keys_do_not_stay():
    cache = RadixCache()
    for tenant in range(100):
        insert(cache, tenant, [1], [tenant])
        cache.match(f"only asked {tenant}", as_run([1]))
    cache.evict(100)
    cache.match("asked later", as_run([1]))
    assert not cache._roots
    assert not cache._accounts
    assert not cache._holdings._in_use


def test_a_tree_that_has_gone_is_grown_again_from_an_old_match():
    cache = RadixCache()
    root, parent = cache.match(None, b""), insert(cache, None, [1], [1])[0]
    insert(cache, None, [1, 2], [1, 2])
    cache.lock(parent)
    assert cache.evict(2).tolist() == [2]
    assert cache.peek(None, as_run([1])) == 1
    cache.unlock(parent)
    assert cache.evict(1).tolist() == [1]
    assert (parent.node.run, len(parent.node.slots)) == (b"", 0)  # states may have the match for long
    insert(cache, None, [3], [3])
    cache.extend(root, None, as_run([4]), as_array([4]))
    assert [cache.peek(None, as_run([token])) for token in (1, 3, 4)] == [0, 1, 1]
    cache.check()


def test_a_long_leaf_loses_its_tail_and_no_more():
    cache = RadixCache()
    insert(cache, None, list(range(1000)), list(range(1000)))
    assert cache.evict(100).tolist() == list(range(900, 1000))
    assert cache.match(None, as_run(range(1000))).num_tokens == 900
    cache.check()


def test_tokens_after_the_end_of_a_state_are_not_kept_with_it():
    cache = RadixCache()
    known, _ = insert(cache, None, [1, 2], [0, 1])
    cache.keep(known)
    cache.lock(known)
    cache.extend(known, None, as_run([1, 2, 3, 4]), as_array([0, 1, 2, 3]))
    cache.unlock(known)
    insert(cache, None, [5], [4])
    assert cache.evict(3).tolist() == [2, 3, 4]
    cache.check()


owned = st.lists(
    st.tuples(st.integers(1, 60), st.integers(0, 60), st.sampled_from([1.0, 1.0, 0.25, 0.7, 3.0])),
    min_size=1,
    max_size=5,
)


@given(
    owned=owned, counts=st.lists(st.integers(0, 60), min_size=1, max_size=4), batch=st.sampled_from([1, 8])
)
def test_f7a_owners_give_tokens_down_to_one_level(owned, counts, batch):
    """Against the definition, to within a batch, over several evictions: an owner that lost tokens is not
    below another that has tokens left to lose. An owner has room for the tokens that it may lose itself, and
    and for the tokens that the highest owner has above it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nodes, "EVICTION_BATCH", batch)
        cache = RadixCache(owner_of=lambda key: key)
        for owner, (size, num_locked, weight) in enumerate(owned):
            insert(cache, owner, list(range(size)), list(range(100 * owner, 100 * owner + size)))
            cache.lock(cache.match(owner, as_run(range(min(size, num_locked)))))
            cache.weigh(owner, weight)
        weights = [weight for _, _, weight in owned]
        locked = [min(size, num_locked) for size, num_locked, _ in owned]
        left = [size for size, _, _ in owned]
        for count in counts:
            num_evictable = sum(left) - sum(locked)
            freed = collections.Counter(slot // 100 for slot in cache.evict(count).tolist())
            assert freed.total() == min(count, num_evictable)
            for owner, given_up in freed.items():
                left[owner] -= given_up
            for owner in freed:
                for other, weight in enumerate(weights):
                    if left[other] > locked[other]:
                        assert left[other] / weight <= (left[owner] + batch) / weights[owner] + 1e-9
            cache.check()
            levels = [size / weight for size, weight in zip(left, weights, strict=True)]
            highest = [owner for owner, level in enumerate(levels) if level == max(levels)]
            for owner, level in enumerate(levels):
                above = {
                    max(0, min(left[top] - locked[top], left[top] - int(level * weights[top])))
                    for top in highest
                    if top != owner
                }
                room = cache.room_for(owner) - (left[owner] - locked[owner])
                assert room in (above if owner not in highest else above | {0})
            assert cache.room_for("another") in [left[top] - locked[top] for top in highest]


@given(num_owners=st.integers(2, 40), count=st.integers(1, 64), weight=st.sampled_from([1.0, 0.5]))
def test_f7b_an_eviction_touches_the_owners_that_lose_tokens_and_no_others(num_owners, count, weight):
    """Counted by the levels that are looked up: a few for each batch that is taken."""
    num_looked_up = 0

    class Counting(nodes.Account):
        @property
        def level(self) -> float:
            nonlocal num_looked_up
            num_looked_up += 1
            return super().level

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("agentflow.engine.cache.radix_cache.Account", Counting)
        cache = RadixCache(owner_of=lambda key: key)
        for owner in range(num_owners):
            insert(cache, owner, list(range(50)), list(range(100 * owner, 100 * owner + 50)))
        cache.weigh(0, weight)
        num_looked_up = 0
        assert len(cache.evict(count)) == count
        assert num_looked_up <= 10 * (1 + count // nodes.EVICTION_BATCH)


def test_a_tenant_that_needs_room_evicts_from_one_that_has_more(monkeypatch):
    monkeypatch.setattr(nodes, "EVICTION_BATCH", 1)
    cache = RadixCache(owner_of=lambda key: key[0], idle_after=1000)
    insert(cache, ("small", 1), list(range(20)), list(range(20)))
    insert(cache, ("small", 2), list(range(20)), list(range(20, 40)))
    insert(cache, ("large", 1), list(range(100)), list(range(100, 200)))
    cache.match(("large", 1), as_run(range(100)))  # used last
    assert all(slot >= 100 for slot in cache.evict(50))
    assert len(cache.evict(20)) == 20
    cached = [cache.peek(("small", 1), as_run(range(20))), cache.peek(("small", 2), as_run(range(20)))]
    assert sum(cached) == cache.peek(("large", 1), as_run(range(100))) == 35
    assert cached == [15, 20]  # of one owner the least recently used


def test_an_owner_with_a_larger_weight_keeps_more():
    cache = RadixCache(owner_of=lambda key: key)
    cache.weigh("b", 9.0)  # it has no tokens yet
    insert(cache, "a", list(range(60)), list(range(60)))
    insert(cache, "b", list(range(60)), list(range(60, 120)))
    cache.weigh("b", 3.0)
    cache.evict(40)
    assert [cache.peek(key, as_run(range(60))) for key in "ab"] == [20, 60]


@pytest.mark.parametrize(("num_entered", "first"), [(100, "active"), (101, "idle")])
def test_an_owner_is_idle_after_so_many_tokens(num_entered, first):
    cache = RadixCache(owner_of=lambda key: key, idle_after=100)
    insert(cache, "idle", list(range(30)), list(range(30)))
    insert(cache, "active", list(range(num_entered)), list(range(100, 100 + num_entered)))
    freed = cache.evict(1).tolist()
    assert freed == ([29] if first == "idle" else [99 + num_entered])
    assert len(cache.evict(1000)) == 29 + num_entered


def test_the_heap_of_owners_drops_old_entries_and_no_others(monkeypatch):
    monkeypatch.setattr(nodes, "EVICTION_BATCH", 1)
    cache = RadixCache(owner_of=lambda key: key)
    owners = random.Random(6)  # the entries that are left are no heap
    num_tokens = num_entries = 0
    while len(cache._holdings._by_level) >= num_entries:  # each token raises the level of its owner
        num_entries = len(cache._holdings._by_level)
        insert(cache, owners.randrange(20), [num_tokens], [num_tokens])
        num_tokens += 1
        assert num_tokens < 1000
    before = {account.owner: account.num_cached for account in cache.accounts()}
    assert len(cache.evict(num_tokens // 2)) == num_tokens // 2
    after = {account.owner: account.num_cached for account in cache.accounts()}
    level = max(after.values())
    assert level < max(before.values())
    assert all(after[owner] in (min(size, level), min(size, level - 1)) for owner, size in before.items())


def test_the_heap_of_leaves_stays_small_under_many_matches():
    cache = RadixCache()
    insert(cache, None, [1, 2, 3], [0, 1, 2])
    for _ in range(10_000):
        cache.match(None, as_run([1, 2, 3]))
    assert len(cache._accounts[None].leaves) < 200
    assert isinstance(cache.match(None, as_run([1])), PrefixMatch)


def _split_and_insert(cache: RadixCache, leaf: list[int]) -> None:
    found = cache.match(None, as_run(leaf[:-1]))
    cache.extend(found, None, as_run([*leaf[:-1], 9]), np.arange(len(leaf), dtype=np.int32))


def _lock(cache: RadixCache, leaf: list[int]) -> None:
    cache.unlock(cache.match(None, as_run(leaf), lock=True))


def _keep(cache: RadixCache, leaf: list[int]) -> None:
    found = cache.match(None, as_run(leaf))
    cache.keep(found, 1.0)
    cache.unkeep(found)
    cache.supersede(found)


def _evict(cache: RadixCache, leaf: list[int]) -> None:
    assert len(cache.evict(len(leaf))) == len(leaf)


@pytest.mark.parametrize(
    "act",
    [
        lambda cache, leaf: cache.peek(None, as_run(leaf)),
        lambda cache, leaf: cache.match(None, as_run(leaf)),
        _split_and_insert,
        _lock,
        _keep,
        _evict,
    ],
    ids=["peek", "match", "insert", "lock", "keep", "evict"],
)
def test_an_operation_costs_what_it_touches_however_large_the_tree_is(act):
    num_lines = {}
    for num_leaves in (20, 500):
        cache = RadixCache()
        for number in range(num_leaves):
            insert(cache, None, [1, 2, 100 + number, 3, 4], list(range(5 * number, 5 * number + 5)))
        cache.evict(5)  # drops the old entries of the heaps, at a cost of the inserts
        with counted_lines() as lines:
            act(cache, [1, 2, 110, 3, 4])
        num_lines[num_leaves] = lines.num
    assert num_lines[500] == num_lines[20]


def test_generated_tokens_are_counted_apart_from_prompts():
    cache = RadixCache()
    insert(cache, None, [1, 2, 3, 4, 5], [0, 1, 2, 3, 4], num_prompt=3)
    assert cache.match(None, as_run([1, 2, 3, 4])).num_output == 1
    longer, _ = cache.extend(
        cache.match(None, as_run([1, 2, 3, 4, 5])),
        None,
        as_run([1, 2, 3, 4, 5, 6]),
        np.arange(6),
        num_prompt=6,
    )
    assert longer.num_output == 2
    assert cache.match(None, as_run([1, 2])).num_output == 0


def test_an_owner_that_returns_after_it_was_idle_has_its_claim_again():
    cache = RadixCache(owner_of=lambda key: key, idle_after=100)
    insert(cache, "idle", list(range(64)), list(range(64)))
    insert(cache, "active", list(range(200)), list(range(100, 300)))
    assert cache.evict(32).tolist() == list(range(32, 64))
    cache.match("idle", as_run(range(3)))
    assert cache.evict(32).tolist() == list(range(268, 300))


def test_leaves_are_evicted_in_the_order_of_their_last_use():
    """Also after the heap of leaves has dropped its old entries."""
    cache = RadixCache()
    for token in range(100):
        insert(cache, None, [token], [token])
    assert cache.evict(50).tolist() == [*range(50)]
    uses = [*range(50, 100), *random.Random(1).choices(range(50, 75), k=1000)]
    for token in uses[50:]:
        cache.match(None, as_run([token]))
    last_use = {token: number for number, token in enumerate(uses)}
    assert cache.evict(50).tolist() == sorted(last_use, key=lambda token: last_use[token])


def test_to_extend_by_cached_tokens_is_a_use():
    cache = RadixCache()
    start = cache.match(None, b"")
    for token in (1, 2, 1):
        cache.extend(start, None, as_run([token]), as_array([token]))
    assert cache.evict(1).tolist() == [2]


def test_unlocking_is_a_use():
    cache = RadixCache()
    held, _ = insert(cache, None, [1], [1])
    for sequence in ([2], [2, 3]):
        insert(cache, None, sequence, sequence)
    cache.lock(held)
    cache.match(None, as_run([2]))
    cache.unlock(held)
    assert [cache.evict(1).tolist() for _ in range(3)] == [[3], [2], [1]]


def test_tokens_are_evicted_after_their_unlock():
    cache = RadixCache()
    match, _ = insert(cache, None, [1, 2], [1, 2])
    cache.lock(match)
    assert len(cache.evict(2)) == 0
    cache.unlock(match)
    assert cache.evict(2).tolist() == [1, 2]


@pytest.mark.parametrize("first", [[1, 2], [1]], ids=["removed", "shortened"])
def test_the_rest_of_a_kept_leaf_is_kept(first):
    cache = RadixCache()
    insert(cache, None, first, first)
    kept, _ = insert(cache, None, [1, 2, 3], [1, 2, 3])
    cache.keep(kept)
    assert cache.evict(1).tolist() == [3]
    insert(cache, None, [9], [9])
    assert cache.evict(1).tolist() == [9]
    cache.check()
    cache.unkeep(kept)
    insert(cache, None, [8], [8])
    assert cache.evict(1).tolist() == [2]


def test_the_kept_leaf_that_continues_last_goes_first():
    cache = RadixCache()
    for token, returns in ((1, (5.0,)), (2, (9.0,)), (3, ())):
        match, _ = insert(cache, None, [token], [token])
        cache.keep(match, *returns)
    shared, _ = insert(cache, None, [4], [4])
    for returns in (20.0, 0.5):  # the earliest of its states counts
        cache.keep(shared, returns)
    for sequence in ([5], [2, 6]):
        insert(cache, None, sequence, sequence)
    for token in (5, 6, 2, 1, 4, 3):
        assert cache.evict(1).tolist() == [token]
        cache.check()


def test_a_superseded_leaf_goes_first_unless_a_state_or_a_client_needs_it():
    cache = RadixCache()
    matches = [insert(cache, None, [token], [token])[0] for token in range(6)]
    for match in matches[:2]:
        cache.keep(match)
    for match in matches[2:4]:
        cache.mark(match.node, 1.0)
    for match in matches[1::2]:
        cache.supersede(match)
    assert [cache.evict(1).tolist() for _ in range(6)] == [[5], [4], [2], [3], [0], [1]]
    cache.supersede(insert(cache, None, [6], [6])[0])  # its parent has nothing else
    assert cache.evict(1).tolist() == [6]


def test_another_leaf_is_chosen_if_the_owner_needs_less():
    cache = RadixCache()
    last, first = [insert(cache, None, [token], [token])[0] for token in range(2)]
    cache.keep(last, 2.0)
    cache.keep(first, 1.0)
    asked = []

    def make_room(leaf) -> bool:
        asked.append(leaf)
        if len(asked) == 1:
            cache.unkeep(first)
        return len(asked) == 1

    assert cache.evict(1, make_room=make_room).tolist() == [1]
    assert cache.evict(1, make_room=make_room).tolist() == [0]
    assert asked == [last.node] * 2


def test_a_locked_leaf_grows_and_knows_which_of_its_tokens_were_generated():
    cache = RadixCache()
    match, _ = insert(cache, None, [1, 2], [0, 1])
    cache.lock(match)
    for size in (4, 5, 6):
        match, _ = cache.extend(match, None, as_run(range(1, size + 1)), np.arange(size), num_prompt=4)
        assert [node.run for node in cache.nodes()] == [as_run(range(1, size + 1))]
    assert match.num_output == 2
    match, _ = cache.extend(match, None, as_run(range(1, 8)), np.arange(7))  # by another prompt
    assert [cache.match(None, as_run(range(1, end))).num_output for end in (5, 6, 7, 8)] == [0, 1, 2, 2]


def test_the_tokens_that_a_leaf_loses_are_not_counted():
    cache = RadixCache()
    insert(cache, None, [1, 2, 3, 4], [0, 1, 2, 3], num_prompt=3)
    for num_left, num_output in ((3, 0), (2, 0)):
        cache.evict(1)
        match = cache.match(None, as_run([1, 2, 3, 4]))
        assert (match.num_tokens, match.num_output) == (num_left, num_output)


def test_the_nodes_that_were_used_last_are_known(monkeypatch):
    monkeypatch.setattr(radix_cache, "MAX_RECENT", 2)
    cache = RadixCache()
    for token in range(3):
        insert(cache, None, [token], [token])
    assert [node.run for node in cache.recent] == [as_run([1]), as_run([2])]
    match = cache.match(None, as_run([1]), lock=True)
    assert [node.run for node in cache.recent] == [as_run([2]), as_run([1])]
    cache.match(None, as_run([2]))
    cache.unlock(match)
    assert [node.run for node in cache.recent] == [as_run([2]), as_run([1])]


def test_nodes_have_numbers_and_owners_have_accounts():
    cache = RadixCache(owner_of=lambda key: key)
    for owner, sequence, slots in (("a", [1, 2], [0, 1]), ("b", [1], [2]), ("a", [1, 3], [0, 3])):
        insert(cache, owner, sequence, slots)
    nodes = [*cache.nodes()]
    assert len({node.number for node in nodes} - {0}) == len(nodes) == 4
    assert {node.parent.number for node in nodes if node.start == 0} == {0}
    accounts = {account.owner: account for account in cache.accounts()}
    assert {owner: account.num_cached for owner, account in accounts.items()} == {"a": 3, "b": 1}
    assert [*cache.accounts("a")] == [accounts["a"]]
    assert not cache.accounts("c")
    assert not [*cache.stored_blocks()]  # this cache keeps no reports
