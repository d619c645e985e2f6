"""A block counts as evicted if all tokens up to its end were cached in the same tree, and no longer are."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from agentflow.engine.cache.evicted_blocks import BLOCK_TOKENS, EvictedBlocks, next_end, tree_hash
from agentflow.engine.cache.radix_cache import PrefixMatch, RadixCache, token_run

# Pieces of about half a block, so that prefixes branch inside blocks and at their ends.
PIECES = st.lists(st.tuples(st.integers(0, 1), st.sampled_from([100, 128, 156])), min_size=1, max_size=7)
KEYS = st.sampled_from(["a", "b"])
OPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), KEYS, PIECES),
        st.tuples(st.just("evict"), st.integers(1, 900)),
        st.tuples(st.just("ask"), KEYS, PIECES),
    ),
    max_size=30,
)


def tokens_of(pieces: list[tuple[int, int]]) -> tuple[int, ...]:
    return tuple(itertools.chain.from_iterable([token] * length for token, length in pieces))


def run_of(tokens: tuple[int, ...]) -> bytes:
    return token_run(np.array(tokens, dtype=np.int32))


class Cache:
    def __init__(self) -> None:
        self.cache = RadixCache()
        self.num_slots = 0

    def put(self, key: str, tokens: tuple[int, ...]) -> None:
        slots = np.arange(self.num_slots, self.num_slots + len(tokens), dtype=np.int32)
        self.num_slots += len(tokens)
        self.cache.extend(self.cache.match(key, b""), key, run_of(tokens), slots)

    def ask(self, key: str, tokens: tuple[int, ...]) -> tuple[PrefixMatch, bool]:
        run = run_of(tokens)
        match = self.cache.match(key, run)
        end = next_end(match.num_tokens)
        missing = run_of(tokens[match.num_tokens : end])
        return match, end <= len(tokens) and self.cache.was_evicted(match, missing)


@given(OPS)
def test_evicted_blocks_are_known(ops):
    cached, ever = Cache(), set()
    for op in ops:
        if op[0] == "evict":
            cached.cache.evict(op[1])
            continue
        key, tokens = op[1], tokens_of(op[2])
        match, was_evicted = cached.ask(key, tokens)
        end = next_end(match.num_tokens)
        assert was_evicted == (end <= len(tokens) and (key, tokens[:end]) in ever)
        if op[0] == "put":
            cached.put(key, tokens)
            ends = range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS)
            ever.update([(key, tokens[:end]) for end in ends])


def test_the_oldest_blocks_are_forgotten():
    blocks = EvictedBlocks(max_blocks=2)
    runs = [run_of((number,) * BLOCK_TOKENS) for number in range(3)]
    for run in runs:
        blocks.add(tree_hash("a"), 0, run, 0)
    assert [blocks.has(tree_hash("a"), run) for run in runs] == [False, True, True]
    assert not blocks.has(tree_hash("b"), runs[2])
