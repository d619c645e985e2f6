"""Tasks that race on branches and cancel the losers: one clear error, or none."""

from __future__ import annotations

import anyio
import anyio.lowlevel
import pytest
from support.observed_backends import Stepped, Unbatched, settle
from support.programs import echo

import agentflow as af

pytestmark = [pytest.mark.anyio, pytest.mark.on_trio]


async def value(branch: af.State) -> None:
    await branch["x"]


async def state(branch: af.State) -> None:
    await branch


async def text(branch: af.State) -> None:
    await branch["x"].whole_text()


async def stream(branch: af.State) -> None:
    async for _ in branch["x"]:
        pass


async def partials(branch: af.State) -> None:
    async for _ in branch["x"].partials():
        pass


async def events(branch: af.State) -> None:
    async for _ in branch:
        pass


WAITS = [value, state, text, stream, partials, events]


async def in_tasks(wait, branches: af.Branches) -> None:
    async with anyio.create_task_group() as tasks:
        for branch in branches:
            tasks.start_soon(wait, branch)


async def raced(s: af.State, backend: Stepped, how, when_won) -> None:
    """Three branches, of which the second is done first."""
    branches = s.fork(3)
    for branch, text in zip(branches, ("long", "short", "long"), strict=True):
        branch += text + af.gen("x")

    async def wait(branch: af.State) -> None:
        await how(branch)
        when_won(branches, tasks)

    async with anyio.create_task_group() as tasks:
        for branch in branches:
            tasks.start_soon(wait, branch)
        await settle()
        await backend.allow(12)


def lengths(prompt: str) -> str:
    return "one" if prompt.endswith("short") else "a b c d e f g h i"


@pytest.mark.parametrize("how", WAITS)
@pytest.mark.parametrize("scope_first", [False, True])
async def test_cancelling_the_losers_and_their_scope_raises_nothing(how, scope_first):
    def stop(branches, tasks):
        if scope_first:
            tasks.cancel_scope.cancel()
        branches[0].cancel()
        branches[2].cancel()
        tasks.cancel_scope.cancel()

    backend = Stepped(lengths)
    async with af.session(backend=backend) as flow, flow.state() as s:
        await raced(s, backend, how, stop)


@pytest.mark.parametrize("how", WAITS)
async def test_tasks_that_wait_for_cancelled_branches_end_with_one_error_that_names_the_line(how):
    def stop(branches, tasks):
        branches[0].cancel()
        branches[2].cancel()

    backend = Stepped(lengths)
    async with af.session(backend=backend) as flow, flow.state() as s:
        with pytest.raises(BaseExceptionGroup) as failure:
            await raced(s, backend, how, stop)
        (error,) = failure.value.exceptions
        assert isinstance(error, af.Cancelled)
        assert error.path in ((0,), (2,))
        assert error.variable == (None if how is state else "x")
        assert f"cancel() of state {error.path} was called at test_races.py:" in str(error)
        assert str(error).endswith("in stop")


@pytest.mark.parametrize("how", WAITS)
async def test_cancelling_the_parent_ends_all_waits_with_one_error(how):
    backend = Stepped(lengths)
    async with af.session(backend=backend) as flow, flow.state() as s:
        with pytest.raises(BaseExceptionGroup) as failure:
            await raced(s, backend, how, lambda branches, tasks: s.cancel())
        (error,) = failure.value.exceptions
        assert isinstance(error, af.Cancelled)
        assert "cancel() of state () was called at" in str(error)


@pytest.mark.parametrize("nested", [0, 1, 3])
@pytest.mark.parametrize("deliver", [lambda backend: backend, Unbatched])
async def test_a_failed_branch_ends_the_waits_for_its_siblings_with_its_own_error(nested, deliver):
    async def wait(branch: af.State, depth: int = 0) -> None:
        if depth == nested:
            await branch["x"]
            return
        async with anyio.create_task_group() as inner:
            inner.start_soon(wait, branch, depth + 1)

    async with af.session(backend=deliver(af.Scripted(echo))) as flow, flow.state() as s:
        async with s.fork(4) as branches:
            for branch, text in zip(branches, ("word " * 50, "word " * 50, "!", "word " * 50), strict=True):
                branch += text + af.gen("x")
        with pytest.raises(BaseExceptionGroup) as failure:
            await in_tasks(wait, branches)
        error: BaseException = failure.value
        while isinstance(error, BaseExceptionGroup):
            (error,) = error.exceptions
        assert isinstance(error, af.errors.EngineFailed)  # the cause, and none of its consequences


async def test_a_scope_that_is_cancelled_ends_the_wait_for_a_cancelled_branch():
    """In any order within one turn of the event loop."""
    async with af.session(backend=Stepped(lengths)) as flow, flow.state() as s:
        s += af.gen("x")
        s.cancel()
        with anyio.CancelScope() as scope:
            scope.cancel()
            await s["x"]
        assert scope.cancelled_caught
