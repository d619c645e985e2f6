"""The Llama shape with heads in which adjacent dimensions rotate together: GLM-4 (arXiv 2406.12793), which
rotates half of each head, GLM-4-0414, with norms around each block, ERNIE 4.5 (Baidu 2025) and Helium
(Kyutai 2025)."""

from __future__ import annotations

from dataclasses import replace

from agentflow.engine.models.config import DecoderConfig, RawConfig
from agentflow.engine.models.families.family import Family, WeightNames, standard_shape

PAIRS = WeightNames(has_pairs=True)
GLM = replace(PAIRS, gate_up=("mlp.gate_up_proj",))
GLM_0414 = replace(GLM, attention_norm="post_self_attn_layernorm", output_norm="post_mlp_layernorm")


def read_glm(raw: RawConfig) -> DecoderConfig:
    fields = {"rms_norm_eps": 1.5625e-7, "partial_rotary_factor": 0.5, **raw}
    return standard_shape(fields, head_dim=128)


def read_ernie(raw: RawConfig) -> DecoderConfig:
    fields = {"rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "tie_word_embeddings": True, **raw}
    return standard_shape(fields, head_dim=128)


def read_helium(raw: RawConfig) -> DecoderConfig:
    return standard_shape({"rms_norm_eps": 1e-8, "rope_theta": 100_000.0, **raw}, head_dim=128)


FAMILIES = (
    Family("GlmForCausalLM", "GLM-4 9B, GLM-Edge", read_glm, GLM),
    Family("Glm4ForCausalLM", "GLM-4-0414, GLM-Z1", read_glm, GLM_0414, gguf=("glm4",)),
    Family("Ernie4_5ForCausalLM", "ERNIE 4.5 without experts", read_ernie, PAIRS, gguf=("ernie4_5",)),
    Family("HeliumForCausalLM", "Helium", read_helium, PAIRS),
)
