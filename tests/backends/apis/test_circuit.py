"""A circuit opens after failures in a row, admits one trial at a time, and closes when that is answered."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentflow.backends.apis.http import circuit as limits
from agentflow.backends.apis.http.circuit import Circuit


@dataclass
class Event:
    kind: str  # begin, begun, succeeded, failed, left
    number: int  # of the request
    at_s: float
    asked_s: float | None = None
    is_trial: bool = False  # of begin


@dataclass
class Period:
    """The time from one opening of the circuit to the next. Only requests that began in it count."""

    opened_at_s: float | None
    pause_s: float
    num_opened: int  # in a row
    events: list[Event] = field(default_factory=list)


class Reference:
    """The circuit by its definition: each question reads all events of the period again."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.periods = [Period(None, 0.0, 0)]

    @property
    def period(self) -> Period:
        return self.periods[-1]

    def closed_at(self) -> int | None:
        """The index of the first event of the period after which the circuit is closed."""
        if self.period.opened_at_s is None:
            return -1
        trials = {event.number for event in self.period.events if event.is_trial}
        for index, event in enumerate(self.period.events):
            if event.kind == "succeeded" or (event.kind == "begun" and event.number in trials):
                return index
        return None

    def status(self) -> str:
        if self.closed_at() is not None:
            return "closed"
        assert self.period.opened_at_s is not None
        is_over = self.now_s >= self.period.opened_at_s + self.period.pause_s
        return "half_open" if is_over else "open"

    def running_trial(self) -> int | None:
        ended = {event.number for event in self.period.events if event.kind in ("failed", "left")}
        trials = [event.number for event in self.period.events if event.is_trial]
        return next((number for number in trials if number not in ended), None)

    def is_ready(self) -> bool:
        status = self.status()
        return status == "closed" or (status == "half_open" and self.running_trial() is None)

    def failures(self) -> int:
        """The failures in a row of a closed circuit. The beginning of a trial's answer leaves one to go."""
        closed_at = self.closed_at()
        assert closed_at is not None
        events = self.period.events
        count = 0
        if closed_at >= 0 and events[closed_at].kind == "begun":
            count = limits.MAX_FAILURES - 1
        for event in events[closed_at + 1 :]:
            count = 0 if event.kind == "succeeded" else count + (event.kind == "failed")
        return count

    def num_opened(self) -> int:
        """The openings in a row: an answer that is complete begins a new row."""
        has_answered = any(event.kind == "succeeded" for event in self.period.events)
        return 0 if has_answered else self.period.num_opened

    def add(self, event: Event) -> None:
        if event.kind == "begin":
            event.is_trial = self.status() == "half_open" and self.is_ready()
            self.period.events.append(event)
            return
        if all(event.number != begun.number for begun in self.period.events if begun.kind == "begin"):
            return
        was_closed, trial = self.closed_at() is not None, self.running_trial()
        self.period.events.append(event)
        if event.kind != "failed":
            return
        if was_closed:
            opens = self.failures() >= limits.MAX_FAILURES or event.asked_s is not None
        else:
            opens = event.number == trial
        if opens:
            number = self.num_opened() + 1
            pause_s = min(limits.MAX_PAUSE_S, limits.FIRST_PAUSE_S * 2 ** (number - 1))
            pause_s = max(pause_s, min(event.asked_s or 0.0, limits.MAX_ASKED_S))
            self.periods.append(Period(self.now_s, pause_s, number))


RESULTS = st.one_of(
    st.tuples(st.sampled_from(["begun", "succeeded", "left"]), st.integers(0, 7), st.none()),
    st.tuples(st.just("failed"), st.integers(0, 7), st.sampled_from([None, None, None, 8.0, 1e6])),
)
STEPS = st.lists(
    st.one_of(
        st.just(("begin", 0, None)),
        RESULTS,
        st.tuples(st.just("wait"), st.just(0), st.sampled_from([1.0, 5.0, 20.0, 60.0, 600.0])),
    ),
    max_size=60,
)


@given(STEPS)
def test_a_circuit_is_as_its_definition_says(steps: list[tuple[str, int, float | None]]) -> None:
    reference = Reference()
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


def test_requests_that_ran_together_open_it_once() -> None:
    now = [0.0]
    circuit = Circuit(lambda: now[0], lambda: 1.0)
    attempts = [circuit.attempt() for _ in range(64)]
    for attempt in attempts:
        attempt.failed()
    assert circuit.left_s == limits.FIRST_PAUSE_S


def test_the_pause_has_jitter() -> None:
    pauses = {opened([0.0]).left_s for _ in range(20)}
    assert len(pauses) > 1
    assert all(limits.FIRST_PAUSE_S / 2 <= pause_s <= limits.FIRST_PAUSE_S for pause_s in pauses)


@pytest.mark.parametrize("result", ["succeeded", "begun"])
def test_one_trial_at_a_time_closes_it(result: str) -> None:
    now = [0.0]
    circuit = opened(now)
    now[0] += limits.FIRST_PAUSE_S
    trial = circuit.attempt()
    assert (circuit.status, circuit.is_ready) == ("half_open", False)
    getattr(trial, result)()
    assert (circuit.status, circuit.is_ready) == ("closed", True)


def test_a_trial_that_is_cancelled_makes_room_for_another() -> None:
    now = [0.0]
    circuit = opened(now)
    now[0] += limits.FIRST_PAUSE_S
    circuit.attempt().left()
    assert circuit.is_ready
    circuit.attempt().failed()
    assert circuit.status == "open"
