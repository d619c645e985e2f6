"""The embedded engine with two small random models: one generates, the other makes embeddings."""

from __future__ import annotations

from pathlib import Path

import anyio
import numpy as np
import pytest
from support.engine.embedding_models import expected_embeddings, expected_ids, write_embedding_model
from support.engine.random_model import write_random_model
from support.faults import has_param

import agentflow as af

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]  # the kernels may be compiled first
TEXTS = ["The quick brown fox", "a dog", "An answer is the answer to a question."]


@pytest.mark.parametrize(
    ("kind", "pooling"),
    [
        ("qwen3", "lasttoken"),
        # Kinds and poolings: tests/engine/models/test_embeddings.py.
        pytest.param("bert", "mean_tokens", marks=pytest.mark.full),
    ],
)
async def test_one_session_generates_and_embeds(tmp_path: Path, kind: str, pooling: str) -> None:
    generating = write_random_model(tmp_path / "generating")
    folder = write_embedding_model(tmp_path / "embedding", kind, pooling=pooling)
    expected = expected_embeddings(folder, [expected_ids(folder, text) for text in TEXTS], pooling)
    backend = af.Embedded(str(generating), embed_model=str(folder), dtype="float32", device="cpu", threads=1)
    async with af.session(backend=backend) as flow, flow.state() as s:
        assert flow.capabilities.embedding_models == ("embedding",)
        s += "Once" + af.gen("tale", max_tokens=8, temperature=0)
        found: list[list[list[float]]] = []

        async def embed() -> None:
            found.append(await flow.embed(TEXTS))

        async with anyio.create_task_group() as group:
            group.start_soon(embed)
            group.start_soon(embed)
        assert s["tale"].usage.output_tokens if await s["tale"] else True
    for vectors in found:
        assert np.abs(np.array(vectors) - expected).max() < 1e-4


async def test_a_session_may_only_embed(tmp_path: Path) -> None:
    folder = write_embedding_model(tmp_path / "embedding", "qwen3", pooling="lasttoken")
    backend = af.Embedded(str(folder), task="embed", dtype="float32", device="cpu", threads=1)
    async with af.session(backend=backend) as flow, flow.state() as s:
        assert flow.capabilities.embedding_models == (flow.capabilities.model,)
        assert len(await flow.embed("a dog")) == 32
        with pytest.raises(af.PromptTooLong, check=has_param("texts")):
            await flow.embed("a dog " * 5_000)
        with pytest.raises(af.errors.NotSupported, check=has_param("model")):
            s += "Once" + af.gen("tale", max_tokens=4)
