"""Maps that are left before their end: when their programs, inputs and slots end."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_engine import FakeEngine
from support.observed_backends import Stepped, assert_idle, settle
from support.programs import agen, ask, echo

import agentflow as af

pytestmark = [pytest.mark.anyio, pytest.mark.on_trio]


class Leaving:
    """A map whose programs wait forever, and whose inputs note their end."""

    def __init__(self) -> None:
        self.backend = Stepped({"": "one two"})
        self.num_ended = 0
        self.has_closed = False

    async def endless(self, s: af.State, question: str) -> str:
        try:
            if question == "0":
                return "first"
            return await ask(s, question)
        finally:
            self.num_ended += 1

    async def inputs(self) -> AsyncIterator[str]:
        try:
            for i in range(1000):
                yield str(i)
        finally:
            self.has_closed = True

    def assert_ended(self) -> None:
        assert self.num_ended == 6
        assert self.has_closed
        assert (self.backend.generator.num_open, self.backend.generator.num_running) == (0, 0)


@pytest.fixture
async def leaving():
    return Leaving()


async def read_one_and_break(results: af.ProgramMap[str]) -> None:
    async for result in results:
        assert result == "first"
        await settle()
        break


async def read_one_and_raise(results: af.ProgramMap[str]) -> None:
    async for _ in results:
        await settle()
        raise ZeroDivisionError


@pytest.mark.parametrize("leave", [read_one_and_break, read_one_and_raise])
async def test_leaving_the_block_ends_everything_at_once(leaving, leave):
    async with af.session(backend=leaving.backend) as flow:
        with suppress(ZeroDivisionError):
            async with flow.map(leaving.endless, leaving.inputs(), concurrency=5) as results:
                await leave(results)
        leaving.assert_ended()
        await settle()
        assert flow._link.states == {}


@pytest.mark.parametrize("leave", [read_one_and_break, read_one_and_raise])
async def test_a_dropped_map_ends_without_a_block(leaving, leave):
    async with af.session(backend=leaving.backend) as flow:
        with suppress(ZeroDivisionError):
            await leave(flow.map(leaving.endless, leaving.inputs(), concurrency=5))
        gc.collect()
        await settle()
        leaving.assert_ended()


async def test_a_map_outside_a_block_ends_with_the_session(leaving):
    async with af.session(backend=leaving.backend) as flow:
        results = flow.map(leaving.endless, leaving.inputs(), concurrency=5)
        await read_one_and_break(results)
        assert leaving.num_ended == 1
    leaving.assert_ended()
    with pytest.raises(af.Cancelled, match="session ended"):
        await anext(results)


async def test_cancelling_the_await_ends_everything_before_it_returns(leaving):
    async with af.session(backend=leaving.backend) as flow:
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as group:

                async def collect() -> None:
                    try:
                        await flow.map(leaving.endless, leaving.inputs(), concurrency=5)
                    finally:
                        leaving.assert_ended()

                group.start_soon(collect)
                await settle()
                scope.cancel()
        assert scope.cancelled_caught
        leaving.assert_ended()


async def test_cancelling_the_wait_for_one_result_does_not_cancel_the_map(leaving):
    async with af.session(backend=leaving.backend) as flow:
        async with flow.map(leaving.endless, leaving.inputs(), concurrency=5) as results:
            assert await anext(results) == "first"
            with anyio.CancelScope() as scope:
                scope.cancel()
                await anext(results)
            assert scope.cancelled_caught
            await leaving.backend.allow(20)
            assert await anext(results) == "one two"
        await results.aclose()  # may be repeated


async def test_a_sync_generator_of_inputs_is_closed():
    ended = []

    def inputs() -> Iterator[str]:
        try:
            yield from "abcdefghi"
        finally:
            ended.append("inputs")

    async with af.session(backend=af.Scripted(echo)) as flow:
        async with flow.map(ask, inputs(), concurrency=1) as results:
            assert await anext(results) == "<a>"
        assert ended == ["inputs"]


async def test_leaving_frees_the_slots_of_an_engine():
    engine = FakeEngine(max_running=4, token_budget=16)

    @af.program
    async def long(s: af.State, i: int) -> str:
        s += f"begin {i} " + af.gen("x", max_tokens=3 if i == 0 else 400)
        return await s["x"]

    async with af.session(backend=engine) as flow:
        async with flow.map(long, range(100), concurrency=8) as results:
            assert len(await anext(results)) > 0
        await engine.assert_idle()


@given(
    num_turns=st.integers(0, 60),
    num_taken=st.integers(0, 12),
    concurrency=st.integers(1, 6),
    way=st.sampled_from(["list", "block", "loop"]),
)
async def test_a_map_may_be_cancelled_at_any_turn(num_turns, num_taken, concurrency, way):
    """After ``num_turns`` turns of the loop or ``num_taken`` results."""

    @af.program
    async def forking(s: af.State, i: int) -> int:
        s += f"{i}" + af.gen("x")
        async with s.fork(2) as branches:
            for branch in branches:
                branch += af.gen("y")
        s += branches[0]["y"] + af.gen("z")
        await s["z"]
        return i

    def mapped(flow: af.Session) -> af.ProgramMap[int]:
        return flow.map(forking, agen([*range(20)]), concurrency=concurrency)

    async def read(flow: af.Session) -> None:
        if way == "list":
            assert await mapped(flow) == [*range(20)]
        elif way == "block":
            async with mapped(flow) as results:
                assert [await anext(results) for _ in range(num_taken)] == [*range(num_taken)]
            running.append(len(flow._link.states))
        else:
            found = 0
            async for result in mapped(flow):
                assert result == found
                found += 1
                if found > num_taken:
                    break

    backend = af.Scripted(echo)
    running: list[int] = []
    async with af.session(backend=backend) as flow:
        async with anyio.create_task_group() as group:
            group.start_soon(read, flow)
            for _ in range(num_turns):
                await anyio.lowlevel.checkpoint()
            group.cancel_scope.cancel()
        if way != "loop":
            assert flow._link.states == {}
        await settle()
        assert (flow._link.states, flow._link.variables) == ({}, {})
        assert_idle(backend)
    assert running in ([], [0])
