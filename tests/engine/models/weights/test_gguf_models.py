"""Small random models of every architecture, written to GGUF files, against the same from safetensors."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.engine.device import DEVICE
from support.engine.family_models import IN_BLOCKS, YARN
from support.engine.family_models import save_model as save_family
from support.engine.gguf_models import round_weights, write_gguf
from support.engine.runner_driver import Driver

from agentflow.engine.models.memory_need import memory_need
from agentflow.engine.models.torch_runner import TorchRunner
from agentflow.engine.runner import RunnerInfo
from agentflow.errors import BadArgument, BadModelFolder

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "short_factor": [1.0, 1.1, 1.3, 1.5, 1.6, 1.7],
    "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
    "original_max_position_embeddings": 128,
    "partial_rotary_factor": 0.75,
}
GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 32}
LATENT = {"num_key_value_heads": 4, "moe_intermediate_size": 32, "v_head_dim": 16}
LATENT |= {"rope_parameters": YARN | {"mscale": 0.6, "mscale_all_dim": 0.6}}
# Fields that a file lacks have the values that llama.cpp assumes.
CHANGED: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama_tied": {},
    "llama_biased": {},
    "llama_wide_heads": {"head_dim": 32},
    "llama_llama3": {},
    "llama_linear": {},
    "llama_yarn": {"rope_parameters": YARN | {"beta_fast": 8.0}},
    "mistral_window": {},
    "mixtral": {},
    "qwen2": {},
    "qwen3": {"head_dim": 32, "tie_word_embeddings": True},
    "qwen3_moe": {"head_dim": 32, "num_experts": 12, "moe_intermediate_size": 32, "norm_topk_prob": True},
    "smollm3": {"no_rope_layer_interval": 4, "num_hidden_layers": 5},
    "olmo2": {},
    "phi3": {},
    "phi3_longrope": {"sliding_window": 16, "rope_parameters": LONGROPE, "max_position_embeddings": 256},
    "granite": {},
    "seed_oss": {"head_dim": 32},
    "olmo3": {"layer_types": None, "num_hidden_layers": 5},
    "exaone4": {"layer_types": None, "num_hidden_layers": 5},
    "exaone4_full": {},
    "glm4": {"head_dim": 32},
    "ernie4_5": {"head_dim": 32},
    "olmoe": {"intermediate_size": 32},
    "gemma": {"head_dim": 32},
    "gemma2": GEMMA,
    "gemma3": GEMMA | {"_sliding_window_pattern": 6, "layer_types": None},
    "gpt_oss": {"head_dim": 32},
    "gpt2": {"n_embd": 64, "n_head": 4},
    "starcoder": {"n_embd": 64, "n_head": 4, "activation_function": "gelu"},
    "deepseek_v2": LATENT,
    "deepseek_v2_groups": LATENT,
    "starcoder2": {},
    "phi": {"num_key_value_heads": 4},
    "gpt_neox": {"hidden_act": "gelu"},
    "gpt_neox_in_turn": {},
    "falcon": {},
    "falcon_groups": {"ffn_hidden_size": 96},
    "falcon_groups_one_norm": {"num_kv_heads": 2},
    "stablelm": {},
    "stablelm_parallel": {"num_key_value_heads": 2},
    "cohere": {},
    "cohere_normed": {},
    "cohere2": {},
}
"""Names of ``family_models``, and how their configs differ here."""
EXACT = ("llama", "mixtral", "gemma2", "gpt2", "gpt_oss", "deepseek_v2", "phi3", "falcon")
"""One for each way to read weights: rows in pairs, stacked experts, shifted norms, transposed, fused."""


def save_model(name: str, folder: Path) -> None:
    save_family(name, folder, **(IN_BLOCKS | CHANGED[name]))


def logprobs(
    path: Path,
    dtype: str = "float32",
    quantize: str | None = None,
    num_tokens: int = 120,
    device: str = "cpu",
) -> tuple[NDArray[np.float32], TorchRunner]:
    """The log-probabilities of random tokens after each token of a random text."""
    runner = TorchRunner(path, num_slots=200, device=device, dtype=dtype, quantize=quantize)
    tokens = np.random.default_rng(1).integers(10, 320, num_tokens)
    driver = Driver(runner)
    walker = driver.add(tokens.tolist())
    rows = np.arange(num_tokens - 1)
    output = driver.step([(walker, len(rows))], rows=rows, target_ids=rows + 100, needs_logprobs=True)
    assert output.logprobs is not None
    return output.logprobs, runner


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *[(name, "Q8_0") for name in CHANGED],
        *[pytest.param(name, "F32", marks=() if name in EXACT else pytest.mark.full) for name in CHANGED],
    ],
)
def test_a_gguf_file_computes_what_its_folder_does(name: str, kind: str, tmp_path: Path) -> None:
    save_model(name, tmp_path)
    write_gguf(tmp_path, tmp_path / "model.gguf", kind)
    round_weights(tmp_path, kind)
    expected, from_folder = logprobs(tmp_path)
    found, from_file = logprobs(tmp_path / "model.gguf")
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)
    assert np.ptp(expected) > 1
    for field in ("vocab_size", "max_context", "end_token_ids", "kv_bytes_per_token"):
        assert getattr(from_file.info, field) == getattr(from_folder.info, field)


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v2_groups"])
def test_f42j_files_with_absorbed_attention_compute_the_same(name: str, tmp_path: Path) -> None:
    save_model(name, tmp_path)
    write_gguf(tmp_path, file := tmp_path / "model.gguf", is_absorbed=True)
    expected, from_folder = logprobs(tmp_path)
    found, from_file = logprobs(file)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)
    assert from_file.info.kv_bytes_per_token == from_folder.info.kv_bytes_per_token
    _, kept = logprobs(file, "auto")
    assert kept.info.max_context == from_folder.info.max_context


def test_f42j_relatives_of_deepseek_v2_are_refused(tmp_path: Path) -> None:
    save_model("deepseek_v2", tmp_path)
    write_gguf(tmp_path, file := tmp_path / "model.gguf", changes={"deepseek2.expert_gating_func": 2})
    with pytest.raises(BadModelFolder) as caught:
        logprobs(file)
    assert caught.value.param == "deepseek2.expert_gating_func"


@dataclass(frozen=True)
class In8Bits:
    """A model's folder, its file in 8 bits, the file's output, and the output with dense weights in
    bfloat16."""

    folder: Path
    file: Path
    exact: NDArray[np.float32]
    rounded: NDArray[np.float32]
    dense: RunnerInfo


@pytest.fixture(
    scope="module",
    params=[
        "llama_tied",
        "llama_biased",
        "qwen3_moe",
        "gemma3",
        "phi3",
        "gpt2",
        "gpt_oss",
        "gpt_neox",
        "cohere",
        "phi",
    ],
)
def in_8_bits(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> In8Bits:
    save_model(request.param, folder := tmp_path_factory.mktemp(request.param))
    write_gguf(folder, file := folder / "model.gguf", "Q8_0")
    exact, _ = logprobs(file)
    rounded, runner = logprobs(file, "bfloat16")
    return In8Bits(folder, file, exact, rounded, runner.info)


@pytest.mark.parametrize("source", ["gguf", "safetensors"])
def test_quantised_weights_are_multiplied_as_they_are(in_8_bits: In8Bits, source: str) -> None:
    """Errors are relative to the errors of bfloat16: their size differs between random models."""
    if source == "gguf":
        found, kept = logprobs(in_8_bits.file, "auto")
    else:
        found, kept = logprobs(in_8_bits.folder, "bfloat16", "int8")
    exact, dense = in_8_bits.exact, in_8_bits.dense
    assert np.abs(found - exact).mean() < 3 * np.abs(in_8_bits.rounded - exact).mean()
    assert kept.info.weight_bytes < 0.6 * dense.weight_bytes
    assert "8-bit" in kept.info.weights
    assert "Q8_0" in kept.info.weights
    assert ("as in its file" in kept.info.weights) == (source == "gguf")
    assert dense.weights == "bfloat16 weights"


@pytest.mark.gpu
@pytest.mark.parametrize(("source", "tolerance"), [("gguf", 0.25), ("safetensors", 1e-3)])
def test_the_kernels_for_gpus_multiply_quantised_weights(
    source: str, tolerance: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16, and rounded from a model in float32."""
    pytest.importorskip("triton", reason="triton is for x86-64 and Linux")
    save_model("llama_tied", tmp_path)
    write_gguf(tmp_path, file := tmp_path / "model.gguf", "Q8_0")
    options = (file, "auto", None) if source == "gguf" else (tmp_path, "float32", "int8")
    expected, native = logprobs(*options, num_tokens=6)
    monkeypatch.setenv("AGENTFLOW_KERNELS", "triton")
    found, runner = logprobs(*options, num_tokens=6, device=DEVICE)
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance)
    assert runner.info.weights == native.info.weights
    assert "Q8_0" in runner.info.weights


