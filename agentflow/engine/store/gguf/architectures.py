"""The architectures of GGUF files: their configs and the names of their tensors in transformers.

An entry of ``ARCHITECTURES`` describes one architecture: a function that reads the config from the metadata,
and the names of its tensors. Where a file leaves out a fact, such as the layers with windows, the function
assumes the same as llama.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from agentflow.engine.store.gguf.container import StoredTensor
from agentflow.engine.store.gguf.metadata import GgufMetadata
from agentflow.engine.store.gguf.tensors import dequantise

StoredTensors = Mapping[str, StoredTensor]
Config = dict[str, Any]

ROPE_TENSORS: Final = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
"""Tensors that are read as a part of the config."""
_MAX_LAYERS: Final = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """An architecture. ``top``, ``layer`` and ``experts`` map names in the file to names in the model,
    without ``.weight`` and ``.bias``."""

    read: Callable[[GgufMetadata, StoredTensors], Config]  # returns the config
    top: Mapping[str, str]  # names outside of layers
    # Names in a layer: below ``blk.N.`` in the file, below ``prefix`` in the model. With ``{}``, the model
    # has a tensor for each row of the file's tensor.
    layer: Mapping[str, str]
    prefix: str = "model.layers.{}."
    experts: Mapping[str, str] | None = None  # the names of one expert's matrices; ``{}`` is its number
    has_pairs: bool = False  # query and key rows are stored in pairs
    norm_shift: float = 0.0  # added to norm weights
    transposed: frozenset[str] = frozenset()  # matrices that the model stores as inputs by outputs
    has_stacks: bool = False  # the model has all experts in one tensor
    # The matrix that expands latents to keys and values may be two tensors in the file, ``k_b_proj`` and
    # ``v_b_proj``; it is one tensor in the model.
    splits_latents: bool = False


def _common(data: GgufMetadata, stored: StoredTensors, architecture: str, model_type: str) -> Config:
    """Reads the fields that most architectures share."""
    hidden_size, num_heads = data.integer(".embedding_length"), _num_heads(data)
    head_dim = data.integer(".attention.key_length", hidden_size // num_heads)
    if data.integer(".attention.value_length", head_dim) != head_dim:
        raise data.reject(
            ".attention.value_length", "differs from the length of keys, which is not supported"
        )
    return _decoder(data, stored, architecture, model_type, head_dim) | {
        "rms_norm_eps": data.number(".attention.layer_norm_rms_epsilon")
    }


def _decoder(
    data: GgufMetadata, stored: StoredTensors, architecture: str, model_type: str, head_dim: int
) -> Config:
    """Reads the fields that all decoders with rotated heads share. ``head_dim``: the size of the part that
    may rotate."""
    num_heads = _num_heads(data)
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": _vocab_size(data, stored),
        "max_position_embeddings": data.integer(".context_length"),
        "num_hidden_layers": _num_layers(data),
        "hidden_size": data.integer(".embedding_length"),
        "intermediate_size": data.integer(".feed_forward_length"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": data.integer(".attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rope_parameters": _rope(data, stored, head_dim),
        "attention_bias": "blk.0.attn_q.bias" in stored,
        "mlp_bias": "blk.0.ffn_up.bias" in stored,
        "tie_word_embeddings": "output.weight" not in stored,
    }


def _num_heads(data: GgufMetadata) -> int:
    count = data.integer(".attention.head_count")
    if count < 1:
        raise data.reject(".attention.head_count", "must be at least 1")
    return count


def _num_layers(data: GgufMetadata) -> int:
    """Returns the number of layers. It is limited, because it determines the lengths of lists."""
    count = data.integer(".block_count")
    if not 0 < count <= _MAX_LAYERS:
        raise data.reject(".block_count", f"is {count}: a model has 1 to {_MAX_LAYERS:,} layers")
    return count


def _vocab_size(data: GgufMetadata, stored: StoredTensors) -> int:
    """Returns the size of the vocabulary: the rows of the embedding, which may be padded."""
    embedding = stored.get("token_embd.weight")
    return embedding.shape[0] if embedding is not None else data.integer(".vocab_size")


def _rope(data: GgufMetadata, stored: StoredTensors, head_dim: int) -> Config:
    rope: Config = {"rope_type": "default", "rope_theta": data.number(".rope.freq_base", 10_000.0)}
    num_rotated = data.integer(".rope.dimension_count", head_dim)
    if num_rotated != head_dim:
        rope["partial_rotary_factor"] = num_rotated / head_dim
    original = data.integer(".rope.scaling.original_context_length", data.integer(".context_length"))
    factors = stored.get("rope_factors_short.weight") or stored.get("rope_freqs.weight")
    if factors is not None:
        # Files have factors for Llama 3, too, instead of the parameters from which they follow.
        long = stored.get("rope_factors_long.weight", factors)
        return rope | {
            "rope_type": "longrope",
            "short_factor": _values(factors),
            "long_factor": _values(long),
            "attention_factor": data.number(".rope.scaling.attn_factor", 1.0),
            "original_max_position_embeddings": original,
        }
    factor = data.number(".rope.scaling.factor", data.number(".rope.scale_linear", 1.0)) or 1.0
    match data.text(".rope.scaling.type", "linear"):
        case "linear" if factor != 1.0:
            return rope | {"rope_type": "linear", "factor": factor}
        case "yarn":
            return rope | {
                "rope_type": "yarn",
                "factor": factor,
                "original_max_position_embeddings": original,
                "beta_fast": data.number(".rope.scaling.yarn_beta_fast", 32.0),
                "beta_slow": data.number(".rope.scaling.yarn_beta_slow", 1.0),
                **_yarn_amplitude(data, factor),
            }
        case "linear" | "none" | "longrope":
            return rope
        case kind:
            raise data.reject(".rope.scaling.type", f"is {kind!r}, which is not supported")


def _yarn_amplitude(data: GgufMetadata, factor: float) -> Config:
    if ".rope.scaling.yarn_attn_factor" in data:
        return {"attention_factor": data.number(".rope.scaling.yarn_attn_factor")}
    if multiplier := data.number(".rope.scaling.yarn_log_multiplier", 0.0):
        return {"mscale": 1.0, "mscale_all_dim": multiplier}
    if ".rope.scaling.attn_factor" in data:
        plain = 0.1 * math.log(factor) + 1 if factor > 1 else 1.0
        return {"attention_factor": plain * data.number(".rope.scaling.attn_factor")}
    return {}


def _values(tensor: StoredTensor) -> list[float]:
    return [float(value) for value in dequantise(tensor.rows, tensor.type_name).reshape(-1)]


def _layer_types(data: GgufMetadata, pattern: int) -> list[str]:
    """Returns the kind of each layer. The file lists the layers with windows; otherwise all layers except
    every ``pattern``-th have one."""
    slides, num_layers = data.numbers(".attention.sliding_window_pattern"), _num_layers(data)
    if len(slides) != num_layers:
        pattern = int(slides[0]) if len(slides) == 1 else pattern
        slides = [bool((i + 1) % pattern) for i in range(num_layers)]
    return ["sliding_attention" if one else "full_attention" for one in slides]


def _llama(data: GgufMetadata, stored: StoredTensors) -> Config:
    """Reads Llama, Mistral and Mixtral, which are one architecture in GGUF."""
    config = _common(data, stored, "LlamaForCausalLM", "llama")
    window = data.integer(".attention.sliding_window", 0)
    if num_experts := data.integer(".expert_count", 0):
        return config | {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "num_local_experts": num_experts,
            "num_experts_per_tok": data.integer(".expert_used_count"),
            "sliding_window": window or None,
        }
    if window:
        return config | {
            "architectures": ["MistralForCausalLM"],
            "model_type": "mistral",
            "sliding_window": window,
        }
    return config


def _qwen2(data: GgufMetadata, stored: StoredTensors) -> Config:
    return _common(data, stored, "Qwen2ForCausalLM", "qwen2")


def _qwen3(data: GgufMetadata, stored: StoredTensors) -> Config:
    return _common(data, stored, "Qwen3ForCausalLM", "qwen3")


def _qwen2_vl(data: GgufMetadata, stored: StoredTensors) -> Config:
    return _qwen2(data, stored) | _axes(data, stored)


def _qwen3_vl(data: GgufMetadata, stored: StoredTensors) -> Config:
    return _qwen3(data, stored) | _axes(data, stored)


def _axes(data: GgufMetadata, stored: StoredTensors) -> Config:
    """Returns the rope with the number of frequencies of each axis."""
    head_dim = data.integer(".attention.key_length", data.integer(".embedding_length") // _num_heads(data))
    sections = [int(count) for count in data.numbers(".rope.dimension_sections")]
    if len(sections) not in (3, 4):
        raise data.reject(".rope.dimension_sections", "must have a number for each axis")
    return {"rope_parameters": _rope(data, stored, head_dim) | {"mrope_section": sections[:3]}}


def _qwen3_moe(data: GgufMetadata, stored: StoredTensors) -> Config:
    return _common(data, stored, "Qwen3MoeForCausalLM", "qwen3_moe") | {
        "num_experts": data.integer(".expert_count"),
        "num_experts_per_tok": data.integer(".expert_used_count"),
        "moe_intermediate_size": data.integer(".expert_feed_forward_length"),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _smollm3(data: GgufMetadata, stored: StoredTensors) -> Config:
    return _common(data, stored, "SmolLM3ForCausalLM", "smollm3") | {"no_rope_layer_interval": 4}


def _olmo2(data: GgufMetadata, stored: StoredTensors) -> Config:
    """Reads OLMo 2 and OLMo 3, which are one architecture in GGUF."""
    window = data.integer(".attention.sliding_window", 0)
    if not window:
        return _common(data, stored, "Olmo2ForCausalLM", "olmo2")
    config = _common(data, stored, "Olmo3ForCausalLM", "olmo3")
    rope = config["rope_parameters"]
    local = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    return config | {
        "sliding_window": window,
        "layer_types": _layer_types(data, 4),
        "rope_parameters": {"full_attention": rope, "sliding_attention": local},
    }


def _exaone4(data: GgufMetadata, stored: StoredTensors) -> Config:
    window = data.integer(".attention.sliding_window", 0)
    return _common(data, stored, "Exaone4ForCausalLM", "exaone4") | {
        "sliding_window": window or None,
        **({"layer_types": _layer_types(data, 4)} if window else {}),
    }


def _granite(data: GgufMetadata, stored: StoredTensors) -> Config:
    return _common(data, stored, "GraniteForCausalLM", "granite") | {
        "embedding_multiplier": data.number(".embedding_scale", 1.0),
        "residual_multiplier": data.number(".residual_scale", 1.0),
        "attention_multiplier": data.number(".attention.scale", 0.0),
        "logits_scaling": data.number(".logit_scale", 1.0),
    }


def _glm4(data: GgufMetadata, stored: StoredTensors) -> Config:
    config = _common(data, stored, "Glm4ForCausalLM", "glm4")
    return config | {"partial_rotary_factor": 1.0}  # ``rope_parameters`` takes precedence


def _ernie4_5(data: GgufMetadata, stored: StoredTensors) -> Config:
    return _common(data, stored, "Ernie4_5ForCausalLM", "ernie4_5")


def _seed_oss(data: GgufMetadata, stored: StoredTensors) -> Config:
    return _common(data, stored, "SeedOssForCausalLM", "seed_oss")


def _olmoe(data: GgufMetadata, stored: StoredTensors) -> Config:
    return _common(data, stored, "OlmoeForCausalLM", "olmoe") | {
        "num_experts": data.integer(".expert_count"),
        "num_experts_per_tok": data.integer(".expert_used_count"),
        "norm_topk_prob": False,
    }


def _phi3(data: GgufMetadata, stored: StoredTensors) -> Config:
    config = _common(data, stored, "Phi3ForCausalLM", "phi3")
    original = data.integer(".rope.scaling.original_context_length", config["max_position_embeddings"])
    return config | {
        "original_max_position_embeddings": original,
        "sliding_window": data.integer(".attention.sliding_window", 0) or None,
    }


def _gemma(data: GgufMetadata, config: Config, large: int, pattern: int) -> Config:
    """Adds the fields of Gemma to a config.

    Args:
        data: the metadata.
        config: the common fields.
        large: the number of layers in the size that scales scores by ``hidden_size / num_heads``.
        pattern: all layers except every ``pattern``-th have a window.
    """
    is_large = config["num_hidden_layers"] == large
    return config | {
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_act": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": (
            config["hidden_size"] // config["num_attention_heads"] if is_large else config["head_dim"]
        ),
        "layer_types": _layer_types(data, pattern),
        "final_logit_softcapping": data.number(".final_logit_softcapping", 0.0) or None,
    }


def _gemma1(data: GgufMetadata, stored: StoredTensors) -> Config:
    return _common(data, stored, "GemmaForCausalLM", "gemma") | {"hidden_act": "gelu_pytorch_tanh"}


def _gemma2(data: GgufMetadata, stored: StoredTensors) -> Config:
    config = _gemma(data, _common(data, stored, "Gemma2ForCausalLM", "gemma2"), large=46, pattern=2)
    return config | {
        "sliding_window": data.integer(".attention.sliding_window", 4096),
        "attn_logit_softcapping": data.number(".attn_logit_softcapping", 0.0) or None,
    }


def _gemma3(data: GgufMetadata, stored: StoredTensors) -> Config:
    config = _gemma(data, _common(data, stored, "Gemma3ForCausalLM", "gemma3_text"), large=62, pattern=6)
    window = data.integer(".attention.sliding_window", 0)
    local = {"rope_type": "default", "rope_theta": data.number(".rope.freq_base_swa", 10_000.0)}
    return config | {
        "sliding_window": window or None,
        "rope_parameters": {"full_attention": config["rope_parameters"], "sliding_attention": local},
        **({} if window else {"layer_types": ["full_attention"] * config["num_hidden_layers"]}),
    }


def _gpt_oss(data: GgufMetadata, stored: StoredTensors) -> Config:
    config = _common(data, stored, "GptOssForCausalLM", "gpt_oss")
    return config | {
        "intermediate_size": data.integer(".expert_feed_forward_length"),
        "num_local_experts": data.integer(".expert_count"),
        "num_experts_per_tok": data.integer(".expert_used_count"),
        "sliding_window": data.integer(".attention.sliding_window"),
        "layer_types": _layer_types(data, 2),
        "rope_parameters": config["rope_parameters"] | {"truncate": False},
    }


# The supported values of llama.cpp's ``expert_gating_func``: unspecified, softmax.
_SOFTMAX_GATES: Final = (0, 1)


def _deepseek2(data: GgufMetadata, stored: StoredTensors) -> Config:
    """Reads DeepSeek-V2. The sizes of keys and values are under the usual keys in files for plain attention,
    and under separate keys (``_mla``) in files for absorbed attention, which caches latents."""
    if (gating := data.integer(".expert_gating_func", 0)) not in _SOFTMAX_GATES:
        raise data.reject(".expert_gating_func", f"is {gating}: only DeepSeek-V2 is supported")
    rotated = data.integer(".rope.dimension_count")
    key_dim = data.integer(".attention.key_length_mla", data.integer(".attention.key_length"))
    num_groups = data.integer(".expert_group_count", 1)
    config = _decoder(data, stored, "DeepseekV2ForCausalLM", "deepseek_v2", rotated)
    rope = config["rope_parameters"]
    if rope["rope_type"] == "yarn":
        # The file stores a tenth of mscale_all_dim, and angles are not scaled.
        mscale = 10 * data.number(".rope.scaling.yarn_log_multiplier", 0.0)
        rope |= {"attention_factor": 1.0, "mscale_all_dim": mscale}
    return config | {
        "rms_norm_eps": data.number(".attention.layer_norm_rms_epsilon"),
        "q_lora_rank": data.integer(".attention.q_lora_rank", 0) or None,
        "kv_lora_rank": data.integer(".attention.kv_lora_rank"),
        "qk_nope_head_dim": key_dim - rotated,
        "qk_rope_head_dim": rotated,
        "v_head_dim": data.integer(".attention.value_length_mla", data.integer(".attention.value_length")),
        "first_k_dense_replace": data.integer(".leading_dense_block_count", 0),
        "n_routed_experts": data.integer(".expert_count"),
        "num_experts_per_tok": data.integer(".expert_used_count"),
        "n_shared_experts": data.integer(".expert_shared_count", 0),
        "moe_intermediate_size": data.integer(".expert_feed_forward_length"),
        "routed_scaling_factor": data.number(".expert_weights_scale", 0.0) or 1.0,
        "norm_topk_prob": data.flag(".expert_weights_norm", False),
        "topk_method": "group_limited_greedy" if num_groups > 1 else "greedy",
        "n_group": num_groups,
        "topk_group": data.integer(".expert_group_used_count", num_groups),
    }


def _with_layer_norms(
    data: GgufMetadata, stored: StoredTensors, architecture: str, model_type: str
) -> Config:
    hidden_size = data.integer(".embedding_length")
    head_dim = data.integer(".attention.key_length", hidden_size // _num_heads(data))
    return _decoder(data, stored, architecture, model_type, head_dim) | {
        "layer_norm_eps": data.number(".attention.layer_norm_epsilon"),
        "partial_rotary_factor": 1.0,  # ``rope_parameters`` takes precedence
    }


def _starcoder2(data: GgufMetadata, stored: StoredTensors) -> Config:
    return _with_layer_norms(data, stored, "Starcoder2ForCausalLM", "starcoder2") | {
        "hidden_act": "gelu_pytorch_tanh",
        "sliding_window": data.integer(".attention.sliding_window", 0) or None,
    }


def _phi2(data: GgufMetadata, stored: StoredTensors) -> Config:
    return _with_layer_norms(data, stored, "PhiForCausalLM", "phi") | {"hidden_act": "gelu_new"}


def _gpt_neox(data: GgufMetadata, stored: StoredTensors) -> Config:
    """Reads GPT-NeoX with the exact GELU, as in Pythia: the file does not specify the variant."""
    return _with_layer_norms(data, stored, "GPTNeoXForCausalLM", "gpt_neox") | {
        "hidden_act": "gelu",
        "rotary_pct": 1.0,  # ``rope_parameters`` takes precedence
        "use_parallel_residual": data.flag(".use_parallel_residual", True),
    }


def _falcon(data: GgufMetadata, stored: StoredTensors) -> Config:
    """Reads Falcon. The first models are the "new decoder architecture" with a single KV head."""
    config = _with_layer_norms(data, stored, "FalconForCausalLM", "falcon")
    return config | {
        "hidden_act": "gelu",
        "new_decoder_architecture": True,
        "num_kv_heads": config["num_key_value_heads"],
        "ffn_hidden_size": config["intermediate_size"],
    }


def _stablelm(data: GgufMetadata, stored: StoredTensors) -> Config:
    """Reads StableLM. Blocks with a single norm are parallel; the metadata about them may be wrong."""
    return _with_layer_norms(data, stored, "StableLmForCausalLM", "stablelm") | {
        "use_parallel_residual": "blk.0.ffn_norm.weight" not in stored,
        "qk_layernorm": "blk.0.attn_q_norm.weight" in stored,
    }


def _command_r(data: GgufMetadata, stored: StoredTensors) -> Config:
    return _with_layer_norms(data, stored, "CohereForCausalLM", "cohere") | {
        "logit_scale": data.number(".logit_scale"),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in stored,
    }


def _cohere2(data: GgufMetadata, stored: StoredTensors) -> Config:
    return _with_layer_norms(data, stored, "Cohere2ForCausalLM", "cohere2") | {
        "logit_scale": data.number(".logit_scale"),
        "sliding_window": data.integer(".attention.sliding_window"),
        "layer_types": _layer_types(data, 4),
    }


def _gpt2(data: GgufMetadata, stored: StoredTensors) -> Config:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": _vocab_size(data, stored),
        "n_positions": data.integer(".context_length"),
        "n_embd": data.integer(".embedding_length"),
        "n_layer": _num_layers(data),
        "n_head": data.integer(".attention.head_count"),
        "n_inner": data.integer(".feed_forward_length"),
        "layer_norm_epsilon": data.number(".attention.layer_norm_epsilon"),
        "activation_function": "gelu_new",
        "tie_word_embeddings": "output.weight" not in stored,
    }


def _starcoder(data: GgufMetadata, stored: StoredTensors) -> Config:
    """Reads StarCoder, which has the exact GELU: the file does not specify the variant."""
    return _gpt2(data, stored) | {
        "activation_function": "gelu",
        "architectures": ["GPTBigCodeForCausalLM"],
        "model_type": "gpt_bigcode",
        "multi_query": True,
    }


_TOP: Final = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NORMS_AROUND: Final = _LAYER | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_EXPERTS: Final = {
    "ffn_gate": "mlp.experts.{}.gate_proj",
    "ffn_down": "mlp.experts.{}.down_proj",
    "ffn_up": "mlp.experts.{}.up_proj",
}
_GPT2_TOP: Final = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
}
_GPT2_MATRICES: Final = {
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}

ARCHITECTURES: Final[Mapping[str, Architecture]] = {
    "llama": Architecture(
        read=_llama,
        top=_TOP,
        layer=_LAYER | {"ffn_gate_inp": "block_sparse_moe.gate"},
        experts={
            "ffn_gate": "block_sparse_moe.experts.{}.w1",
            "ffn_down": "block_sparse_moe.experts.{}.w2",
            "ffn_up": "block_sparse_moe.experts.{}.w3",
        },
        has_pairs=True,
    ),
    "qwen2": Architecture(read=_qwen2, top=_TOP, layer=_LAYER),
    "qwen3": Architecture(read=_qwen3, top=_TOP, layer=_LAYER),
    "qwen2vl": Architecture(read=_qwen2_vl, top=_TOP, layer=_LAYER),
    "qwen3vl": Architecture(read=_qwen3_vl, top=_TOP, layer=_LAYER),
    "qwen3moe": Architecture(
        read=_qwen3_moe,
        top=_TOP,
        layer=_LAYER | {"ffn_gate_inp": "mlp.gate"},
        experts=_EXPERTS,
    ),
    "smollm3": Architecture(read=_smollm3, top=_TOP, layer=_LAYER, has_pairs=True),
    "olmo2": Architecture(read=_olmo2, top=_TOP, layer=_NORMS_AROUND),
    "exaone4": Architecture(read=_exaone4, top=_TOP, layer=_NORMS_AROUND),
    "granite": Architecture(read=_granite, top=_TOP, layer=_LAYER, has_pairs=True),
    "glm4": Architecture(
        read=_glm4,
        top=_TOP,
        layer=_LAYER
        | {
            "post_attention_norm": "post_self_attn_layernorm",
            "ffn_up": "mlp.gate_up_proj",
            "post_ffw_norm": "post_mlp_layernorm",
        },
    ),
    "ernie4_5": Architecture(read=_ernie4_5, top=_TOP, layer=_LAYER),
    "seed_oss": Architecture(
        read=_seed_oss, top=_TOP, layer=_LAYER | {"post_attention_norm": "post_attention_layernorm"}
    ),
    "olmoe": Architecture(
        read=_olmoe, top=_TOP, layer=_LAYER | {"ffn_gate_inp": "mlp.gate"}, experts=_EXPERTS
    ),
    "phi3": Architecture(
        read=_phi3,
        top=_TOP,
        layer=_LAYER | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    ),
    "gemma": Architecture(read=_gemma1, top=_TOP, layer=_LAYER, norm_shift=-1.0),
    "gemma2": Architecture(read=_gemma2, top=_TOP, layer=_NORMS_AROUND, norm_shift=-1.0),
    "gemma3": Architecture(read=_gemma3, top=_TOP, layer=_NORMS_AROUND, norm_shift=-1.0),
    "gpt-oss": Architecture(
        read=_gpt_oss,
        top=_TOP,
        layer=_LAYER
        | {"post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.router"}
        | {"attn_sinks": "self_attn.sinks", "ffn_down_exps": "mlp.experts.down_proj"},
        transposed=frozenset({"ffn_down_exps", "ffn_gate_exps", "ffn_up_exps"}),
        has_stacks=True,
    ),
    "deepseek2": Architecture(
        read=_deepseek2,
        top=_TOP,
        layer=_LAYER
        | {
            "attn_q_a": "self_attn.q_a_proj",
            "attn_q_a_norm": "self_attn.q_a_layernorm",
            "attn_q_b": "self_attn.q_b_proj",
            "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
            "attn_kv_a_norm": "self_attn.kv_a_layernorm",
            "attn_kv_b": "self_attn.kv_b_proj",
            "attn_k_b": "self_attn.k_b_proj",
            "attn_v_b": "self_attn.v_b_proj",
            "ffn_gate_inp": "mlp.gate",
            "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
            "ffn_up_shexp": "mlp.shared_experts.up_proj",
            "ffn_down_shexp": "mlp.shared_experts.down_proj",
        },
        experts=_EXPERTS,
        splits_latents=True,
    ),
    "starcoder2": Architecture(
        read=_starcoder2, top=_TOP, layer=_LAYER | {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}
    ),
    "gpt2": Architecture(
        read=_gpt2,
        top=_GPT2_TOP,
        layer=_GPT2_MATRICES | {"attn_norm": "ln_1", "ffn_norm": "ln_2"},
        prefix="transformer.h.{}.",
        transposed=frozenset(_GPT2_MATRICES),
    ),
    "starcoder": Architecture(
        read=_starcoder,
        top=_GPT2_TOP,
        layer=_GPT2_MATRICES | {"attn_norm": "ln_1", "ffn_norm": "ln_2"},
        prefix="transformer.h.{}.",
    ),
    "phi2": Architecture(
        read=_phi2,
        top=_TOP | {"output_norm": "model.final_layernorm"},
        layer=_LAYER | {"attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
    ),
    "gptneox": Architecture(read=_gpt_neox, top=_TOP, layer=_LAYER | {"attn_qkv": "self_attn.qkv_proj"}),
    "falcon": Architecture(
        read=_falcon,
        top=_TOP,
        # If there are two norms, the second is the norm of the attention.
        layer=_LAYER
        | {"attn_norm": "mlp.norm", "attn_norm_2": "self_attn.norm", "attn_qkv": "self_attn.qkv_proj"},
    ),
    "stablelm": Architecture(
        read=_stablelm,
        top=_TOP,
        layer=_LAYER | {f"attn_{part}_norm": f"self_attn.{part}_layernorm.norms.{{}}" for part in ("q", "k")},
    ),
    "command-r": Architecture(read=_command_r, top=_TOP, layer=_LAYER),
    "cohere2": Architecture(read=_cohere2, top=_TOP, layer=_LAYER),
}
"""The architectures by ``general.architecture``."""
