"""Adapters (LoRA) of a running engine: loading, replacing and unloading next to requests, and the cache.

The fake runner raises if a request's slots were computed under another adapter, or if its own was dropped.
"""

from __future__ import annotations

import shutil
import signal
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from unittest.mock import patch

import anyio
import pytest
import torch
from support.engine.adapters import write_plain_adapter
from support.fake_engine import TOKENIZER
from support.faults import has_param
from support.holds import Hold, until
from support.plain_model import plain_model_engine, runner
from support.process_engine import Ticks, kill, process_engine
from support.processes import signal_child

from agentflow.engine.client import EngineClient, running_engine
from agentflow.engine.messages import Finished
from agentflow.engine.request import Origin
from agentflow.engine.runner import ReadAdapter
from agentflow.engine.scheduling.scheduler import SchedulerConfig
from agentflow.engine.simulator.fake_runner import FakeRunner
from agentflow.errors import (
    AgentflowError,
    BadArgument,
    BadModelFolder,
    EngineDown,
    EngineFailed,
    UnknownModel,
)
from agentflow.protocol.sampling import SamplingParams

pytestmark = [pytest.mark.anyio, pytest.mark.trio_in_full]
PROMPT = list(range(20, 60))


def adapter(folder: Path, value: float = 1.0) -> Path:
    return write_plain_adapter(folder, {"q_proj.lora_A": torch.full((4, 8), value)})


async def run(
    client: EngineClient, name: str = "", *, count: int = 4, prompt: list[int] = PROMPT
) -> Finished:
    params = SamplingParams(max_tokens=count, ignore_eos=True)
    return await client.generate(prompt, params, seed=0, origin=Origin(adapter=name))


async def test_each_adapter_has_its_own_outputs_and_cache(tmp_path: Path) -> None:
    async with plain_model_engine() as client:
        await client.load_adapter("one", adapter(tmp_path / "one"))
        await client.load_adapter("two", adapter(tmp_path / "two", 2.0))
        await client.load_adapter("also one", tmp_path / "one")
        names = ["", "one", "two"]
        first = [await run(client, name) for name in names]
        assert [end.cached_tokens for end in first] == [0, 0, 0]
        assert len({tuple(end.token_ids) for end in first}) == 3
        together: dict[str, Finished] = {}

        async def keep(name: str) -> None:
            together[name] = await run(client, name)

        async with anyio.create_task_group() as group:
            for name in [*names, "also one"]:
                group.start_soon(keep, name)
        assert [together[name].token_ids for name in names] == [end.token_ids for end in first]
        assert together["also one"].token_ids == first[1].token_ids
        assert all(end.cached_tokens == len(PROMPT) - 1 for end in together.values())


async def test_a_reload_with_other_weights_does_not_use_the_cache(tmp_path: Path) -> None:
    async with plain_model_engine() as client:
        before = await client.load_adapter("one", adapter(tmp_path / "one"))
        old = await run(client, "one")
        assert (await client.load_adapter("one", tmp_path / "one")).identity == before.identity
        assert (await run(client, "one")).cached_tokens == len(PROMPT) - 1
        after = await client.load_adapter("one", adapter(tmp_path / "one", 3.0))
        assert after.identity != before.identity
        new = await run(client, "one")
        assert new.cached_tokens == 0
        assert new.token_ids != old.token_ids


async def test_a_request_keeps_an_adapter_that_is_unloaded(tmp_path: Path) -> None:
    sent = anyio.Event()
    async with plain_model_engine() as client:
        await client.load_adapter("one", adapter(tmp_path / "one"))
        expected = await run(client, "one", count=200)
        results: list[Finished] = []

        async def keep() -> None:
            params = SamplingParams(max_tokens=200, ignore_eos=True)
            origin = Origin(adapter="one")
            results.append(
                await client.generate(PROMPT, params, seed=0, origin=origin, on_text=lambda _: sent.set())
            )

        async with anyio.create_task_group() as group:
            group.start_soon(keep)
            await sent.wait()
            client.unload_adapter("one")
            with pytest.raises(UnknownModel):
                await run(client, "one")
        assert results[0].token_ids == expected.token_ids
        assert client.adapters == {}
        client.unload_adapter("one")  # once more changes nothing
        await run(client)


async def test_weights_are_freed_with_their_last_use(tmp_path: Path) -> None:
    fake = runner()
    async with running_engine(lambda: (fake, TOKENIZER, SchedulerConfig())) as client:
        for name in ("one", "same"):
            await client.load_adapter(name, adapter(tmp_path / "one"))
        await run(client, "one")
        client.unload_adapter("one")
        await run(client, "same")
        assert len(fake.adapters) == 1
        client.unload_adapter("same")
        await client.stats()  # read after the message before it
        assert not fake.adapters


