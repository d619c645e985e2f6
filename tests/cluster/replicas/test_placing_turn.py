"""Two models behind one server: their requests are placed in one turn, and replicas under them may die."""

from __future__ import annotations

from contextlib import AsyncExitStack

import anyio
import pytest
from cluster.replicas.test_replica_set import Job
from support.fake_replicas import Replicas
from support.server.http_clients import only_asyncio

from agentflow.cluster.replicas import placing_turn
from agentflow.cluster.replicas.placing_turn import PlacingTurn
from agentflow.engine.request import Origin

anyio_backend = pytest.fixture(only_asyncio)  # trio starts tasks in any order, and may take a turn for one
pytestmark = pytest.mark.anyio


async def test_requests_of_two_models_are_placed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[list[int]] = []  # the requests of each model

    def place(waiting, now_s) -> None:
        turns.append([len(calls) for _, calls in waiting])
        real(waiting, now_s)

    real = placing_turn.place_together
    turn = PlacingTurn()
    async with AsyncExitStack() as stack:
        worlds = [Replicas(2), Replicas(2)]
        clients = [await stack.enter_async_context(world.open(turn=turn)) for world in worlds]
        monkeypatch.setattr(placing_turn, "place_together", place)
        for world in worlds:
            world.is_automatic = False
        origin = Origin(task_group=7, program=1)
        jobs = [Job([number] * 20, origin=origin) for number in range(20, 26)]
        async with anyio.create_task_group() as group:
            for job, client in zip(jobs, clients * 3, strict=True):
                group.start_soon(job.run, client)
            await worlds[0].until(lambda: sum(map(sum, turns)) == 6)
            assert turns == [[3, 3]]
            for world in worlds:
                await world.step_all()
            worlds[1].children[0].die()  # the requests of one model move, and no other
            for world in worlds:
                world.become_automatic()
        for job in jobs:
            job.check()
        assert [world.num_started for world in worlds] == [2, 3]


async def test_a_model_that_is_closed_takes_part_no_more() -> None:
    turn = PlacingTurn()
    async with Replicas(2).open(turn=turn) as client:
        async with Replicas(2).open(turn=turn) as other:
            assert len(turn.sets) == 2
            for one in (client, other):
                job = Job([30] * 20)
                await job.run(one)
                job.check()
        assert len(turn.sets) == 1
        job = Job([31] * 20)
        await job.run(client)
        job.check()
