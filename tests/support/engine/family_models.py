"""Small models of each architecture, with random weights, made by transformers' own classes."""

from __future__ import annotations

import copy
import functools
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

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
IN_BLOCKS = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
"""Sizes whose rows are whole blocks of 32 values."""
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
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
LAYER_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
MSCALE = {"mscale": 0.8, "mscale_all_dim": 0.6}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 6,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "moe_intermediate_size": 24,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}
# With features that the plain Llama shape lacks.
COMPOSED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama_yarn": ("llama", {"rope_parameters": YARN}),
    "llama_yarn_exact": ("llama", {"rope_parameters": YARN | {"truncate": False, "beta_fast": 8.0}}),
    "llama_gelu": ("llama", {"hidden_act": "gelu_new"}),
    "mistral_window": ("mistral", {"sliding_window": 16}),
    "qwen2_window": ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
    "qwen3_window": (
        "qwen3",
        {"head_dim": 16, "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    ),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 2}),
    "llama_dynamic": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 500.0}},
    ),
    "ministral": ("ministral", {"head_dim": 8, "sliding_window": 16, "layer_types": LAYER_TYPES}),
    "granite": (
        "granite",
        {"attention_multiplier": 0.2, "logits_scaling": 3.0, "embedding_multiplier": 0.6}
        | {"residual_multiplier": 0.3, "rms_norm_eps": 1e-3},
    ),
    "hyperclovax": (
        "hyperclovax",
        {"logits_scaling": 0.5, "residual_multiplier": 0.3, "rms_norm_eps": 1e-3},
    ),
    "seed_oss": ("seed_oss", {"head_dim": 16, "attention_out_bias": True}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "mixtral_window": ("mixtral", {"num_local_experts": 4, "sliding_window": 16}),
    "qwen3_moe": (
        "qwen3_moe",
        {"head_dim": 16, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
    ),
    "qwen3_moe_normalised": (
        "qwen3_moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
        | {"head_dim": 16, "mlp_only_layers": [1]},
    ),
    "qwen3_moe_window": (
        "qwen3_moe",
        {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
        | {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    ),
    "olmoe": ("olmoe", {"num_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 24}),
    "gemma": ("gemma", {"head_dim": 16}),
    "gemma2": ("gemma2", {"head_dim": 16, "sliding_window": 16, "query_pre_attn_scalar": 24}),
    "vaultgemma": ("vaultgemma", {"head_dim": 16, "sliding_window": 16, "query_pre_attn_scalar": 24}),
    "gemma3": (
        "gemma3_text",
        {"head_dim": 16, "sliding_window": 16, "query_pre_attn_scalar": 24, "_sliding_window_pattern": 2}
        | {"layer_types": LAYER_TYPES},
    ),
    "gemma3_images": (
        "gemma3",
        {
            "text_config": SIZES | {"head_dim": 16, "sliding_window": 16, "query_pre_attn_scalar": 24},
            "vision_config": {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
            | {"num_hidden_layers": 1, "image_size": 28, "patch_size": 14},
            "mm_tokens_per_image": 4,
        },
    ),
    "phi3": ("phi3", {}),
    "phi3_window": ("phi3", {"sliding_window": 16}),
    "phi3_partial": (
        "phi3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}},
    ),
    "phi3_longrope": (
        "phi3",
        {
            "max_position_embeddings": 1024,
            "original_max_position_embeddings": 256,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 500.0,
                "short_factor": [1.0, 1.1, 1.3, 1.7],
                "long_factor": [1.0, 2.0, 3.0, 4.0],
                "original_max_position_embeddings": 256,
            },
        },
    ),
    "olmo2": ("olmo2", {}),
    "olmo3": (
        "olmo3",
        {
            "sliding_window": 16,
            "layer_types": LAYER_TYPES,
            "rope_parameters": {
                "full_attention": YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "exaone4": ("exaone4", {"sliding_window": 16, "layer_types": LAYER_TYPES}),
    "exaone4_full": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "glm": ("glm", {"head_dim": 16}),
    "glm4": ("glm4", {"head_dim": 16, "attention_bias": False}),
    "helium": ("helium", {"head_dim": 8}),
    "ernie4_5": ("ernie4_5", {"head_dim": 16, "use_bias": True}),
    "gpt_oss": (
        "gpt_oss",
        {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16},
    ),
    "deepseek_v2": (
        "deepseek_v2",
        LATENT | {"q_lora_rank": None, "n_routed_experts": 6, "rope_parameters": YARN | MSCALE},
    ),
    "deepseek_v2_groups": (
        "deepseek_v2",
        LATENT
        | {"q_lora_rank": 24, "n_routed_experts": 8, "routed_scaling_factor": 2.0}
        | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    ),
    "starcoder2": ("starcoder2", {"sliding_window": None, "tie_word_embeddings": False}),
    "starcoder2_window": ("starcoder2", {"sliding_window": 16}),
    "gpt2": (
        "gpt2",
        {"n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 256, "num_key_value_heads": None},
    ),
    "starcoder": (
        "gpt_bigcode",
        {"n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 256, "num_key_value_heads": None}
        | {"tie_word_embeddings": False},
    ),
    "starcoder_all_heads": (
        "gpt_bigcode",
        {"n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 256, "num_key_value_heads": None}
        | {"multi_query": False},
    ),
    "gpt_neo": (
        "gpt_neo",
        {"num_layers": 3, "num_heads": 6, "attention_types": [[["global", "local"], 1], [["local"], 1]]}
        | {"window_size": 16, "num_key_value_heads": None},
    ),
    "opt": ("opt", {"ffn_dim": 80, "word_embed_proj_dim": 48, "num_key_value_heads": None}),
    "phi": ("phi", {"num_key_value_heads": 6}),
    "phi_normed": ("phi", {"qk_layernorm": True, "tie_word_embeddings": True}),
    "gptj": (
        "gptj",
        {"n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 256, "rotary_dim": 4}
        | {"num_key_value_heads": None},
    ),
    "gpt_neox": ("gpt_neox", {"num_key_value_heads": None}),
    "gpt_neox_in_turn": (
        "gpt_neox",
        {"use_parallel_residual": False, "attention_bias": False, "num_key_value_heads": None}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0}},
    ),
    "falcon": ("falcon", {"tie_word_embeddings": False, "num_key_value_heads": None}),
    "falcon_groups": (
        "falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True, "ffn_hidden_size": 80}
        | {"tie_word_embeddings": False, "num_key_value_heads": None},
    ),
    "falcon_groups_one_norm": (
        "falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 3, "num_ln_in_parallel_attn": 1}
        | {"num_key_value_heads": None},
    ),
    "falcon_in_turn": (
        "falcon",
        {"multi_query": False, "parallel_attn": False, "bias": True, "tie_word_embeddings": False}
        | {"num_key_value_heads": None},
    ),
    "stablelm": ("stablelm", {"use_qkv_bias": True}),
    "stablelm_parallel": (
        "stablelm",
        {"use_parallel_residual": True, "qk_layernorm": True, "num_key_value_heads": 3},
    ),
    "cohere": ("cohere", {"logit_scale": 0.3}),
    "cohere_normed": (
        "cohere",
        {"logit_scale": 2.0, "use_qk_norm": True, "attention_bias": True, "tie_word_embeddings": False},
    ),
    "cohere2": ("cohere2", {"sliding_window": 16, "num_hidden_layers": 4, "logit_scale": 0.5}),
}
# Families that run through transformers.
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "arcee": ("arcee", {}),
    "granitemoe": (
        "granitemoe",
        {"attention_multiplier": 0.2, "logits_scaling": 3.0, "num_local_experts": 4},
    ),
    "phimoe_longrope": (
        "phimoe",
        {
            "num_local_experts": 4,
            "max_position_embeddings": 1024,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 500.0,
                "short_factor": [1.0, 1.1, 1.3, 1.7],
                "long_factor": [1.0, 4.0, 9.0, 16.0],
                "short_mscale": 1.2,
                "long_mscale": 1.4,
                "original_max_position_embeddings": 256,
            },
        },
    ),
    "cwm": (
        "cwm",
        {"sliding_window": 16, "head_dim": 8, "bos_token_id": 1}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    ),
}


def saved_model(name: str, folder: Path, **changed: Any) -> transformers.PreTrainedModel:
    """A model with random weights, biases and norms, saved to ``folder``. ``changed``: in its config. Skips
    the test if the installed transformers lacks the architecture."""
    made, is_shared = _written(name, folder, changed)
    return copy.deepcopy(made.model) if is_shared else made.model


def save_model(name: str, folder: Path, **changed: Any) -> None:
    """Saves the model of ``saved_model``, without a copy of it."""
    _written(name, folder, changed)


def _written(name: str, folder: Path, changed: dict[str, Any]) -> tuple[_Made, bool]:
    """The model, written to ``folder``, and whether other tests have the same object."""
    kind, own = (MODELS | COMPOSED | OTHERS)[name]
    if kind not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    is_large = changed.get("vocab_size", 0) > 10_000
    made = (_made.__wrapped__ if is_large else _made)(kind, json.dumps(SIZES | own | changed))
    folder.mkdir(parents=True, exist_ok=True)
    for file, content in made.files.items():
        (folder / file).write_bytes(content)
    torch.set_rng_state(made.rng_state)  # a test's random numbers do not depend on earlier tests
    return made, not is_large


@dataclass(frozen=True)
class _Made:
    """A model, its files, and the random numbers that come after its weights."""

    model: transformers.PreTrainedModel
    files: dict[str, bytes]
    rng_state: torch.Tensor


@functools.lru_cache(100)  # several tests have the same models
def _made(kind: str, config: str) -> _Made:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(kind, **json.loads(config))
    )
    with torch.no_grad():
        for parameter in model.parameters():
            # Large enough that the tokens of a sequence differ and near-ties are rare.
            parameter.add_(torch.randn_like(parameter) * 0.2)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        files = {file.name: file.read_bytes() for file in Path(folder).iterdir()}
    return _Made(model.eval(), files, torch.get_rng_state())
