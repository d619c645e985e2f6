"""Command R (Cohere 2024): parallel blocks with one layer norm without a bias, scaled logits, and heads in
which adjacent dimensions rotate together. Command R7B and A (arXiv 2504.00698) have windows in three layers
of four, and the others do not rotate."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from agentflow.engine.models.config import DecoderConfig, LayerShape, RawConfig
from agentflow.engine.models.families.family import (
    Family,
    WeightNames,
    layer_types,
    standard_shape,
    windowed,
)

NAMES = WeightNames(mlp_norm="input_layernorm", has_pairs=True)


def _shape(raw: RawConfig, theta: float, **changes: Any) -> DecoderConfig:
    return standard_shape(
        {"tie_word_embeddings": True, "rope_theta": theta} | dict(raw),
        norm="layer_unbiased",
        norm_eps=float(raw.get("layer_norm_eps", 1e-5)),
        logit_scale=float(raw.get("logit_scale", 0.0625)),
        is_parallel=True,
        **changes,
    )


def read_cohere(raw: RawConfig) -> DecoderConfig:
    """Command R+ norms queries and keys, each head with separate weights."""
    return _shape(raw, 500_000.0, qk_norm="each_head" if raw.get("use_qk_norm") else "")


def read_cohere2(raw: RawConfig) -> DecoderConfig:
    pattern = int(raw.get("sliding_window_pattern") or 4)
    kinds = layer_types(raw, lambda i: "sliding_attention" if (i + 1) % pattern else "full_attention")
    raw = {"sliding_window": 4096, **raw}
    rotates = raw["sliding_window"] is not None
    layers = tuple(
        replace(layer, rope="global" if rotates and kind == "sliding_attention" else None)
        for layer, kind in zip(windowed(raw, kinds) or (LayerShape(),) * len(kinds), kinds, strict=True)
    )
    return _shape(raw, 10_000.0, layers=layers)


FAMILIES = (
    Family("CohereForCausalLM", "Command R, Command R+, Aya 23", read_cohere, NAMES, gguf=("command-r",)),
    Family("Cohere2ForCausalLM", "Command R7B, Command A", read_cohere2, NAMES, gguf=("cohere2",)),
)
