"""``variable.map(function)``: a Python function between two states, its failures, and states that end."""

from __future__ import annotations

import anyio
import pytest
from support.faults import has_param
from support.observed_backends import Observed, Stepped, Unbatched, assert_idle, settle
from support.programs import echo
from support.session_peer import HANG

import agentflow as af
from agentflow.language.states.variable import Variable
from agentflow.protocol import ops

pytestmark = [pytest.mark.anyio, pytest.mark.on_trio]


@pytest.mark.parametrize("unbatched", [False, True])
async def test_a_mapped_variable_is_a_variable(unbatched):
    backend = af.Scripted(echo)
    async with af.session(backend=Unbatched(backend) if unbatched else backend) as flow, flow.state() as s:
        s += "a" + af.gen("x")
        twice = s["x"].map(lambda text: text * 2)
        length = twice.map(lambda text: str(len(text)))
        upper = s["x"].upper().map(lambda text: f"{text}?")
        s += f"[{twice}]" + length + upper.strip()
        assert await s.text() == "a<a>[<a><a>]6<A>?"
        assert (await twice, await length, await upper) == ("<a><a>", "6", "<A>?")
        assert [delta async for delta in twice] == ["<a><a>"]
        assert twice.finish_reason == "provided"
        assert [v.name for v in s.variables] == ["x"]
    assert_idle(backend)


async def test_the_function_receives_the_typed_value():
    number = af.gen("n", type=int)
    async with af.session(backend=af.Scripted(["41"])) as flow, flow.state() as s:
        s += number
        assert await s[number].map(lambda n: str(n + 1)) == "42"
        assert await s[number].strip().map(lambda text: text + "1") == "411"


def fails(text: str) -> str:
    raise ZeroDivisionError("nothing to divide")


def refuses(text: str) -> str:
    raise af.errors.BadArgument("not this one")


async def awaitable() -> None:
    raise AssertionError("ran")


FUNCTIONS = [
    (fails, af.errors.RunFailed, r"map failed: ZeroDivisionError\('nothing to divide'\)"),
    (refuses, af.errors.BadArgument, "not this one"),
    (len, af.errors.BadArgument, "map: the function must return a string, not 3"),
    (lambda text: None, af.errors.BadArgument, "map: the function must return a string, not None"),
]


@pytest.mark.parametrize(("function", "kind", "message"), FUNCTIONS)
async def test_a_failing_function_fails_its_variable_and_its_consumers(function, kind, message):
    async with af.session(backend=af.Scripted(echo)) as flow, flow.state() as s, flow.state() as other:
        s += "a" + af.gen("x")
        mapped = s["x"].map(function)
        other += "got " + mapped + af.gen("y")
        with pytest.raises(kind, match=message):
            await mapped
        with pytest.raises(af.errors.RunFailed, match=r"'x.map'") as failure:
            await other
        assert isinstance(failure.value.__cause__, af.errors.RunFailed | af.errors.BadArgument)
        await s  # its own ops are all well


@pytest.mark.parametrize("function", [None, "upper", 3, awaitable])
async def test_only_synchronous_functions_are_mapped(function):
    observed = Observed(af.Scripted(echo))
    async with af.session(backend=observed) as flow, flow.state() as s:
        s += "a" + af.gen("x")
        with pytest.raises(af.errors.BadArgument, check=has_param("function")):
            s["x"].map(function)
        await s
        assert observed.of(ops.Expect) == []


async def test_a_map_of_a_failed_variable_fails_with_it():
    async with af.session(backend=af.Scripted(echo)) as flow, flow.state() as s, flow.state() as other:
        s += "!" + af.gen("x")
        before = s["x"].map(str.upper)
        await s["x"].settled()
        after = s["x"].map(str.upper)
        other += before
        for mapped in (before, after):
            with pytest.raises(af.AgentflowError, match="cannot answer"):
                await mapped
        with pytest.raises(af.errors.RunFailed, match=r"'x.map'"):
            await other


async def test_variables_of_a_sealed_branch_can_be_mapped():
    async with af.session(backend=af.Scripted(echo)) as flow, flow.state() as s:
        async with s.fork(2) as branches:
            for branch in branches:
                branch += "b" + af.gen("x")
        for branch in branches:
            s += branch["x"].map(str.upper)
        assert await s.text() == "<B><B>"


async def test_a_variable_of_an_ended_run_cannot_be_mapped():
    observed = Observed(af.Scripted(echo))
    async with af.session(backend=observed) as flow:
        async with flow.state() as s:
            s += "a" + af.gen("x")
            await s
        with pytest.raises(af.errors.StateClosed, match="'x'"):
            s["x"].map(str.upper)
        assert observed.of(ops.Expect) == []
    with pytest.raises(af.errors.StateClosed, match="session has ended"):
        s["x"].map(str.upper)


