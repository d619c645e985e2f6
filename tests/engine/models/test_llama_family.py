"""Small random models of every architecture that is supported, against transformers' own code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.engine.runner_driver import Driver
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from agentflow.engine.models.torch_runner import TorchRunner

SIZES = {
    "vocab_size": 320,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
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
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama_tied": ("llama", {"tie_word_embeddings": True}),
    "llama_biased": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama_all_heads": ("llama", {"num_key_value_heads": 6}),
    "llama_wide_heads": ("llama", {"head_dim": 16}),
    "llama_linear": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}},
    ),
    "llama_llama3": ("llama", {"rope_parameters": LLAMA3}),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 16}),
}


def saved_model(name: str, folder: Path) -> PreTrainedModel:
    """A model with random weights, biases and norms, saved to ``folder``."""
    kind, changed = MODELS[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(SIZES | changed)))
    with torch.no_grad():
        for parameter in model.parameters():
            # Large enough that the tokens of a sequence differ and near-ties are rare.
            parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    return model.eval()


def assert_equal_to_transformers(model: PreTrainedModel, folder: Path) -> None:
    """Greedy tokens of three requests in one batch, prefilled in random chunks."""
    runner = TorchRunner(folder, num_slots=400, device="cpu", dtype="float32")
    driver = Driver(runner)
    prompts = [torch.randint(10, 320, (n,)).tolist() for n in (3, 40, 17)]
    batch = [driver.add(prompt) for prompt in prompts]
    driver.generate(batch, 20, max_chunk=12)
    for sequence in batch:
        with torch.inference_mode():
            logits = model(torch.tensor([sequence.tokens[:-1]])).logits[0]
        assert sequence.generated == logits[sequence.prompt_len - 1 :].argmax(-1).tolist()
    assert runner.info.end_token_ids == (7, 9)
    assert len(set(batch[1].generated)) > 5


@pytest.mark.parametrize("kernels", ["native", "torch", "reference"])
@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_equal_transformers(
    name: str, kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENTFLOW_KERNELS", kernels)
    assert_equal_to_transformers(saved_model(name, tmp_path), tmp_path)


def test_a_folder_in_shards(tmp_path: Path) -> None:
    model = saved_model("qwen2", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    shards = {name: f"model-0000{i % 3}.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in set(shards.values()):
        save_file({name: tensors[name] for name in tensors if shards[name] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    assert_equal_to_transformers(model, tmp_path)


def test_a_config_as_older_releases_wrote_it(tmp_path: Path) -> None:
    """rope_theta and rope_scaling instead of rope_parameters, no head_dim, one end token, and rotary
    frequencies among the weights."""
    model = saved_model("llama_llama3", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    scaling = config.pop("rope_parameters")
    config |= {"rope_theta": scaling.pop("rope_theta"), "rope_scaling": scaling, "eos_token_id": 9}
    del config["head_dim"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(tensors, tmp_path / "model.safetensors")
    assert_equal_to_transformers(model, tmp_path)


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16])
def test_weights_stored_in_another_type(stored: torch.dtype, tmp_path: Path) -> None:
    model = saved_model("llama", tmp_path)
    model.to(stored).save_pretrained(tmp_path)
    assert_equal_to_transformers(model.float(), tmp_path)


def test_a_chunk_that_ends_before_the_prompt_gives_no_token(tmp_path: Path) -> None:
    saved_model("llama", tmp_path)
    driver = Driver(TorchRunner(tmp_path, num_slots=100, device="cpu", dtype="bfloat16"))
    sequence = driver.add(range(10, 40))
    output = driver.step([(sequence, 12)])
    assert (output.token_ids.tolist(), output.logprobs) == ([], None)
    driver.generate([sequence], 3)
    assert len(sequence.generated) == 3
