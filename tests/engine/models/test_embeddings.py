"""Embeddings of small random models, on a whole engine, against transformers' own hidden states."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from gguf import GGUFWriter
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from support.engine.device import DEVICE
from support.engine.embedding_models import (
    VOCAB,
    expected_embeddings,
    expected_ids,
    write_embedding_model,
)
from support.engine.gguf_models import write_gguf, write_vocabulary
from support.faults import has_param
from support.server.http_clients import only_asyncio

from agentflow.engine.client import EngineClient
from agentflow.engine.local_engine import open_engine, open_generator
from agentflow.engine.models.encoder_runner import MAX_PADDING, groups_of_similar_length
from agentflow.engine.options import EngineOptions
from agentflow.engine.store.embedding_folder import read_embedding_folder
from agentflow.errors import BadArgument, BadModelFolder, PromptTooLong
from agentflow.runtime.generator import EmbeddingOptions

pytestmark = [pytest.mark.gpu, pytest.mark.anyio, pytest.mark.timeout(120)]
anyio_backend = pytest.fixture(only_asyncio)
RNG = np.random.default_rng(3)
LENGTHS = [1, 5, 17, 3, 60, 60, 33, 100, 2, 18, 40, 1]
PROMPTS = [[int(i) for i in RNG.integers(4, VOCAB, n)] for n in LENGTHS]
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3": ("qwen3", "lasttoken", {}),
    "qwen3 with the name of a generating model": (
        "qwen3",
        "lasttoken",
        {"architecture": "Qwen3ForCausalLM"},
    ),
    "qwen3 with an own head": ("qwen3", "lasttoken", {"tie_word_embeddings": False, "normalises": False}),
    "qwen3 that slides": (
        "qwen3",
        "lasttoken",
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    ),
    "qwen3 averaged": ("qwen3", "mean_tokens", {}),
    "mistral": ("mistral", "lasttoken", {"num_key_value_heads": 2, "dense": 24}),
    "bert": ("bert", "cls_token", {}),
    "bert averaged": ("bert", "mean_tokens", {"normalises": False}),
    "bert with a layer": ("bert", "mean_tokens", {"dense": 24}),
    "mpnet": ("mpnet", "mean_tokens", {}),
    "xlm-roberta": ("xlm-roberta", "max_tokens", {}),
    "roberta": ("roberta", "mean_sqrt_len_tokens", {}),
    "distilbert": ("distilbert", "weightedmean_tokens", {"dim": 32, "n_heads": 4, "hidden_dim": 48}),
}


@asynccontextmanager
async def embedding_engine(folder: Path, **options: Any) -> AsyncIterator[EngineClient]:
    chosen = {"model": str(folder), "task": "embed", "dtype": "float32", "kv_tokens": 2048, "device": DEVICE}
    async with open_engine(EngineOptions(**(chosen | options))) as client:
        yield client


async def embed(client: EngineClient, prompts: list[list[int]]) -> np.ndarray:
    found: dict[int, np.ndarray] = {}

    async def one(number: int) -> None:
        end = await client.embed(prompts[number])
        assert end.prompt_tokens == len(prompts[number])
        found[number] = np.frombuffer(end.embedding, dtype="<f4")

    async with anyio.create_task_group() as group:
        for number in range(len(prompts)):
            group.start_soon(one, number)
    return np.stack([found[number] for number in range(len(prompts))])


@pytest.mark.parametrize("name", MODELS)
async def test_equal_those_of_transformers_whatever_shares_the_batch(tmp_path: Path, name: str) -> None:
    kind, pooling, changes = MODELS[name]
    folder = write_embedding_model(tmp_path, kind, pooling=pooling, **changes)
    steps = {key: changes[key] for key in ("dense", "normalises") if key in changes}
    expected = expected_embeddings(folder, PROMPTS, pooling, **steps)
    async with embedding_engine(folder) as client:
        together = await embed(client, PROMPTS)
        one_by_one = np.concatenate([await embed(client, [prompt]) for prompt in PROMPTS])
        assert client.info.embedding_size == expected.shape[1]
        stats = await client.stats()
    assert np.abs(together - expected).max() < 1e-4
    assert np.abs(one_by_one - expected).max() < 1e-4
    assert stats.in_use_slots == 0


@pytest.mark.parametrize("kind", ["qwen3", "bert"])
async def test_small_budgets_and_pools_change_nothing(tmp_path: Path, kind: str) -> None:
    pooling = "lasttoken" if kind == "qwen3" else "mean_tokens"
    folder = write_embedding_model(tmp_path, kind, pooling=pooling)
    expected = expected_embeddings(folder, PROMPTS, pooling)
    async with embedding_engine(folder, token_budget=32, kv_tokens=130, max_running=3) as client:
        found = await embed(client, PROMPTS)
    assert np.abs(found - expected).max() < 1e-4


async def test_a_shared_instruction_is_computed_once(tmp_path: Path) -> None:
    folder = write_embedding_model(tmp_path, "qwen3", pooling="lasttoken")
    instruction = PROMPTS[4]
    queries = [[*instruction, *prompt[:9], 1] for prompt in PROMPTS]
    async with embedding_engine(folder) as client:
        first = await client.embed([*instruction, 1])
        found = await embed(client, queries)
        stats = await client.stats()
        again = await client.embed(queries[0])
    assert first.cached_tokens == 0
    assert stats.cached_tokens >= len(instruction) * len(queries)
    assert again.cached_tokens == len(queries[0]) - 1
    assert np.abs(found - expected_embeddings(folder, queries, "lasttoken")).max() < 1e-4


@pytest.mark.parametrize("kind", ["qwen3", "bert", "mpnet", "xlm-roberta"])
@pytest.mark.parametrize("has_modules", [True, False])
async def test_texts_get_the_special_tokens_of_the_folder(
    tmp_path: Path, kind: str, has_modules: bool
) -> None:
    pooling = "lasttoken" if kind == "qwen3" else "mean_tokens"
    architecture = "Qwen3ForCausalLM" if kind == "qwen3" else ""
    folder = write_embedding_model(
        tmp_path, kind, pooling=pooling if has_modules else None, architecture=architecture
    )
    texts = ["The quick brown fox", "", "naïve façade, 日本語 " * 5, "An answer is the answer."]
    async with embedding_engine(folder) as client:
        ids = client.tokenizer.encode_whole(texts)
        assert ids == [expected_ids(folder, text) for text in texts]
        found = await embed(client, [one for one in ids if one])
    expected = expected_embeddings(folder, [one for one in ids if one], pooling)
    assert np.abs(found - expected).max() < 1e-4


async def test_special_tokens_in_a_text_are_text(tmp_path: Path) -> None:
    folder = write_embedding_model(tmp_path, "bert", pooling="cls_token")
    async with embedding_engine(folder) as client:
        (ids,) = client.tokenizer.encode_whole(["a [SEP] b"])
    assert ids.count(client.tokenizer.find_id("[SEP]")) == 1


@pytest.mark.parametrize(
    ("kind", "longest"), [("bert", 130), ("mpnet", 128), ("xlm-roberta", 128), ("qwen3", 130)]
)
async def test_texts_of_all_positions_fit_and_longer_ones_are_rejected(
    tmp_path: Path, kind: str, longest: int
) -> None:
    pooling = "lasttoken" if kind == "qwen3" else "mean_tokens"
    folder = write_embedding_model(tmp_path, kind, pooling=pooling)
    ids = [int(i) for i in RNG.integers(4, VOCAB, longest)]
    async with embedding_engine(folder) as client:
        assert client.info.max_context == longest
        found = await embed(client, [ids])
        with pytest.raises(PromptTooLong):
            await client.embed([*ids, 5])
    assert np.abs(found - expected_embeddings(folder, [ids], pooling)).max() < 1e-4


@pytest.mark.parametrize("kind", ["qwen3", "bert"])
async def test_the_folder_may_name_a_shorter_length(tmp_path: Path, kind: str) -> None:
    pooling = "lasttoken" if kind == "qwen3" else "mean_tokens"
    folder = write_embedding_model(tmp_path, kind, pooling=pooling, max_tokens=20)
    async with embedding_engine(folder) as client:
        assert client.info.max_context == 20


@pytest.mark.parametrize(
    "own_process",
    # It imports transformers, for seconds; test_embedding_process has embeddings of a process.
    [False, pytest.param(True, marks=pytest.mark.full)],
)
async def test_computes_in_bfloat16(tmp_path: Path, own_process: bool) -> None:
    folder = write_embedding_model(tmp_path, "bert", pooling="mean_tokens")
    async with embedding_engine(folder, own_process=own_process, dtype="bfloat16") as client:
        found = await embed(client, PROMPTS)
    expected = expected_embeddings(folder, PROMPTS, "mean_tokens")
    assert (found * expected).sum(axis=1).min() > 0.99


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"modules.json": '[{"type": "a.Transformer"}, {"type": "a.WordWeights"}]'}, "modules.json"),
        ({"modules.json": "{}"}, "modules.json"),
        ({"modules.json": "["}, "modules.json"),
        ({"1_Pooling/config.json": '{"pooling_mode_of_tomorrow": true}'}, "pooling_mode"),
        ({"1_Pooling/config.json": '{"pooling_mode": "best"}'}, "pooling_mode"),
        (
            {"1_Pooling/config.json": '{"pooling_mode_cls_token": true, "include_prompt": false}'},
            "include_prompt",
        ),
        ({"1_Pooling/config.json": None}, "config.json"),
        ({"2_Dense/model.safetensors": None}, "model.safetensors"),
        ({"2_Dense/config.json": '{"in_features": 32}'}, "modules.json"),
        ({"sentence_bert_config.json": '{"max_seq_length": "long"}'}, "modules.json"),
    ],
)
async def test_faults_of_a_folder(tmp_path: Path, changes: dict[str, str | None], param: str) -> None:
    folder = write_embedding_model(tmp_path, "bert", pooling="mean_tokens", dense=24)
    for name, content in changes.items():
        (folder / name).unlink(missing_ok=True)
        if content is not None:
            (folder / name).write_text(content)
    with pytest.raises(BadModelFolder, check=has_param(param)):
        read_embedding_folder(folder)


async def test_an_encoder_and_decoder_is_rejected(tmp_path: Path) -> None:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4}
    folder = write_embedding_model(tmp_path, "t5", pooling="mean_tokens", **sizes)
    with pytest.raises(BadModelFolder, check=has_param("architectures")):
        async with embedding_engine(folder):
            pass


@pytest.mark.parametrize("options", [{"task": "generate"}, {"quantize": "int8"}])
async def test_an_encoder_neither_generates_nor_is_quantised(tmp_path: Path, options: dict[str, str]) -> None:
    folder = write_embedding_model(tmp_path, "bert", pooling="mean_tokens")
    with pytest.raises((BadModelFolder, BadArgument), check=has_param(next(iter(options)))):
        async with embedding_engine(folder, **options):
            pass


@given(st.lists(st.integers(1, 600), max_size=60))
def test_groups_hold_every_text_once_with_little_padding(lens: list[int]) -> None:
    groups = list(groups_of_similar_length(lens))
    assert sorted(i for group in groups for i in group) == list(range(len(lens)))
    for group in groups:
        longest = max(lens[i] for i in group)
        assert lens[group[0]] == longest
        assert len(group) * longest <= MAX_PADDING * sum(lens[i] for i in group)


def write_embedding_gguf(folder: Path, file: Path, **changes: Any) -> Path:
    """The decoder of ``folder`` as llama.cpp converts it: the tokenizer appends a token, whose hidden
    state is the embedding."""
    with_model = file.parent / "with_model"
    shutil.copytree(folder, with_model)
    weights = {f"model.{name}": values for name, values in load_file(folder / "model.safetensors").items()}
    save_file(weights, with_model / "model.safetensors")
    said = {"qwen3.pooling_type": 3, "tokenizer.ggml.add_eos_token": True, "tokenizer.ggml.eos_token_id": 0}
    write_gguf(with_model, file, vocabulary=partial(write_vocabulary, folder), changes=said | changes)
    return file


async def test_a_gguf_file_of_a_decoder_embeds_as_its_folder_does(tmp_path: Path) -> None:
    folder = write_embedding_model(tmp_path / "folder", "qwen3", pooling="lasttoken")
    file = write_embedding_gguf(folder, tmp_path / "model.gguf")
    texts = ["The quick brown fox", "a dog"]
    expected = expected_embeddings(folder, [expected_ids(folder, text) for text in texts], "lasttoken")
    options = {"task": "embed", "dtype": "float32", "kv_tokens": 2048, "device": DEVICE, "threads": 1}
    async with open_generator(model=str(file), **options) as generator:
        vectors, _ = await generator.embedder.embed(texts, EmbeddingOptions())
    assert np.abs(np.stack(vectors) - expected).max() < 1e-4


def test_gguf_files_that_do_not_take_the_last_token_are_refused(tmp_path: Path) -> None:
    folder = write_embedding_model(tmp_path / "folder", "qwen3", pooling="lasttoken")
    averaged = write_embedding_gguf(folder, tmp_path / "model.gguf", **{"qwen3.pooling_type": 1})
    with pytest.raises(BadModelFolder, check=has_param("pooling_type")):
        read_embedding_folder(averaged)
    writer = GGUFWriter(tmp_path / "encoder.gguf", "bert")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(BadModelFolder, match="encoder"):
        read_embedding_folder(tmp_path / "encoder.gguf")
