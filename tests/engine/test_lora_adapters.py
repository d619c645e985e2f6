"""Adapters (LoRA) of a running engine: loading, replacing and unloading beside requests, and the cache.

The fake runner raises if a request's slots were computed under another adapter, or if its own was dropped.
"""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest
import torch
from support.engine.adapters import write_plain_adapter
from support.fake_engine import TOKENIZER
from support.faults import has_param
from support.holds import Hold
from support.plain_engine import plain_engine, runner
from support.process_engine import kill, process_engine

from agentflow.engine.client import EngineClient, running_engine
from agentflow.engine.process.ipc import Finished, Origin
from agentflow.engine.scheduling.scheduler import SchedulerConfig
from agentflow.errors import BadModelFolder, UnknownModel
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
    async with plain_engine() as client:
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
    async with plain_engine() as client:
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
    async with plain_engine() as client:
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
    async with plain_engine() as client:
        await client.load_adapter("one", adapter(tmp_path / "one"))
        with pytest.raises(BadModelFolder, check=has_param("adapter_config.json")):
            await client.load_adapter("one", tmp_path)
        await run(client, "one")


async def test_a_new_process_loads_the_adapters_again(tmp_path: Path) -> None:
    async with plain_engine() as client:
        await client.load_adapter("one", adapter(tmp_path / "one"))
        expected = await run(client, "one", count=12)
    results = []

    async def keep() -> None:
        results.append(await run(client, "one", count=12))

    hold = Hold(tmp_path / "hold")
    async with process_engine(hold_at={"7": hold.path}) as client:
        await client.load_adapter("one", tmp_path / "one")
        await client.load_adapter("changed", adapter(tmp_path / "changed"))
        await client.load_adapter("gone", adapter(tmp_path / "gone"))
        client.unload_adapter("gone")
        async with anyio.create_task_group() as group:
            group.start_soon(keep)
            await hold.reached()
            adapter(tmp_path / "changed", 2.0)
            kill(client, hold)
        assert (await client.stats()).restarts == 1
        for name in ("changed", "gone"):
            with pytest.raises(UnknownModel):
                await run(client, name)
    assert results[0].token_ids == expected.token_ids
