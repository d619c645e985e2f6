"""Forks: independent states that share the text before them; as a task group, branches that fail together."""

import copy
import pickle
from contextlib import nullcontext

import anyio
import pytest
from support.faults import has_param
from support.observed_backends import Observed, Stepped, assert_idle, settle
from support.programs import echo

import agentflow as af
from agentflow.protocol import ops

pytestmark = [pytest.mark.anyio, pytest.mark.on_trio]


@pytest.mark.parametrize("count", [-1, True, False, 1.0, "2", None, ops.MAX_BRANCHES + 1])
async def test_a_fork_needs_a_number_of_branches(count):
    observed = Observed(af.Scripted(echo))
    async with af.session(backend=observed) as flow, flow.state() as s:
        with pytest.raises(af.errors.BadArgument, check=has_param("count")):
            s.fork(count)
        assert observed.ops == [ops.Open(s.id)]


async def test_branches_continue_from_the_fork_independently():
    async with af.session(backend=af.Scripted(echo)) as flow, flow.state() as s:
        s += "a"
        branches = s.fork(2)
        s += "b" + af.gen("own")
        for letter, branch in zip("xy", branches, strict=True):
            branch += letter + af.gen("own")
        late = s.fork(1)[0]
        late += af.gen("late")
        assert [await b["own"] for b in branches] == ["<ax>", "<ay>"]
        assert await s["own"] == "<ab>"
        assert await late["late"] == "<ab<ab>>"
        assert isinstance(branches, list)
        assert [b.path for b in (s, *branches, late)] == [(), (0,), (1,), (2,)]


async def test_branches_inherit_variable_names_and_may_redefine_them():
    async with af.session(backend=af.Scripted(echo)) as flow, flow.state() as s:
        s += "1" + af.gen("x") + "2" + af.gen("y")
        first, second = s.fork(2)
        assert first["x"] is second["x"] is s["x"]
        first += "3" + af.gen("x")
        s += "4" + af.gen("y")
        assert len({id(state["x"]) for state in (s, first, second)}) == 2
        assert first["x"] is not s["x"] is second["x"]
        assert first["y"] is second["y"] is not s["y"]
        assert [v.name for v in first.variables] == ["x"]
        assert await first["x"] == "<1<1>2<1<1>2>3>"
        second += af.gen("only here")
        assert "only here" not in s
        assert "only here" not in first


async def test_leaving_the_block_seals_the_branches_and_does_not_wait():
    backend = Stepped({"": "one two"})
    async with af.session(backend=backend) as flow, flow.state() as s:
        async with s.fork(2) as branches:
            for branch in branches:
                branch += af.gen("x")
        assert not branches[0]["x"].is_done
        for use in (lambda: branches[0].add("more"), lambda: branches[1].fork(1)):
            with pytest.raises(af.errors.StateClosed, match="sealed"):
                use()
        s += "goes on"
        await backend.allow(4)
        assert [await branch["x"] for branch in branches] == ["one two"] * 2


async def test_awaiting_branches_sends_all_awaits_at_once():
    backend = Stepped({"": "one two"})
    observed = Observed(backend)
    async with af.session(backend=observed) as flow, flow.state() as s:
        async with s.fork(3) as branches:
            for branch in branches:
                branch += af.gen("x") + "end"
        steps = []

        async def wait():
            await branches
            steps.append("all")

        async with anyio.create_task_group() as group:
            group.start_soon(wait)
            await settle()
            assert [op.state for op in observed.of(ops.Await)] == [branch.id for branch in branches]
            await backend.allow(5)
            assert steps == []
            await backend.allow(1)
        assert steps == ["all"]


async def test_a_failed_branch_cancels_its_siblings_and_fails_its_parent_with_the_cause():
    async with af.session(backend=af.Scripted(echo)) as flow, flow.state() as s:
        s += "p"
        async with s.fork(3) as branches:
            branches[0] += many_words(200) + af.gen("x")
            branches[1] += "!" + af.gen("x") + af.gen("next")
            branches[2] += many_words(200) + af.gen("x")
        await branches[1]["x"].settled()
        s += af.gen("own")
        with pytest.raises(af.errors.RunFailed, match=r"branch 1.*cannot answer p!") as failure:
            await s
        assert isinstance(failure.value.__cause__, af.errors.EngineFailed)
        for failed in (branches, branches.gather("x"), branches[1]["x"]):  # and not a consequence
            with pytest.raises(af.errors.EngineFailed, match="cannot answer p!"):
                await failed
        with pytest.raises(af.errors.RunFailed, match="'next'"):
            await branches[1]["next"]
        for sibling in (branches[0], branches[2]):
            for wait in (sibling, sibling["x"]):
                with pytest.raises(af.Cancelled, match="branch 1 of its fork failed") as cancelled:
                    await wait
                assert cancelled.value.path == sibling.path
                assert cancelled.value.variable == (None if wait is sibling else "x")
                assert isinstance(cancelled.value.__cause__, af.errors.EngineFailed)
        with pytest.raises(af.errors.RunFailed, match=r"'own'.*branch 1"):
            await s["own"]


