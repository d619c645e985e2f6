"""Phi-1 to 2 (arXiv 2306.11644, 2309.05463): parallel blocks with one layer norm, and a bias in the head.

Phi-3 and Phi-4 (arXiv 2404.14219, 2412.08905, 2503.01743): fused matrices; some rotate only a part of each
head, or scale each frequency by a separate factor."""

from __future__ import annotations

from agentflow.engine.models.config import DecoderConfig, RawConfig
from agentflow.engine.models.families.family import Family, WeightNames, standard_shape, windowed
from agentflow.engine.models.rope import rope_parameters

PHI = WeightNames(
    final_norm="model.final_layernorm",
    q_norm="self_attn.q_layernorm",
    k_norm="self_attn.k_layernorm",
    output="self_attn.dense",
    mlp_norm="input_layernorm",
    gate_up=("mlp.fc1",),
    down="mlp.fc2",
)
PHI3 = WeightNames(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",))


def read_phi(raw: RawConfig) -> DecoderConfig:
    return standard_shape(
        raw,
        norm="layer",
        qk_norm="head" if raw.get("qk_layernorm") else "",
        is_gated=False,
        is_parallel=True,
    )


def read_phi3(raw: RawConfig) -> DecoderConfig:
    original = raw["original_max_position_embeddings"]  # takes precedence over the field of the rope
    parameters = rope_parameters(raw) | {"original_max_position_embeddings": original}
    raw = {**raw, "rope_scaling": None, "rope_parameters": parameters}
    return standard_shape(raw, layers=windowed(raw))


FAMILIES = (
    Family("PhiForCausalLM", "Phi-1, Phi-1.5, Phi-2", read_phi, PHI, gguf=("phi2",)),
    Family("Phi3ForCausalLM", "Phi-3, Phi-3.5, Phi-4, Phi-4 mini", read_phi3, PHI3, gguf=("phi3",)),
)