async def test_a_damaged_adapter_changes_nothing(tmp_path: Path) -> None:
    async with plain_model_engine() as client:
        await client.load_adapter("one", adapter(tmp_path / "one"))
        with pytest.raises(BadModelFolder, check=has_param("adapter_config.json")):
            await client.load_adapter("one", tmp_path)
        await run(client, "one")


class PlainRunner:
    """A runner whose model cannot have adapters."""

    def __init__(self) -> None:
        fake = runner()
        self.info, self.launch, self.collect, self.close = fake.info, fake.launch, fake.collect, fake.close


async def test_a_model_without_adapters_rejects_them(tmp_path: Path) -> None:
    async with running_engine(lambda: (PlainRunner(), TOKENIZER, SchedulerConfig())) as client:
        with pytest.raises(BadArgument, check=has_param("model")):
            await client.load_adapter("one", adapter(tmp_path / "one"))
        assert (await run(client)).output_tokens == 4


async def test_f10e_requests_run_while_an_adapter_is_read(tmp_path: Path) -> None:
    has_begun, may_end = threading.Event(), threading.Event()

    class SlowReader(FakeRunner):
        def read_adapter(self, folder: Path) -> ReadAdapter:
            has_begun.set()
            may_end.wait()
            return super().read_adapter(folder)

    async with plain_model_engine(kind=SlowReader) as client:
        try:
            with anyio.fail_after(20):
                async with anyio.create_task_group() as group:
                    group.start_soon(client.load_adapter, "one", adapter(tmp_path / "one"))
                    await until(has_begun.is_set)
                    assert (await run(client)).output_tokens == 4
                    with pytest.raises(UnknownModel):
                        await run(client, "one")
                    may_end.set()
        finally:
            may_end.set()
        assert (await run(client, "one")).output_tokens == 4


async def test_an_adapter_can_be_read_after_a_thread_for_it_could_not_start(tmp_path: Path) -> None:
    real = threading.Thread.start

    def start(self: threading.Thread) -> None:
        if self.name == "agentflow-adapters" and not failed:
            failed.append(self)
            raise RuntimeError("can't start new thread")
        real(self)

    failed: list[threading.Thread] = []
    async with plain_model_engine() as client:
        with patch.object(threading.Thread, "start", start), anyio.fail_after(20):
            with pytest.raises(EngineFailed):
                await client.load_adapter("one", adapter(tmp_path / "one"))
            await client.load_adapter("one", adapter(tmp_path / "one"))
        assert (await run(client, "one")).output_tokens == 4


async def test_f10e_an_adapter_that_is_read_slowly_is_no_hung_engine(tmp_path: Path) -> None:
    ticks, hold = Ticks(), Hold(tmp_path / "hold")
    async with process_engine(ticks=ticks, hold_adapter=hold.path) as client:
        await run(client)
        with anyio.fail_after(60):
            async with anyio.create_task_group() as group:
                group.start_soon(client.load_adapter, "one", adapter(tmp_path / "one"))
                await hold.reached()
                for _ in range(200):
                    await ticks.tick()
                hold.release()
        assert (await run(client, "one")).output_tokens == 4
        assert (await client.stats()).restarts == 0


COUNT = 1100
"""Tokens of a request that still runs when an adapter has been read."""


class Replaced:
    """Requests that run with the adapter "one" when a step is held, and then end."""

    def __init__(self, client: EngineClient, hold: Hold) -> None:
        self._client = client
        self._hold = hold
        self.ends: list[Finished] = []
        self.errors: list[AgentflowError] = []

    async def _keep(self) -> None:
        try:
            self.ends.append(await run(self._client, "one", count=COUNT))
        except AgentflowError as error:
            self.errors.append(error)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with anyio.create_task_group() as group:
            group.start_soon(self._keep)
            await self._hold.reached()
            yield


async def expected_with(folder: Path) -> list[int]:
    async with plain_model_engine(max_context=1200) as client:
        await client.load_adapter("one", folder)
        return (await run(client, "one", count=COUNT)).token_ids