def many_words(num_words: int) -> str:
    """A text that takes a while to repeat."""
    return "word " * num_words


async def test_a_failure_in_nested_groups_propagates_to_the_root():
    async with af.session(backend=af.Scripted(echo)) as flow, flow.state() as s:
        async with s.fork(2) as outer:
            async with outer[0].fork(2) as inner:
                inner[1] += "!" + af.gen("x")
                inner[0] += many_words(200) + af.gen("x")
            outer[1] += many_words(200) + af.gen("x")
        await inner[1]["x"].settled()
        for state, branches in ((s, "branch 0.*branch 1"), (outer[0], "branch 1")):
            with pytest.raises(af.errors.RunFailed, match=f"{branches}.*cannot answer !") as failure:
                await state
            assert isinstance(failure.value.__cause__, af.errors.EngineFailed)
        for cancelled in (inner[0]["x"], outer[1]["x"]):
            with pytest.raises(af.Cancelled):
                await cancelled


async def test_a_failure_cancels_the_forks_of_siblings():
    async with af.session(backend=Stepped(echo)) as flow, flow.state() as s:
        async with s.fork(2) as branches:
            grandchild = branches[0].fork(1)[0]
            grandchild += many_words(3) + af.gen("x")
            branches[1] += "!" + af.gen("x")
        with pytest.raises(af.Cancelled):
            await grandchild["x"]


async def test_cancelling_a_branch_does_not_affect_its_siblings_and_parent():
    backend = Stepped({"": "one two"})
    async with af.session(backend=backend) as flow, flow.state() as s:
        async with s.fork(2) as branches:
            for branch in branches:
                branch += af.gen("x")
            await backend.allow(1)
            branches[0].cancel()
        s += af.gen("own")
        await backend.allow(4)
        assert await branches[1]["x"] == "one two"
        assert await s["own"] == "one two"
        await s
        with pytest.raises(af.Cancelled):
            await branches[0]["x"]
        with pytest.raises(af.Cancelled):
            await branches


async def test_a_gen_cancelled_by_the_backend_does_not_fail_its_group():
    script = [af.Cancelled("by the backend"), "answer"]
    async with af.session(backend=af.Scripted(script)) as flow, flow.state() as s:
        async with s.fork(2) as branches:
            for branch in branches:
                branch += af.gen("x")
        with pytest.raises(af.Cancelled, match="by the backend"):
            await branches[0]["x"]
        assert await branches[1]["x"] == "answer"
        await s


async def leave_early(branches: af.Branches, scope: anyio.CancelScope | None) -> None:
    async with branches:
        for branch in branches:
            branch += af.gen("x")
        await settle()
        if scope is None:
            raise ZeroDivisionError
        scope.cancel()
        await anyio.sleep_forever()


@pytest.mark.parametrize("by_error", [True, False])
async def test_a_block_that_is_left_early_cancels_the_branches_and_tells_why(by_error):
    backend = Stepped({"": "never"})
    async with af.session(backend=backend) as flow, flow.state() as s:
        branches = s.fork(2)
        with anyio.CancelScope() as scope, pytest.raises(ZeroDivisionError) if by_error else nullcontext():
            await leave_early(branches, None if by_error else scope)
        reason = "left by ZeroDivisionError" if by_error else "cancellation of its task"
        for branch in branches:
            with pytest.raises(af.Cancelled, match=reason):
                await branch["x"]
            with pytest.raises(af.errors.StateClosed, match=reason):
                branch += "more"
        await settle()
        assert backend.generator.num_running == 0
        s += "the parent goes on"
        await s


async def test_a_failed_branch_of_a_plain_fork_does_not_affect_the_others():
    async with af.session(backend=af.Scripted(echo)) as flow, flow.state() as s:
        s += "p"
        bad, good = s.fork(2)
        bad += "!" + af.gen("x")
        good += af.gen("x")
        s += af.gen("own")
        assert await good["x"] == "<p>"
        assert await s["own"] == "<p>"
        with pytest.raises(af.errors.EngineFailed):
            await bad
        await s


