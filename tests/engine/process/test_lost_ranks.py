"""A supervised engine whose model is divided over processes: one stands still, or loses the engine."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest
from support.commands import is_rank
from support.engine.random_model import write_random_model
from support.process_template import FORK_RANKS
from support.processes import has_ended

from agentflow.engine.client import EngineClient
from agentflow.engine.local_engine import open_engine
from agentflow.engine.options import EngineOptions
from agentflow.errors import BadArgument
from agentflow.protocol.sampling import SamplingParams

pytestmark = [pytest.mark.anyio, pytest.mark.trio_in_full, pytest.mark.timeout(180)]
LENGTH = 80
SAMPLING = SamplingParams(max_tokens=LENGTH, ignore_eos=True, temperature=1.0)


async def text(client: EngineClient, on_text: Callable[[str], object] | None = None) -> str:
    return (await client.generate([5, 6, 7, 8], SAMPLING, seed=3, on_text=on_text)).text


def ranks() -> list[psutil.Process]:
    """The processes of ranks below this one."""
    found = psutil.Process().children(recursive=True)
    return [process for process in found if not has_ended(process) and is_rank(process)]


async def test_a_rank_that_stops_is_replaced_and_its_requests_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_random_model(tmp_path)
    monkeypatch.setenv(FORK_RANKS, "1")
    options = EngineOptions(model=str(tmp_path), device="cpu", dtype="float32", kv_tokens=1000, threads=2)
    async with open_engine(options) as alone:
        expected = await text(alone)
    divided = EngineOptions(
        **{name: getattr(options, name) for name in ("model", "device", "dtype", "kv_tokens", "threads")},
        tensor_parallel=2,
        own_process=True,
        step_timeout_s=5.0,  # a loaded machine may take seconds for the first step
    )
    async with open_engine(divided) as client:
        (first,) = ranks()
        found, has_begun = [], anyio.Event()

        async def generate() -> None:
            found.append(await text(client, lambda _: has_begun.set()))

        async with anyio.create_task_group() as requests:
            requests.start_soon(generate)
            await has_begun.wait()
            first.send_signal(signal.SIGSTOP)
        assert found == [expected]
        assert has_ended(first)
        (second,) = ranks()
        second.parent().send_signal(signal.SIGKILL)  # the engine
        await anyio.to_thread.run_sync(second.wait, 30)
    assert ranks() == []


@pytest.mark.parametrize("changed", [{"task": "embed"}, {"loras": ("a=/nowhere",)}])
async def test_features_of_one_process_are_refused_before_anything_starts(
    changed: dict[str, Any], tmp_path: Path
) -> None:
    write_random_model(tmp_path)
    options = EngineOptions(model=str(tmp_path), tensor_parallel=2, own_process=True, **changed)
    with pytest.raises(BadArgument) as refused:
        async with open_engine(options):
            pass
    assert refused.value.param == "tensor_parallel"
