"""Phi-3 and Phi-4 (arXiv 2404.14219, 2412.08905, 2503.01743): fused matrices; some rotate only a part of each
head, or stretch each frequency by a separate factor."""

from __future__ import annotations

from dataclasses import replace

from agentflow.engine.models.config import DecoderConfig, RawConfig
from agentflow.engine.models.families.family import (
    Family,
    WeightNames,
    layer_types,
    standard_shape,
    windowed,
)

NAMES = WeightNames(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",))


def read_phi3(raw: RawConfig) -> DecoderConfig:
    """With "longrope", the context is limited to the range of the short factors."""
    shape = standard_shape(raw, layers=windowed(raw, layer_types(raw, lambda i: "sliding_attention")))
    if shape.rope.kind == "longrope":
        shape = replace(shape, max_context=min(shape.max_context, shape.rope.original_context))
    return shape


FAMILIES = (Family("Phi3ForCausalLM", "Phi-3, Phi-3.5, Phi-4, Phi-4 mini", read_phi3, NAMES, gguf=("phi3",)),)
