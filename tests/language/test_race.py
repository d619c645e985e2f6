"""Races: the first result, the end of the other branches, and failures."""

from __future__ import annotations

import anyio
import pytest
from support.faults import has_param
from support.observed_backends import Stepped, assert_idle, outcome_of, settle
from support.programs import ask, by_end, echo

import agentflow as af

pytestmark = [pytest.mark.anyio, pytest.mark.on_trio]

SCRIPT = by_end({"never": "word " * 500, "short": "one two"})


async def test_the_first_program_wins_and_the_states_of_the_others_are_cancelled():
    backend = Stepped(SCRIPT)
    forks = []

    async def forking(s: af.State) -> str:
        copy = s.copy()
        forks.append(copy)
        return await ask(copy, "never")

    async def program(s: af.State) -> str:
        slow = s.copy()
        found = await af.race(ask(slow, "never"), ask(s.copy(), "short"), forking(s))
        for state in (slow, forks[0]):
            with pytest.raises(af.errors.StateClosed, match="cancelled"):
                state.add("more")
        s += "the parent goes on"
        await s
        return found

    assert await outcome_of(program, backend, num_words=6) == "one two"


async def test_runs_race_and_the_slow_one_leaves_nothing_behind():
    backend = af.Scripted(SCRIPT)
    async with af.session(backend=backend) as flow:
        assert await af.race(flow.run(ask, "never"), flow.run(ask, "short")) == "one two"
        await settle()
        assert_idle(backend)


@pytest.mark.parametrize("what", ["variables", "states"])
async def test_variables_and_states_race(what):
    backend = Stepped(SCRIPT)
    async with af.session(backend=backend) as flow, flow.state() as s, anyio.create_task_group() as group:
        slow, fast = s.fork(2)
        slow += "never" + af.gen("x", max_tokens=1000)
        fast += "short" + af.gen("x")

        async def race() -> None:
            if what == "states":
                assert await af.race(slow, fast) is fast
            else:
                assert await af.race(slow["x"], fast["x"].upper()) == "ONE TWO"
            with pytest.raises(af.Cancelled):
                await slow["x"]
            fast.add("goes on")
            await fast

        group.start_soon(race)
        await settle()
        await backend.allow(4)
    assert_idle(backend)


async def test_the_state_of_the_winner_and_those_above_it_go_on():
    async with af.session(backend=af.Scripted(SCRIPT)) as flow, flow.state() as s:
        s += "short" + af.gen("a")
        copy = s.copy()
        s += "never" + af.gen("b", max_tokens=1000)
        copy += "short" + af.gen("c")
        assert await af.race(s["b"], s["a"], copy["c"]) == "one two"
        s += "more"
        await s["b"]


async def test_failures_lose_and_do_not_fail_the_run():
    async def program(s: af.State) -> str:
        failing = s.copy()
        return await af.race(ask(failing, "a!"), ask(s.copy(), "b c d"))

    async with af.session(backend=af.Scripted(echo)) as flow:
        assert await flow.run(program) == "<b c d>"


async def test_if_all_fail_the_first_failure_is_raised_alone():
    async def fails(error: Exception, steps: int) -> None:
        for _ in range(steps):
            await anyio.lowlevel.checkpoint()
        raise error

    with pytest.raises(KeyError) as failure:
        await af.race(fails(ValueError(), 5), fails(KeyError(), 1))
    assert len(failure.value.__notes__) == 1


async def test_of_those_that_end_in_the_same_step_the_first_wins():
    event = anyio.Event()

    async def wait(index: int) -> int:
        await event.wait()
        return index

    async def setting() -> int:
        event.set()
        await anyio.sleep_forever()
        return -1

    for _ in range(10):
        event = anyio.Event()
        assert await af.race(setting(), wait(0), wait(1), wait(2)) == 0


async def test_a_contender_may_be_done_already():
    async def done(value: int) -> int:
        return value

    assert await af.race(done(1), done(2)) == 1


async def test_cancelling_a_race_cancels_the_contenders():
    ended = []

    async def waits() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            ended.append(1)

    with anyio.move_on_after(0) as scope:
        await af.race(waits(), waits())
    assert scope.cancelled_caught
    assert ended == [1, 1]


async def test_nested_races_cancel_the_inner_states():
    backend = Stepped(SCRIPT)
    async with af.session(backend=backend) as flow, flow.state() as s, anyio.create_task_group() as group:
        inner = s.fork(2)

        async def nested() -> str:
            return await af.race(ask(inner[0], "never"), ask(inner[1], "never"))

        async def race() -> None:
            assert await af.race(nested(), ask(s.copy(), "short")) == "one two"

        group.start_soon(race)
        await settle()
        await backend.allow(6)
        await settle()
        assert backend.generator.num_running == 0


async def test_a_contender_that_cannot_be_awaited_is_rejected():
    async def never() -> None:
        raise AssertionError

    for contenders in ((), (never, never()), (never(), 3)):
        with pytest.raises(af.errors.BadArgument, check=has_param("contenders")):
            await af.race(*contenders)


def test_a_trace_names_the_line():
    @af.program
    async def program(s: af.State) -> str:
        return await af.race(ask(s.copy(), "a"), ask(s.copy(), "b"))

    with pytest.raises(af.errors.DataDependent, match=r"test_race.py:\d+, in program"):
        program.trace()
