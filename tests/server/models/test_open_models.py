"""Opening a server's models: small random ones, each in a real engine process."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from support.commands import engines_of
from support.faults import has_param
from support.server.http_clients import only_asyncio
from support.small_tokenizers import byte_level, write_folder

from agentflow.engine.machine.resources import FreeMemory
from agentflow.engine.models.memory_need import (
    PROCESS_BYTES,
    WANTED_KV_TOKENS,
    MemoryNeed,
    divide_memory,
    memory_need,
)
from agentflow.engine.options import EngineOptions
from agentflow.engine.tenant import ANONYMOUS
from agentflow.errors import BadArgument, BadModelFolder
from agentflow.protocol.sampling import SamplingParams
from agentflow.server.config.schema import EngineConfig
from agentflow.server.models import open_models as open_models_module
from agentflow.server.models.models import EngineModel
from agentflow.server.models.open_models import open_models

VOCAB, WIDTH = 300, 32
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": WIDTH,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "eos_token_id": 1,
}


anyio_backend = pytest.fixture(only_asyncio)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with random weights."""
    folder = tmp_path_factory.mktemp("small")
    write_folder(folder, byte_level(vocab_size=VOCAB))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    torch.manual_seed(0)
    layer = "model.layers.0."
    square = [f"{layer}self_attn.{name}_proj.weight" for name in "qkvo"]
    square += [f"{layer}mlp.{name}_proj.weight" for name in ("gate", "up", "down")]
    norms = ["model.norm.weight", f"{layer}input_layernorm.weight", f"{layer}post_attention_layernorm.weight"]
    weights = {"model.embed_tokens.weight": torch.randn(VOCAB, WIDTH)}
    weights |= {name: torch.randn(WIDTH, WIDTH) for name in square}
    weights |= {name: torch.ones(WIDTH) for name in norms}
    save_file(weights, folder / "model.safetensors")
    return folder


def options(
    folder: Path, device: str | None = "cpu", kv_tokens: int | None = None, tensor_parallel: int = 1
) -> EngineOptions:
    return EngineOptions(
        str(folder), device=device, kv_tokens=kv_tokens, threads=1, tensor_parallel=tensor_parallel
    )


def fix_free(monkeypatch: pytest.MonkeyPatch, free: FreeMemory) -> None:
    """Fixed, because real free memory changes while a test runs."""

    async def reported(devices: object) -> FreeMemory:
        return free

    monkeypatch.setattr(open_models_module, "free_memory", reported)