@pytest.mark.parametrize("is_replaced", [True, False], ids=["replaced", "unloaded"])
async def test_f4a_a_request_keeps_its_adapter_in_a_new_process(tmp_path: Path, is_replaced: bool) -> None:
    old, new = adapter(tmp_path / "old"), adapter(tmp_path / "new", 2.0)
    first = Hold(tmp_path / "first")
    steps = {str(step): str(tmp_path / "later") for step in range(8, COUNT)}  # there is none yet
    async with process_engine(hold_at={"7": first.path, **steps}) as client:
        await client.load_adapter("one", old)
        replaced = Replaced(client, first)
        async with replaced.running():
            if is_replaced:
                has_loaded = anyio.Event()

                async def load() -> None:
                    await client.load_adapter("one", new)
                    has_loaded.set()

                held = first
                async with anyio.create_task_group() as group:
                    group.start_soon(load)
                    while not has_loaded.is_set():  # step by step: the request is not to end before
                        before, held = held, Hold(tmp_path / "later")
                        before.release()
                        await held.reached()
                kill(client, held)
            else:
                client.unload_adapter("one")
                kill(client, first)
        [end] = replaced.ends
        assert end.token_ids == await expected_with(old)
        if is_replaced:
            assert (await run(client, "one", count=COUNT)).token_ids == await expected_with(new)
        else:
            with pytest.raises(UnknownModel):
                await run(client, "one")


async def test_f4b_a_request_whose_adapter_is_gone_fails_alone(tmp_path: Path) -> None:
    """Its files were replaced in their folder, and nothing has the old ones when the process dies."""
    folder = adapter(tmp_path / "one")
    hold = Hold(tmp_path / "hold")
    async with process_engine(hold_at={"7": hold.path}) as client:
        await client.load_adapter("one", folder)
        replaced = Replaced(client, hold)
        async with replaced.running():
            adapter(folder, 2.0)
            kill(client, hold)
            assert (await run(client)).output_tokens == 4
        assert not replaced.ends
        [error] = replaced.errors
        assert isinstance(error, EngineFailed)
        assert "adapter" in str(error)
        await client.load_adapter("one", folder)
        assert (await run(client, "one", count=COUNT)).token_ids == await expected_with(folder)


async def test_f4c_an_adapter_is_kept_only_for_the_requests_that_use_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old, new = adapter(tmp_path / "old"), adapter(tmp_path / "new", 2.0)
    hold = Hold(tmp_path / "hold")
    async with process_engine(hold_at={"7": hold.path}) as client:
        await client.load_adapter("one", old)
        replaced = Replaced(client, hold)
        async with replaced.running():
            client.unload_adapter("one")
            hold.release()
        assert len(replaced.ends) == 1
        await client.load_adapter("one", new)
        shutil.rmtree(old)
        signal_child(client.engine.pid, signal.SIGKILL)
        await until(lambda: client.engine.restarts == 1 and client.engine.pid is not None)
        assert (await run(client, "one", count=COUNT)).token_ids == await expected_with(new)
    assert "could not be loaded again" not in caplog.text


async def test_a_new_process_loads_the_adapters_again(tmp_path: Path) -> None:
    async with plain_model_engine() as client:
        await client.load_adapter("one", adapter(tmp_path / "one"))
        expected = await run(client, "one", count=12)
    results = []

    async def keep() -> None:
        results.append(await run(client, "one", count=12))

    hold = Hold(tmp_path / "hold")
    async with process_engine(hold_at={"7": hold.path}) as client:
        await client.load_adapter("one", tmp_path / "one")
        await client.load_adapter("changed", adapter(tmp_path / "changed", 5.0))
        await client.load_adapter("gone", adapter(tmp_path / "gone"))
        client.unload_adapter("gone")
        async with anyio.create_task_group() as group:
            group.start_soon(keep)
            await hold.reached()
            adapter(tmp_path / "changed", 2.0)
            kill(client, hold)
        assert (await client.stats()).restarts == 1
        with pytest.raises(UnknownModel):
            await run(client, "gone")
    assert results[0].token_ids == expected.token_ids


async def test_f37_an_adapter_that_could_not_be_loaded_again_may_come_back(tmp_path: Path) -> None:
    """Its name is known, so it is not an unknown model."""
    folder = adapter(tmp_path / "one")
    async with process_engine() as client:
        await client.load_adapter("one", folder)
        adapter(folder, 2.0)
        signal_child(client.engine.pid, signal.SIGKILL)
        await until(lambda: client.engine.restarts == 1 and client.engine.pid is not None)
        for _ in range(2):  # it waits for the adapter, or comes later
            with pytest.raises(EngineDown):
                await run(client, "one")
        adapter(folder)
        signal_child(client.engine.pid, signal.SIGKILL)
        await until(lambda: client.engine.restarts == 2 and client.engine.pid is not None)
        assert (await run(client, "one", count=COUNT)).token_ids == await expected_with(folder)
