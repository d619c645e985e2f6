"""Where requests run, as watches and live graphs show it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
from support.fake_engine import TEMPLATE
from support.fake_replicas import Replicas

import agentflow as af
from agentflow.backends.local import interpreted
from agentflow.engine.client import EngineClient
from agentflow.engine.generator.generator import EngineGenerator
from agentflow.protocol.backend import Connection, Deliver, Lost


@dataclass
class Backend:
    """Sessions on an engine that runs."""

    client: EngineClient

    @asynccontextmanager
    async def connect(self, deliver: Deliver, lost: Lost) -> AsyncIterator[Connection]:
        async with interpreted(EngineGenerator(self.client, TEMPLATE), deliver) as connection:
            yield connection


pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("count", [1, 2])
async def test_running_requests_have_the_replica_on_which_they_are(count: int) -> None:
    replicas = Replicas(count)
    async with replicas.open() as client:
        await replicas.settle()
        replicas.is_automatic = False
        async with af.session(backend=Backend(client)) as flow:
            states = [flow.state() for _ in range(6)]
            for number, state in enumerate(states):
                state += f"{number} " * 30 + af.gen("one", max_tokens=3) + af.gen("two", max_tokens=1)
            await replicas.until(lambda: client.num_calls == 6)
            await replicas.settle()
            await replicas.step_all()
            held = {
                request_id: number
                for number, child in replicas.children.items()
                for request_id in child.engine._requests
            }
            assert set(held.values()) == set(range(count))
            nodes = (await flow.graph()).nodes
            expected = sorted(held.values()) if count > 1 else [None] * 6
            shown = [node.replica for node in nodes if node.name == "one"]
            assert sorted(shown, key=str) == expected
            assert [node.replica for node in nodes if node.name == "two"] == [None] * 6

            outline = str(await flow.graph())
            assert [f"replica {number}" in outline for number in range(2)] == [count > 1] * 2

            # A request that moves is shown where it went.
            if count > 1:
                replicas.children[0].die()
                await replicas.settle()
                nodes = (await flow.graph()).nodes
                assert {node.replica for node in nodes if node.name == "one"} == {1}

            replicas.become_automatic()
            snapshot = await client.watches.snapshot(None, 0, 0)
            assert {row[-1] for row in snapshot.requests} <= ({0, 1} if count > 1 else {None})
            for state in states:
                await state["two"]
            assert client._request_of == {}
