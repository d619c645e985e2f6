"""Appending to states: order, checks that leave everything unchanged, closing a state, awaiting it."""

import functools

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_engine import FakeEngine
from support.observed_backends import Observed, Stepped, Unbatched, settle
from support.programs import measure
from support.shallow_stack import LONG_CHAIN, shallow_stack

import agentflow as af
from agentflow.language import op_log
from agentflow.protocol import ops

pytestmark = pytest.mark.anyio


@pytest.fixture
def observed() -> Observed:
    return Observed(af.Scripted(measure))


@pytest.mark.on_trio
async def test_ops_are_in_the_order_of_appending(observed):
    async with af.session(backend=observed) as flow, flow.state() as s:
        s += "a" + af.gen("x", seed=1) + "b"
        s += af.user("c", af.select("y", ["7 chars", "24 chars"]), "d")
        s += "e"
    state = s.id
    assert observed.ops[:-1] == [
        ops.Open(state),
        ops.Text(state, ("a",)),
        ops.Gen(state, s["x"].id, "x", af.gen("x", seed=1).params),
        ops.Text(state, ("b",)),
        ops.Begin(state, "user"),
        ops.Text(state, ("c",)),
        ops.Select(state, s["y"].id, "y", ("7 chars", "24 chars")),
        ops.Text(state, ("d",)),
        ops.End(state),
        ops.Text(state, ("e",)),
        ops.Cancel(state),
    ]


async def test_consecutive_texts_are_one_op(observed):
    async with af.session(backend=observed) as flow, flow.state() as s:
        s += af.gen("x")
        s += af.user("a", "", "b" + s["x"] + "c", f"d{s['x']}")
        var = s["x"].id
        assert observed.of(ops.Text) == [ops.Text(s.id, ("a", "b", ops.Ref(var), "c", "d", ops.Ref(var)))]
        s += ""
        assert len(observed.of(ops.Text)) == 1  # nothing is no op


good = st.sampled_from(
    ["text", af.gen("new"), af.select("pick", ["0 chars", "1 chars"]), "a" + af.gen("old")]
)
bad = st.sampled_from([5, None, af.user("nested"), b"bytes"])


@given(before=st.lists(good, max_size=3), wrong=bad, after=st.lists(good, max_size=3))
async def test_an_append_that_fails_changes_nothing(before, wrong, after):
    observed = Observed(af.Scripted(measure))
    async with af.session(backend=observed) as flow, flow.state() as s:
        s += af.gen("old")
        old, sent = s["old"], list(observed.ops)
        with pytest.raises(af.errors.BadArgument):
            s += af.assistant(*before, wrong, *after)
        assert observed.ops == sent
        assert s.variables == [old]
        assert s["old"] is old
        assert "new" not in s
        s += "works"
        await s
        assert await old == "0 chars"


async def test_a_name_refers_to_its_latest_variable(observed):
    async with af.session(backend=observed) as flow, flow.state() as s:
        s += af.gen("x")
        first = s["x"]
        s += "-" + af.gen("x") + "-" + af.gen("x")
        assert s["x"] is s.variables[-1]
        assert [await v for v in (first, *s.variables[1:])] == ["0 chars", "8 chars", "16 chars"]
        assert await first == "0 chars"


async def test_a_variable_of_another_session_is_refused(observed):
    async with (
        af.session(backend=observed) as flow,
        flow.state() as s,
        af.session(backend=af.Scripted(measure)) as other,
        other.state() as o,
    ):
        o += af.gen("x")
        with pytest.raises(af.errors.ForeignState, match="'x'"):
            s += o["x"]
        s += await o["x"]
        assert observed.of(ops.Text) == [ops.Text(s.id, ("0 chars",))]


@pytest.mark.on_trio
async def test_a_state_is_closed_when_its_run_ends(observed):
    async with af.session(backend=observed) as flow:
        async with flow.state() as s:
            s += af.gen("x")
            branches = s.fork(1)
            await s
        for use in (lambda: s.add("more"), lambda: s.fork(2), lambda: branches[0].add("more")):
            with pytest.raises(af.errors.StateClosed, match="has ended"):
                use()
        with pytest.raises(af.errors.StateClosed, match="cannot become a task group"):
            await branches.__aenter__()
        await s  # all of it was done
        assert await s["x"] == "0 chars"
        s.cancel()  # has nothing to do
        assert observed.of(ops.Cancel) == []
    with pytest.raises(af.errors.StateClosed, match="session has ended"):
        s += "more"


