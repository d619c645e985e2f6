"""Programs and runs: their results and errors, and that nothing of them is left over."""

import anyio
import pytest
from support.faults import has_param
from support.observed_backends import Observed, Stepped, Unbatched, assert_idle, settle
from support.programs import echo

import agentflow as af
from agentflow.protocol import ops
from agentflow.protocol.backend import Backend

pytestmark = pytest.mark.anyio


@af.program
async def ask(s: af.State, question: str, *, times: int = 1) -> str:
    """Asks."""
    for _ in range(times):
        s += question + af.gen("answer")
    return await s["answer"]


async def test_a_run_gives_what_the_program_returns():
    async with af.session(backend=af.Scripted(echo)) as flow:
        assert await flow.run(ask, "why") == "<why>"
        assert await flow.run(ask, "why", times=2) == "<why<why>why>"
        assert (ask.__name__, ask.__doc__) == ("ask", "Asks.")


async def test_a_program_requires_a_state():
    with pytest.raises(af.errors.BadArgument, check=has_param("state")):
        await ask("why")


@pytest.mark.on_trio
async def test_a_run_waits_for_unawaited_variables():
    backend = Stepped({"": "one two three"})

    @af.program
    async def careless(s: af.State) -> str:
        s += af.gen("x")
        branch = s.fork(1)[0]
        branch += af.gen("y")
        return "done"

    async with af.session(backend=backend) as flow, anyio.create_task_group() as group:
        results = []

        async def run():
            results.append(await flow.run(careless))

        group.start_soon(run)
        await backend.allow(5)
        assert results == []
        await backend.allow(1)
        assert results == ["done"]


@pytest.fixture(params=[lambda backend: backend, Unbatched], ids=["at once", "unbatched"])
def backend(request) -> Backend:
    """The scripted backend, whose events come together or one by one."""
    return request.param(af.Scripted(echo))


@pytest.mark.on_trio
@pytest.mark.parametrize("where", ["root", "branch", "group", "text"])
async def test_an_unawaited_failure_is_raised_by_the_run(where, backend):
    @af.program
    async def careless(s: af.State) -> str:
        if where == "root":
            s += "!" + af.gen("x")
        elif where == "branch":
            s.fork(2)[1].add("!").add(af.gen("x"))
        elif where == "group":
            async with s.fork(2) as branches:
                branches[1].add("!").add(af.gen("x"))
        else:  # an op without a variable fails, after everything that has one
            other = s.fork(1)[0]
            other += "!" + af.gen("x")
            with pytest.raises(af.errors.EngineFailed):
                await other
            s += af.user("text ", other["x"])
        return "done"

    async with af.session(backend=backend) as flow:
        if where == "text":  # the program caught the failure that the other one follows from
            assert await flow.run(careless) == "done"
            return
        # In a group, the branch or the parent that fails first.
        kinds = (af.errors.EngineFailed, af.errors.RunFailed) if where == "group" else af.errors.EngineFailed
        with pytest.raises(kinds, match="cannot answer !"):
            await flow.run(careless)


async def test_a_failed_op_after_the_last_value_is_raised_by_the_run(backend):
    async with af.session(backend=backend) as flow, flow.state() as other:

        @af.program
        async def consume(s: af.State) -> str:
            s += "a" + af.gen("x")
            s += other["bad"]
            return await s["x"]

        other += "!" + af.gen("bad")
        with pytest.raises(af.errors.RunFailed, match="'bad'"):
            await flow.run(consume)


async def test_a_failure_that_the_program_caught_is_not_raised_by_the_run(backend):
    @af.program
    async def careful(s: af.State, *, grouped: bool) -> list[str]:
        branches = s.fork(3)
        if grouped:
            await branches.__aenter__()
        for letter, branch in zip("a!c", branches, strict=True):
            branch += letter + af.gen("x")
        values = []
        for branch in branches:
            try:
                values.append(await branch["x"])
            except af.AgentflowError as error:
                values.append(type(error).__name__)
        return values

    async with af.session(backend=backend) as flow:
        assert await flow.run(careful, grouped=False) == ["<a>", "EngineFailed", "<c>"]
        assert (await flow.run(careful, grouped=True))[1] == "EngineFailed"


async def test_other_failures_than_the_caught_one_are_raised_by_the_run(backend):
    @af.program
    async def half_careful(s: af.State) -> str:
        first, second = s.fork(2)
        first += "1!" + af.gen("x")
        second += "2!" + af.gen("x")
        with pytest.raises(af.errors.EngineFailed):
            await first["x"]
        return "done"

    async with af.session(backend=backend) as flow:
        with pytest.raises(af.errors.EngineFailed, match="cannot answer 2!"):
            await flow.run(half_careful)


