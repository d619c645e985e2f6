"""The time of searches for a ``stop_regex``: of one request, and of all requests of a client together."""

from __future__ import annotations

import pytest

from agentflow.errors import RequestRefused
from agentflow.protocol.bounds.cpu_allowance import CpuAllowance
from agentflow.protocol.text import stop_pattern
from agentflow.protocol.text.stop_pattern import BURST_S, SHARED_BURST_S, SHARED_PART, StopPattern


class Clock:
    """The processor time of this thread, of which each search takes ``search_s``; and the time of the day."""

    def __init__(self) -> None:
        self.search_s = 0.0
        self.day_s = 0.0
        self._used_s = 0.0

    def thread_time(self) -> float:
        self._used_s += self.search_s  # read before and after each search
        return self._used_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(stop_pattern.time, "thread_time", clock.thread_time)
    return clock


def search(pattern: StopPattern) -> None:
    pattern.add("a")
    assert pattern.step() is None


def test_many_slow_patterns_of_one_client_share_the_time_of_one(clock: Clock) -> None:
    shared = CpuAllowance(SHARED_BURST_S, SHARED_PART, lambda: clock.day_s)
    slow, sound = [StopPattern(f"[b-{end}]", shared) for end in "cdefgh"], StopPattern("b", shared)
    clock.search_s = 0.6 * BURST_S
    for pattern in slow[:2]:
        search(pattern)  # the second one still has time when it begins
    for pattern in slow[:2]:
        with pytest.raises(RequestRefused):
            search(pattern)
    clock.search_s = 0.0001
    for _ in range(100):
        search(sound)  # however much the others use
    with pytest.raises(RequestRefused):
        search(slow[0])
    clock.search_s = 0.04 * BURST_S
    search(slow[2])
    with pytest.raises(RequestRefused):
        search(slow[2])  # it has had more than a sound pattern needs
    clock.day_s = 10.0
    search(StopPattern("[b-z]", shared))


def test_patterns_of_other_clients_have_their_own_time(clock: Clock) -> None:
    clock.search_s = 0.9 * BURST_S
    for _ in range(3):
        search(StopPattern("b", CpuAllowance(SHARED_BURST_S, SHARED_PART, lambda: clock.day_s)))
