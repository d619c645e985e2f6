"""A session in an event loop that is not its own: an error in place of a wait that nothing ends."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import anyio.from_thread
import anyio.lowlevel
import anyio.to_thread
import pytest
from support.observed_backends import Stepped
from support.programs import ask, by_end, echo

import agentflow as af

pytestmark = pytest.mark.on_trio

USES: dict[str, Callable[[af.Session, af.State], Awaitable[Any]]] = {}


def use(function: Callable[[af.Session, af.State], Awaitable[Any]]) -> None:
    USES[function.__name__] = function


@use
async def run(flow: af.Session, s: af.State) -> None:
    await flow.run(ask, "a")


@use
async def stream(flow: af.Session, s: af.State) -> None:
    async for _ in flow.stream(ask, "a"):
        pass


@use
async def map_(flow: af.Session, s: af.State) -> None:
    await flow.map(ask, ["a"])


@use
async def open_state(flow: af.Session, s: af.State) -> None:
    flow.state()


@use
async def append(flow: af.Session, s: af.State) -> None:
    s += "more"


@use
async def await_variable(flow: af.Session, s: af.State) -> None:
    await s["x"]


@use
async def read_variable(flow: af.Session, s: af.State) -> None:
    async for _ in s["x"]:
        pass


@use
async def await_state(flow: af.Session, s: af.State) -> None:
    await s


@use
async def read_state(flow: af.Session, s: af.State) -> None:
    async for _ in s:
        pass


@use
async def cancel(flow: af.Session, s: af.State) -> None:
    s.cancel()


@use
async def fork(flow: af.Session, s: af.State) -> None:
    s.fork(2)


@use
async def map_variable(flow: af.Session, s: af.State) -> None:
    s["x"].map(str.upper)


@use
async def stats(flow: af.Session, s: af.State) -> None:
    await flow.stats()


@use
async def embed(flow: af.Session, s: af.State) -> None:
    await flow.embed("text")


@use
async def act(flow: af.Session, s: af.State) -> None:
    await af.act(s, tools=[ask_nobody])


def ask_nobody() -> str:
    return "nobody"


def in_another_loop(use: Callable[..., Awaitable[Any]], *args: Any) -> None:
    async def main() -> None:
        with anyio.fail_after(10):
            await use(*args)

    contextvars.Context().run(anyio.run, main)


@pytest.mark.anyio
@pytest.mark.parametrize("use", USES.values(), ids=USES)
async def test_f21c_a_session_in_another_loop_is_an_error(use):
    async with af.session(backend=Stepped(by_end({"": "never"}))) as flow, flow.state() as s:
        s += af.gen("x")
        with pytest.raises(af.errors.ProgramError, match=r"asyncio\.run_coroutine_threadsafe"):
            await anyio.to_thread.run_sync(in_another_loop, use, flow, s)


@pytest.mark.anyio
async def test_f21d_a_thread_without_a_loop_may_not_append():
    async with af.session(backend=af.Scripted(echo)) as flow, flow.state() as s:
        with pytest.raises(af.errors.ProgramError, match=r"asyncio\.run_coroutine_threadsafe"):
            await anyio.to_thread.run_sync(s.add, "more")
        s += "a" + af.gen("x")
        assert await s["x"] == "<a>"


@pytest.mark.anyio
async def test_f21e_values_that_are_there_are_read_in_any_loop():
    async with af.session(backend=af.Scripted(echo)) as flow, flow.state() as s:
        s += "a" + af.gen("x")
        await s

        async def read() -> None:
            assert await s["x"] == "<a>"
            await s

            assert flow.capabilities.model == "scripted"
            flow.check_alive()

        await anyio.to_thread.run_sync(in_another_loop, read)


def test_f21f_a_loop_between_two_runs_is_the_same():
    """IPython's terminal runs one loop like this, cell by cell."""
    with asyncio.Runner() as cells:
        flow = cells.run(af.open_session(backend=af.Scripted(echo)))
        s = flow.state()

        async def ask_again() -> str:
            s.add("a" + af.gen("x"))
            return await s["x"]

        assert cells.run(ask_again()) == "<a>"
        with pytest.raises(af.errors.ProgramError, match=r"asyncio\.run_coroutine_threadsafe"):
            contextvars.Context().run(asyncio.run, flow.close())
        cells.run(flow.close())


def test_f37_a_line_outside_a_task_is_like_one_in_it():
    """A callback of the loop, as ``python -m asyncio`` runs a line without ``await``."""
    with asyncio.Runner() as lines:

        async def typed(line: Callable[[], Any]) -> Any:
            done = asyncio.get_running_loop().create_future()

            def run() -> None:
                try:
                    done.set_result(line())
                except Exception as error:
                    done.set_exception(error)

            asyncio.get_running_loop().call_soon(run)
            return await done

        async def value(found: Awaitable[str]) -> str:
            with anyio.fail_after(10):
                return await found

        flow = lines.run(af.open_session(backend=af.Scripted(echo)))
        s = lines.run(typed(flow.state))
        lines.run(typed(lambda: s.limit(deadline_s=60)))
        lines.run(typed(lambda: s.add("a" + af.gen("x"))))
        assert lines.run(value(s["x"])) == "<a>"
        mapped = lines.run(typed(lambda: s["x"].map(str.upper)))
        assert lines.run(value(mapped)) == "<A>"
        stream = lines.run(typed(lambda: flow.map(ask, ["b"])))
        assert lines.run(value(stream)) == ["<b>"]
        lines.run(flow.close())


def test_f37_between_two_runs_nothing_is_sent_and_the_error_says_so():
    with asyncio.Runner() as cells:
        flow = cells.run(af.open_session(backend=af.Scripted(echo)))
        s = flow.state()

        async def ask_again() -> str:
            s.add("a" + af.gen("x"))
            return await s["x"]

        assert cells.run(ask_again()) == "<a>"
        for use_it in (
            lambda: s.add("a"),
            lambda: s.fork(2),
            lambda: s.limit(deadline_s=9),
            lambda: s["x"].map(str.upper),
            lambda: flow.limit(deadline_s=9),
            lambda: flow.map(ask, ["a"]),
            lambda: flow.stream(ask, "a"),
            s.seal,
            s.cancel,
        ):
            with pytest.raises(af.errors.ProgramError, match=r"no event loop runs here: .* IPython"):
                use_it()
        assert cells.run(flow.run(ask, "b")) == "<b>"
        cells.run(flow.close())


def test_f37_a_session_that_no_line_opened_is_reported_without_one():
    with asyncio.Runner() as cells:
        flow = cells.run(af.open_session(backend=af.Scripted(echo)))
        with pytest.warns(ResourceWarning, match="^a session was not closed: write"):
            del flow
        cells.run(anyio.lowlevel.checkpoint())


@pytest.mark.anyio
async def test_f21g_another_thread_uses_it_as_the_error_says():
    async with af.session(backend=af.Scripted(echo)) as flow:
        loop = asyncio.get_running_loop() if not is_trio() else None

        def work() -> str:
            if loop is None:
                return anyio.from_thread.run(flow.run, ask, "a")
            return asyncio.run_coroutine_threadsafe(flow.run(ask, "a"), loop).result()

        assert await anyio.to_thread.run_sync(work) == "<a>"


def is_trio() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return True
    return False
