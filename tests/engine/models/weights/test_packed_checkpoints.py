"""Safetensors with quantised matrices, against the values that they stand for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from support.engine.packed_models import (
    KINDS,
    awq,
    gptq,
    mxfp4,
    pack_stacks,
    packed,
    quantise_folder,
)
from support.engine.runner_driver import Driver
from support.faults import has_param

from agentflow.engine.models.memory_need import memory_need
from agentflow.engine.models.torch_runner import TorchRunner
from agentflow.engine.models.weights.packed_matrices import (
    GroupedMatrix,
    awq_matrix,
    gptq_matrix,
    mxfp4_blocks,
    mxfp4_values,
    packed_matrix,
)
from agentflow.engine.store.gguf.tensors import dequantise
from agentflow.errors import BadModelFolder

SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": 7,
    "pad_token_id": 0,
}
GPT_OSS = {"head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16}


def save_model(kind: str, folder: Path, **changed: Any) -> None:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(kind, **(SIZES | changed))
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    folder.mkdir()
    model.save_pretrained(folder)


def run(folder: Path, dtype: str) -> tuple[NDArray[np.float32], int]:
    """Log-probabilities of random tokens after each of a random text, and the bytes of the weights."""
    runner = TorchRunner(folder, num_slots=200, device="cpu", dtype=dtype)
    driver = Driver(runner)
    walker = driver.add(np.random.default_rng(1).integers(10, 320, 120).tolist())
    targets = np.arange(100, 219)
    output = driver.step([(walker, 119)], rows=np.arange(119), target_ids=targets, needs_logprobs=True)
    assert output.logprobs is not None
    return output.logprobs, runner.info.weight_bytes


@pytest.mark.parametrize("kind", KINDS)
def test_a_packed_folder_computes_what_its_values_do(kind: str, tmp_path: Path) -> None:
    save_model("qwen2", tmp_path / "values")
    quantise_folder(tmp_path / "values", tmp_path / "packed", kind)
    expected, _ = run(tmp_path / "values", "float32")
    found, _ = run(tmp_path / "packed", "float32")
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
    assert np.ptp(expected) > 1
    rounded, dense_bytes = run(tmp_path / "values", "bfloat16")
    kept, num_bytes = run(tmp_path / "packed", "auto")
    assert num_bytes < 0.85 * dense_bytes  # the embedding is dense
    need = memory_need("packed", tmp_path / "packed", "bfloat16", None).weight_bytes
    assert 0.9 * dense_bytes < need < 1.3 * dense_bytes  # with the scales
    assert np.abs(kept - expected).mean() < 2e-2 * np.abs(expected).mean()
    assert np.abs(kept - expected).mean() < 4 * np.abs(rounded - expected).mean()


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("kind", ["gptq", "gptq_act_order", "gptq_8_bits_zeros"])
def test_gpt2_in_gptq(kind: str, kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPT-2's plain matrices are [in, out], one of them square; GPTQ's matrices are [out, in]."""
    monkeypatch.setenv("AGENTFLOW_KERNELS", kernels)
    save_model("gpt2", tmp_path / "values")
    endings = ("c_attn", "c_proj", "c_fc")
    quantise_folder(tmp_path / "values", tmp_path / "packed", kind, endings=endings, is_transposed=True)
    expected, _ = run(tmp_path / "values", "float32")
    found, _ = run(tmp_path / "packed", "float32")
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
    assert np.ptp(expected) > 1
    _, dense_bytes = run(tmp_path / "values", "bfloat16")
    kept, num_bytes = run(tmp_path / "packed", "auto")
    assert (num_bytes < 0.85 * dense_bytes) == (kernels == "native")
    assert np.abs(kept - expected).mean() < 2e-2 * np.abs(expected).mean()


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_experts_in_mxfp4(kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTFLOW_KERNELS", kernels)
    save_model("gpt_oss", tmp_path / "values", **GPT_OSS)
    pack_stacks(tmp_path / "values", tmp_path / "packed")
    expected, _ = run(tmp_path / "values", "float32")
    found, _ = run(tmp_path / "packed", "float32")
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
    rounded, dense_bytes = run(tmp_path / "values", "bfloat16")
    kept, num_bytes = run(tmp_path / "packed", "auto")
    assert (num_bytes < 0.75 * dense_bytes) == (kernels == "native")
    assert np.abs(kept - expected).mean() < 4 * np.abs(rounded - expected).mean()


# Multiples of 8 outputs, as both formats need, in groups of 32 to 128 inputs.
sizes = st.tuples(st.integers(1, 4), st.sampled_from([(64, 32), (128, 128), (256, 128), (96, -1)]))
settings_of_matrices = settings(max_examples=15, deadline=None)


def weight_of(size: tuple[int, tuple[int, int]], seed: int) -> torch.Tensor:
    torch.manual_seed(seed)
    return torch.randn(8 * size[0], size[1][0]) * 0.05


def assert_blocks_near(matrix: GroupedMatrix, exact: torch.Tensor, *, is_symmetric: bool) -> None:
    """Blocks have the values of the matrix but for the rounding of minimums, or to 8 bits."""
    blocks = matrix.blocks(is_symmetric=is_symmetric)
    assert blocks is not None
    found = torch.from_numpy(dequantise(blocks.rows, blocks.type))
    bound = 2**-8 if blocks.type == "Q8_0" else 2**-10
    assert (found - exact).abs().max() <= bound * exact.abs().max() * 2


@settings_of_matrices
@given(sizes, st.integers(0, 99))
def test_awq_matrices(size: tuple[int, tuple[int, int]], seed: int) -> None:
    parts, exact = awq(weight_of(size, seed), size[1][1])
    matrix = awq_matrix(parts["qweight"], parts["qzeros"], parts["scales"])
    assert torch.equal(matrix.dequantised(), exact)
    assert_blocks_near(matrix, exact, is_symmetric=False)


@settings_of_matrices
@given(
    sizes,
    st.integers(0, 99),
    st.sampled_from([2, 4, 8]),
    st.sampled_from([1, 2]),
    st.booleans(),
    st.booleans(),
)
def test_gptq_matrices(
    size: tuple[int, tuple[int, int]],
    seed: int,
    bits: int,
    version: int,
    act_order: bool,
    is_symmetric: bool,
) -> None:
    weight = weight_of((size[0] * 2, size[1]), seed)
    parts, exact = gptq(
        weight, bits, size[1][1], version=version, act_order=act_order, is_symmetric=is_symmetric
    )
    arguments = parts["qweight"], parts["qzeros"], parts["scales"], parts["g_idx"]
    matrix = gptq_matrix(*arguments, bits, 2 - version)
    assert torch.equal(matrix.dequantised(), exact)
    assert_blocks_near(matrix, exact, is_symmetric=is_symmetric)


@settings_of_matrices
@given(sizes, st.integers(0, 99), st.sampled_from([4, 8]), st.booleans(), st.booleans())
def test_packed_matrices(
    size: tuple[int, tuple[int, int]], seed: int, bits: int, act_order: bool, is_symmetric: bool
) -> None:
    weight = weight_of(size, seed)[:-3]  # the last word of zero points is not full
    parts, exact = packed(weight, bits, size[1][1], is_symmetric=is_symmetric, act_order=act_order)
    matrix = packed_matrix(
        parts["weight_packed"],
        parts["weight_scale"],
        parts.get("weight_zero_point"),
        parts.get("weight_g_idx"),
        (weight.shape[0], weight.shape[1]),
        bits,
    )
    assert torch.equal(matrix.dequantised(), exact)
    assert_blocks_near(matrix, exact, is_symmetric=is_symmetric)


def test_mxfp4_is_exact_in_blocks_of_5_bits() -> None:
    torch.manual_seed(3)
    blocks, scales, exact = mxfp4(torch.randn(2, 12, 96) * torch.logspace(-3, 1, 12)[:, None])
    assert torch.equal(mxfp4_values(blocks, scales), exact)
    found = mxfp4_blocks(blocks[1], scales[1])
    np.testing.assert_array_equal(dequantise(found.rows, found.type), exact[1].numpy())


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        {"quant_method": "eetq"},
        {"load_in_8bit": True},
        {"quant_method": "awq", "bits": 4, "version": "gemv"},
        {"quant_method": "awq", "bits": 3},
        {"quant_method": "gptq", "bits": 3},
        {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"},
        {"quant_method": "gptq", "bits": 4, "is_marlin_format": True},
        {"quant_method": "gptq", "bits": 4, "dynamic": {"-:lm_head": {}}},
        {
            "quant_method": "compressed-tensors",
            "format": "marlin-24",
            "config_groups": {"group_0": {"weights": {"num_bits": 4}}},
        },
        {
            "quant_method": "compressed-tensors",
            "format": "nvfp4-pack-quantized",
            "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "float"}}},
        },
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"weights": {"num_bits": 3}}},
        },
    ],
    ids=lambda config: "-".join(
        str(config.get(name)) for name in ("quant_method", "format", "version", "bits")
    ),
)
def test_formats_that_are_not_read(config: dict[str, Any], tmp_path: Path) -> None:
    save_model("qwen2", tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": config}))
    with pytest.raises(BadModelFolder, check=has_param("quantization_config")) as caught:
        TorchRunner(tmp_path / "model", num_slots=4, device="cpu")
    assert str(config.get("quant_method", "unknown")).split("-")[0] in str(caught.value).lower()


@pytest.mark.parametrize(
    ("name", "shape"), [("qzeros", None), ("scales", (3, 64)), ("qweight", (9, 8)), ("g_idx", (64,))]
)
def test_damaged_parts(name: str, shape: tuple[int, ...] | None, tmp_path: Path) -> None:
    """Missing, or of another shape; or groups that do not exist."""
    save_model("qwen2", tmp_path / "values")
    quantise_folder(tmp_path / "values", tmp_path / "packed", "gptq")
    file = tmp_path / "packed" / "model.safetensors"
    tensors, stem = load_file(file), "model.layers.1.self_attn.o_proj."
    damaged = tensors.pop(stem + name)
    if shape is not None:
        tensors[stem + name] = torch.full(shape, 9, dtype=damaged.dtype)
    save_file(tensors, file)
    for dtype in ("auto", "float32"):
        with pytest.raises(BadModelFolder) as caught:
            TorchRunner(tmp_path / "packed", num_slots=4, device="cpu", dtype=dtype)
        assert caught.value.param in (stem + name, stem + "weight")
