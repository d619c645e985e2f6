"""Few waiting requests, which are kept without trees, are found like many."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.engine.requests import request_of

from agentflow.engine.request import Request
from agentflow.engine.scheduling.policies import match_order
from agentflow.engine.scheduling.policies.match_order import MatchOrder
from agentflow.engine.scheduling.policies.waiting_tree import WaitingTree

SHORT_TOKENS = 3
# Tokens, of which some are cached; the rank; and whether the scheduler holds the request back.
Waiting = tuple[list[int], int, int]
WAITING = st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=6), st.integers(0, 6), st.integers(0, 1))
ARRIVALS = st.lists(st.tuples(WAITING, st.booleans()), min_size=1, max_size=4)


@given(ARRIVALS)
def test_f37_few_requests_are_found_like_many(arrivals: Sequence[tuple[Waiting, bool]]) -> None:
    orders = []
    for max_few in (0, 1, 4):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(match_order, "MAX_FEW", max_few)
            orders.append(drained(arrivals))
    assert orders == [orders[0]] * 3


class Fault(Exception):
    """Raised in place of ``WaitingTree.add``."""


@pytest.mark.parametrize("num_added", range(6))
def test_f37_after_a_fault_where_paced_requests_are_set_apart_they_are_set_apart_again(
    monkeypatch: pytest.MonkeyPatch, num_added: int
) -> None:
    monkeypatch.setattr(match_order, "MAX_FEW", 0)
    orders = [MatchOrder(SHORT_TOKENS), MatchOrder(SHORT_TOKENS)]
    for order in orders:
        for number in range(6):
            objective = "throughput" if number % 2 else "latency"
            request = request_of(number, [10 + number, 9], 2, objective=objective)
            request.arrival = number
            order.add(request, request.reusable_run(), 0, (0, 0, 0))
    add, left = WaitingTree.add, iter(range(num_added))

    def add_some(*args: Any) -> None:
        if next(left, None) is None:
            raise Fault
        add(*args)

    with monkeypatch.context() as patched:
        patched.setattr(WaitingTree, "add", add_some)
        with pytest.raises(Fault):
            orders[0].hold_back_paced()
    assert [asked_about(order, is_paced=True) for order in orders] == [[0, 2, 4]] * 2
    assert [asked_about(order, is_paced=False) for order in orders] == [[*range(6)]] * 2


def asked_about(order: MatchOrder, *, is_paced: bool) -> list[int]:
    """The requests that a step asks about, in the order of their ids, if all of them are blocked.
    ``is_paced``: those that ``pace`` holds back together are held back."""
    asked: list[int] = []

    def is_blocked(request: Request, match: int | None) -> bool:
        asked.append(request.id)
        return True

    order.start_step()
    if is_paced:
        order.hold_back_paced()
    assert order.first(is_blocked) is None
    return sorted(asked)


def drained(arrivals: Sequence[tuple[Waiting, bool]]) -> list[tuple[int, bool, int]]:
    """The places of the requests that are admitted in one step, in their order."""
    order = MatchOrder(SHORT_TOKENS)
    places: dict[int, tuple[int, bool, int]] = {}
    held: set[int] = set()
    for number, ((tokens, cached, rank), is_held) in enumerate(arrivals):
        # Only the first token is the request's own, so that no two share a prefix that is cached differently.
        request = request_of(number, [10 + number, *tokens, 9], 1)
        request.arrival = number
        match = min(cached, request.num_reusable)
        order.add(request, request.reusable_run(), match, (0, 0, rank))
        places[number] = rank, not order.is_short(request, match), -match
        if is_held:
            held.add(number)

    def is_blocked(request: Request, match: int | None) -> bool:
        request.is_held_back = request.is_held_back or request.id in held
        return request.is_held_back

    order.start_step()
    found = []
    while (first := order.first(is_blocked)) is not None:
        found.append(places[first.id])
        order.remove(first)
    return found
