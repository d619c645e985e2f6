"""Other routers' rules."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from agentflow.cluster.routing.load import RoutedRequest
from agentflow.cluster.simulated.published import (
    ConsistentHashing,
    LeastLoaded,
    RayPrefixAware,
    RoundRobin,
    SentTree,
    SGLangCacheAware,
)
from agentflow.engine.cache.token_run import common_prefix_len


def tokens(value: int, length: int) -> bytes:
    return np.full(length, value, dtype=np.int32).tobytes()


def place(policy: RoundRobin, *runs: bytes) -> list[int]:
    calls = [RoutedRequest(number, "key", run) for number, run in enumerate(runs)]
    policy.place(calls, 0.0)
    return [call.replica for call in calls]


def with_replicas(policy: RoundRobin, count: int = 3) -> RoundRobin:
    for replica in range(count):
        policy.add(replica)
    return policy


@given(
    st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, 1), min_size=1, max_size=8)), max_size=12),
    st.lists(st.integers(0, 1), min_size=1, max_size=8),
)
def test_the_tree_of_sent_prompts_against_a_list(
    sent: list[tuple[int, list[int]]], wanted: list[int]
) -> None:
    tree = SentTree()
    runs = [(replica, np.array(prompt, dtype=np.int32).tobytes()) for replica, prompt in sent]
    for replica, run in runs:
        tree.insert("key", run, replica)
    run = np.array(wanted, dtype=np.int32).tobytes()
    longest = max((common_prefix_len(run, other) for _, other in runs), default=0)
    num_matched, owners = tree.match("key", run)
    assert num_matched == longest
    if longest:
        assert set(owners) <= {r for r, other in runs if common_prefix_len(run, other) == longest}
        assert owners
    for replica in range(3):
        mine = {
            other[: 4 * end] for r, other in runs if r == replica for end in range(1, len(other) // 4 + 1)
        }
        assert tree.num_tokens[replica] == len(mine)


def test_the_least_recent_prompts_leave_a_tree_that_is_full() -> None:
    tree = SentTree(max_tokens=250)
    for value in (1, 2, 1, 3):
        tree.insert("key", tokens(value, 100), 0)
    assert [tree.match("key", tokens(value, 100))[0] for value in (1, 2, 3)] == [100, 0, 100]


def test_round_robin_and_the_shortest_queue() -> None:
    assert place(with_replicas(RoundRobin()), *[b"aaaa"] * 4) == [0, 1, 2, 0]
    policy = with_replicas(LeastLoaded())
    assert place(policy, *[b"aaaa"] * 3) == [0, 1, 2]
    policy.ended(RoutedRequest(0, "key", b"aaaa", replica=1), 1, 0.0)
    assert place(policy, b"aaaa") == [1]


def test_consistent_hashing_moves_only_the_requests_of_a_lost_replica() -> None:
    policy = with_replicas(ConsistentHashing(), 8)
    runs = [tokens(value, 300) for value in range(200)]
    before = place(policy, *runs)
    assert len(set(before)) == 8
    policy.lose(3)
    after = place(policy, *runs)
    assert all(new == old for old, new in zip(before, after, strict=True) if old != 3)
    assert 3 not in after


def test_ray_sends_a_shared_prefix_to_one_replica_however_long_its_queue_is() -> None:
    runs = [tokens(1, 100) + tokens(2 + i, 20) for i in range(50)]
    assert place(with_replicas(RayPrefixAware()), *runs) == [0] * 50
    limited = place(with_replicas(RayPrefixAware(imbalanced_threshold=10)), *runs)
    assert set(limited) > {0}


def test_ray_sends_little_shared_prompts_where_it_sent_the_least() -> None:
    runs = [tokens(1, 5) + tokens(2 + i, 95) for i in range(3)]
    assert place(with_replicas(RayPrefixAware()), *runs) == [0, 1, 2]


def test_sglang_balances_queues_that_differ_too_much() -> None:
    policy = with_replicas(SGLangCacheAware())
    runs = [tokens(1, 100) + tokens(2 + i, 20) for i in range(70)]
    placed = place(policy, *runs)
    assert placed[:65] == [0] * 65
    assert 1 in placed[65:]


def test_sglang_follows_prefixes_above_its_threshold_only() -> None:
    policy = with_replicas(SGLangCacheAware())
    assert place(policy, tokens(1, 100)) == [0]
    assert place(policy, tokens(1, 25) + tokens(2, 75), tokens(1, 40) + tokens(3, 60)) == [1, 0]
