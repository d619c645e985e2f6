"""Maps whose programs or inputs fail: their errors, and that a plain loop raises the same."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.observed_backends import Observed, Stepped, assert_idle, settle
from support.programs import ask, echo

import agentflow as af

pytestmark = [pytest.mark.anyio, pytest.mark.on_trio]


async def test_the_first_failure_is_raised_and_cancels_the_rest():
    backend = Stepped({"bad": "one", "": "never ever"})
    ended = []

    async def fragile(s: af.State, question: str) -> None:
        try:
            await ask(s, question)
            raise KeyError(question)
        finally:
            ended.append(question)

    async with af.session(backend=backend) as flow, anyio.create_task_group() as group:

        async def collect() -> None:
            with pytest.raises(KeyError, match="bad") as failure:
                await flow.map(fragile, ["a", "b", ("bad",), "c", "d"], concurrency=4)
            assert failure.value.__notes__[-1:] == ["in map: input 2 was ('bad',)"]

        group.start_soon(collect)
        await settle()
        await backend.allow(3)  # only the third generates a single word
        await settle()
        assert sorted(ended) == ["a", "b", "bad", "c"]  # the last one never began
        assert (backend.generator.num_open, backend.generator.num_running) == (0, 0)


async def test_results_before_the_failure_come_first_and_it_is_raised_once(flow):
    received = []
    results = flow.map(ask, ["a", "b", "c!", "d"], concurrency=1)

    async def read() -> None:
        async for result in results:
            received.append(result)

    with pytest.raises(af.errors.EngineFailed, match="cannot answer c!"):
        await read()
    assert received == ["<a>", "<b>"]
    await read()
    await results.aclose()
    await read()
    assert received == ["<a>", "<b>"]


async def test_failures_are_returned_among_the_results(flow):
    async def typed(s: af.State, question: str) -> str:
        return await ask(s, question)

    results = await flow.map(typed, ["a", "b!", {"wrong": 1}, {1: 2}, "c"], on_error="return", concurrency=2)
    assert [type(result) for result in results] == [str, af.errors.EngineFailed, TypeError, TypeError, str]
    assert "unexpected keyword argument 'wrong'" in str(results[2])
    assert [result for result in results if isinstance(result, str)] == ["<a>", "<c>"]


@pytest.mark.parametrize("on_error", ["raise", "return"])
@pytest.mark.parametrize("is_async", [False, True])
async def test_a_failure_of_the_inputs_is_raised_with_either_on_error(flow, on_error, is_async):
    def broken() -> Iterator[str]:
        yield from "ab"
        raise OSError("the disk is gone")

    async def also_broken() -> AsyncIterator[str]:
        for item in broken():
            yield item

    with pytest.raises(OSError, match="the disk is gone") as failure:
        await flow.map(ask, also_broken() if is_async else broken(), on_error=on_error)
    assert failure.value.__notes__[-1:] == ["in map: raised by the inputs, after 2 of them"]
    assert flow.is_alive


async def test_a_lost_session_fails_the_map_and_not_an_input():
    observed = Observed(Stepped({"": "never"}))
    async with af.session(backend=observed) as flow, anyio.create_task_group() as group:

        async def collect() -> None:
            with pytest.raises(af.ServerLost, match="gone") as failure:
                await flow.map(ask, (str(i) for i in range(10**9)), on_error="return")
            assert not hasattr(failure.value, "__notes__")

        group.start_soon(collect)
        await settle()
        observed.lose(af.ServerLost("gone"))


async def test_the_note_on_an_input_is_one_short_line():
    class Wild:
        def __repr__(self) -> str:
            raise ZeroDivisionError

    async def fails(s: af.State, item: object) -> None:
        raise KeyError

    async with af.session(backend=af.Scripted(echo)) as flow:
        for item in (Wild(), "x\n" * 10**6, [{"a": "b" * 100}] * 1000, 10**5000):
            with pytest.raises(KeyError) as failure:
                await flow.map(fails, [item])
            [note] = failure.value.__notes__
            assert note.startswith("in map: input 0 was ")
            assert len(note) < 150
            assert "\n" not in note


@pytest.mark.parametrize("anyio_backend", ["asyncio"])  # on trio, a program cannot raise a cancellation
async def test_f12_a_program_that_is_cancelled_from_within_fails_its_input_alone(anyio_backend):
    """A task of another library was cancelled, and the program waited for it."""

    async def cancelled(s: af.State, i: int) -> int:
        if i == 2:
            raise anyio.get_cancelled_exc_class()
        return i

    async with af.session(backend=af.Scripted(echo)) as flow:
        results = [r async for r in flow.map(cancelled, range(5), on_error="return", concurrency=1)]
        assert [r for r in results if isinstance(r, int)] == [0, 1, 3, 4]
        assert isinstance(results[2], af.errors.RunFailed)
        with pytest.raises(af.errors.RunFailed):
            _ = [r async for r in flow.map(cancelled, range(5), concurrency=1)]


@given(
    plans=st.lists(st.tuples(st.integers(0, 5), st.booleans(), st.booleans()), max_size=25),
    concurrency=st.integers(1, 6),
)
async def test_a_map_gives_what_a_plain_loop_gives(plans, concurrency):
    """The reference: the same program, one input after the other."""

    @af.program
    async def plan(s: af.State, num_turns: int, forks: bool, fails: bool) -> str:
        for turn in range(num_turns):
            s += f"{turn}" + af.gen("x")
        for branch in s.fork(2) if forks else []:
            branch += af.gen("y")
            if fails:
                branch += "!" + af.gen("z")
        if fails and not forks:
            raise KeyError(num_turns)
        return await s["x"] if num_turns else "none"

    def plainly(outcome: object) -> object:
        return (type(outcome), str(outcome)) if isinstance(outcome, Exception) else outcome

    backend = af.Scripted(echo)
    async with af.session(backend=backend) as flow:
        expected: list[object] = []
        for each in plans:
            try:
                expected.append(await flow.run(plan, *each))
            except Exception as error:
                expected.append(error)
        found = await flow.map(plan, plans, concurrency=concurrency, on_error="return")
        assert [*map(plainly, found)] == [*map(plainly, expected)]
        received: list[object] = []
        failures = [plainly(each) for each in expected if isinstance(each, Exception)]
        try:
            async for result in flow.map(plan, plans, concurrency=concurrency):
                received.append(result)
        except Exception as error:
            failure = plainly(error)
            assert failure in failures
        else:
            assert (failures, len(received)) == ([], len(plans))
        assert received == expected[: len(received)]
        await settle()
        assert_idle(backend)