async def test_a_run_waits_for_its_maps_and_raises_their_failures():
    backend = Stepped(["one two", "one two"])
    received = []

    @af.program
    async def program(s: af.State, function) -> str:
        s += af.gen("x")
        s["x"].map(function)
        return "done"

    async with af.session(backend=backend) as flow, anyio.create_task_group() as group:
        group.start_soon(flow.run, program, lambda text: received.append(text) or text)
        await backend.allow(2)
        assert received == ["one two"]
        group.start_soon(backend.allow, 2)
        with pytest.raises(af.errors.RunFailed, match="map failed: ZeroDivisionError"):
            await flow.run(program, fails)
    assert_idle(backend)


async def test_a_failure_that_only_a_map_received_is_raised_by_the_run():
    @af.program
    async def program(s: af.State) -> str:
        s += "!" + af.gen("x")
        s["x"].map(str.upper)
        return "done"

    async with af.session(backend=af.Scripted(echo)) as flow:
        with pytest.raises(af.errors.EngineFailed, match="cannot answer"):
            await flow.run(program)


async def test_leaving_a_state_cancels_its_pending_maps():
    backend = Stepped(["one two"])
    async with af.session(backend=backend) as flow, flow.state() as other:
        async with flow.state() as s:
            s += af.gen("x")
            mapped = s["x"].map(str.upper)
            other += mapped
            await backend.allow(1)
        with pytest.raises(af.Cancelled):
            await mapped
        with pytest.raises(af.errors.RunFailed, match=r"'x.map'"):
            await other
    assert_idle(backend)


async def test_cancelling_a_state_fails_the_consumers_of_its_expected_variables():
    """The variable is one of the branch, and the client has not provided it."""
    backend = Stepped(["one two"])
    async with af.session(backend=backend) as flow, flow.state() as s, flow.state() as other:
        branch = s.copy()
        s += af.gen("x")
        mapped = Variable(branch._node.expect_text("x.map"))
        other += mapped
        await settle()
        branch.cancel()
        with pytest.raises(af.errors.RunFailed, match=r"'x.map'") as failure:
            await other
        assert isinstance(failure.value.__cause__, af.Cancelled)
        await backend.allow(2)
        assert await s["x"] == "one two"


async def test_closing_a_state_fails_the_consumers_of_its_expected_variables():
    backend = af.Scripted([])
    async with af.session(backend=backend) as flow, flow.state() as other:
        state, var = flow._link.next_id(), flow._link.next_id()
        flow._link._connection.send([ops.Open(state), ops.Expect(state, var, "mine")])
        flow._link._connection.send([ops.Text(other.id, (ops.Ref(var),)), ops.Close(state)])
        await settle()
        assert other._node.error.message.startswith("the text needs 'mine', which has no value: ")
        assert other._node.error.cause.code == "cancelled"
    assert_idle(backend)


async def test_only_what_is_expected_can_be_provided(server):
    async with af.session(server.url) as flow, flow.state() as s:
        s += f"a {HANG}" + af.gen("x")
        flow._link._connection.send([ops.Provide(s["x"].id, "forged")])
        with pytest.raises(af.errors.ProtocolError, match="provides"):
            await s["x"]
    await server.wait_until_idle()


async def test_maps_over_the_wire(server):
    async with af.session(server.url) as flow, flow.state() as s, flow.state() as other:
        s += "say this" + af.gen("x")
        mapped = s["x"].map(lambda text: f"{text} and that")
        failing = s["x"].map(fails)
        other += f"got {mapped}" + af.gen("y")
        assert await other["y"] == "that"
        assert await other.text() == "got this and thatthat"
        other += failing
        with pytest.raises(af.errors.RunFailed, match=r"'x.map'"):
            await other
    await server.wait_until_idle()


@pytest.mark.parametrize("is_told_of_both", [False, True])
async def test_failures_with_equal_messages_are_distinct(is_told_of_both):
    @af.program
    async def two(s: af.State) -> str:
        s += "a" + af.gen("x")
        mapped = [s["x"].map(fails), s["x"].map(fails)]
        for variable in mapped[: 1 + is_told_of_both]:
            with pytest.raises(af.errors.RunFailed):
                await variable
        await settle()
        return "went on"

    async with af.session(backend=af.Scripted("one")) as flow:
        if is_told_of_both:
            assert await flow.run(two) == "went on"
        else:
            with pytest.raises(af.errors.RunFailed, match="nothing to divide"):
                await flow.run(two)