@pytest.mark.on_trio
async def test_awaiting_a_state_that_closed_early_fails():
    backend = Stepped({"": "one two"})
    async with af.session(backend=backend) as flow:
        async with flow.state() as s:
            s += af.gen("x")
            s += "after"
        with pytest.raises(af.Cancelled):
            await s
        with pytest.raises(af.Cancelled):
            await s["x"]
        async with flow.state() as t:
            t += "text"
        with pytest.raises(af.errors.StateClosed, match="has ended"):
            await t


@pytest.mark.on_trio
async def test_tasks_that_await_a_state_fail_when_it_closes():
    async with af.session(backend=Stepped({"": "slow"})) as flow, flow.state() as slow:
        received = []

        async def wait(state):
            with pytest.raises(af.errors.StateClosed) as failure:
                await state
            assert failure.value.reason == "ended"
            received.append(str(failure.value))

        slow += af.gen("x")
        async with anyio.create_task_group() as group, flow.state() as s:
            s += slow["x"]
            group.start_soon(wait, s)
            await settle()
            assert received == []
        assert received == ["state () has ended with its run"]


@pytest.mark.on_trio
async def test_a_cancelled_state_cannot_be_used(observed):
    async with af.session(backend=observed) as flow, flow.state() as s:
        s += af.gen("x")
        branch = s.fork(1)[0]
        s.cancel()
        s.cancel()
        for state in (s, branch):
            with pytest.raises(af.errors.StateClosed, match="cancelled"):
                state += "more"
            with pytest.raises(af.Cancelled):
                await state
        with pytest.raises(af.Cancelled):
            await s["x"]


@pytest.mark.on_trio
async def test_awaiting_waits_for_everything_appended_before():
    backend = Stepped({"": "one two", "end": "three"})
    async with af.session(backend=backend) as flow, flow.state() as s:
        steps = []

        async def wait():
            await s
            steps.append("reached")

        s += af.gen("x") + "end"
        async with anyio.create_task_group() as group:
            group.start_soon(wait)
            await backend.allow(1)
            assert steps == []
            s += af.gen("later")  # not waited for
            await backend.allow(1)
            assert steps == ["reached"]
            assert s["x"].is_done
            assert not s["later"].is_done
            await backend.allow(1)
        await s


@pytest.mark.on_trio
async def test_a_state_is_not_done_when_its_last_gen_is():
    """Ops after the gen in the same append may still wait, or fail."""
    backend = Stepped(lambda prompt: "slow answer" if "slow" in prompt else "fast")
    async with af.session(backend=backend) as flow, flow.state() as fast, flow.state() as slow:
        slow += "slow" + af.gen("late")
        fast += af.assistant(af.gen("x"), slow["late"])
        steps = []

        async def wait():
            await fast["x"]
            steps.append("variable")
            await fast
            steps.append("state")

        async with anyio.create_task_group() as group:
            group.start_soon(wait)
            await backend.allow(2)
            assert steps == ["variable"]
            await backend.allow(1)
            assert steps == ["variable", "state"]


@pytest.mark.on_trio
async def test_concurrent_awaits_send_one_op(observed):
    async with af.session(backend=observed) as flow, flow.state() as s:
        s += "text"
        async with anyio.create_task_group() as group:
            for _ in range(5):
                group.start_soon(s.settled)
        assert observed.of(ops.Await) == [ops.Await(s.id, 1)]
        await s  # is done: no need to ask
        s += "more"
        await s
        assert [op.ticket for op in observed.of(ops.Await)] == [1, 2]


async def test_awaiting_a_turn_that_ends_in_a_finished_gen_sends_no_op(observed):
    async with af.session(backend=observed) as flow, flow.state() as s:
        s += af.assistant("a", af.gen("x"))
        await s["x"]
        await s
        assert observed.of(ops.Await) == []


