"""Few waiting requests, which are kept without trees, are found like many."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.engine.requests import request_of

from agentflow.engine.request import Request
from agentflow.engine.scheduling.policies import match_order
from agentflow.engine.scheduling.policies.match_order import MatchOrder

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
