"""The router's choices against the least cost of all placements, on small clusters."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples

from agentflow.cluster.routing.load import EngineShape, RoutedRequest
from agentflow.cluster.routing.router import Router
from agentflow.engine.simulator.cost_model import CostModel

COST = CostModel(base_s=5e-3, row_s=2e-5, logits_s=0.0, read_s=2e-8, pair_s=1e-9)
SHAPE = EngineShape(COST, max_running=8, kv_tokens=20_000)

begun = st.tuples(st.integers(0, 3), st.integers(1, 900), st.booleans())
"""A request: whose prefix it has, the tokens after the prefix, and whether it has its first token."""


def request(number: int, prefix: int, length: int, **rest: object) -> RoutedRequest:
    begin = np.full(600, prefix, dtype=np.int32)
    own = np.full(length, 100 + number, dtype=np.int32)
    return RoutedRequest(number, "key", np.concatenate((begin, own)).tobytes(), **rest)  # type: ignore[arg-type]


def loaded(num_replicas: int, earlier: Sequence[tuple[int, int, bool]]) -> Router:
    router = Router(SHAPE, "m")
    for replica in range(num_replicas):
        router.add(replica)
    for number, (prefix, length, has_started) in enumerate(earlier):
        one = request(number, prefix, length)
        router.place([one], 0.0)
        if has_started:
            router.started(one, 0.0)
    return router


@examples(60)
@given(num_replicas=st.integers(1, 4), earlier=st.lists(begun, max_size=12), length=st.integers(1, 900))
def test_a_request_goes_where_it_costs_least(
    num_replicas: int, earlier: list[tuple[int, int, bool]], length: int
) -> None:
    router = loaded(num_replicas, earlier)
    one = request(99, 0, length)
    hits, num_popular, _ = router.tree.match("key", one.run)
    costs = [
        float(terms.own[replica] + terms.others[replica])
        for replica in range(num_replicas)
        for terms in [router.loads.terms(one, dict(hits), 0.0, num_popular=num_popular)]
    ]
    router.place([one], 0.0)
    assert costs[one.replica] == pytest.approx(min(costs))


@examples(60)
@given(
    num_replicas=st.integers(2, 4),
    earlier=st.lists(begun, max_size=12),
    lengths=st.lists(st.integers(1, 900), min_size=2, max_size=8),
)
def test_a_task_group_costs_little_more_than_on_the_best_replicas(
    num_replicas: int, earlier: list[tuple[int, int, bool]], lengths: list[int]
) -> None:
    """All sets of 1, 2 and 4 replicas are tried, with equal parts."""
    router = loaded(num_replicas, earlier)
    members = [request(50 + i, 0, length, task_group="g") for i, length in enumerate(lengths)]
    longest = max(members, key=lambda call: len(call.run))
    matches = [router.tree.match("key", call.run) for call in members]
    hits = {
        replica: sum(match.hits.get(replica, 0) for match in matches) // len(members)
        for replica in range(num_replicas)
    }
    num_popular = min(match.num_popular for match in matches)
    costs: dict[frozenset[int], float] = {}
    for parts in (1, 2, 4):
        if parts > min(len(members), num_replicas):
            break
        own, others = router.loads.terms(
            longest,
            hits,
            0.0,
            num_popular=num_popular,
            count=-(-len(members) // parts),
            num_common=600,
        )
        for chosen in itertools.combinations(range(num_replicas), parts):
            ends_s = max(float(own[replica]) for replica in chosen)
            delays_s = sum(float(others[replica]) for replica in chosen)
            costs[frozenset(chosen)] = len(members) * ends_s + delays_s
    router.place(members, 0.0)
    used = frozenset(call.replica for call in members)  # five members in four parts of two use three
    assert min(cost for chosen, cost in costs.items() if used <= chosen) <= 1.05 * min(costs.values())
