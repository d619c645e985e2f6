"""Norms after each block instead of before it: OLMo 2 (arXiv 2501.00656), which also norms whole rows of
queries and keys; OLMo 3 (arXiv 2512.13961), with windows; and EXAONE 4 (arXiv 2507.11407), which norms each
head of queries and keys."""

from __future__ import annotations

from agentflow.engine.models.config import DecoderConfig, RawConfig
from agentflow.engine.models.families.family import Family, WeightNames, read_ropes, standard_shape, windowed

NAMES = WeightNames(
    input_norm="",
    attention_norm="post_attention_layernorm",
    mlp_norm="",
    output_norm="post_feedforward_layernorm",
)


def read_olmo2(raw: RawConfig) -> DecoderConfig:
    return standard_shape(raw, qk_norm="row")


def read_olmo3(raw: RawConfig) -> DecoderConfig:
    """Reads the shape. Three of four layers have a window and an unscaled rope."""
    rope, local_rope = read_ropes(raw, raw["rope_theta"])
    layers = windowed(raw, lambda i: (i + 1) % 4 != 0, sliding="local")
    return standard_shape(raw, qk_norm="row", rope=rope, local_rope=local_rope, layers=layers)


def read_exaone4(raw: RawConfig) -> DecoderConfig:
    """Reads the shape. In models with windows, the layers without a window do not rotate."""
    has_windows = raw["sliding_window"] is not None

    def slides(layer: int) -> bool:  # not called if the config has the types: its pattern may then be "LLLG"
        return has_windows and (layer + 1) % int(raw.get("sliding_window_pattern") or 4) != 0

    layers = windowed(raw, slides, full=None if has_windows else "global")
    return standard_shape(raw, qk_norm="head", layers=layers)


FAMILIES = (
    Family("Olmo2ForCausalLM", "OLMo 2", read_olmo2, NAMES, gguf=("olmo2",)),
    Family("Olmo3ForCausalLM", "OLMo 3", read_olmo3, NAMES, gguf=("olmo2",)),
    Family("Exaone4ForCausalLM", "EXAONE 4", read_exaone4, NAMES, gguf=("exaone4",)),
)
