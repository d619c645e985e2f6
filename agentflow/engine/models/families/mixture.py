"""Mixtures of experts. Mixtral (arXiv 2401.04088), Qwen3-MoE (arXiv 2505.09388) and OLMoE (arXiv 2409.02060)
have the Llama shape with experts. GPT-OSS (arXiv 2508.10925) has experts with biases, attention sinks, and
windows in every other layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from agentflow.engine.models.config import DecoderConfig, ExpertsShape, RawConfig
from agentflow.engine.models.families.family import ExpertNames, Family, WeightNames, standard_shape, windowed
from agentflow.engine.models.families.llama import read_mistral, read_qwen3
from agentflow.errors import BadModelFolder
from agentflow.kernels.activations import CLAMP_ALPHA, CLAMP_LIMIT

MIXTRAL = WeightNames(
    experts=ExpertNames(
        router="block_sparse_moe.gate",
        gate="block_sparse_moe.experts.{}.w1",
        up="block_sparse_moe.experts.{}.w3",
        down="block_sparse_moe.experts.{}.w2",
    )
)
QWEN3_EXPERTS = ExpertNames(
    router="mlp.gate",
    gate="mlp.experts.{}.gate_proj",
    up="mlp.experts.{}.up_proj",
    down="mlp.experts.{}.down_proj",
)
QWEN3 = WeightNames(experts=QWEN3_EXPERTS)
GPT_OSS = WeightNames(
    experts=ExpertNames(
        router="mlp.router", gate_up="mlp.experts.gate_up_proj", down="mlp.experts.down_proj", is_stacked=True
    )
)


def _with_experts(
    shape: DecoderConfig, experts: ExpertsShape, is_sparse: Callable[[int], bool] = lambda i: True
) -> DecoderConfig:
    """Returns the shape with experts in the layers for which ``is_sparse``."""
    layers = tuple(replace(shape.layer(i), is_sparse=is_sparse(i)) for i in range(shape.num_layers))
    return replace(shape, experts=experts, layers=layers)


def read_mixtral(raw: RawConfig) -> DecoderConfig:
    shape, num_used = read_mistral(raw), int(raw["num_experts_per_tok"])
    return _with_experts(
        shape, ExpertsShape(int(raw["num_local_experts"]), num_used, shape.intermediate_size)
    )


def read_qwen3_moe(raw: RawConfig) -> DecoderConfig:
    """Reads the shape. Some layers may have a plain MLP. All layers have a window, if enabled."""
    experts = ExpertsShape(
        int(raw["num_experts"]),
        int(raw["num_experts_per_tok"]),
        int(raw["moe_intermediate_size"]),
        bool(raw.get("norm_topk_prob", False)),
    )
    dense, step = set(raw.get("mlp_only_layers") or ()), int(raw.get("decoder_sparse_step", 1))
    shape = read_qwen3({**raw, "max_window_layers": 0, "layer_types": None})
    return _with_experts(shape, experts, lambda i: i not in dense and (i + 1) % step == 0)


def read_olmoe(raw: RawConfig) -> DecoderConfig:
    """Reads the shape. Queries and keys have norms over whole rows."""
    if raw.get("clip_qkv") is not None:
        raise BadModelFolder("clipped queries, keys and values are not supported", param="clip_qkv")
    shape = standard_shape(raw, qk_norm="row")
    experts = ExpertsShape(
        int(raw["num_experts"]),
        int(raw["num_experts_per_tok"]),
        shape.intermediate_size,
        bool(raw.get("norm_topk_prob", False)),
    )
    return _with_experts(shape, experts)


def read_gpt_oss(raw: RawConfig) -> DecoderConfig:
    expected = CLAMP_LIMIT, CLAMP_ALPHA
    if (raw.get("swiglu_limit", CLAMP_LIMIT), raw.get("swiglu_alpha", CLAMP_ALPHA)) != expected:
        raise BadModelFolder(
            f"swiglu_limit must be {CLAMP_LIMIT} and swiglu_alpha {CLAMP_ALPHA}", param="swiglu_limit"
        )
    layers = windowed(raw, lambda i: i % 2 == 0)
    shape = standard_shape(raw, activation="clamped_swiglu", has_sinks=True, layers=layers)
    num_used = int(raw["num_experts_per_tok"])
    return _with_experts(
        shape, ExpertsShape(int(raw["num_local_experts"]), num_used, shape.intermediate_size)
    )


FAMILIES = (
    Family("MixtralForCausalLM", "Mixtral", read_mixtral, MIXTRAL, gguf=("llama",)),
    Family("Qwen3MoeForCausalLM", "Qwen3 with experts", read_qwen3_moe, QWEN3, gguf=("qwen3moe",)),
    Family("OlmoeForCausalLM", "OLMoE", read_olmoe, QWEN3, gguf=("olmoe",)),
    Family("GptOssForCausalLM", "GPT-OSS", read_gpt_oss, GPT_OSS, gguf=("gpt-oss",)),
)
