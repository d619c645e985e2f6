"""The limit on expected waits, against queues that are simulated to their end."""

from __future__ import annotations

import contextlib
import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.clocks import ClockS

from agentflow.engine.messages import Failed, Finished, Started
from agentflow.engine.request import Origin, Submit
from agentflow.errors import Overloaded
from agentflow.protocol.sampling import SamplingParams
from agentflow.server.models.wait_limit import MAX_IDLE_TENANTS, WaitLimit


def submit(request_id: int, tenant: str = "ann", priority: int = 0) -> Submit:
    return Submit(request_id, [1], SamplingParams(), origin=Origin(tenant, priority=priority))


def finished(request_id: int) -> Finished:
    return Finished(request_id, [], "", "length", 3, 0, 1, [])


def test_an_empty_queue_takes_anything():
    admission = WaitLimit(0.001, ClockS())
    admission.check("ann")
    admission.sent(submit(1))
    admission.received([Started([1])])
    admission.check("ann")


@pytest.mark.parametrize("place_s", [0.05, 0.5, 3.0])
def test_a_steady_queue_is_foreseen(place_s):
    """One request starts each ``place_s``; two come in that time."""
    clock = ClockS()
    admission = WaitLimit(10.0, clock)
    queue: list[int] = []
    foreseen: dict[int, float] = {}
    came: dict[int, float] = {}
    errors: list[float] = []
    refused = 0
    for number in range(600):
        for request_id in (2 * number, 2 * number + 1):
            try:
                admission.check("ann")
            except Overloaded as error:
                refused += error.retry_after_s >= 1
                continue
            foreseen[request_id], came[request_id] = admission.expected_wait_s("ann"), clock.now_s
            admission.sent(submit(request_id))
            queue.append(request_id)
        clock.now_s += place_s
        started = queue.pop(0)
        admission.received([Started([started])])
        errors.append(foreseen[started] - (clock.now_s - came[started]))
    assert refused > 300
    assert len(queue) * place_s <= 10.0 + 2 * place_s
    assert max(map(abs, errors[-50:])) <= 2 * place_s


@pytest.mark.parametrize("order", [0, -1, None], ids=["first come", "last come", "random"])
@pytest.mark.parametrize("batch", [1, 16])
def test_whatever_the_order_the_queue_is_as_long_as_the_wait_allows(order, batch):
    """``batch`` requests start together, after ``batch`` * 0.1 s. Three times as many come as can start."""
    clock, rng = ClockS(), random.Random(1)
    admission = WaitLimit(5.0, clock)
    queue: list[int] = []
    lengths: list[int] = []
    numbers = itertools.count()
    for _ in range(1200 // batch):
        for number in itertools.islice(numbers, 3 * batch):
            clock.now_s += 0.1 / 3
            with contextlib.suppress(Overloaded):
                admission.check("ann")
                admission.sent(submit(number))
                queue.append(number)
        lengths.append(len(queue))
        if len(queue) > batch:
            places = [rng.randrange(len(queue)) if order is None else order for _ in range(batch)]
            admission.received([Started([queue.pop(min(place, len(queue) - 1)) for place in places])])
    settled = lengths[len(lengths) // 3 :]
    # 5 s are 50 places, give or take the requests of a batch.
    assert 50 - 2 * batch <= min(settled)
    assert max(settled) <= 50 + batch


def test_other_tenants_are_not_refused_for_one_that_floods():
    clock = ClockS()
    admission = WaitLimit(5.0, clock)
    for request_id in range(100):
        admission.sent(submit(request_id, "flood"))
    for request_id in range(10):
        clock.now_s += 1
        admission.received([Started([request_id])])
    with pytest.raises(Overloaded, match=r"\b90 s\b.*\b5 s\b"):
        admission.check("flood")
    admission.check("quiet")
    admission.sent(submit(1000, "quiet"))
    admission.check("quiet")


def test_the_pace_of_an_overload_is_forgotten_when_it_is_over():
    clock = ClockS()
    admission = WaitLimit(10.0, clock)
    for request_id in range(20):
        admission.sent(submit(request_id))
    for request_id in range(19):  # 3 s for each place
        clock.now_s += 3
        admission.received([Started([request_id])])
    clock.now_s += 0.01
    admission.received([Started([19])])
    clock.now_s += 3600
    for request_id in range(20, 120):  # one after the other, with room for all
        admission.sent(submit(request_id))
        clock.now_s += 0.01
        admission.received([Started([request_id])])
    for request_id in range(200, 230):
        admission.check("ann")
        admission.sent(submit(request_id))


def test_while_nothing_starts_the_oldest_shows_how_long_it_takes():
    clock = ClockS()
    admission = WaitLimit(10.0, clock)
    admission.sent(submit(1))
    admission.check("ann")
    clock.now_s += 10.5
    with pytest.raises(Overloaded):
        admission.check("ann")
    admission.received([Failed(1, "cancelled", "")])
    admission.check("ann")


def test_a_request_that_waits_for_its_priority_blocks_no_other():
    clock = ClockS()
    admission = WaitLimit(10.0, clock)
    admission.sent(submit(1, priority=-1))  # all others start before it
    for request_id in range(2, 30):
        admission.check("ann")
        admission.sent(submit(request_id))
        admission.received([Started([request_id])])
        clock.now_s += 5
    admission.sent(submit(30))
    clock.now_s += 20.5  # now nothing starts, and the new one shows it
    with pytest.raises(Overloaded):
        admission.check("ann")
    admission.received([Failed(30, "cancelled", "")])
    admission.check("ann")
    with pytest.raises(Overloaded):
        admission.check("ann", priority=-1)


def test_without_a_limit_nothing_is_refused():
    clock = ClockS()
    admission = WaitLimit(None, clock)
    for request_id in range(10):
        admission.sent(submit(request_id))
    clock.now_s += 1e6
    admission.check("ann")


def test_idle_tenants_are_forgotten():
    admission = WaitLimit(1.0, ClockS())
    for number in range(3 * MAX_IDLE_TENANTS):
        admission.sent(submit(number, str(number)))
        admission.received([Started([number])])
    assert len(admission._lines) <= MAX_IDLE_TENANTS
    assert not admission._tenant_of


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["sent", "started", "finished", "failed"]),
            st.integers(0, 8),
            st.sampled_from(["ann", "ben"]),
            st.floats(0, 5),
        ),
        max_size=40,
    )
)
def test_waiting_requests_are_counted_in_any_order_of_events(events):
    """Against a plain set, with starts and ends of unknown requests and of requests that started before."""
    clock = ClockS()
    admission = WaitLimit(1.0, clock)
    waiting: dict[int, str] = {}
    known: set[int] = set()
    for what, request_id, tenant, passes_s in events:
        clock.now_s += passes_s
        if what == "sent":
            if request_id in known:
                continue
            known.add(request_id)
            waiting[request_id] = tenant
            admission.sent(submit(request_id, tenant))
        else:
            waiting.pop(request_id, None)
            message = {
                "started": Started([request_id]),
                "finished": finished(request_id),
                "failed": Failed(request_id, "cancelled", ""),
            }[what]
            admission.received([message])
        for name in ("ann", "ben"):
            expected = admission.expected_wait_s(name)
            assert expected >= 0
            assert math.isfinite(expected)
            if name not in waiting.values():
                assert expected == 0
    assert set(admission._tenant_of) == set(waiting)
