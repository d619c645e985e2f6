"""Two real engine processes on the fake model, one of which is killed or stopped while it generates."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest
from msgspec.structs import replace
from support.engine_loaders import start
from support.fake_engine import TOKENIZER
from support.holds import Hold, until
from support.process_engine import PLAIN, PROMPT, Ticks, generate
from support.processes import signal_child

from agentflow.cluster.replicas.open_replicas import replicated_engine
from agentflow.engine.client import EngineClient

pytestmark = pytest.mark.anyio

HELD_AT = 40
"""A step that no measurement reaches, and every request of these tests does."""


@asynccontextmanager
async def two_processes(hold: Hold, ticks: Ticks | None = None) -> AsyncIterator[EngineClient]:
    opening = replicated_engine(
        [replace(start(hold_at={str(HELD_AT): hold.path}), reports=True) for _ in range(2)],
        lambda: TOKENIZER,
        deadlines=None if ticks is None else ticks.deadlines,
    )
    async with opening as client:
        yield client


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_request_continues_on_another_replica(tmp_path, end) -> None:
    """The process stands in a step when it is killed or stopped, after it has sent some tokens."""
    hold, ticks = Hold(tmp_path / "hold"), Ticks()
    async with two_processes(hold, ticks) as client:
        results: list[tuple[str, list[str]]] = []

        async def run() -> None:
            finished, deltas = await generate(client, PROMPT)
            results.append((finished.text, deltas))

        async with anyio.create_task_group() as group:
            for _ in range(6):
                group.start_soon(run)
            await hold.reached()
            busy = max(client.engine.replicas, key=lambda one: one.requests)
            signal_child(busy.pid, end)
            hold.release()
            if end is signal.SIGSTOP:
                # Time passes for the other process, too: only while it has no requests.
                await until(lambda: client.engine.replicas[1 - busy.number].requests == 0)
                await ticks.until(lambda: client.engine.replicas[busy.number].state != "serving")
            await until(lambda: len(results) == 6)
        assert {text for text, _ in results} == {PLAIN.text}
        assert all(PLAIN.text.startswith("".join(deltas)) for _, deltas in results)
        assert client.engine.replicas[1 - busy.number].restarts == 0
        await until(lambda: all(one.state == "serving" for one in client.engine.replicas))
        stats = await client.stats()
        assert stats.restarts >= 1
        assert (stats.running, stats.in_use_slots) == (0, 0)
