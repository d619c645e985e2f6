"""StarCoder 2 (arXiv 2402.19173): the attention of Mistral, with a window, and the norms and MLP of GPT-2."""

from __future__ import annotations

from agentflow.engine.models.config import DecoderConfig, RawConfig
from agentflow.engine.models.families.family import Family, WeightNames, standard_shape, windowed

NAMES = WeightNames(gate_up=("mlp.c_fc",), down="mlp.c_proj")


def read_starcoder2(raw: RawConfig) -> DecoderConfig:
    return standard_shape(raw, norm="layer", is_gated=False, layers=windowed(raw))


FAMILIES = (Family("Starcoder2ForCausalLM", "StarCoder2", read_starcoder2, NAMES, gguf=("starcoder2",)),)
