"""Task groups whose block also uses asyncio's own."""

from __future__ import annotations

import asyncio

import anyio
import anyio.lowlevel
import pytest

import agentflow as af
from agentflow.runtime.task_group import open_task_group

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend():
    return "asyncio"


async def failing_group():
    """Fails while its block already waits for the tasks."""

    async def fail():
        await anyio.lowlevel.checkpoint()
        raise ValueError("in a task")

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(anyio.sleep_forever())
        tasks.create_task(fail())


async def test_the_error_of_an_asyncio_task_group_leaves_the_block():
    with pytest.raises(ExceptionGroup) as failure:
        async with af.session(backend=af.Scripted("x")):
            await failing_group()
    assert failure.group_contains(ValueError, match="in a task", depth=1)


async def test_a_session_ends_well_after_a_handled_failure():
    async with af.session(backend=af.Scripted("x")) as flow:
        with pytest.raises(ExceptionGroup):
            await failing_group()
        async with flow.state() as s:
            s += af.gen("x")
            assert await s["x"] == "x"


async def test_a_cancellation_from_outside_goes_on():
    """Also one that arrives while the group ends."""
    reached = []

    async def slow_end():
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                task.cancel()
                await anyio.lowlevel.checkpoint()

    async def main():
        async with open_task_group() as group:
            with pytest.raises(ExceptionGroup):
                await failing_group()
            group.start_soon(slow_end)
            await anyio.lowlevel.checkpoint()
            group.cancel_scope.cancel()
        reached.append("after the group")

    task = asyncio.create_task(main())  # noqa: TID251  # cancelled as asyncio's own code does it
    with pytest.raises(asyncio.CancelledError):
        await task
    assert reached == []


@pytest.mark.parametrize("fails", [False, True])
async def test_a_cancellation_that_the_block_never_saw_goes_on(fails):
    """Ctrl-C calls ``task.cancel()`` while the task runs: the next await raises it, which is the group's."""
    reached = []

    async def main():
        async with open_task_group() as group:
            if fails:
                with pytest.raises(ExceptionGroup):
                    await failing_group()
            asyncio.current_task().cancel()
            group.cancel_scope.cancel()
        reached.append("after the group")

    with pytest.raises(asyncio.CancelledError):
        await asyncio.create_task(main())  # noqa: TID251  # cancelled as asyncio's own code does it
    assert reached == []
