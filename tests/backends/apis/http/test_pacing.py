"""Requests find the rate that a provider accepts, and wait together when it asks for that."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta

import anyio
import anyio.lowlevel
import pytest

from agentflow.backends.apis.http.pacing import Pace, reset_s

pytestmark = [pytest.mark.anyio, pytest.mark.on_trio]


class Provider:
    """Refuses requests beyond ``limit`` at a time."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.num_running = self.num_refused = self.num_answered = 0

    async def ask(self, pace: Pace) -> None:
        while True:
            async with pace.turn() as began_at:
                is_accepted = self.num_running < self.limit
                self.num_running += is_accepted
                for _ in range(3):
                    await anyio.lowlevel.checkpoint()
                self.num_running -= is_accepted
            if is_accepted:
                self.num_answered += 1
                pace.widen({})
                return
            self.num_refused += 1
            pace.narrow(began_at, 0.0)


@pytest.mark.parametrize("limit", [1, 4, 50])
async def test_a_crowd_finds_the_limit_of_a_provider(limit: int) -> None:
    pace, provider = Pace(), Provider(limit)
    async with anyio.create_task_group() as group:
        for _ in range(200):
            group.start_soon(provider.ask, pace)
    assert provider.num_answered == 200
    assert pace.num_running == 0
    assert 1.0 <= pace.window < math.inf
    assert provider.num_refused < 600


async def test_without_refusals_nothing_waits() -> None:
    pace, provider = Pace(), Provider(1000)
    async with anyio.create_task_group() as group:
        for _ in range(1000):
            group.start_soon(provider.ask, pace)
    assert (provider.num_refused, pace.window) == (0, math.inf)


async def test_requests_are_admitted_in_their_order() -> None:
    pace = Pace()
    pace.window = 1.0
    admitted: list[int] = []

    async def request(number: int) -> None:
        async with pace.turn():
            admitted.append(number)
            await anyio.lowlevel.checkpoint()

    async with anyio.create_task_group() as group:
        for number in range(20):
            group.start_soon(request, number)
            await anyio.lowlevel.checkpoint()
    assert admitted == list(range(20))


async def test_refusals_of_requests_that_ran_together_count_once() -> None:
    pace = Pace()
    pace.window = 64.0
    turns = [pace.turn() for _ in range(40)]
    began = [await turn.__aenter__() for turn in turns]
    for turn in turns:
        await turn.__aexit__(None, None, None)
    pace.num_running = 40
    for began_at in began:
        pace.narrow(began_at, 0.0)
    assert 20.0 <= pace.window <= 21.0


async def test_an_exhausted_limit_is_waited_for() -> None:
    pace = Pace()
    pace.widen({"x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": "20ms"})
    resumes_at = pace._resumes_at
    async with pace.turn() as began_at:
        assert began_at >= resumes_at
    pace.widen({"x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": "2h"})  # too long
    pace.widen({"x-ratelimit-remaining-requests": "3", "x-ratelimit-reset-requests": "59s"})
    async with pace.turn():
        pass


async def test_a_cancelled_request_makes_room() -> None:
    pace = Pace()
    pace.window = 1.0
    async with pace.turn():
        with anyio.move_on_after(0):
            async with pace.turn():
                raise AssertionError
    async with pace.turn():
        assert pace.num_running == 1


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("1s", 1),
        ("6m0s", 360),
        ("1h2m3.5s", 3723.5),
        ("120ms", 0.12),
        ("2m", 120),
        ("7", 7),
        ("", 0),
        ("-3", 0),
        ("x", 0),
    ],
)
def test_durations(value: str, seconds: float) -> None:
    assert reset_s(value) == pytest.approx(seconds)


def test_times() -> None:
    later = datetime.now(UTC) + timedelta(seconds=3000)
    assert 2900 < reset_s(later.isoformat().replace("+00:00", "Z")) <= 3000
    assert reset_s("2020-01-01T00:00:00Z") == 0
    assert reset_s("2020-01-01T00:00:00") == 0  # without a zone
