"""OLMo 2 (arXiv 2501.00656): norms after each block, and of whole rows of queries and keys."""

from __future__ import annotations

from agentflow.engine.models.config import DecoderConfig, RawConfig
from agentflow.engine.models.families.family import Family, WeightNames, standard_shape

NAMES = WeightNames(
    input_norm="",
    attention_norm="post_attention_layernorm",
    mlp_norm="",
    output_norm="post_feedforward_layernorm",
)


def read_olmo2(raw: RawConfig) -> DecoderConfig:
    return standard_shape({"rms_norm_eps": 1e-5} | dict(raw), qk_norm="row")


FAMILIES = (Family("Olmo2ForCausalLM", "OLMo 2", read_olmo2, NAMES, gguf=("olmo2",)),)
