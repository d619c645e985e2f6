"""StableLM (arXiv 2402.17834): layer norms, rotation of a part of each head. Some sizes have parallel blocks,
and a tensor for the norm of each head of queries and keys."""

from __future__ import annotations

from dataclasses import replace

from agentflow.engine.models.config import DecoderConfig, RawConfig
from agentflow.engine.models.families.family import Family, WeightNames, standard_shape

NAMES = WeightNames(q_norm="self_attn.q_layernorm.norms.{}", k_norm="self_attn.k_layernorm.norms.{}")


def read_stablelm(raw: RawConfig) -> DecoderConfig:
    return standard_shape(
        {"partial_rotary_factor": 0.25} | dict(raw),
        norm="layer",
        norm_eps=float(raw.get("layer_norm_eps", 1e-5)),
        qk_norm="each_head" if raw.get("qk_layernorm") else "",
        is_parallel=bool(raw.get("use_parallel_residual", False)),
    )


FAMILIES = (
    Family(
        "StableLmForCausalLM",
        "StableLM 3B, StableLM 2",
        read_stablelm,
        NAMES,
        (replace(NAMES, mlp_norm="input_layernorm"),),  # of parallel blocks
        gguf=("stablelm",),
    ),
)
