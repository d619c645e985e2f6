"""Weights that are not numbers: the requests that meet them fail, and no others."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from support.engine.device import DEVICE
from support.engine.embedding_models import write_embedding_model
from support.engine.random_model import write_random_model
from support.server.http_clients import only_asyncio

from agentflow.engine.client import EngineClient
from agentflow.engine.local_engine import open_engine
from agentflow.engine.options import EngineOptions
from agentflow.errors import EngineFailed
from agentflow.protocol.sampling import SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.anyio]
anyio_backend = pytest.fixture(only_asyncio)
BAD = 200
"""The token whose embedding is not finite."""
GOOD = [5, 6, 7, 8]


def damage(folder: Path, name: str, value: float, row: int = BAD) -> Path:
    weights = load_file(folder / "model.safetensors")
    weights[name][row, 3] = value
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(params=["native", "torch"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu" or request.param == "torch":
        monkeypatch.setenv("AGENTFLOW_KERNELS", request.param)


@pytest.fixture(params=[math.nan, math.inf], ids=["nan", "infinite"])
async def client(
    request: pytest.FixtureRequest, tmp_path: Path, kernels: None
) -> AsyncIterator[EngineClient]:
    folder = damage(
        write_random_model(tmp_path, tie_word_embeddings=False), "model.embed_tokens.weight", request.param
    )
    async with open_engine(EngineOptions(str(folder), device=DEVICE, kv_tokens=1000, threads=1)) as client:
        yield client


async def test_f38b_requests_fail_where_the_model_computes_no_numbers(client: EngineClient) -> None:
    greedy = SamplingParams(max_tokens=4, ignore_eos=True)
    for params in (greedy, SamplingParams(max_tokens=4, ignore_eos=True, temperature=1.0, logprobs=True)):
        with pytest.raises(EngineFailed, match="not finite"):
            await client.generate([*GOOD, BAD], params, seed=0)
        end = await client.generate(GOOD, params, seed=0)
        assert end.output_tokens == 4
    with pytest.raises(EngineFailed, match="not finite"):
        await client.score([*GOOD, BAD, 9], 1)
    assert all(value is not None and math.isfinite(value) for value in (await client.score(GOOD, 1)).logprobs)
    with pytest.raises(EngineFailed, match="not finite"):
        await client.score_choices(GOOD, [[BAD, 4], [9, 4]])
    assert (await client.stats()).running == 0


@pytest.mark.parametrize(
    ("kind", "pooling", "embedding"),
    [
        ("qwen3", "lasttoken", "embed_tokens.weight"),
        ("bert", "mean_tokens", "embeddings.word_embeddings.weight"),
    ],
)
async def test_f38b_no_embedding_has_values_that_are_not_finite(
    tmp_path: Path, kind: str, pooling: str, embedding: str
) -> None:
    folder = damage(write_embedding_model(tmp_path, kind, pooling=pooling), embedding, math.nan)
    options = EngineOptions(str(folder), device=DEVICE, kv_tokens=1000, threads=1, task="embed")
    async with open_engine(options) as client:
        with pytest.raises(EngineFailed, match="not finite"):
            await client.embed([*GOOD, BAD])
        assert (await client.embed(GOOD)).embedding


@pytest.mark.parametrize("kind", ["bert", "xlm-roberta"])
async def test_f37_short_texts_meet_keys_that_are_not_finite(tmp_path: Path, kind: str) -> None:
    folder = write_embedding_model(tmp_path, kind, pooling="mean_tokens")
    damage(folder, "encoder.layer.0.attention.self.key.weight", math.nan, row=0)
    options = EngineOptions(str(folder), device=DEVICE, kv_tokens=1000, threads=1, task="embed")
    async with open_engine(options) as client:
        for num_tokens in (1, 15, 16):
            with pytest.raises(EngineFailed, match="not finite"):
                await client.embed([*range(5, 5 + num_tokens)])
