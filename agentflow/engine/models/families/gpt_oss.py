"""GPT-OSS (arXiv 2508.10925): a mixture of experts with biases, attention sinks, windows in every other
layer."""

from __future__ import annotations

from dataclasses import replace

from agentflow.engine.models.config import DecoderConfig, ExpertsShape, LayerShape, RawConfig
from agentflow.engine.models.families.family import (
    ExpertNames,
    Family,
    WeightNames,
    layer_types,
    standard_shape,
    windowed,
)
from agentflow.errors import BadModelFolder
from agentflow.kernels.activations import CLAMP_ALPHA, CLAMP_LIMIT

NAMES = WeightNames(
    experts=ExpertNames(
        router="mlp.router", gate_up="mlp.experts.gate_up_proj", down="mlp.experts.down_proj", is_stacked=True
    )
)


def read_gpt_oss(raw: RawConfig) -> DecoderConfig:
    expected = CLAMP_LIMIT, CLAMP_ALPHA
    if (raw.get("swiglu_limit", CLAMP_LIMIT), raw.get("swiglu_alpha", CLAMP_ALPHA)) != expected:
        raise BadModelFolder(
            f"swiglu_limit must be {CLAMP_LIMIT} and swiglu_alpha {CLAMP_ALPHA}", param="swiglu_limit"
        )
    kinds = layer_types(raw, lambda i: "full_attention" if i % 2 else "sliding_attention")
    shape = standard_shape(
        {"rms_norm_eps": 1e-5} | dict(raw), head_dim=64, activation="clamped_swiglu", has_sinks=True
    )
    layers = windowed(raw, kinds) or (LayerShape(),) * len(kinds)
    experts = ExpertsShape(
        int(raw["num_local_experts"]), int(raw["num_experts_per_tok"]), shape.intermediate_size
    )
    layers = tuple(replace(layer, is_sparse=True) for layer in layers)
    return replace(shape, layers=layers, experts=experts)


FAMILIES = (Family("GptOssForCausalLM", "GPT-OSS", read_gpt_oss, NAMES, gguf=("gpt-oss",)),)
