"""Small random models of every architecture, written to GGUF files, against the same from safetensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support.engine.gguf_models import round_weights, write_gguf
from support.engine.runner_driver import Driver
from transformers import AutoConfig, AutoModelForCausalLM

from agentflow.engine.models.torch_runner import TorchRunner

SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": [7, 9],
    "pad_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "short_factor": [1.0, 1.1, 1.3, 1.5, 1.6, 1.7],
    "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
    "original_max_position_embeddings": 128,
    "partial_rotary_factor": 0.75,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama_tied": ("llama", {"tie_word_embeddings": True}),
    "llama_biased": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama_wide_heads": ("llama", {"head_dim": 32}),
    "llama_llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama_linear": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}},
    ),
    "llama_yarn": ("llama", {"rope_parameters": YARN | {"beta_fast": 8.0}}),
    "mistral": ("mistral", {"sliding_window": 16}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2": ("qwen2", {}),
    "qwen2_yarn": ("qwen2", {"rope_parameters": YARN}),
    "qwen3": ("qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3_moe": (
        "qwen3_moe",
        {
            "head_dim": 32,
            "num_experts": 12,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
        },
    ),
    "smollm3": ("smollm3", {"num_hidden_layers": 5}),
    "olmo2": ("olmo2", {}),
    "phi3": ("phi3", {"sliding_window": None}),
    "phi3_longrope": ("phi3", {"sliding_window": 16, "rope_parameters": LONGROPE}),
    "gemma2": ("gemma2", {"head_dim": 32, "sliding_window": 16, "query_pre_attn_scalar": 32}),
    "gemma3": ("gemma3_text", {"head_dim": 32, "sliding_window": 16, "query_pre_attn_scalar": 32}),
    "gpt_oss": (
        "gpt_oss",
        {"head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16},
    ),
    "gpt2": ("gpt2", {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256}),
}


def save_model(name: str, folder: Path) -> None:
    """A model with random weights, biases and norms."""
    kind, changed = MODELS[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(SIZES | changed)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)


def logprobs(
    path: Path, dtype: str = "float32", quantize: str | None = None
) -> tuple[NDArray[np.float32], TorchRunner]:
    """Of random tokens after each of a random text."""
    runner = TorchRunner(path, num_slots=200, device="cpu", dtype=dtype, quantize=quantize)
    tokens = np.random.default_rng(1).integers(10, 320, 120)
    driver = Driver(runner)
    walker = driver.add(tokens.tolist())
    targets = np.arange(100, 219)
    output = driver.step([(walker, 119)], rows=np.arange(119), target_ids=targets, needs_logprobs=True)
    assert output.logprobs is not None
    return output.logprobs, runner


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
@pytest.mark.parametrize("name", MODELS)
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


@pytest.mark.parametrize(
    "name", ["llama_tied", "llama_biased", "qwen3_moe", "gemma3", "phi3", "gpt2", "gpt_oss"]
)
@pytest.mark.parametrize("source", ["gguf", "safetensors"])
def test_quantised_weights_are_multiplied_as_they_are(name: str, source: str, tmp_path: Path) -> None:
    """Errors are compared with those of bfloat16: what they grow to differs between random models."""
    save_model(name, tmp_path)
    write_gguf(tmp_path, file := tmp_path / "model.gguf", "Q8_0")
    exact, _ = logprobs(file)
    rounded, dense = logprobs(file, "bfloat16")
    if source == "gguf":
        found, kept = logprobs(file, "auto")
    else:
        found, kept = logprobs(tmp_path, "bfloat16", "int8")
    assert np.abs(found - exact).mean() < 3 * np.abs(rounded - exact).mean()
    assert kept.info.weight_bytes < 0.6 * dense.info.weight_bytes
    assert "8-bit" in kept.info.weights
    assert "Q8_0" in kept.info.weights
    assert ("as in its file" in kept.info.weights) == (source == "gguf")
    assert dense.info.weights == "bfloat16 weights"


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