@pytest.mark.parametrize("kind", ["Q4_0", "Q5_1", "Q8_0", "MXFP4", "F16"])
@pytest.mark.parametrize("name", ["llama", "llama_tied"])
def test_f42k_the_weights_take_what_was_estimated(name: str, kind: str, tmp_path: Path) -> None:
    save_family(name, tmp_path, **(IN_BLOCKS | {"vocab_size": 8192}))
    write_gguf(tmp_path, file := tmp_path / "model.gguf", kind)
    need = memory_need("", file, "auto", None)
    _, runner = logprobs(file, "auto")
    assert need.weight_bytes == pytest.approx(runner.info.weight_bytes, rel=0.05)
    assert need.vocabulary == 8192


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["Q4_0", "Q5_1", "Q8_0"])
def test_the_weights_take_what_was_estimated_on_a_gpu(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The outputs of these small matrices are padded."""
    pytest.importorskip("triton", reason="triton is for x86-64 and Linux")
    monkeypatch.setenv("AGENTFLOW_KERNELS", "triton")
    save_family("llama_tied", tmp_path, **(IN_BLOCKS | {"vocab_size": 8192}))
    write_gguf(tmp_path, file := tmp_path / "model.gguf", kind)
    need = memory_need("", file, "auto", None, on_gpu=True)
    runner = TorchRunner(file, num_slots=200, device=DEVICE)
    assert need.weight_bytes == pytest.approx(runner.info.weight_bytes, rel=0.1)


def test_f42g_quantising_what_is_quantised_is_refused(tmp_path: Path) -> None:
    save_model("llama_tied", tmp_path)
    write_gguf(tmp_path, file := tmp_path / "model.gguf", "Q8_0")
    with pytest.raises(BadArgument) as caught:
        logprobs(file, "auto", "int4")
    assert caught.value.param == "quantize"
    _, rounded = logprobs(file, "bfloat16", "int4")
    assert "Q4_1" in rounded.info.weights


@pytest.mark.parametrize("part", ["width", "file"])
def test_f42g_quantising_a_part_warns_once(
    part: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Rows of 80 weights are no whole blocks; a file's routers are not quantised."""
    if part == "width":
        save_family("llama", path := tmp_path, **(IN_BLOCKS | {"intermediate_size": 80}))
    else:
        save_model("gpt_oss", tmp_path)
        write_gguf(tmp_path, path := tmp_path / "model.gguf", "Q8_0")
    _, runner = logprobs(path, "auto", "int8")
    assert "Q8_0" in runner.info.weights
    messages = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert len([message for message in messages if "quantize" in message]) == 1


def test_f42g_quantising_widths_without_blocks_is_refused(tmp_path: Path) -> None:
    save_family("llama", tmp_path, hidden_size=48, intermediate_size=80)
    with pytest.raises(BadArgument) as caught:
        logprobs(tmp_path, "bfloat16", "int8")
    assert caught.value.param == "quantize"


@pytest.mark.parametrize("name", ["gpt_oss", "mixtral"])
def test_experts_in_mxfp4_become_5_bits_with_the_same_values(name: str, tmp_path: Path) -> None:
    save_model(name, tmp_path)
    write_gguf(tmp_path, file := tmp_path / "model.gguf", "MXFP4")
    exact, _ = logprobs(file)
    rounded, dense = logprobs(file, "bfloat16")
    found, kept = logprobs(file, "auto")
    assert np.abs(found - exact).mean() < 3 * np.abs(rounded - exact).mean()
    assert kept.info.weight_bytes < 0.4 * dense.info.weight_bytes
    assert kept.info.weights == "5-bit weights (Q5_0), as in its file"


def test_float16_runs_as_float32_on_a_cpu(tmp_path: Path) -> None:
    save_model("llama_tied", tmp_path)
    exact, _ = logprobs(tmp_path)
    found, runner = logprobs(tmp_path, "float16")
    np.testing.assert_array_equal(found, exact)
    assert runner.info.weights == "float32 weights"
