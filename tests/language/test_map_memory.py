"""Maps without end: the memory of a session and an interpreter does not grow with the number of runs."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress

import anyio
import anyio.lowlevel
import pytest
from support.observed_backends import Unbatched, assert_idle, settle
from support.programs import ask, echo
from support.wire_server import thread_server

import agentflow as af
from agentflow.backends import scripted_generator
from agentflow.language.batch.map import READ_AHEAD
from agentflow.language.markers import MARKERS
from agentflow.runtime.interpreter.interpreter import Interpreter

pytestmark = pytest.mark.anyio


@af.program
async def eventful(s: af.State, i: int) -> str | None:
    """One of all the ways in which a run can go and end."""
    s += f"{i}" + af.gen("x")
    async with s.fork(2) as branches:
        for branch in branches:
            branch += "b" + af.gen("y")
            branch.fork(1)[0].add("deep" + af.gen("z"))
    match i % 8:
        case 0:
            raise KeyError(i)
        case 1:
            branches[0].cancel()
        case 2:
            s += f"wired {branches[0]['y']}" + af.gen("w")
            return await s["w"]
        case 3:
            other = s.fork(1)[0]
            other += "!" + af.gen("fails") + af.gen("never")
            with suppress(af.errors.EngineFailed):
                await other["fails"]
        case 4:
            s.fork(1)[0].add("!").add(af.gen("fails"))
        case 5:
            with anyio.move_on_after(0):
                await branches
        case 6:
            return None
    await branches[1]
    return await s["x"]


NONE_LEFT = {"states": 0, "variables": 0, "markers": 0, "answers": 0}


def tables(flow: af.Session) -> dict[str, int]:
    """The sizes of all that a session knows of its runs."""
    return {
        "states": len(flow._link.states),
        "variables": len(flow._link.variables),
        # All sessions of the process share the table.
        "markers": sum(marked._node.state.link is flow._link for marked in MARKERS._variables.values()),
        "answers": len(flow._link._answers),
    }


def tables_of(interpreter: Interpreter[object]) -> dict[str, int]:
    """The sizes of all that an interpreter knows of its states."""
    return {
        "states": len(interpreter._states._states),
        "variables": len(interpreter._variables),
        "events": len(interpreter.events._changed_records),
    }


async def map_eventfully(flow: af.Session, num_runs: int) -> None:
    num_failed = 0
    async for result in flow.map(eventful, range(num_runs), on_error="return", concurrency=16):
        num_failed += isinstance(result, Exception)
    assert num_runs // 8 <= num_failed < num_runs
    await settle()
    gc.collect()  # the marker's table is weak


@pytest.mark.parametrize("wrap", [lambda backend: backend, Unbatched], ids=["plain", "unbatched"])
async def test_all_tables_are_empty_after_many_runs(wrap):
    backend = af.Scripted(echo)
    async with af.session(backend=wrap(backend)) as flow:
        await map_eventfully(flow, 96)
        assert tables(flow) == NONE_LEFT
        if wrap is not Unbatched:
            interpreter = flow._link._connection._connection.interpreter
            with anyio.fail_after(10):
                while any(tables_of(interpreter).values()):
                    await anyio.lowlevel.checkpoint()
        assert_idle(backend)


async def test_a_server_and_its_client_hold_nothing_after_many_runs():
    with thread_server() as server:
        async with af.session(server.url) as flow:
            await map_eventfully(flow, 96)
            cursors, queue = flow._link._connection._cursors, flow._link._connection._queue
            [session] = server.call(lambda: list(server._server.sessions._sessions.values()))

            def is_empty() -> bool:
                return not any(tables_of(session.interpreter).values())

            with anyio.fail_after(10):
                while tables(flow) != NONE_LEFT:  # the events of the last run are on their way
                    await flow.stats()
                    gc.collect()
                # Closes are held back until their states' last events have come.
                while cursors._states or cursors._variables or not server.call(is_empty):
                    await flow.stats()
            assert (cursors._due, cursors.unanswered) == ([], {})
            assert len(queue) < 100  # ops that the server has not confirmed yet
        await server.wait_until_idle()


class Growth:
    """Inputs that look at the memory on their way, when the results of all before them were taken: how many
    runs are open at other times depends on the order of tasks, which trio draws."""

    def __init__(self, marks: list[int]) -> None:
        self.marks = marks
        self.num_taken = 0
        self.bytes_at: list[int] = []
        self.peaks: list[int] = []

    async def inputs(self) -> AsyncIterator[str]:
        for i in range(self.marks[-1] + 1):
            if i in self.marks:
                self.peaks.append(tracemalloc.get_traced_memory()[1])
                while self.num_taken < i:
                    await anyio.lowlevel.checkpoint()
                await settle()
                gc.collect()
                self.bytes_at.append(tracemalloc.get_traced_memory()[0])
                tracemalloc.reset_peak()
            yield f"{i}"


async def test_memory_is_constant_over_many_inputs(monkeypatch):
    monkeypatch.setattr(scripted_generator, "MAX_CALLS", 100)
    growth = Growth([250, 350, 750])
    tracemalloc.start()
    try:
        async with af.session(backend=af.Scripted(echo)) as flow:
            async for _ in flow.map(ask, growth.inputs(), concurrency=8):
                growth.num_taken += 1
    finally:
        tracemalloc.stop()
    assert growth.num_taken == 751
    # 400 runs lie between the marks: anything that each left behind would show.
    assert growth.bytes_at[2] - growth.bytes_at[1] < 400 * 8
    assert growth.peaks[2] < 2 * growth.peaks[1]


async def test_unread_results_are_bounded():
    num_read = 0

    def endless() -> Iterator[str]:
        nonlocal num_read
        while True:
            num_read += 1
            yield "a"

    flow = af.session(backend=af.Scripted(echo))
    async with flow, flow.map(ask, endless(), concurrency=3) as results:
        for num_taken in range(1, 20):
            assert await anext(results) == "<a>"
            await settle()
            assert num_read == num_taken + READ_AHEAD * 3
        assert tables(flow) == NONE_LEFT
