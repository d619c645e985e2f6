"""Folders that cannot be run: each gives one error that names the fault."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.faults import has_param

from agentflow.engine.models.families.registry import read_config
from agentflow.engine.models.torch_runner import TorchRunner
from agentflow.errors import BadModelFolder

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 20,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "num_key_value_heads": 2}
OPT = {"architectures": ["OPTForCausalLM"], "model_type": "opt", "ffn_dim": 12}
GEMMA = {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"}
DEEPSEEK = {"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "kv_lora_rank": 8} | {
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "v_head_dim": 4,
}
MIXTRAL = MISTRAL | {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 2}
GPT_NEO = {"architectures": ["GPTNeoForCausalLM"], "num_layers": 2, "num_heads": 2}
QWEN = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "num_key_value_heads": 2}
LLAVA = {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava"}
QWEN_VL = QWEN | {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl"}


def write_config(folder: Path, **changed: object) -> None:
    config = {key: value for key, value in (CONFIG | changed).items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(config))


def write_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """All tensors of the small model, as ``change`` left them."""
    layer = "model.layers.0."
    shapes = {"model.embed_tokens": (20, 8), "lm_head": (20, 8), "model.norm": (8,)}
    shapes |= {f"{layer}self_attn.{name}_proj": (8, 8) for name in "qkvo"}
    shapes |= {f"{layer}mlp.{name}_proj": (12, 8) for name in ("gate", "up")}
    shapes |= {f"{layer}mlp.down_proj": (8, 12)}
    shapes |= {f"{layer}{name}_layernorm": (8,) for name in ("input", "post_attention")}
    tensors = {f"{name}.weight": torch.zeros(shape) for name, shape in shapes.items()}
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def load(folder: Path) -> TorchRunner:
    return TorchRunner(folder, num_slots=4, device="cpu", dtype="float32")


def test_defaults_of_a_short_config(tmp_path: Path) -> None:
    write_config(tmp_path)
    config = read_config(tmp_path)
    assert (config.num_kv_heads, config.head_dim, config.tie_word_embeddings) == (2, 4, False)
    assert (config.rope.kind, config.rope.theta, config.end_token_ids) == ("default", 10000.0, ())


def test_f37_the_type_of_a_model_may_be_anything(tmp_path: Path) -> None:
    write_config(tmp_path)
    shape = read_config(tmp_path)
    write_config(tmp_path, model_type=[])
    assert read_config(tmp_path) == shape


def test_a_pattern_of_windows_in_letters_stands_beside_the_types_of_layers(tmp_path: Path) -> None:
    exaone = {"architectures": ["Exaone4ForCausalLM"], "num_hidden_layers": 2, "sliding_window": 8}
    types = {"layer_types": ["sliding_attention", "full_attention"]}
    write_config(tmp_path, **exaone, **types)
    shape = read_config(tmp_path)
    write_config(tmp_path, **exaone, **types, sliding_window_pattern="LLLG")
    assert read_config(tmp_path) == shape


def test_end_tokens_come_from_both_files(tmp_path: Path) -> None:
    write_config(tmp_path, eos_token_id=5)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 5]}')
    assert read_config(tmp_path).end_token_ids == (3, 5)


@pytest.mark.parametrize(
    "changed",
    [
        MISTRAL | {"sliding_window": 64},
        MISTRAL | {"sliding_window": None},
        QWEN | {"sliding_window": 32, "use_sliding_window": False},
        {"sliding_window": 32},
        {"rope_scaling": None, "rope_theta": 5e5},
    ],
)
def test_windows_that_are_never_reached_are_fine(tmp_path: Path, changed: dict[str, Any]) -> None:
    write_config(tmp_path, **changed)
    config = read_config(tmp_path)
    assert (config.max_context, config.layers) == (64, ())


@pytest.mark.parametrize(
    ("changed", "param", "value"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "architectures", "MambaForCausalLM"),
        ({"architectures": ...}, "architectures", "llama"),
        ({"hidden_size": ...}, "model.embed_tokens.weight", "(20, 4096)"),
        ({"architectures": "BertModel"}, "architectures", "BertModel"),
        (LLAVA | {"text_config": {"model_type": "olmo"}}, "text_config", "olmo"),
        ({"hidden_size": "wide"}, "config.json", "wide"),
        ({"num_attention_heads": 0}, "config.json", ""),
        ({"quantization_config": 4}, "config.json", ""),
        ({"num_key_value_heads": 3}, "config.json", "3"),
        ({"num_key_value_heads": -2}, "config.json", "num_kv_heads is -2"),
        ({"vocab_size": 10**20}, "model.embed_tokens.weight", "(20, 8)"),
        ({"intermediate_size": 2**60}, "model.layers.0.mlp.gate_proj.weight", "(12, 8)"),
        ({"hidden_size": -8, "head_dim": 4}, "config.json", "hidden_size is -8"),
        ({"max_position_embeddings": 0}, "config.json", "max_context is 0"),
        ({"rms_norm_eps": math.nan}, "config.json", "norm_eps is nan"),
        ({"rope_theta": math.nan}, "rope_parameters", ""),
        ({"rope_theta": -2.0}, "rope_parameters", ""),
        (MIXTRAL | {"num_experts_per_tok": 3}, "config.json", "3 of 2"),
        (MIXTRAL | {"num_experts_per_tok": 0}, "config.json", "experts of a token is 0"),
        ({"head_dim": 10**20}, "config.json", "head_dim is 1"),
        ({"head_dim": 4, "num_attention_heads": 10**20}, "config.json", "num_heads is 1"),
        ({"head_dim": 4, "num_key_value_heads": 10**20}, "config.json", "100000000000000000000"),
        (MISTRAL | {"num_hidden_layers": 10**12}, "config.json", "num_hidden_layers is 1"),
        (GPT_NEO | {"attention_types": [[["global"], 10**12]]}, "attention_types", ""),
        (QWEN_VL | {"rope_parameters": {"mrope_section": [10**12, 0, 0]}}, "mrope_section", ""),
        ({"per_layer_config": {"0": {"hidden_act": "gelu"}}}, "per_layer_config", ""),
        ({"hidden_act": "tanh"}, "hidden_act", "tanh"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quantization_config", "hqq"),
        ({"rope_scaling": {"type": "su", "factor": 4.0}}, "rope_type", "su"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "short_factor", ""),
        (
            {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1, 1, 1]}},
            "short_factor",
            "3",
        ),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor", ""),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor", "1.5"),
        (MISTRAL | {"layer_types": ["chunked_attention"]}, "layer_types", "chunked_attention"),
        (MISTRAL | {"layer_types": ["full_attention"] * 2}, "layer_types", "2"),
        (OPT | {"do_layer_norm_before": False}, "do_layer_norm_before", ""),
        (OPT | {"word_embed_proj_dim": 4}, "word_embed_proj_dim", ""),
        (DEEPSEEK | {"topk_method": "noaux_tc"}, "topk_method", "noaux_tc"),
        (DEEPSEEK | {"scoring_func": "sigmoid"}, "scoring_func", "softmax"),
        (DEEPSEEK, "num_experts_per_tok", ""),
        (GEMMA | {"use_bidirectional_attention": True}, "use_bidirectional_attention", ""),
        ({"architectures": ["FalconForCausalLM"], "alibi": True}, "alibi", "ALiBi"),
        ({"architectures": ["OlmoeForCausalLM"], "clip_qkv": 8.0}, "clip_qkv", ""),
        (GPT_NEO | {"attention_types": [[["global", "both"], 1]]}, "attention_types", ""),
        ({"architectures": ["GraniteForCausalLM"], "residual_multiplier": 0}, "config.json", "zero"),
    ],
)
def test_configs_that_cannot_be_run(tmp_path: Path, changed: dict[str, Any], param: str, value: str) -> None:
    write_config(tmp_path, **changed)
    write_weights(tmp_path, lambda tensors: None)
    with pytest.raises(BadModelFolder, check=has_param(param)) as caught:
        load(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert value in str(caught.value)


@pytest.mark.parametrize("content", ["{", "[]", None])
def test_a_config_that_is_none(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(BadModelFolder, check=has_param("config.json")):
        load(tmp_path)


@pytest.mark.parametrize(
    ("change", "tensor", "shape"),
    [
        (lambda tensors: tensors.pop("model.norm.weight"), "model.norm.weight", ""),
        (lambda tensors: tensors.pop("lm_head.weight"), "lm_head.weight", ""),
        (
            lambda tensors: tensors.update({"model.norm.weight": torch.zeros(9)}),
            "model.norm.weight",
            "(9,)",
        ),
        (
            lambda tensors: tensors.update({"model.layers.0.self_attn.q_norm.weight": torch.zeros(4)}),
            "model.layers.0.self_attn.q_norm.weight",
            "",
        ),
        (
            lambda tensors: tensors.update({"model.norm.weight": torch.zeros(8, dtype=torch.int64)}),
            "model.norm.weight",
            "int64",
        ),
    ],
)
def test_weights_that_do_not_fit(
    tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], object], tensor: str, shape: str
) -> None:
    write_config(tmp_path)
    write_weights(tmp_path, change)
    with pytest.raises(BadModelFolder, check=has_param(tensor)) as caught:
        load(tmp_path)
    assert shape in str(caught.value)


def test_a_tied_model_ignores_a_head_that_is_stored_all_the_same(tmp_path: Path) -> None:
    write_config(tmp_path, tie_word_embeddings=True)
    write_weights(tmp_path, lambda tensors: None)
    runner = load(tmp_path)
    num_bytes = runner.info.weight_bytes
    runner.close()
    write_weights(tmp_path, lambda tensors: tensors.update({"lm_head.weight": torch.ones(20, 8)}))
    runner = load(tmp_path)
    assert runner.info.weight_bytes - num_bytes >= 20 * 8 * 4
    runner.close()


@pytest.mark.parametrize(
    ("file", "content", "param"),
    [
        ("model.safetensors", b"version https://git-lfs", "model.safetensors"),
        ("model.safetensors.index.json", b"{}", "model.safetensors.index.json"),
        ("model.safetensors.index.json", b'{"weight_map": {"a": "gone.safetensors"}}', "gone.safetensors"),
        ("pytorch_model.bin", b"", "*.safetensors"),
    ],
)
def test_weight_files_that_cannot_be_read(tmp_path: Path, file: str, content: bytes, param: str) -> None:
    write_config(tmp_path)
    (tmp_path / file).write_bytes(content)
    with pytest.raises(BadModelFolder, check=has_param(param)):
        load(tmp_path)


def test_a_shard_that_is_cut_off(tmp_path: Path) -> None:
    write_config(tmp_path)
    write_weights(tmp_path, lambda tensors: None)
    file = tmp_path / "model.safetensors"
    assert load_file(file)
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(BadModelFolder, check=has_param("model.safetensors")):
        load(tmp_path)
