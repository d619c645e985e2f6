"""What open states need is evicted last, and is ordinary cache again when they are over or forgotten."""

import numpy as np

from agentflow.server.core import liveness
from agentflow.server.core.liveness import Liveness
from agentflow.server.core.radix_cache import RadixCache
from agentflow.server.core.radix_node import PrefixMatch
from agentflow.server.core.token_run import token_run


def insert(cache: RadixCache, tokens: list[int], slots: list[int]) -> PrefixMatch:
    run = token_run(np.array(tokens, dtype=np.int32))
    match, _ = cache.extend(cache.match(None, b""), None, run, np.array(slots, dtype=np.int32))
    return match


def test_what_an_open_state_needs_goes_last_and_its_close_ends_that():
    cache = RadixCache()
    live = Liveness(cache, num_slots=100)
    live.refresh("state", insert(cache, [1, 1], [0, 1]), num_computed=2)
    insert(cache, [2, 2], [2, 3])
    assert cache.evict(2).tolist() == [2, 3]  # though it was used later
    insert(cache, [3, 3], [4, 5])
    live.close("state")
    live.close("state")
    assert cache.evict(2).tolist() == [0, 1]


def test_a_state_that_did_nothing_for_long_is_forgotten():
    cache = RadixCache()
    live = Liveness(cache, num_slots=100)
    live.refresh("old", insert(cache, [1], [0]), num_computed=0)
    live.refresh("new", insert(cache, [2], [1]), num_computed=300)
    live.expire(100 * liveness.EXPIRES_AFTER_POOLS)
    assert len(live) == 2
    live.expire(100 * liveness.EXPIRES_AFTER_POOLS + 1)
    assert len(live) == 1
    assert cache.evict(1).tolist() == [0]


def test_states_are_bounded_by_the_pool():
    cache = RadixCache()
    live = Liveness(cache, num_slots=3)
    for number in range(10):
        live.refresh(number, insert(cache, [number], [number]), num_computed=0)
    assert len(live) == 3
    assert sum(node.keeps for node in cache.nodes()) == 3
