"""An embedded session whose model is divided over two processes."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from support.commands import is_rank
from support.engine.random_model import write_random_model
from support.processes import has_ended
from support.server.http_clients import only_asyncio

import agentflow as af

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(180)]
anyio_backend = pytest.fixture(only_asyncio)


async def story(folder: Path, tensor_parallel: int) -> tuple[str, list[psutil.Process]]:
    """A text, and the processes that the engine had meanwhile."""
    backend = af.Embedded(
        str(folder), dtype="float32", device="cpu", kv_tokens=500, threads=2, tensor_parallel=tensor_parallel
    )
    async with af.session(backend=backend, seed=3) as flow, flow.state() as s:
        s += "Once" + af.gen("tale", max_tokens=24, temperature=1.0, ignore_eos=True)
        text = await s["tale"]
        children = psutil.Process().children(recursive=True)
        return text, [child for child in children if is_rank(child)]


async def test_an_embedded_model_is_divided_over_processes(tmp_path: Path) -> None:
    folder = write_random_model(tmp_path / "model")
    alone, none = await story(folder, 1)
    divided, ranks = await story(folder, 2)
    assert divided == alone
    assert (len(none), len(ranks)) == (0, 1)
    assert all(has_ended(rank) for rank in ranks)
