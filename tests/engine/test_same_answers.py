"""A request with a seed has the same answer next to any other requests and with any cached prefixes."""

from __future__ import annotations

import os
from pathlib import Path

import anyio
import numpy as np
import pytest
from support.chat_template_shapes import CHATML
from support.engine.family_models import save_model
from support.engine.random_model import write_random_model
from support.faults import has_param
from support.server.http_clients import only_asyncio
from support.small_tokenizers import byte_level, write_folder

from agentflow.engine.client import EngineClient
from agentflow.engine.local_engine import open_engine
from agentflow.engine.options import EngineOptions
from agentflow.errors import BadArgument
from agentflow.kernels import native_library
from agentflow.protocol.sampling import SamplingParams

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]
anyio_backend = pytest.fixture(only_asyncio)
RNG = np.random.default_rng(36)
PREFIX = RNG.integers(10, 300, 200).tolist()
PROMPTS = [[*PREFIX[: 37 * i], *RNG.integers(10, 300, 40 + 90 * i).tolist()] for i in range(6)]
PARAMS = SamplingParams(max_tokens=16, temperature=1.0, ignore_eos=True)


def options(folder: Path, **changed: object) -> EngineOptions:
    given = {"device": "cpu", "kv_tokens": 8000, "threads": 2, "deterministic": True, **changed}
    return EngineOptions(str(folder), **given)  # type: ignore[arg-type]


async def answers(client: EngineClient) -> list[list[int]]:
    """The answers to all prompts, requested concurrently."""
    found: list[list[int]] = [[] for _ in PROMPTS]

    async def one(index: int) -> None:
        found[index] = (await client.generate(PROMPTS[index], PARAMS, seed=index)).token_ids

    async with anyio.create_task_group() as group:
        for index in range(len(PROMPTS)):
            group.start_soon(one, index)
    return found


def write_family(name: str, folder: Path) -> None:
    save_model(name, folder, max_position_embeddings=1024)
    write_folder(folder, byte_level(("<s>", "</s>"), vocab_size=300), {"eos_token": "</s>"}, CHATML)


@pytest.mark.parametrize(
    "family", [pytest.param("the default model", marks=pytest.mark.full), "llama", "gemma3"]
)
async def test_f36d_neither_company_nor_cache_nor_chunks_change_an_answer(
    family: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    if family == "the default model":
        folder = request.getfixturevalue("model_folder")
    else:
        write_family(family, folder := tmp_path)
    async with open_engine(options(folder)) as client:
        cold = [
            (await client.generate(prompt, PARAMS, seed=index)).token_ids
            for index, prompt in enumerate(PROMPTS)
        ]
        assert await answers(client) == cold
    async with open_engine(options(folder, cache=False, token_budget=50, threads=1)) as client:
        assert await answers(client) == cold


@pytest.mark.parametrize("kernels", ["native", "torch"])
async def test_f36e_deterministic_is_rejected_where_sums_depend_on_the_batch(
    kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENTFLOW_KERNELS", kernels)
    if kernels == "torch":
        write_random_model(tmp_path)
    else:
        write_family("arcee", tmp_path)  # runs through transformers
    with pytest.raises(BadArgument, check=has_param("deterministic")):
        async with open_engine(options(tmp_path)):
            pass


def test_f36f_tiles_are_left_out_because_they_have_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTFLOW_CPU", "")
    monkeypatch.setattr(native_library, "cpu_flags", lambda: frozenset(native_library.LEVELS["amx"]))
    native_library.keep_order()
    assert os.environ["AGENTFLOW_CPU"] == native_library.native_level() == "avx512_bf16"
    monkeypatch.setenv("AGENTFLOW_CPU", "avx2")
    native_library.keep_order()
    assert native_library.native_level() == "avx2"
