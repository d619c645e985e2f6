"""Adapters on several engines: a request keeps the weights that it was sent with, on all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import anyio
import pytest
import torch
from support import holds
from support.engine.adapters import write_plain_adapter
from support.fake_replicas import Replicas

from agentflow.cluster.routing.load import RoutedRequest
from agentflow.cluster.routing.router import Router
from agentflow.engine.client import EngineClient
from agentflow.engine.messages import AdapterLoaded, UnloadAdapter
from agentflow.engine.request import Origin
from agentflow.errors import AgentflowError
from agentflow.protocol.sampling import SamplingParams

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(30)]


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


def jobs_of(count: int) -> list[Job]:
    return [job(10 + number) for number in range(count)]


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
        loaded: list[AdapterLoaded] = []

        async def load() -> None:
            loaded.append(await self.client.load_adapter(name, folder))

        async with anyio.create_task_group() as group:
            group.start_soon(load)
            await self.until(lambda: bool(loaded))
        return loaded[0].identity

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
                engines = [child.engine for child in replicas.children.values()]
                while client.adapters["one"].identity == identity:
                    await replicas.settle()
                    if not all(engine._inbox.empty() for engine in engines):  # a thread has read the adapter
                        await replicas.step_all()
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


async def lose(world: World, *numbers: int) -> None:
    """Replaces replicas, and waits until they have read their adapters, or could not."""
    restarts = {number: world.client.engine.replicas[number].restarts for number in numbers}
    for number in numbers:
        world.replicas.children[number].die()

    def are_back() -> bool:
        replicas = [world.client.engine._replicas[number] for number in numbers]
        return all(
            one.state == "serving" and one.supervisor.restarts > restarts[one.number] for one in replicas
        ) and not any(one.supervisor._reloads for one in replicas)

    await world.until(are_back)


@pytest.mark.parametrize("is_group", [False, True])
async def test_f37_requests_avoid_a_replica_that_could_not_load_their_adapter_again(two, tmp_path, is_group):
    def jobs(adapter: str = "one") -> list[Job]:
        group = 7 if is_group else 0
        return [job(10 + number, adapter=adapter, task_group=group) for number in range(8)]

    await two.load("one", write(tmp_path / "one"))
    expected, base = await two.texts(*jobs()), await two.texts(*jobs(""))
    write(tmp_path / "one", 2.0)
    await lose(two, 1)
    assert await two.texts(*jobs(), *jobs("")) == expected + base
    assert await two.texts(*jobs()) == expected
    await two.load("one", write(tmp_path / "one"))
    assert not any(one.supervisor._lacking for one in two.client.engine._replicas)
    await lose(two, 0)
    assert await two.texts(*jobs()) == expected


class PrefersSecond(Router):
    """Places requests on replica 1 unless they bar it."""

    def place(self, calls: Sequence[RoutedRequest], now_s: float) -> None:
        for call in calls:
            call.barred = call.barred or [0]
        super().place(calls, now_s)


async def test_f37_requests_that_wait_for_an_adapter_go_to_another_replica_if_it_is_gone(tmp_path):
    replicas = Replicas(2)
    async with replicas.open(
        router=lambda shape, loaded: PrefersSecond(shape, loaded.info.identity)
    ) as client:
        world = World(replicas, client)
        await replicas.settle()
        await world.load("one", write(tmp_path / "one"))
        expected = await world.texts(*jobs_of(8))
        write(tmp_path / "one", 2.0)
        replicas.is_automatic = False
        replicas.children[1].die()
        await replicas.until(lambda: client.engine.replicas[1].restarts == 1)
        await replicas.until(lambda: client.engine.replicas[1].state == "serving")
        jobs = jobs_of(8)
        async with anyio.create_task_group() as group:
            for one in jobs:
                group.start_soon(one.run, client)
            await replicas.until(lambda: client.engine.replicas[1].requests == 8)
            assert client.engine._replicas[1].supervisor._journal._missing
            await world.until(lambda: all(one.has_ended for one in jobs))
        assert [(one.text, one.error) for one in jobs] == [(text, None) for text in expected]
        await world.until(lambda: all(not one.requests for one in client.engine.replicas))


async def test_f37_requests_fail_if_no_replica_could_load_their_adapter_again(two, tmp_path):
    await two.load("one", write(tmp_path / "one"))
    expected = await two.texts(job(adapter=""))
    write(tmp_path / "one", 2.0)
    await lose(two, 0, 1)
    jobs = jobs_of(8)
    await two.run(*jobs)
    assert {one.error.code for one in jobs} == {"engine_down"}
    assert await two.texts(job(adapter="")) == expected
    write(tmp_path / "one")
    await lose(two, 0)
    assert len(await two.texts(*jobs_of(8))) == 8


@pytest.mark.parametrize("event", ["die", "drain"])
async def test_f37_requests_stay_with_the_one_replica_that_may_have_their_adapter(two, tmp_path, event):
    replicas, client = two.replicas, two.client
    folder = write(tmp_path / "one")
    await two.load("one", folder)
    expected = await two.texts(job())
    write(folder, 2.0)
    await lose(two, 1)
    write(folder)
    replicas.is_automatic = False
    first, second = job(), job()
    async with anyio.create_task_group() as group:
        group.start_soon(first.run, client)
        await replicas.until(lambda: bool(client.engine.replicas[0].requests))
        await replicas.step_all()
        if event == "die":
            replicas.children[0].die()
        else:
            client.engine.drain(0, 1e9)
            await replicas.until(lambda: client.engine.replicas[0].state == "draining")
        group.start_soon(second.run, client)
        await two.until(lambda: first.has_ended and second.has_ended)
    assert [(one.text, one.error) for one in (first, second)] == [(expected[0], None)] * 2
    await two.until(lambda: client.engine.replicas[0].restarts == 1)
    assert await two.texts(job()) == expected


@pytest.mark.parametrize("is_unloaded", [False, True])
async def test_f37_requests_do_not_wait_for_a_second_load_that_has_failed(tmp_path, is_unloaded):
    replicas = Replicas(2)
    async with replicas.open(
        router=lambda shape, loaded: PrefersSecond(shape, loaded.info.identity)
    ) as client:
        world = World(replicas, client)
        await replicas.settle()
        identity = await world.load("one", write(tmp_path / "one"))
        expected = await world.texts(*jobs_of(8))
        second = client.engine._replicas[1].supervisor
        # Replica 0 has loaded the same weights by another name, from files that replica 1 cannot read.
        second.must_load(AdapterLoaded(99, "two", str(tmp_path / "gone"), identity, 1))
        await world.until(lambda: not second._reloads)
        if is_unloaded:
            second.send(UnloadAdapter(identity))  # one of the two names
            await replicas.settle()
        assert await world.texts(*jobs_of(8)) == expected
        assert len(second._adapters) == 2 - is_unloaded
        assert not second.lacks(identity)
