"""A circuit opens after failures in a row, admits one trial at a time, and closes when that is answered."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.apis.circuit_reference import CircuitReference, Event
from support.examples import examples

from agentflow.runtime import circuit as limits
from agentflow.runtime.circuit import Circuit

Step = tuple[str, int, float | None]  # the kind, which of the running requests, and a time


def request(*kinds: str, asked_s: float | None = None) -> list[Step]:
    """A new request with its results."""
    return [("begin", 0, None), *[(kind, -1, asked_s) for kind in kinds]]


def wait(seconds: float) -> list[Step]:
    return [("wait", 0, seconds)]


# Failures are frequent, so that circuits open often.
MOVES = st.one_of(
    st.sampled_from(
        [
            request("failed"),
            request("failed") * 3,
            [*request("failed") * 3, *wait(5.0)],
            [*wait(60.0), *request("begun", "failed")],
            request("begun", "failed"),
            request("begun", "succeeded"),
            request("failed", asked_s=8.0),
            request("failed", asked_s=1e6),
            # One that began before the circuit opened ends later.
            [*request(), *request("failed") * 3, ("succeeded", 0, None)],
            [*request(), *request("failed") * 3, *wait(60.0), *request("succeeded"), ("failed", 0, 8.0)],
            request() * 4,
            request("begun"),
            wait(4.5),
            wait(5.0),
            wait(20.0),
            wait(600.0),
        ]
    ),
    st.tuples(st.sampled_from(["begun", "succeeded", "failed", "left"]), st.integers(0, 7), st.none()).map(
        lambda step: [step]
    ),
)
STEPS = st.lists(MOVES, min_size=5, max_size=20).map(lambda moves: [step for move in moves for step in move])


@given(STEPS)
@examples(300)
def test_a_circuit_is_as_its_definition_says(steps: list[Step]) -> None:
    reference = CircuitReference()
    circuit = Circuit(lambda: reference.now_s, lambda: 1.0)
    running = {}  # the requests that have not ended
    number = 0
    for kind, index, value in steps:
        if kind == "wait":
            reference.now_s += value or 0.0
        elif kind == "begin":
            number += 1
            running[number] = circuit.attempt()
            reference.add(Event("begin", number, reference.now_s))
        elif running:
            chosen = list(running)[index % len(running)]
            attempt = running[chosen]
            if kind == "failed":
                attempt.failed(value)
            else:
                getattr(attempt, kind)()
            reference.add(Event(kind, chosen, reference.now_s, value))
            if kind != "begun":
                attempt.left()  # changes nothing after another result
                del running[chosen]
        assert (circuit.status, circuit.is_ready) == (reference.status(), reference.is_ready())
        assert circuit.left_s == pytest.approx(reference.left_s())


def opened(now: list[float]) -> Circuit:
    circuit = Circuit(lambda: now[0])
    for _ in range(limits.MAX_FAILURES):
        circuit.attempt().failed()
    return circuit


def test_failures_that_are_not_in_a_row_leave_it_closed() -> None:
    circuit = Circuit()
    for _ in range(5):
        for _ in range(limits.MAX_FAILURES - 1):
            circuit.attempt().failed()
        circuit.attempt().succeeded()
    assert circuit.status == "closed"
    assert (circuit.num_failures, circuit.num_answered) == (10, 5)


def test_the_pause_has_jitter() -> None:
    pauses = {opened([0.0]).left_s for _ in range(20)}
    assert len(pauses) > 1
    assert all(limits.FIRST_PAUSE_S / 2 <= pause_s <= limits.FIRST_PAUSE_S for pause_s in pauses)


def test_a_trial_that_is_cancelled_makes_room_for_another() -> None:
    now = [0.0]
    circuit = opened(now)
    now[0] += limits.FIRST_PAUSE_S
    circuit.attempt().left()
    assert circuit.is_ready
    circuit.attempt().failed()
    assert circuit.status == "open"
