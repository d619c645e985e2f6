"""The Llama shape, with a window, layers without rotation, or scaled sums: Llama 2 to 3, Mistral, Qwen 2 and
3, SmolLM3, Granite 3, HyperCLOVA X, InternLM3 and Seed-OSS."""

from __future__ import annotations

from dataclasses import replace

from agentflow.engine.models.config import DecoderConfig, LayerShape, RawConfig
from agentflow.engine.models.families.family import Family, WeightNames, standard_shape, windowed
from agentflow.errors import BadModelFolder

HYPERCLOVAX = WeightNames(attention_norm="post_norm1", output_norm="post_norm2")


def read_llama(raw: RawConfig) -> DecoderConfig:
    """Reads the standard shape, without windows."""
    return standard_shape(raw)


def read_mistral(raw: RawConfig) -> DecoderConfig:
    """Reads the shape. All layers have a window, if the config has one."""
    return standard_shape(raw, layers=windowed(raw))


def read_qwen2(raw: RawConfig) -> DecoderConfig:
    """Reads the shape. The layers after the first ``max_window_layers`` have a window, if enabled."""
    layers: tuple[LayerShape, ...] = ()
    if raw.get("use_sliding_window", False):
        layers = windowed(raw, lambda i: i >= int(raw["max_window_layers"]))
    return standard_shape(raw, layers=layers)


def read_qwen3(raw: RawConfig) -> DecoderConfig:
    """Reads the shape: Qwen 2, with norms over each head of queries and keys."""
    return replace(read_qwen2(raw), qk_norm="head")


def read_smollm3(raw: RawConfig) -> DecoderConfig:
    """Reads the shape. Every fourth layer does not rotate (NoPE; Yang et al. 2025, arXiv 2501.18795). These
    layers have windows, if enabled."""
    interval, num_layers = int(raw.get("no_rope_layer_interval", 4)), int(raw["num_hidden_layers"])
    rotates = raw.get("no_rope_layers") or [(i + 1) % interval != 0 for i in range(num_layers)]
    kinds = raw.get("layer_types") or ["full_attention" if one else "sliding_attention" for one in rotates]
    shape = read_qwen2({**raw, "layer_types": kinds})
    layers = tuple(
        replace(shape.layer(i), rope="global" if rotates[i] else None) for i in range(shape.num_layers)
    )
    return replace(shape, layers=layers)


def read_granite(raw: RawConfig) -> DecoderConfig:
    """Reads the shape. Granite multiplies the output of each block by a constant before it is added to the
    residual. Here the residual is divided by the constant instead. Norms of the residual then give the same
    results with an epsilon that is divided by the constant's square; norms of a block's output keep their
    epsilon."""
    shape, part = standard_shape(raw), float(raw.get("residual_multiplier", 1.0))
    return replace(
        shape,
        norm_eps=shape.norm_eps / part**2,
        output_norm_eps=shape.norm_eps,
        embedding_scale=float(raw.get("embedding_multiplier", 1.0)) / part,
        attention_scale=float(raw.get("attention_multiplier", 1.0)),
        logit_scale=1 / float(raw.get("logits_scaling", 1.0)),
    )


def read_hyperclovax(raw: RawConfig) -> DecoderConfig:
    """Reads the shape: Granite with norms after the blocks. Its factor multiplies the logits, instead of
    dividing them."""
    if not raw.get("use_post_norm", True):
        raise BadModelFolder("blocks without norms after them are not supported", param="use_post_norm")
    shape = read_granite({"attention_multiplier": 0.0, **raw})
    return replace(shape, logit_scale=1 / shape.logit_scale)


FAMILIES = (
    Family("LlamaForCausalLM", "Llama 2 to 3.3, SmolLM and SmolLM2, TinyLlama", read_llama, gguf=("llama",)),
    Family("InternLM3ForCausalLM", "InternLM3", read_llama, gguf=("llama",)),
    Family("MistralForCausalLM", "Mistral 7B, Mistral Small", read_mistral, gguf=("llama",)),
    Family("MinistralForCausalLM", "Ministral 8B", read_mistral),
    Family("Qwen2ForCausalLM", "Qwen2, Qwen2.5, QwQ, R1 distillations", read_qwen2, gguf=("qwen2",)),
    Family("Qwen3ForCausalLM", "Qwen3", read_qwen3, gguf=("qwen3",)),
    Family("SmolLM3ForCausalLM", "SmolLM3", read_smollm3, gguf=("smollm3",)),
    Family("GraniteForCausalLM", "Granite 3", read_granite, gguf=("granite",)),
    Family("HyperCLOVAXForCausalLM", "HyperCLOVA X SEED Think", read_hyperclovax, HYPERCLOVAX),
    Family("SeedOssForCausalLM", "Seed-OSS", read_llama, gguf=("seed_oss",)),
)