@pytest.mark.parametrize("as_told", [lambda backend: backend, Unbatched], ids=["at once", "unbatched"])
async def test_a_failed_state_raises_at_every_await(as_told):
    backend = as_told(af.Scripted([af.errors.EngineFailed("broken")]))
    async with af.session(backend=backend) as flow, flow.state() as s:
        s += af.gen("x")
        s += af.gen("y")
        for _ in range(2):
            with pytest.raises(af.errors.EngineFailed, match="broken"):
                await s
        with pytest.raises(af.errors.EngineFailed, match="broken"):
            await s["x"]
        with pytest.raises(af.errors.RunFailed, match=r"'y'.*broken") as failure:
            await s["y"]
        assert isinstance(failure.value.__cause__, af.errors.EngineFailed)


@pytest.mark.on_trio
async def test_a_full_backlog_rejects_appends_until_ops_are_done(monkeypatch):
    monkeypatch.setattr(op_log, "MAX_IN_FLIGHT", 100)
    engine = FakeEngine()
    async with af.session(backend=engine) as flow, flow.state() as s:
        s += "begin "
        await s
        engine.gate.allow(0)
        branches = s.fork(1)
        s += af.gen("x", max_tokens=2)
        for _ in range(98):
            s += "y"
        await engine.gate.held()
        with pytest.raises(af.errors.BacklogFull):
            s.join(branches)
        assert branches[0]._node.own == []  # nothing was asked of the branch
        with pytest.raises(af.errors.BacklogFull, match="100 ops"):
            s += "one too many"
        with pytest.raises(af.errors.BacklogFull):
            s.fork(1)
        engine.gate.open()
        await s  # awaiting makes room, so it is always possible
        s += "there is room again"
        await s


async def closed_state(flow, script_end):
    async with flow.state() as s:
        s += script_end
        s += af.gen("x")
        await s["x"].settled()
        return s, f"[{s['x']}]"


async def test_a_finished_variable_of_a_closed_state_stands_for_its_value(observed):
    async with af.session(backend=observed) as flow:
        old, marker = await closed_state(flow, "ask")
        async with flow.state() as s:
            s += "got " + old["x"] + marker
            await s
            assert observed.of(ops.Text)[-1] == ops.Text(s.id, ("got ", "3 chars", "[", "3 chars", "]"))


async def test_a_failed_variable_of_a_closed_state_raises_why():
    async with af.session(backend=af.Scripted([af.errors.EngineFailed("broken")])) as flow:
        old, marker = await closed_state(flow, "ask")
        async with flow.state() as s:
            for item in (old["x"], marker):
                with pytest.raises(af.errors.EngineFailed, match="broken"):
                    s += item


@pytest.mark.on_trio
async def test_an_unfinished_variable_of_a_closed_state_is_refused():
    async with af.session(backend=Stepped({"": "one two"})) as flow:
        async with flow.state() as old:
            old += af.gen("x")
        async with flow.state() as s:
            with pytest.raises(af.Cancelled):
                s += old["x"]


@pytest.mark.on_trio
async def test_cancelling_reaches_a_chain_of_forks_deeper_than_the_stack():
    with shallow_stack():
        async with af.session(backend=Stepped({"": "never"})) as flow, flow.state() as root:
            state = root
            for _ in range(LONG_CHAIN):
                state = state.fork(1)[0]
            state += af.gen("x")
            await settle()
            root.cancel()
            with pytest.raises(af.Cancelled):
                await state["x"]
            with pytest.raises(af.errors.StateClosed, match="cancelled"):
                state += "more"


async def seeds_of(seed: int | None, *, names: tuple[str, ...] = ("a", "b")) -> list[int]:
    """The seeds of two runs with a fork each."""
    observed = Observed(af.Scripted(measure))
    async with af.session(backend=observed, seed=seed) as flow:
        for _ in range(2):
            async with flow.state() as s:
                s += af.assistant(af.gen(names[0], temperature=1.0), af.gen(names[1], temperature=1.0))
                s += af.user("And?") + af.gen("own", seed=7)
                for branch in (*s.fork(2), *s.fork(1)):
                    branch += af.user("And?") + af.gen("c", temperature=1.0)
    assert [op.params.seed for op in observed.of(ops.Gen)].count(7) == 2
    return [op.params.seed for op in observed.of(ops.Gen) if op.params.seed != 7]


