"""Learned positions, layer norms and no gates: GPT-2 (Radford et al. 2019), GPT-Neo (Black et al. 2021), OPT
(arXiv 2205.01068) and StarCoder (arXiv 2305.06161), whose heads share one key and value."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from agentflow.engine.models.config import DecoderConfig, LayerShape, RawConfig
from agentflow.engine.models.families.family import Family, WeightNames, gpt_fields, standard_shape
from agentflow.engine.models.rope import RopeConfig
from agentflow.errors import BadModelFolder

NO_ROPE = RopeConfig("default", 10_000.0)  # unused: the layers do not rotate

GPT2 = WeightNames(
    embedding="transformer.wte",
    positions="transformer.wpe",
    layers="transformer.h.{}.",
    final_norm="transformer.ln_f",
    input_norm="ln_1",
    qkv=("attn.c_attn",),
    output="attn.c_proj",
    mlp_norm="ln_2",
    gate_up=("mlp.c_fc",),
    down="mlp.c_proj",
    is_transposed=True,
    ignored=("attn.bias", "attn.masked_bias"),
)
STARCODER = replace(GPT2, is_transposed=False, is_fused_by_head=True)
GPT_NEO = replace(
    GPT2,
    qkv=("attn.attention.q_proj", "attn.attention.k_proj", "attn.attention.v_proj"),
    output="attn.attention.out_proj",
    is_transposed=False,
    ignored=("attn.attention.bias", "attn.attention.masked_bias"),
)
OPT = WeightNames(
    embedding="model.decoder.embed_tokens",
    positions="model.decoder.embed_positions",
    layers="model.decoder.layers.{}.",
    final_norm="model.decoder.final_layer_norm",
    input_norm="self_attn_layer_norm",
    output="self_attn.out_proj",
    mlp_norm="final_layer_norm",
    gate_up=("fc1",),
    down="fc2",
)


def _shape(raw: RawConfig, **changes: Any) -> DecoderConfig:
    fields: dict[str, Any] = {
        "norm": "layer",
        "rope": NO_ROPE,
        "is_gated": False,
        "position_offset": 0,
        "layers": (LayerShape(rope=None),) * int(raw["num_hidden_layers"]),
    }
    return standard_shape(raw, **(fields | changes))


def read_gpt2(raw: RawConfig, num_kv_heads: int | None = None) -> DecoderConfig:
    for name in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        if raw.get(name):
            raise BadModelFolder(f"{name} is not supported", param=name)
    fields = gpt_fields(raw) | {"num_key_value_heads": num_kv_heads}
    return _shape(fields, attention_scale=0.0 if raw.get("scale_attn_weights", True) else 1.0)


def read_starcoder(raw: RawConfig) -> DecoderConfig:
    return read_gpt2(raw, 1 if raw["multi_query"] else None)


def read_gpt_neo(raw: RawConfig) -> DecoderConfig:
    """Reads the shape. Scores are not scaled, and some layers have a window."""
    groups, num_layers = raw["attention_types"], int(raw["num_layers"])
    has_all = sum(len(kinds) * count for kinds, count in groups) == num_layers
    kinds = [kind for kinds, count in groups for kind in kinds * count] if has_all else []
    if not has_all or not set(kinds) <= {"global", "local"}:
        raise BadModelFolder("a layer is neither global nor local", param="attention_types")
    window = int(raw.get("window_size", 256))
    fields = {
        "num_hidden_layers": raw["num_layers"],
        "num_attention_heads": raw["num_heads"],
        "intermediate_size": raw.get("intermediate_size") or 4 * int(raw["hidden_size"]),
    }
    return _shape(
        dict(raw) | fields,
        attention_scale=1.0,
        layers=tuple(LayerShape(window if kind == "local" else 0, rope=None) for kind in kinds),
    )


def read_opt(raw: RawConfig) -> DecoderConfig:
    """Reads the shape. Requires norms before the blocks, as in all sizes except 350M."""
    if not raw.get("do_layer_norm_before", True) or raw.get("_remove_final_layer_norm"):
        raise BadModelFolder("norms after the blocks are not supported", param="do_layer_norm_before")
    if int(raw.get("word_embed_proj_dim") or raw["hidden_size"]) != int(raw["hidden_size"]):
        raise BadModelFolder("projected embeddings are not supported", param="word_embed_proj_dim")
    return _shape({**raw, "intermediate_size": raw["ffn_dim"]}, position_offset=2)


FAMILIES = (
    Family("GPT2LMHeadModel", "GPT-2, DistilGPT-2", read_gpt2, GPT2, gguf=("gpt2",)),
    Family("GPTBigCodeForCausalLM", "StarCoder, SantaCoder", read_starcoder, STARCODER, gguf=("starcoder",)),
    Family("GPTNeoForCausalLM", "GPT-Neo", read_gpt_neo, GPT_NEO),
    Family("OPTForCausalLM", "OPT but for its 350M", read_opt, OPT),
)
