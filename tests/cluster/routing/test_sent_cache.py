"""The guessed cache of a server, compared with a cache that keeps every prefix in a list."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from agentflow.cluster.routing.feed import Follower
from agentflow.cluster.routing.prefix_tree import PrefixTree
from agentflow.cluster.routing.sent_cache import SentCache
from agentflow.engine.cache.blocks import BLOCK_TOKENS

PROMPTS = st.lists(st.lists(st.integers(0, 1), max_size=5), max_size=30)


def run(blocks: Sequence[int], rest: int = 0) -> bytes:
    """A block is 64 tokens of one value. ``rest``: tokens after the last whole block."""
    tokens = [number for block in blocks for number in [block + 1] * BLOCK_TOKENS] + [9] * rest
    return np.array(tokens, dtype=np.int32).tobytes()


class PlainCache:
    """The prefixes with the time of their last use. The oldest without a longer one leaves."""

    def __init__(self, size: int) -> None:
        self.used: dict[tuple[int, ...], int] = {}
        self._size = size

    def sent(self, prompt: Sequence[int], now: int) -> None:
        kept = prompt[: self._size]
        self.used |= {tuple(kept[: end + 1]): now for end in range(len(kept))}
        while len(self.used) > self._size:
            leaves = [one for one in self.used if not any(other[:-1] == one for other in self.used)]
            del self.used[min(leaves, key=lambda leaf: self.used[leaf])]

    def hit(self, prompt: Sequence[int]) -> int:
        return max([len(one) for one in self.used if tuple(prompt[: len(one)]) == one], default=0)


@given(PROMPTS, st.integers(1, 8), st.integers(0, 63))
def test_the_tree_holds_the_prefixes_that_a_cache_of_this_size_would(
    prompts: list[list[int]], size: int, rest: int
) -> None:
    tree = PrefixTree("m")
    follower, cache = Follower(tree, 3), SentCache(3, "m", size * BLOCK_TOKENS + rest)
    plain = PlainCache(size)
    for now, prompt in enumerate(prompts):
        update = cache.sent("key", run(prompt, rest))
        plain.sent(prompt, now)
        assert update is None or follower.receive(update)
        tree.check()
        assert len(cache) == tree.num_blocks == len(plain.used)
        for asked in prompts:
            held = tree.match("key", run(asked)).hits.get(3, 0)
            assert held == BLOCK_TOKENS * plain.hit(asked)


def test_keys_share_the_size_and_no_prefix() -> None:
    tree = PrefixTree("m")
    follower, cache = Follower(tree, 0), SentCache(0, "m", 3 * BLOCK_TOKENS)
    for key in ("a", "b"):
        update = cache.sent(key, run([0, 1]))
        assert update is not None
        assert follower.receive(update)
    assert tree.match("a", run([0, 1])).hits == {0: BLOCK_TOKENS}
    assert tree.match("b", run([0, 1])).hits == {0: 2 * BLOCK_TOKENS}
