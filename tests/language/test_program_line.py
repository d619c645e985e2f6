"""A failure names the line of the program that appended the failing expression, wherever it is raised."""

from __future__ import annotations

import inspect
import os

import pytest
from support.observed_backends import Unbatched
from support.session_peer import HANG

import agentflow as af

pytestmark = pytest.mark.anyio

FILE = os.path.basename(__file__)


BROKEN = af.errors.EngineFailed("broken")  # one object for all raises


def echo(prompt: str) -> str | Exception:
    return BROKEN if prompt.endswith("!") else "fine"


def here(offset: int = 0) -> int:
    """The number of the caller's line, or of one near it."""
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return frame.f_back.f_lineno + offset


async def notes_of(awaitable) -> list[str]:
    with pytest.raises(af.AgentflowError) as failure:
        await awaitable
    return failure.value.__notes__


def note(line: int, function: str) -> str:
    return f"what failed was appended at {FILE}:{line}, in {function}"


OPS = ["gen", "reference", "transform", "select", "set", "limit", "turn", "block", "sum", "helper"]


def helper(s: af.State, source: af.Variable) -> int:
    s.add(source)
    return here(-1)


async def append_failing(s: af.State, kind: str, failed: af.Variable) -> tuple[int, str]:
    """Appends something that fails; gives the line that did."""
    name = "append_failing"
    s += "some " + af.gen("good")
    s.hint(forks=1)
    s.copy()
    match kind:
        case "gen":
            s += "!" + af.gen("x")
            line = here(-1)
        case "reference":
            s += f"so {failed}"
            line = here(-1)
        case "transform":
            s += s["good"].json("a")
            line = here(-1)
        case "select":
            s += af.select("x", ["not", "these"])
            line = here(-1)
        case "set":
            s.set("q", failed)
            line = here(-1)
        case "limit":
            await s["good"]
            s.limit(output_tokens=0)
            s += af.gen("x")
            line = here(-1)
        case "turn":
            s += af.user("a") + af.assistant(
                "b!",
                af.gen("x"),
            )
            line = here(-4)
        case "block":
            async with s.user():
                s += "!"
                s += af.gen("x")
                line = here(-1)
        case "sum":
            s += "a" + af.gen("x") + "b" + failed + af.gen("y")
            line = here(-1)
        case _:
            line, name = helper(s, failed), "helper"
    s += af.user("and more") + af.gen("later")
    return line, name


@pytest.mark.parametrize("kind", OPS)
@pytest.mark.parametrize("unbatched", [False, True])
async def test_each_op_that_fails_names_its_line(kind, unbatched):
    name = "test_each_op_that_fails_names_its_line"
    backend = Unbatched(af.Scripted(echo)) if unbatched else af.Scripted(echo)
    async with af.session(backend=backend) as flow, flow.state() as s, flow.state() as other:
        other += "!" + af.gen("failed")
        failing = here(-1)
        await other["failed"].settled()
        line, where = await append_failing(s, kind, other["failed"])
        with pytest.raises(af.AgentflowError) as failure:
            await s["later"]
        # Where a value was missing, it is the failure that it comes from whose line is named.
        is_passed_on = kind in ("reference", "set", "sum", "helper")
        expected = note(failing, name) if is_passed_on else note(line, where)
        assert failure.value.__notes__ == [expected]
        assert await notes_of(s) == [expected]


async def test_the_replies_of_an_agent_name_the_line_that_starts_it():
    name = "test_the_replies_of_an_agent_name_the_line_that_starts_it"
    async with af.session(backend=af.Scripted([af.Overloaded("busy")] * 2)) as flow:
        async with flow.state() as s:
            s += af.user("?")
            with pytest.raises(af.Overloaded) as failure:
                await af.act(s, tools=[len_of])
            line = here(-1)
        assert failure.value.__notes__ == [note(line, name)]
        async with flow.state() as s:
            s += af.user("?")
            with pytest.raises(af.Overloaded) as failure:
                async for _ in af.act(s, tools=[len_of]):
                    pass
            line = here(-2)
        assert failure.value.__notes__ == [note(line, name)]


def len_of(text: str) -> int:
    return len(text)


async def test_a_failed_branch_names_the_line_of_the_branch():
    async def work(branch: af.State, text: str) -> int:
        branch += text + af.gen("x")
        return here(-1)

    async with af.session(backend=af.Scripted(echo)) as flow, flow.state() as s:
        s += "p"
        async with s.fork(2) as branches:
            await work(branches[0], "a")
            line = await work(branches[1], "b!")
        expected = note(line, "work")
        assert await notes_of(branches[1]["x"]) == [expected]
        assert await notes_of(s) == [expected]
        assert await notes_of(branches.gather("x")) == [expected]


async def test_failures_with_one_exception_name_their_own_lines():
    async with af.session(backend=af.Scripted(echo)) as flow, flow.state() as s:
        first, second = s.fork(2)
        first += "!" + af.gen("x")
        line = here(-1)
        second += "more before it"
        second += "!" + af.gen("x")
        for branch, at in ((first, line), (second, line + 3)):
            expected = note(at, "test_failures_with_one_exception_name_their_own_lines")
            assert await notes_of(branch["x"]) == [expected]
            assert await notes_of(branch) == [expected]


async def test_an_error_at_the_end_of_a_run_names_its_line():
    lines = []

    @af.program
    async def program(s: af.State) -> None:
        s += "!" + af.gen("x")
        lines.append(here(-1))

    async with af.session(backend=af.Scripted(echo)) as flow:
        assert await notes_of(flow.run(program)) == [note(lines[0], "program")]
        async with flow.stream(program) as events:
            with pytest.raises(af.errors.EngineFailed) as failure:
                async for _ in events:
                    pass
        assert failure.value.__notes__ == [note(lines[0], "program")]


async def test_the_line_is_exact_among_many_appends():
    backend = af.Scripted(lambda prompt: "x" if len(prompt) < 200 else BROKEN)
    async with af.session(backend=backend) as flow, flow.state() as s:
        for _ in range(100):
            s += "a"
            s += "b" + af.gen("x")
            line = here(-1)
            await s["x"].settled()
            if s._node.error is not None:
                break
        assert await notes_of(s) == [note(line, "test_the_line_is_exact_among_many_appends")]


async def test_failures_over_the_wire_name_their_line(server):
    async with af.session(server.url) as flow, flow.state() as s, flow.state() as other:
        other += f"a {HANG}" + af.gen("x")
        first = here(-1)
        other.limit(deadline_s=0.001)
        s += "b " + af.gen("y")
        s += other["x"]
        s += "say c" + af.gen("z")
        name = "test_failures_over_the_wire_name_their_line"
        assert await notes_of(other["x"]) == [note(first, name)]
        assert await notes_of(s["z"]) == [note(first, name)]
        branch = flow.state()
        async with branch as t:
            t += "say d" + af.gen("x")
            t += t["x"].json("a")
            assert await notes_of(t) == [note(here(-1), name)]
    await server.wait_until_idle()


async def test_a_cancelled_state_names_no_line():
    async with af.session(backend=af.Scripted(echo)) as flow, flow.state() as s:
        s += "a" + af.gen("x")
        s.cancel()
        with pytest.raises(af.Cancelled) as failure:
            await s["x"]
        assert not hasattr(failure.value, "__notes__")