@pytest.mark.on_trio
async def test_a_failure_caught_at_the_parent_is_not_raised_by_the_run(backend):
    @af.program
    async def falls_back(s: af.State) -> str:
        async with s.fork(2) as branches:
            branches[0] += "!" + af.gen("x")
        await branches[0]["x"].settled()  # which raises nothing
        await settle()
        try:
            await s
        except af.errors.RunFailed:
            return "fallback"
        return "unreachable"

    async with af.session(backend=backend) as flow:
        assert await flow.run(falls_back) == "fallback"


@pytest.mark.on_trio
async def test_a_cancelled_branch_does_not_fail_the_run():
    backend = Stepped({"": "never"})

    @af.program
    async def abandons(s: af.State) -> str:
        branch = s.fork(1)[0]
        branch += af.gen("x")
        await settle()
        branch.cancel()
        return "done"

    async with af.session(backend=backend) as flow:
        assert await flow.run(abandons) == "done"
        await settle()
        assert backend.generator.num_running == 0


class OwnError(Exception):
    """A program's error."""


@pytest.mark.on_trio
@pytest.mark.parametrize("error", [OwnError("x"), KeyError("x"), ExceptionGroup("own", [OwnError()])])
@pytest.mark.parametrize("depth", [0, 2])
async def test_an_exception_of_the_program_is_raised_unchanged_by_the_run(error, depth):
    backend = Stepped({"": "never"})

    async def fails(s: af.State, depth: int) -> None:
        s += af.gen("x")
        await settle()
        if depth == 0:
            raise error
        async with s.fork(2) as branches:
            await fails(branches[0], depth - 1)

    async with af.session(backend=backend) as flow:
        with pytest.raises(type(error)) as failure:
            await flow.run(fails, depth)
        assert failure.value is error
        await settle()
        assert_idle(backend)
        assert await flow.run(returns_at_once) == "at once"


async def returns_at_once(s: af.State) -> str:
    return "at once"


@pytest.mark.on_trio
@pytest.mark.parametrize("num_words", range(6))
async def test_cancelling_a_run_leaves_nothing_of_it(num_words):
    """At any point of a program with a fork, a wired join and an await."""
    backend = Stepped({"": "one two"})

    @af.program
    async def program(s: af.State) -> str:
        s += af.gen("x")
        async with s.fork(2) as branches:
            for branch in branches:
                branch += af.gen("y")
        for branch in branches:
            s += branch["y"]
        s += af.gen("z")
        return await s["z"]

    async with af.session(backend=backend) as flow:
        async with anyio.create_task_group() as group:
            group.start_soon(flow.run, program)
            await settle()
            await backend.allow(num_words)
            group.cancel_scope.cancel()
        await settle()
        assert_idle(backend)
    assert_idle(backend)


@pytest.mark.on_trio
async def test_a_run_that_has_ended_leaves_nothing_in_the_session():
    backend = af.Scripted(echo)
    observed = Observed(backend)
    async with af.session(backend=observed) as flow:
        for _ in range(3):
            await flow.run(ask, "why")
            with pytest.raises(af.errors.EngineFailed):
                await flow.run(ask, "!")
        await settle()
        assert_idle(backend)
        assert (flow._link.states, flow._link.variables) == ({}, {})
        assert len(observed.of(ops.Close)) == len(observed.of(ops.Open)) == 6


@pytest.mark.on_trio
async def test_runs_side_by_side_do_not_touch_each_other():
    async with af.session(backend=af.Scripted(echo)) as flow:
        results = {}

        async def run(number: int) -> None:
            try:
                results[number] = await flow.run(ask, f"{number}!" if number % 3 == 0 else str(number))
            except af.errors.EngineFailed as error:
                results[number] = str(error)

        async with anyio.create_task_group() as group:
            for number in range(12):
                group.start_soon(run, number)
        assert results == {n: f"cannot answer {n}!" if n % 3 == 0 else f"<{n}>" for n in range(12)}


async def test_a_returned_variable_can_be_read_after_the_run():
    async with af.session(backend=af.Scripted(echo)) as flow:

        @af.program
        async def lazy(s: af.State) -> af.Variable:
            s += "why" + af.gen("x")
            return s["x"]

        variable = await flow.run(lazy)
        assert (await variable, variable.finish_reason) == ("<why>", "eos")
    assert await variable == "<why>"
