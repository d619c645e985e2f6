"""Adapters on several engines: a request keeps the weights that it was sent with, on all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import anyio
import pytest
import torch
from support import holds
from support.engine.adapters import write_plain_adapter
from support.fake_replicas import Replicas

from agentflow.engine.client import EngineClient
from agentflow.engine.request import Origin
from agentflow.errors import AgentflowError
from agentflow.protocol.sampling import SamplingParams

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]


@dataclass(eq=False)
class Job:
    """A request with an adapter, and its text or its error."""

    prompt: list[int]
    origin: Origin
    text: str | None = None
    error: AgentflowError | None = None

    async def run(self, client: EngineClient, on_sent: Callable[[], None] | None = None) -> None:
        params = SamplingParams(max_tokens=12)
        try:
            end = await client.generate(self.prompt, params, seed=0, origin=self.origin, on_sent=on_sent)
            self.text = end.text
        except AgentflowError as error:
            self.error = error

    @property
    def has_ended(self) -> bool:
        return self.text is not None or self.error is not None


def job(first: int = 10, *, adapter: str = "one", task_group: int = 0) -> Job:
    return Job([first, 20], Origin(adapter=adapter, task_group=task_group))


def write(folder: Path, value: float = 1.0) -> Path:
    return write_plain_adapter(folder, {"q_proj.lora_A": torch.full((4, 8), value)})


@dataclass(eq=False)
class World:
    replicas: Replicas
    client: EngineClient

    async def until(self, is_so: Callable[[], bool]) -> None:
        """Lets the engines run until something is so."""

        def is_so_when_awake() -> bool:
            self.replicas.become_automatic()  # the thread that reads adapters does not wake a fake engine
            return is_so()

        await holds.until(is_so_when_awake)

    async def load(self, name: str, folder: Path) -> str:
        """Loads an adapter. Returns its identity."""
        async with anyio.create_task_group() as group:
            group.start_soon(self.client.load_adapter, name, folder)
            await self.until(lambda: name in self.client.adapters)
        return self.client.adapters[name].identity

    async def run(self, *jobs: Job) -> None:
        async with anyio.create_task_group() as group:
            for one in jobs:
                group.start_soon(one.run, self.client)
            await self.until(lambda: all(one.has_ended for one in jobs))

    async def texts(self, *jobs: Job) -> list[str | None]:
        await self.run(*jobs)
        assert [one.error for one in jobs] == [None] * len(jobs)
        return [one.text for one in jobs]

    def num_loaded(self, identity: str) -> int:
        """The replicas whose process has the adapter."""
        return sum(identity in one.engine._runner.adapters for one in self.replicas.children.values())


@pytest.fixture
async def two():
    replicas = Replicas(2)
    async with replicas.open() as client:
        await replicas.settle()
        yield World(replicas, client)


@pytest.mark.parametrize("event", ["die", "drain", "wait", "replace"])
async def test_f37_an_unloaded_adapter_stays_on_all_replicas_until_its_last_request(two, tmp_path, event):
    replicas, client = two.replicas, two.client
    identity = await two.load("one", write(tmp_path / "one"))
    expected = await two.texts(job())
    assert expected != await two.texts(job(adapter=""))
    later = job()
    async with anyio.create_task_group() as group:
        replicas.is_automatic = False
        if event == "wait":
            group.start_soon(later.run, client, lambda: client.unload_adapter("one"))
        else:
            group.start_soon(later.run, client)
            await replicas.settle()
            await replicas.step_all()
            await replicas.step_all()
            [number] = [one.number for one in client.engine.replicas if one.requests]
            if event == "replace":
                group.start_soon(client.load_adapter, "one", write(tmp_path / "other", 2.0))
                await replicas.settle()
                await replicas.step_all()
                engines = [child.engine for child in replicas.children.values()]
                await holds.until(lambda: not any(engine._inbox.empty() for engine in engines))  # both read
                await replicas.step_all()
                assert client.adapters["one"].identity != identity
            else:
                client.unload_adapter("one")
                await replicas.settle()
                await replicas.step_all()
            assert not later.has_ended
            if event == "drain":
                client.engine.drain(number, 0.0)
            else:
                replicas.children[number].die()
        await two.until(lambda: later.has_ended)
    assert (later.text, later.error) == (expected[0], None)
    await two.until(lambda: not two.num_loaded(identity))
    assert not client.engine._unneeded
    assert not client.engine._adapter_of
