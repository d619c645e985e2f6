"""Concurrent appends of two tasks to one state are rejected; sequential appends are not."""

from __future__ import annotations

import asyncio
import gc
import threading
import types
from collections.abc import Awaitable, Generator

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest
from support.observed_backends import Observed, assert_idle, settle

import agentflow as af
from agentflow.protocol import ops

pytestmark = pytest.mark.anyio


def length(prompt: str) -> str:
    return f"<{len(prompt)}>"


@pytest.mark.parametrize("how", ["append", "turn", "set", "read", "fork", "hint", "join"])
async def test_concurrent_appends_are_rejected_until_the_other_task_ends(how):
    observed = Observed(af.Scripted(length))
    ways = {
        "append": lambda s: s.add("x"),
        "turn": lambda s: s.add(af.user("x")),
        "set": lambda s: s.set("x", "y"),
        "read": lambda s: s.text(),
        "fork": lambda s: s.copy(),
        "hint": lambda s: s.hint(forks=1),
        "join": lambda s: s.join(branches),
    }
    async with af.session(backend=observed) as flow, flow.state() as s:
        branches = s.fork(1)
        other_waits = anyio.Event()

        async def other():
            s.add("other ")
            await other_waits.wait()

        s += "one "
        async with anyio.create_task_group() as group:
            group.start_soon(other)
            await settle()
            num_ops = len(observed.ops)
            with pytest.raises(af.errors.ConcurrentAppend):
                ways[how](s)
            assert len(observed.ops) == num_ops
            other_waits.set()
        ways[how](s)  # the other has ended
        await s


async def test_one_of_two_tasks_that_alternate_is_rejected():
    backend = af.Scripted(length)
    refused = []
    async with af.session(backend=backend) as flow, flow.state() as s:

        async def append(name: str) -> None:
            try:
                for _ in range(5):
                    s.add(name)
                    await settle()
            except af.errors.ConcurrentAppend:
                refused.append(name)

        async with anyio.create_task_group() as group:
            for name in "ab":
                group.start_soon(append, name)
        assert len(refused) == 1
        text = await s.text()
        assert (text.count(refused[0]), text.count("ab".replace(refused[0], ""))) == (1, 5)
    assert_idle(backend)


async def test_a_parent_task_appends_after_its_child_tasks():
    async with af.session(backend=af.Scripted(length)) as flow, flow.state() as s:

        async def child(depth: int) -> None:
            s.add(f"{depth}(")
            if depth:
                async with anyio.create_task_group() as inner:
                    inner.start_soon(child, depth - 1)
            s.add(")")

        s += "a"
        async with anyio.create_task_group() as group:
            group.start_soon(child, 3)
        s += "b"
        assert await s.text() == "a3(2(1(0())))b"


@pytest.mark.parametrize("ends", ["well", "raising", "cancelled"])
async def test_a_task_appends_after_a_child_that_returned_raised_or_was_cancelled(ends):
    async with af.session(backend=af.Scripted(length)) as flow, flow.state() as s:

        async def child(scope: anyio.CancelScope) -> None:
            with scope:
                s.add("child ")
                if ends == "raising":
                    raise ZeroDivisionError
                if ends == "cancelled":
                    await anyio.sleep_forever()

        s += "a "
        scope = anyio.CancelScope()
        with pytest.raises(ExceptionGroup) if ends == "raising" else anyio.CancelScope():
            async with anyio.create_task_group() as group:
                group.start_soon(child, scope)
                await settle()
                scope.cancel()
        s += "b"
        assert await s.text() == "a child b"


async def test_one_task_appends_to_many_states_and_many_tasks_each_to_their_own():
    async with af.session(backend=af.Scripted(length)) as flow, flow.state() as s:
        branches = s.fork(20)

        async def work(branch: af.State) -> None:
            for _ in range(5):
                branch.add("x")
                await anyio.lowlevel.checkpoint()

        for _ in range(3):
            for branch in branches:
                branch += "p"
        async with anyio.create_task_group() as group:
            for branch in branches:
                group.start_soon(work, branch)
        s.join(branches)
        assert await s.text() == "pppxxxxx" * 20


async def test_tasks_append_one_after_the_other_while_earlier_ones_wait():
    """Each appends and lives on, and none comes back."""
    async with af.session(backend=af.Scripted(length)) as flow, flow.state() as s:
        is_over = anyio.Event()

        async def runner(index: int) -> None:
            s.add(f"{index} ")
            if index < 5:
                group.start_soon(runner, index + 1)
            await is_over.wait()

        async with anyio.create_task_group() as group:
            group.start_soon(runner, 0)
            await settle()
            is_over.set()
        assert await s.text() == "0 1 2 3 4 5 "


async def test_nested_programs_append_in_runs_maps_and_streams():
    @af.program
    async def inner(s: af.State, text: str) -> str:
        s += text + af.gen("x")
        return await s["x"]

    @af.program
    async def outer(s: af.State, text: str) -> str:
        s += "outer "
        await inner(s, text)
        s += " again "
        return await inner(s, text)

    async with af.session(backend=af.Scripted(length)) as flow:
        assert await flow.map(outer, ["a", "b"]) == ["<18>"] * 2
        async with flow.stream(outer, "a") as events:
            received = [event async for event in events]
        assert received[-1] == af.RunDone("<18>")


async def test_an_append_from_a_thread_without_an_event_loop_is_rejected():
    observed = Observed(af.Scripted(length))
    async with af.session(backend=observed) as flow, flow.state() as s:
        with pytest.raises(af.errors.ProgramError, match=r"anyio\.from_thread"):
            await anyio.to_thread.run_sync(s.add, "x")
        assert observed.ops == [ops.Open(s.id)]
        await anyio.to_thread.run_sync(anyio.from_thread.run_sync, s.add, "y")
        assert await s.text() == "y"
        assert threading.current_thread() is threading.main_thread()


async def test_tasks_that_ended_are_not_kept():
    async with af.session(backend=af.Scripted(length)) as flow, flow.state() as s:
        for _ in range(50):
            async with anyio.create_task_group() as group:
                group.start_soon(_append, s)
        gc.collect()
        s += "x"
        assert len(s._node._writer._last) <= 2


async def _append(s: af.State) -> None:
    s.add("x")


# Behaviour of asyncio alone


class Asking:
    """Awaitable, and no coroutine: asyncio wraps it in a generator."""

    def __init__(self, state: af.State) -> None:
        self._state = state

    def __await__(self) -> Generator[object, None, str]:
        self._state.add("wrapped " + af.gen("x"))
        return self._state["x"].__await__()


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("wrap", ["wait_for", "gather", "shield", "timeout"])
@pytest.mark.parametrize("kind", ["coroutine", "awaitable", "generator"])
async def test_awaitables_that_asyncio_runs_in_their_own_task_may_append(wrap, kind):
    async with af.session(backend=af.Scripted(length)) as flow, flow.state() as s:

        async def ask() -> str:
            return await Asking(s)

        @types.coroutine
        def ask_old() -> Generator[object, None, str]:
            return (yield from Asking(s).__await__())

        def asked() -> Awaitable[str]:
            return {"coroutine": ask, "awaitable": lambda: Asking(s), "generator": ask_old}[kind]()

        for _ in range(3):
            s += "own "
            match wrap:
                case "wait_for":
                    await asyncio.wait_for(asked(), 10)
                case "gather":
                    await asyncio.gather(asked())
                case "shield":
                    await asyncio.shield(asked())
                case "timeout":
                    async with asyncio.timeout(10):
                        await asked()
            await settle()
        s += "end"
        assert (await s.text()).count("own wrapped") == 3