async def test_branches_that_failed_before_the_block_fail_the_group():
    async with af.session(backend=af.Scripted(echo)) as flow, flow.state() as s:
        branches = s.fork(3)
        branches[0].cancel()
        branches[1] += "!" + af.gen("x")
        with pytest.raises(af.errors.EngineFailed):
            await branches[1]
        async with branches:
            branches[2] += many_words(200) + af.gen("x")
        with pytest.raises(af.errors.RunFailed, match="branch 1"):
            await s
        with pytest.raises(af.Cancelled, match="branch 1"):
            await branches[2]["x"]


async def test_a_fork_of_a_failed_state_fails_with_it():
    async with af.session(backend=af.Scripted(echo)) as flow, flow.state() as s:
        s += "!" + af.gen("x")
        async with s.fork(2) as branches:
            for branch in branches:
                branch += af.gen("y")
        for branch in branches:  # both alike: it is not one's failure that cancels the other
            with pytest.raises(af.errors.RunFailed, match="the fork did not happen") as failure:
                await branch["y"]
            assert isinstance(failure.value.__cause__, af.errors.EngineFailed)


async def test_a_branch_that_is_cancelled_before_it_began_leaves_nothing_open():
    backend = Stepped({"": "one"})
    async with af.session(backend=backend) as flow:
        async with flow.state() as s:
            s += af.gen("x")
            branches = s.fork(3)
            branches[1].cancel()
            await backend.allow(1)
            assert backend.generator.num_open == 3
        await settle()
        assert backend.generator.num_open == 0
    assert_idle(backend)


async def test_a_parent_may_end_before_its_fork_has_run():
    backend = Stepped({"": "one"})
    async with af.session(backend=backend) as flow:
        async with flow.state() as s:
            s += af.gen("x")
            for branch in s.fork(3):
                branch += af.gen("y")
        await settle()
    assert_idle(backend)


async def test_f37_a_shallow_copy_of_a_state_is_a_branch():
    async with af.session(backend=af.Scripted(echo)) as flow, flow.state() as s:
        s += "a"
        branch = copy.copy(s)
        branch += "b" + af.gen("x")
        assert await branch["x"] == "<ab>"
        assert await s.text() == "a"
        for copied in (copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match=r"a State belongs to its session.* s\.copy\(\)"):
                copied(s)


async def test_f37_a_slice_of_branches_has_their_methods():
    async with af.session(backend=af.Scripted(echo)) as flow, flow.state() as s:
        s += "a"
        async with s.fork(3) as branches:
            for number, branch in enumerate(branches):
                branch += f"{number}" + af.gen("x")
        assert await branches[1:].gather("x") == ["<a1>", "<a2>"]
        s.join(branches[:2], separator="|")
        assert await s.text() == "a0<a0>|1<a1>"
        with pytest.raises(af.errors.BadArgument, match=r"await branches\.gather\('x'\)"):
            branches["x"]
        for method in (branches[:0].first, branches[:0].best, branches[:0].vote):
            with pytest.raises(af.errors.BadArgument, match="there are no branches to choose from"):
                await method("x")
        assert [branch async for branch in branches[:0].as_completed("x")] == []


@pytest.mark.parametrize("model", [None, "second"])
async def test_f37_a_fork_of_none_has_no_branches(model):
    observed, second = Observed(af.Scripted(echo)), af.Scripted(echo)
    async with af.session(models={"first": observed, "second": second}) as flow, flow.state() as s:
        s += "a"
        s.hint(forks=0)
        num_ops = len(observed.ops)
        async with s.fork(0, model=model) as branches:
            for branch in branches:
                branch += af.gen("x")
        await branches
        assert (await branches.gather("x"), branches.variables("x")) == ([], [])
        assert [branch async for branch in branches.as_completed("x")] == []
        s.join(branches, separator="|")
        assert len(observed.ops) == num_ops
        (branch,) = s.fork(1)
        branch += af.gen("x")
        assert (branch.path, await branch["x"]) == ((0,), "<a>")
        with pytest.raises(af.errors.UnknownModel):
            s.fork(0, model="third")


async def test_f37_a_compiled_program_may_fork_into_none():
    @af.program
    async def gather(s: af.State, names: list[str]) -> str:
        s += "a"
        async with s.fork(len(names)) as branches:
            for name, branch in zip(names, branches, strict=True):
                branch += name + af.gen("x")
        s.join(branches)
        s += af.gen("end")
        return await s["end"]

    async with af.session(backend=af.Scripted(echo)) as flow:
        for names in ([], ["b"]):
            result = await flow.run(gather, names)
            assert await flow.submit(gather.trace(names=names)) == result
