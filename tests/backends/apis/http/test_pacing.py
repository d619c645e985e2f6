"""Requests find the rate that a provider accepts, and wait together when it asks for that."""

from __future__ import annotations

import math

import anyio
import anyio.lowlevel
import pytest

from agentflow.backends.apis.http.pacing import FIRST_REQUESTS, RequestPacer
from agentflow.backends.apis.http.rate_limits import Demand

pytestmark = [pytest.mark.anyio, pytest.mark.on_trio]


class Provider:
    """Refuses requests beyond ``limit`` at a time."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.num_running = self.num_refused = self.num_answered = 0

    async def ask(self, pace: RequestPacer) -> None:
        while True:
            async with pace.turn(Demand(0)) as turn:
                is_accepted = self.num_running < self.limit
                self.num_running += is_accepted
                for _ in range(3):
                    await anyio.lowlevel.checkpoint()
                self.num_running -= is_accepted
                turn.answered({}, is_refused=not is_accepted)
            if is_accepted:
                self.num_answered += 1
                pace.widen()
                return
            self.num_refused += 1
            pace.narrow(turn, 0.0)


@pytest.mark.parametrize("limit", [1, 4, 50])
async def test_a_crowd_finds_the_limit_of_a_provider(limit: int) -> None:
    pace, provider = RequestPacer(), Provider(limit)
    async with anyio.create_task_group() as group:
        for _ in range(200):
            group.start_soon(provider.ask, pace)
    assert provider.num_answered == 200
    assert pace.num_running == 0
    assert pace.window >= 1.0
    assert provider.num_refused < 600


async def test_without_refusals_nothing_waits() -> None:
    pace, provider = RequestPacer(), Provider(1000)
    async with anyio.create_task_group() as group:
        for _ in range(1000):
            group.start_soon(provider.ask, pace)
    assert (provider.num_refused, pace.window) == (0, math.inf)


async def test_requests_are_admitted_in_their_order() -> None:
    pace = RequestPacer()
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
    pace = RequestPacer()
    pace.window = 64.0
    contexts = [pace.turn() for _ in range(40)]
    turns = [await context.__aenter__() for context in contexts]
    for context, turn in zip(contexts, turns, strict=True):
        await context.__aexit__(None, None, None)
        pace.narrow(turn, 0.0)
    assert pace.window == 20.0


LAST = {"x-ratelimit-remaining-requests": "0"}


async def answered(pace: RequestPacer, headers: dict[str, str]) -> None:
    async with pace.turn(Demand(0)) as turn:
        turn.answered(headers)


async def test_an_exhausted_limit_is_waited_for() -> None:
    pace = RequestPacer()
    began_at = anyio.current_time()
    await answered(pace, {**LAST, "x-ratelimit-reset-requests": "20ms"})
    async with pace.turn(Demand(0)) as turn:
        assert turn.began_at >= began_at + 0.02


async def test_a_wait_that_is_too_long_is_left_to_the_provider() -> None:
    pace = RequestPacer()
    await answered(pace, {**LAST, "x-ratelimit-reset-requests": "2h"})
    async with pace.turn(Demand(0)):
        pass


async def test_a_request_that_fits_does_not_wait_for_a_limit_of_others() -> None:
    pace = RequestPacer()
    left = {"x-ratelimit-limit-tokens": "1000", "x-ratelimit-remaining-tokens": "100"}
    await answered(pace, {**left, "x-ratelimit-reset-tokens": "54s"})
    waits: list[float] = []

    class TooLongError(Exception):
        pass

    def check(wait_s: float) -> None:
        waits.append(wait_s)
        raise TooLongError

    with pytest.raises(TooLongError):
        async with pace.turn(Demand(2000), check):
            raise AssertionError
    async with pace.turn(Demand(200), check):
        pass
    assert waits == [pytest.approx((500 - 100) / (1000 / 60), rel=0.1)]


async def test_a_refusal_that_a_reported_limit_explains_leaves_the_window() -> None:
    pace = RequestPacer()
    async with pace.turn(Demand(0)) as turn:
        turn.answered({**LAST, "x-ratelimit-reset-requests": "30s"}, is_refused=True)
    pace.narrow(turn, 0.0)
    assert pace.window == math.inf
    async with pace.turn() as turn:  # nothing of a limit, such as a list of models
        pass
    pace.narrow(turn, 0.0)
    assert pace.window == 1.0


async def test_a_crowd_waits_for_the_first_answer_which_may_tell_limits() -> None:
    pace = RequestPacer()
    sent = 0
    answer = anyio.Event()

    async def request() -> None:
        nonlocal sent
        async with pace.turn(Demand(0)) as turn:
            sent += 1
            await answer.wait()
            turn.answered({})

    async with anyio.create_task_group() as group:
        for _ in range(100):
            group.start_soon(request)
        while sent < FIRST_REQUESTS:
            await anyio.lowlevel.checkpoint()
        for _ in range(5):
            await anyio.lowlevel.checkpoint()
        assert sent == FIRST_REQUESTS
        answer.set()
    assert sent == 100


async def test_a_cancelled_request_makes_room() -> None:
    pace = RequestPacer()
    pace.window = 1.0
    async with pace.turn():
        with anyio.move_on_after(0):
            async with pace.turn():
                raise AssertionError
    async with pace.turn():
        assert pace.num_running == 1
