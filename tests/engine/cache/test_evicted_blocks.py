"""A block that is missing was cached in its tree and evicted, is cached in another tree, or is new."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from agentflow.engine.cache.evicted_blocks import HASHED_BLOCK_TOKENS, EvictedBlocks, block_hashes, next_end
from agentflow.engine.cache.radix_cache import RadixCache
from agentflow.engine.cache.token_run import token_run

# Two runs of equal tokens, so that most sequences begin alike and branch inside blocks or at their ends.
SEQUENCES = st.builds(
    lambda num_zeros, num_ones: (0,) * num_zeros + (1,) * num_ones,
    st.sampled_from([100, 256, 257, 300, 511, 512, 700, 1024]),
    st.sampled_from([0, 0, 100, 256, 300]),
)
KEYS = st.sampled_from(["a", "b", "c"])
OPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), KEYS, SEQUENCES),
        st.tuples(st.just("evict"), st.integers(1, 900)),
        st.tuples(st.just("ask"), KEYS, SEQUENCES),
    ),
    min_size=5,
    max_size=30,
)


def run_of(tokens: tuple[int, ...]) -> bytes:
    return token_run(np.array(tokens, dtype=np.int32))


class Cache:
    def __init__(self) -> None:
        self.cache = RadixCache()
        self.num_slots = 0

    def put(self, key: str, tokens: tuple[int, ...]) -> None:
        """Half of the tokens, and then the others, as a request adds them: the leaf grows."""
        slots = np.arange(self.num_slots, self.num_slots + len(tokens), dtype=np.int32)
        self.num_slots += len(tokens)
        half = len(tokens) // 2
        match, _ = self.cache.extend(self.cache.match(key, b""), key, run_of(tokens[:half]), slots[:half])
        self.cache.lock(match)
        self.cache.extend(match, key, run_of(tokens), slots)
        self.cache.unlock(match)

    def reasons(self, key: str, tokens: tuple[int, ...]) -> tuple[int, bool, Hashable]:
        """The end of the first block that is not cached, whether it was evicted, and the tree that has it."""
        match = self.cache.match(key, run_of(tokens))
        end = next_end(match.num_tokens)
        if end > len(tokens):
            return end, False, None
        return end, *self.cache.find_block(match, key, run_of(tokens[end - HASHED_BLOCK_TOKENS : end]))


@given(OPS)
def test_the_reasons_of_a_missing_block(ops):
    cached, ever = Cache(), set()
    for op in ops:
        if op[0] == "evict":
            cached.cache.evict(op[1])
            cached.cache.check()
            continue
        key, tokens = op[1], op[2]
        end, was_evicted, other = cached.reasons(key, tokens)
        is_missing, run = end <= len(tokens), run_of(tokens[:end])
        assert was_evicted == (is_missing and (key, tokens[:end]) in ever)
        others = [one for one in "abc" if is_missing and one != key and cached.cache.peek(one, run) == end]
        assert other in (others or [None])
        if op[0] == "put":
            cached.put(key, tokens)
            cached.cache.check()
            ends = range(HASHED_BLOCK_TOKENS, len(tokens) + 1, HASHED_BLOCK_TOKENS)
            ever.update([(key, tokens[:end]) for end in ends])


def test_the_oldest_blocks_are_forgotten():
    blocks = EvictedBlocks(max_blocks=2)
    hashes = [block_hashes(1, run_of((number,) * HASHED_BLOCK_TOKENS))[0] for number in range(3)]
    for block in hashes:
        blocks.add("a", [block])
    assert [blocks.has("a", block) for block in hashes] == [False, True, True]
    assert not blocks.has("b", hashes[2])
    assert not blocks.has("a", block_hashes(2, run_of((2,) * HASHED_BLOCK_TOKENS))[0])
