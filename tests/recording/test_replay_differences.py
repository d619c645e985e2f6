"""Replays of another program than the recorded one raise at the first difference, and name its place."""

from __future__ import annotations

from functools import partial

import anyio
import pytest
from support.programs import ask, measure

import agentflow as af

pytestmark = pytest.mark.anyio


@af.program
async def judge(s: af.State, change: str = "") -> list[str]:
    s += af.user(
        "An essay of very many words. " * 3 + "This is it. " + ("Really." if change == "prompt" else "Yes.")
    )
    s += af.assistant("It is ", af.gen("first", max_tokens=12 if change == "parameter" else 16))
    if change == "extra gen":
        s += af.assistant(af.gen("more"))
    if change == "other name":
        s += af.assistant("yes or no? ", af.select("other", ["yes", "no"]))
    elif change != "missing gen":
        choices = ["yes", "no", "maybe"] if change == "choices" else ["yes", "no"]
        s += af.assistant("yes or no? ", af.select("related", choices))
    group = s.fork(1 if change == "missing branch" else 2)
    if change != "no group":
        await group.__aenter__()
    for branch in group:
        if change != "idle branch":
            branch += (af.user("?") if change == "no reference" else af.user(s["first"])) + af.gen("x")
    if change == "other reference":
        s += af.assistant(group[1]["x"], af.gen("sum"))
    elif change != "idle branch":
        s += af.assistant(group[0]["x"], af.gen("sum"))
    return [await s] if change == "idle branch" else [await s["sum"]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            "prompt",
            "run 0, state (), op 2: the recording has text '… words. This is it. Yes.', "
            "and the program has text '… words. This is it. Really.'",
        ),
        (
            "parameter",
            "run 0, state (), op 6: the recording has gen 'first' with max_tokens 16, "
            "and the program has gen 'first' with max_tokens 12",
        ),
        (
            "extra gen",
            "run 0, state (), op 9: the recording has text 'yes or no? ', and the program has gen 'more'",
        ),
        (
            "missing gen",
            "run 0, state (), op 8: the recording has begin 'assistant', and the program has a fork of 2",
        ),
        (
            "other name",
            "run 0, state (), op 10: the recording has select 'related', and the program has select 'other'",
        ),
        (
            "choices",
            "run 0, state (), op 10: the recording has select 'related' with choices ('yes', 'no'), "
            "and the program has select 'related' with choices ('yes', 'no', 'maybe')",
        ),
        (
            "missing branch",
            "run 0, state (), op 12: the recording has a fork of 2, and the program has a fork of 1",
        ),
        (
            "no group",
            "run 0, state (): the recording has a task group of the states (0,), (1,), "
            "and the program has none",
        ),
        (
            "no reference",
            """run 0, state (0,), op 1: the recording has text "{'first' of ()}", """
            """and the program has text '?'""",
        ),
        (
            "other reference",
            """run 0, state (), op 14: the recording has text "{'x' of (0,)}", """
            """and the program has text "{'x' of (1,)}\"""",
        ),
        (
            "idle branch",
            "run 0, state (1,), op 0: the recording has begin 'user', and the program has no more",
        ),
    ],
)
async def test_a_changed_program_raises_at_its_first_difference(path, change, message):
    async with af.session(backend=af.Scripted(measure), record=path) as flow:
        first = await flow.run(judge)
    async with af.session(backend=af.Replay(path)) as flow:
        assert await flow.run(judge) == first
    async with af.session(backend=af.Replay(path)) as flow:
        with anyio.fail_after(10), pytest.raises(af.errors.ReplayDiffers) as caught:
            await flow.run(judge, change)
        assert str(caught.value) == message
        assert not flow.is_alive
        with pytest.raises(af.errors.ReplayDiffers):  # and so does every later use
            await flow.run(judge)


async def test_more_at_the_end_is_a_difference(path):
    async with af.session(backend=af.Scripted(measure), record=path) as flow:
        await flow.run(ask, "a question")
    async with af.session(backend=af.Replay(path)) as flow, flow.state() as s:
        assert await ask(s, "a question") == "10 chars"
        with pytest.raises(af.errors.ReplayDiffers, match=r"op 3: .*text 'and'"):
            s += "and"


