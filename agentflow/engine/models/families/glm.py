"""The Llama shape with heads in which adjacent dimensions rotate together: GLM-4 (arXiv 2406.12793), which
rotates half of each head, GLM-4-0414, with norms around each block, ERNIE 4.5 (Baidu 2025) and Helium
(Kyutai 2025)."""

from __future__ import annotations

from dataclasses import replace

from agentflow.engine.models.families.family import Family, WeightNames, standard_shape

PAIRS = WeightNames(has_pairs=True)
GLM = replace(PAIRS, gate_up=("mlp.gate_up_proj",))
GLM_0414 = replace(GLM, attention_norm="post_self_attn_layernorm", output_norm="post_mlp_layernorm")


FAMILIES = (
    Family("GlmForCausalLM", "GLM-4 9B, GLM-Edge", standard_shape, GLM),
    Family("Glm4ForCausalLM", "GLM-4-0414, GLM-Z1", standard_shape, GLM_0414, gguf=("glm4",)),
    Family("Ernie4_5ForCausalLM", "ERNIE 4.5 without experts", standard_shape, PAIRS, gguf=("ernie4_5",)),
    Family("HeliumForCausalLM", "Helium", standard_shape, PAIRS),
)