async def test_the_seed_of_a_gen_follows_from_the_session_and_its_place():
    first = await seeds_of(1)
    assert len(set(first)) == len(first) == 10  # each run, branch and op draws for itself
    assert await seeds_of(1) == first
    assert await seeds_of(1, names=("other", "names")) == first
    assert set(first).isdisjoint(await seeds_of(2))
    assert set(await seeds_of(None)).isdisjoint(await seeds_of(None))


@pytest.mark.on_trio
async def test_a_run_has_the_name_of_its_program_as_a_label(observed):
    @af.program
    async def judge(s: af.State, word: str = "") -> None:
        s += "a"

    async def strange(s: af.State) -> None: ...

    strange.__name__ = "\ud800" + "n" * 300
    graph = judge.trace(word="")
    async with af.session(backend=observed) as flow:
        await flow.run(judge)
        await flow.run(functools.partial(judge, word="a"))
        await flow.map(judge, ["a"])
        [_ async for _ in flow.stream(judge)]
        await flow.submit(graph)
        await flow.run(strange)
        flow.state(program="mine")
        assert [run.program for run in flow.runs[:-2]] == ["judge"] * 5
    roots = [op.ops[0] if isinstance(op, ops.SubmitGraph) else op for op in observed.ops]
    roots = [op for op in roots if isinstance(op, ops.Open)]
    assert [(op.label, op.program) for op in roots] == [
        *[("judge", "")] * 5,
        ("?" + "n" * 255, ""),
        ("", "mine"),
    ]


# States without a program


@pytest.mark.on_trio
async def test_a_state_is_used_without_a_block(observed):
    async with af.session(backend=observed) as flow:
        s = flow.state(cache_salt="salt")
        s += "q" + af.gen("x")
        assert await s["x"] == "1 chars"
        branch = s.copy()
        branch += af.gen("y")
        assert await branch["y"] == "8 chars"
        assert (s.path, branch.path) == ((), (0,))
        with pytest.raises(TypeError):
            async with branch:  # only opened states can be closed
                pass
        async with s:
            s += "more" + af.gen("z")
        with pytest.raises(af.Cancelled):
            await s["z"]
        for closed in (s, branch):
            with pytest.raises(af.errors.StateClosed, match="cancelled"):
                closed.add("x")
    assert observed.of(ops.Open) == [ops.Open(s.id, "salt")]
    assert {op.state for op in observed.of(ops.Close)} == {s.id, branch.id}


async def test_a_program_runs_on_a_state_without_a_block(observed):
    @af.program
    async def ask(s: af.State, question: str) -> str:
        s += question + af.gen("x")
        return await s["x"]

    async with af.session(backend=observed) as flow:
        assert await ask(flow.state(), "four") == "4 chars"


@pytest.mark.parametrize("wrong", [3, None, ["a"], b"a", af.gen, object()], ids=lambda x: type(x).__name__)
async def test_invalid_operands_of_a_sum_are_rejected(wrong):
    async with af.session(backend=af.Scripted(measure)) as flow, flow.state() as s:
        s += af.gen("x")
        for left, right in ((af.gen("y"), wrong), (wrong, af.gen("y")), (s["x"], wrong), (wrong, s["x"])):
            with pytest.raises(af.errors.BadArgument, match=r"cannot append|used as a number"):
                left + right
        for other in (flow, s):
            with pytest.raises(af.errors.BadArgument):
                other + af.gen("y")


async def test_appending_to_a_list_of_branches_is_rejected(observed):
    async with af.session(backend=observed) as flow, flow.state() as s:
        branches = s.fork(2)
        for item in ("text", af.gen("x"), s.fork(1)):
            with pytest.raises(af.errors.BadArgument, match="append to each of them"):
                branches += item
        assert len(branches) == 2