async def test_more_runs_and_fewer_runs_are_differences(path):
    async with af.session(backend=af.Scripted(measure), record=path) as flow:
        await flow.run(ask, "one")
        await flow.run(ask, "two")
    with pytest.raises(af.errors.ReplayDiffers, match="run 1"):
        async with af.session(backend=af.Replay(path)) as flow:
            await flow.run(ask, "one")
    async with af.session(backend=af.Replay(path)) as flow:
        await flow.run(ask, "one")
        await flow.run(ask, "two")
        with pytest.raises(af.errors.ReplayDiffers, match="run 2"):
            await flow.run(ask, "two")


async def test_a_replay_is_checked_while_another_exception_is_handled(path):
    async with af.session(backend=af.Scripted(measure), record=path) as flow:
        await flow.run(ask, "one")
    try:
        raise ZeroDivisionError
    except ZeroDivisionError:
        with pytest.raises(af.errors.ReplayDiffers, match="run 0"):
            async with af.session(backend=af.Replay(path)):
                pass


async def test_a_failure_of_the_block_is_raised_and_not_a_missing_run(path):
    async with af.session(backend=af.Scripted(measure), record=path) as flow:
        await flow.run(ask, "one")
    with pytest.raises(ZeroDivisionError) as caught:
        async with af.session(backend=af.Replay(path)):
            raise ZeroDivisionError
    assert caught.value.__context__ is None


async def test_a_missing_failing_gen_is_a_difference_at_its_branch(path):
    async def program(s: af.State, *, fails: bool) -> None:
        async with s.fork(2) as group:
            group[0].add("good ").add(af.gen("x"))
            if fails:
                group[1].add("bad!").add(af.gen("x"))
        with pytest.raises(af.AgentflowError):
            await group

    async with af.session(backend=af.Scripted(measure), record=path) as flow:
        await flow.run(partial(program, fails=True))
    async with af.session(backend=af.Replay(path)) as flow:
        await flow.run(partial(program, fails=True))
    async with af.session(backend=af.Replay(path)) as flow:
        with pytest.raises(af.errors.ReplayDiffers, match=r"state \(1,\), op 0: .*text 'bad!'"):
            await flow.run(partial(program, fails=False))


async def test_another_salt_is_a_difference(path):
    async def use(flow: af.Session, salt: str) -> None:
        async with flow.state(cache_salt=salt) as s:
            s += af.gen("x")
            await s["x"]

    async with af.session(backend=af.Scripted(measure), record=path) as flow:
        await use(flow, "one")
    async with af.session(backend=af.Replay(path)) as flow:
        with pytest.raises(af.errors.ReplayDiffers, match="cache_salt 'one'"):
            await use(flow, "two")


async def test_another_label_is_no_difference(path):
    async def use(flow: af.Session, name: str) -> list[str]:
        async def one(s: af.State):
            s += "a" + af.gen("x")
            return await s["x"]

        one.__name__ = name
        return [await flow.run(one), await flow.submit(af.program(one).trace())]

    async with af.session(backend=af.Scripted(measure), record=path) as flow:
        recorded = await use(flow, "first")
    async with af.session(backend=af.Replay(path)) as flow:
        assert await use(flow, "second") == recorded


async def test_the_seed_is_the_recorded_one(path):
    async with af.session(backend=af.Scripted(measure), record=path, seed=5) as flow:
        await flow.run(ask, "one")
    assert af.session(backend=af.Replay(path)).seed == 5
    assert af.session(backend=af.Replay(path), seed=5).seed == 5
    with pytest.raises(af.errors.BadArgument, match=r"seed 5, .*seed=6"):
        af.session(backend=af.Replay(path), seed=6)


async def test_stats_that_were_not_recorded_are_empty(path):
    async with af.session(backend=af.Scripted(measure), record=path):
        pass
    async with af.session(backend=af.Replay(path)) as flow:
        assert await flow.stats() == af.Stats(model="scripted")
