"""Models with weights, or keys and values, in 8-bit floats, under Triton's interpreter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.engine.random_model import write_random_model
from support.engine.runner_driver import Driver
from support.faults import has_param

pytest.importorskip("triton", reason="triton is for x86-64 and Linux")

from agentflow.engine.models.memory_need import memory_need
from agentflow.engine.models.tensor_parallel.runner import TensorParallelRunner
from agentflow.engine.models.torch_runner import TorchRunner
from agentflow.engine.models.weights.quantising import quantised
from agentflow.errors import BadArgument

pytestmark = pytest.mark.timeout(120)
PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [200, 100], [5, 6, 7, 8, 40]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_random_model(tmp_path / "model", intermediate_size=64, head_dim=16)


def opened(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kernels: str = "triton", **options: Any
) -> TorchRunner:
    monkeypatch.setenv("AGENTFLOW_KERNELS", kernels)
    return TorchRunner(folder, num_slots=200, device="cpu", dtype="float32", **options)


def greedy(runner: TorchRunner, max_chunk: int = 4096) -> list[list[int]]:
    driver = Driver(runner)
    walkers = [driver.add(prompt) for prompt in PROMPTS]
    driver.generate(walkers, 4, max_chunk=max_chunk)
    return [walker.generated for walker in walkers]


def logprobs(runner: TorchRunner) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """The log-probabilities of a prompt's tokens."""
    driver, tokens = Driver(runner), [5, 6, 7, 8, 9, 10, 11, 12, 13]
    output = driver.step(
        [(driver.add(tokens), len(tokens))],
        rows=np.arange(len(tokens) - 1),
        target_ids=np.array(tokens[1:]),
        needs_logprobs=True,
    )
    assert output.logprobs is not None
    return output.logprobs


def test_f42q_weights_are_rounded_while_a_model_is_loaded(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model computes the same as a model whose files have the rounded weights."""
    runner = opened(folder, monkeypatch, quantize="fp8")
    assert "8-bit weights (F8_E4M3)" in runner.info.weights
    rounded = tmp_path / "rounded"
    rounded.mkdir()
    for file in folder.iterdir():
        (rounded / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.dim() == 2:
            rows = torch.from_numpy(quantised(tensor, "F8_E4M3").rows)
            scales = rows[:, :4].contiguous().view(torch.float32)
            tensors[name] = rows[:, 4:].contiguous().view(torch.float8_e4m3fn).float() * scales
    save_file(tensors, rounded / "model.safetensors", {"format": "pt"})
    reference = opened(rounded, monkeypatch, "torch")
    np.testing.assert_allclose(logprobs(runner), logprobs(reference), rtol=1e-4, atol=1e-4)
    assert greedy(runner) == greedy(reference)
    assert runner.info.identity != opened(folder, monkeypatch).info.identity


def test_f42q_keys_and_values_in_8_bits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They take a quarter of float32, change little, and are the same in chunks of any size."""
    plain, runner = opened(folder, monkeypatch), opened(folder, monkeypatch, kv_dtype="fp8")
    assert 4 * runner.info.kv_bytes_per_token == plain.info.kv_bytes_per_token
    assert runner.kv_layers[0].dtype == torch.float8_e4m3fn
    assert runner.info.identity != plain.info.identity
    assert greedy(runner, max_chunk=3) == greedy(runner)
    difference = np.abs(logprobs(runner) - logprobs(plain))
    assert 0 < difference.max() < 0.1


@pytest.mark.parametrize(("dtype", "kv_dtype", "num_bytes"), [("float32", "fp8", 1), ("auto", "auto", 2)])
@pytest.mark.parametrize("quantize", [None, "fp8"])
def test_the_memory_of_8_bit_floats_is_known_before(
    folder: Path, quantize: str | None, dtype: str, kv_dtype: str, num_bytes: int
) -> None:
    need = memory_need("", folder, dtype, None, quantize, kv_dtype=kv_dtype, on_gpu=True)
    assert need.kv_bytes_per_token == 2 * 2 * 2 * 16 * num_bytes
    dense = memory_need("", folder, dtype, None, on_gpu=True).weight_bytes
    per_weight = 4 if dtype == "float32" else 2
    assert need.weight_bytes == (dense if quantize is None else pytest.approx(dense / per_weight, rel=0.01))


@pytest.mark.parametrize("option", ["quantize", "kv_dtype"])
@pytest.mark.parametrize("kernels", ["", "torch", "native"])
def test_8_bit_floats_are_refused_where_there_are_none(
    folder: Path, monkeypatch: pytest.MonkeyPatch, option: str, kernels: str
) -> None:
    """Before any tensor is read; so do models that are divided, before a process is started."""
    (folder / "model.safetensors").unlink()
    with pytest.raises(BadArgument, check=has_param(option)):
        opened(folder, monkeypatch, kernels, **{option: "fp8"})
    with pytest.raises(BadArgument, check=has_param(option)):
        TensorParallelRunner(folder, 2, num_slots=100, device="cpu", **{option: "fp8"})


def test_an_unknown_type_of_keys_and_values(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadArgument, check=has_param("kv_dtype")):
        opened(folder, monkeypatch, kv_dtype="int8")
