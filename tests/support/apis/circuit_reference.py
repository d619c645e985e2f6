"""The circuit breaker by its definition, for comparison with the backends' one."""

from __future__ import annotations

from dataclasses import dataclass, field

from agentflow.runtime import circuit as limits


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


class CircuitReference:
    """A circuit whose pauses have no jitter. Each question reads all events of the period again."""

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

    def left_s(self) -> float:
        if self.closed_at() is not None:
            return 0.0
        assert self.period.opened_at_s is not None
        return max(0.0, self.period.opened_at_s + self.period.pause_s - self.now_s)

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