@pytest.mark.anyio
async def test_models_are_opened_in_the_memory_there_is_and_warmed_up(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    need = memory_need("", folder, "bfloat16", None)
    assert need.kv_bytes_per_token == 2 * WIDTH * 2
    budget = 2 * (need.weight_bytes + PROCESS_BYTES) + (5000 + 3000) * need.kv_bytes_per_token
    fix_free(monkeypatch, FreeMemory(2 * budget))
    both = {"shared": options(folder), "given": options(folder, kv_tokens=3000)}
    async with open_models(both, memory_share=0.5) as models:
        assert [model.name for model in models] == ["shared", "given"]
        assert len(engines_of()) == 2
        for model, num_slots in zip(models, (5000, 3000), strict=True):
            assert isinstance(model, EngineModel)
            stats = await model.client.stats()
            assert stats.total_slots == num_slots
            # A first request has been answered before the models are there for anybody.
            assert (stats.generated_tokens, stats.running, stats.waiting) == (2, 0, 0)
            assert stats.computed_tokens > 2
            assert model.generator(ANONYMOUS).capabilities.model == model.name
            end = await model.client.generate([5, 6], SamplingParams(max_tokens=3, ignore_eos=True), seed=0)
            assert end.output_tokens == 3
    assert engines_of() == []


@pytest.mark.anyio
async def test_f38c_a_model_that_computes_no_numbers_is_refused(tmp_path: Path, folder: Path) -> None:
    broken = shutil.copytree(folder, tmp_path / "broken")
    weights = load_file(broken / "model.safetensors")
    weights["model.norm.weight"][3] = math.nan
    save_file(weights, broken / "model.safetensors")
    with pytest.raises(BadModelFolder, match="broken"):
        async with open_models({"broken": options(broken, kv_tokens=2000)}):
            pytest.fail("it is served")
    assert engines_of() == []


@pytest.mark.anyio
async def test_models_that_do_not_fit_are_refused_before_any_is_loaded(folder: Path) -> None:
    with pytest.raises(BadArgument):
        async with open_models({"one": options(folder)}, memory_share=1e-9):
            pytest.fail("it opened")
    assert engines_of() == []


@pytest.mark.anyio
async def test_a_model_that_exceeds_gpu_memory_is_rejected_although_main_memory_suffices(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    fix_free(monkeypatch, FreeMemory(10**12, cuda_bytes=10**9))
    with pytest.raises(BadArgument):
        async with open_models({"one": options(folder, device=None)}, memory_share=0.5):
            pytest.fail("it opened")
    assert engines_of() == []


def test_models_on_the_gpu_share_its_memory_and_others_share_main_memory(folder: Path) -> None:
    models = {
        "a": options(folder, "cpu"),
        "b": options(folder, "cuda"),
        "c": options(folder, None),
        "d": options(folder, "cpu", kv_tokens=7000),
    }
    free = FreeMemory(2 * 10**9, cuda_bytes=2 * 10**9 + 10**6)
    folders = dict.fromkeys(models, folder)
    needs = {
        name: memory_need(name, folder, each.dtype, each.kv_tokens, on_gpu=name in "bc")
        for name, each in models.items()
    }

    def shares(names: str, num_bytes: int) -> dict[str, int]:
        group: list[MemoryNeed] = [needs[name] for name in names]
        return divide_memory(group, int(num_bytes * EngineConfig().memory_share))

    sized = open_models_module._sized(models, folders, EngineConfig().memory_share, free)
    expected = shares("ad", free.host_bytes) | shares("bc", free.cuda_bytes or 0)
    assert {name: each.kv_tokens for name, [each] in sized.items()} == expected
    assert [each.own_process for [each] in sized.values()] == [True] * 4
    del models["b"]
    nowhere = open_models_module._sized(models, folders, EngineConfig().memory_share, FreeMemory(10**11))
    assert [nowhere[name][0].kv_tokens for name in "acd"] == [*[WANTED_KV_TOKENS] * 2, 7000]


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_a_gpu_that_is_missing_is_refused_before_anything_is_loaded(
    folder: Path, device: str, replicas: int
) -> None:
    models = {"a": replace(options(folder, device), replicas=replicas)}
    with pytest.raises(BadArgument, match=f"device is {device}") as caught:
        open_models_module._sized(models, {"a": folder}, 0.8, FreeMemory(10**12))
    assert caught.value.param == "device"


def test_one_sentence_tells_that_many_replicas_do_not_fit(folder: Path) -> None:
    models = {"a": replace(options(folder), replicas=300)}
    with pytest.raises(BadArgument, match="292 more") as caught:
        open_models_module._sized(models, {"a": folder}, 0.8, FreeMemory(10**9))
    assert len(str(caught.value)) < 2_000


def test_each_gpu_is_divided_among_its_models(folder: Path) -> None:
    names = {"a": "cuda", "b": "cuda:0", "c": None, "d": "cuda:1"}
    models = {name: options(folder, device) for name, device in names.items()}
    free = FreeMemory(10**12, cuda_bytes=4 * 10**9, other_cuda_bytes={1: 2 * 10**9})
    sized = open_models_module._sized(models, dict.fromkeys(models, folder), 0.8, free)
    needs = [memory_need(name, folder, "auto", None, on_gpu=True) for name in models]
    expected = divide_memory(needs[:3], int(3.2e9)) | divide_memory(needs[3:], int(1.6e9))
    assert {name: each.kv_tokens for name, [each] in sized.items()} == expected
    assert min(expected.values()) > WANTED_KV_TOKENS


def test_a_divided_model_takes_a_part_of_each_gpu(folder: Path) -> None:
    """The pool is as large as the GPU with the least memory for it allows."""
    models = {"a": options(folder, "cuda:0", tensor_parallel=2), "b": options(folder, "cuda:1")}
    free = FreeMemory(10**12, cuda_bytes=4 * 10**9, other_cuda_bytes={1: 4 * 10**9})
    sized = open_models_module._sized(models, dict.fromkeys(models, folder), 0.8, free)
    part, whole = (
        memory_need(name, folder, "auto", None, on_gpu=True, ranks=n)
        for name, n in zip("ab", (2, 1), strict=True)
    )
    shared = divide_memory([part, whole], int(3.2e9))
    assert {name: each[0].kv_tokens for name, each in sized.items()} == shared
    assert shared["a"] < divide_memory([part], int(3.2e9))["a"]


def test_replicas_have_a_gpu_each_and_pools_of_one_size(folder: Path) -> None:
    models = {"a": replace(options(folder, "cuda:1"), replicas=2), "b": options(folder, "cuda:2")}
    folders = dict.fromkeys(models, folder)
    free = FreeMemory(10**12, 4 * 10**9, {1: 4 * 10**9, 2: 3 * 10**9})
    sized = open_models_module._sized(models, folders, 0.8, free)
    assert [(each.device, each.replicas) for each in sized["a"]] == [("cuda:1", 1), ("cuda:2", 1)]
    [size] = {each.kv_tokens for each in sized["a"]}
    assert size == pytest.approx(sized["b"][0].kv_tokens, abs=1)  # the second replica shares its GPU with it
    with pytest.raises(BadArgument, check=has_param("replicas")):
        open_models_module._sized(models, folders, 0.8, FreeMemory(10**12, 10**9, {1: 10**9}))


def test_replicas_on_the_cpu_divide_threads_and_memory(folder: Path) -> None:
    need = memory_need("", folder, "bfloat16", None)
    free = FreeMemory(3 * (need.weight_bytes + PROCESS_BYTES) + 9000 * need.kv_bytes_per_token)
    model = replace(options(folder), replicas=3, threads=7)
    sized = open_models_module._sized({"a": model}, {"a": folder}, 1.0, free)["a"]
    assert [each.threads for each in sized] == [3, 2, 2]
    assert {each.kv_tokens for each in sized} == {3000}
    few = open_models_module._sized({"a": replace(model, threads=1)}, {"a": folder}, 1.0, free)["a"]
    assert [each.threads for each in few] == [1, 1, 1]


@pytest.mark.anyio
async def test_a_model_with_replicas_has_a_process_for_each(folder: Path) -> None:
    model = replace(options(folder, kv_tokens=2000), replicas=2)
    async with open_models({"many": model}) as models:
        assert len(engines_of()) == 2
        [many] = models
        assert isinstance(many, EngineModel)
        assert [one.state for one in many.client.engine.replicas] == ["serving"] * 2
        assert (await many.client.stats()).total_slots == 4000
        end = await many.client.generate([5, 6], SamplingParams(max_tokens=3, ignore_eos=True), seed=0)
        assert end.output_tokens == 3
    assert engines_of() == []


@pytest.mark.parametrize(("device", "size"), [("cuda:3", 1), ("cuda:1", 2)])
def test_a_gpu_that_is_not_there_is_refused(device: str, size: int, folder: Path) -> None:
    models = {"a": options(folder, device, tensor_parallel=size)}
    with pytest.raises(BadArgument, check=has_param("device")):
        open_models_module._sized(models, {"a": folder}, 0.8, FreeMemory(10**12, 10**9, {1: 10**9}))


@pytest.mark.anyio
async def test_a_workload_is_of_one_model(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(BadArgument):
        async with open_models(dict.fromkeys("ab", options(folder)), record_to=tmp_path / "load.jsonl"):
            pytest.fail("it opened")
