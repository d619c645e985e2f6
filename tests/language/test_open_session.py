"""Sessions that are opened in one task and closed in another, as in the cells of a notebook."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest
from support.observed_backends import Stepped, assert_idle
from support.programs import ask, echo

import agentflow as af

pytestmark = pytest.mark.on_trio

Cell = Callable[[dict[str, Any]], Awaitable[None]]


async def run_cells(*cells: Cell) -> dict[str, Any]:
    """Runs each cell in a separate task, with the names that the cells before it have set."""
    names: dict[str, Any] = {}
    for cell in cells:
        async with anyio.create_task_group() as group:
            group.start_soon(cell, names)
    return names


async def opening(names: dict[str, Any]) -> None:
    names["flow"] = await af.open_session(backend=af.Scripted(echo), seed=7)


async def closing(names: dict[str, Any]) -> None:
    await names["flow"].close()


@pytest.mark.anyio
async def test_a_session_is_used_and_closed_in_other_tasks():
    async def first(names: dict[str, Any]) -> None:
        names["result"] = await names["flow"].run(ask, "a")
        names["s"] = names["flow"].state()
        names["s"].add("b" + af.gen("x"))

    async def second(names: dict[str, Any]) -> None:
        names["x"] = await names["s"]["x"]
        names["s"].add("c" + af.gen("y"))
        names["y"] = await names["s"]["y"]
        names["results"] = await names["flow"].map(ask, ["d", "e"])
        names["events"] = [event async for event in names["flow"].stream(ask, "f")]

    names = await run_cells(opening, first, second, closing, closing)
    assert (names["result"], names["x"], names["y"]) == ("<a>", "<b>", "<b<b>c>")
    assert names["results"] == ["<d>", "<e>"]
    assert names["events"][-1] == af.RunDone("<f>")
    assert not names["flow"].is_alive
    with pytest.raises(af.errors.StateClosed):
        names["flow"].state()


@pytest.mark.anyio
async def test_closing_cancels_what_runs():
    backend = Stepped({"": "never"})

    async def open_stepped(names: dict[str, Any]) -> None:
        names["flow"] = await af.open_session(backend=backend)
        names["s"] = names["flow"].state()
        names["s"].add(af.gen("x"))

    names = await run_cells(open_stepped, closing)
    with pytest.raises(af.Cancelled):
        await names["s"]["x"]
    assert_idle(backend)


@pytest.mark.anyio
async def test_an_error_of_opening_is_raised_where_it_is_opened():
    with pytest.raises(af.errors.BadArgument):
        await af.open_session("ws://127.0.0.1:1", backend=af.Scripted(echo))
    with pytest.raises(af.errors.ServerUnreachable):
        await af.open_session("ws://127.0.0.1:1")


@pytest.mark.anyio
async def test_opening_can_be_cancelled():
    class Slow(af.Scripted):
        def connect(self, deliver: Any, lost: Any) -> Any:
            return self

        async def __aenter__(self) -> None:
            entered.set()
            try:
                await anyio.sleep_forever()
            finally:
                left.set()

        async def __aexit__(self, *_: object) -> None:
            raise AssertionError("it was never entered")

    entered, left = anyio.Event(), anyio.Event()
    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:

            async def opens() -> None:
                await af.open_session(backend=Slow(echo))

            group.start_soon(opens)
            await entered.wait()
            group.cancel_scope.cancel()
        await left.wait()


@pytest.mark.anyio
async def test_async_with_closes_an_open_session():
    async with await af.open_session(backend=af.Scripted(echo)) as flow:
        assert await flow.run(ask, "a") == "<a>"
    assert not flow.is_alive


@pytest.mark.anyio
async def test_a_dropped_session_warns_and_is_ended():
    backend = Stepped({"": "never"})
    flows = [await af.open_session(backend=backend)]
    s = flows[0].state()
    s += af.gen("x")
    gc.collect()
    with pytest.warns(ResourceWarning, match=r"test_open_session\.py:\d+.*close"):
        flows.clear()
    with anyio.fail_after(10), pytest.raises(af.Cancelled):
        await s["x"]


def test_a_loop_that_ends_first_warns_and_ends_the_session():
    async def main() -> af.OpenSession:
        return await af.open_session(backend=af.Scripted(echo))

    with pytest.warns(ResourceWarning, match="close"):
        flow = asyncio.run(main())
    assert not flow.is_alive
    asyncio.run(flow.close())


def test_on_trio_too():
    async def main() -> af.OpenSession:
        return await af.open_session(backend=af.Scripted(echo))

    with pytest.warns(ResourceWarning, match="close"):
        flow = anyio.run(main, backend="trio")
    assert not flow.is_alive
