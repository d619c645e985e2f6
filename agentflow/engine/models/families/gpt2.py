"""GPT-2 (Radford et al. 2019) and OPT (arXiv 2205.01068): learned positions, layer norms, no gates."""

from __future__ import annotations

from agentflow.engine.models.config import DecoderConfig, LayerShape, RawConfig
from agentflow.engine.models.families.family import (
    Family,
    WeightNames,
    first_architecture,
    read_activation,
    standard_shape,
)
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


def read_gpt2(raw: RawConfig) -> DecoderConfig:
    for name in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        if raw.get(name):
            raise BadModelFolder(f"{name} is not supported", param=name)
    hidden_size, num_heads = int(raw["n_embd"]), int(raw["n_head"])
    num_layers = int(raw["n_layer"])
    return DecoderConfig(
        architecture=first_architecture(raw),
        vocab_size=int(raw["vocab_size"]),
        hidden_size=hidden_size,
        intermediate_size=int(raw.get("n_inner") or 4 * hidden_size),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        norm_eps=float(raw.get("layer_norm_epsilon", 1e-5)),
        max_context=int(raw["n_positions"]),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", True)),
        rope=NO_ROPE,
        norm="layer",
        activation=read_activation({"activation_function": "gelu_new"} | dict(raw), "activation_function"),
        is_gated=False,
        position_offset=0,
        layers=_unrotated(num_layers),
        attention_scale=0.0 if raw.get("scale_attn_weights", True) else 1.0,
    )


def read_opt(raw: RawConfig) -> DecoderConfig:
    """Requires norms before the blocks, which all sizes except one have."""
    if not raw.get("do_layer_norm_before", True) or raw.get("_remove_final_layer_norm"):
        raise BadModelFolder("norms after the blocks are not supported", param="do_layer_norm_before")
    if int(raw.get("word_embed_proj_dim") or raw["hidden_size"]) != int(raw["hidden_size"]):
        raise BadModelFolder("projected embeddings are not supported", param="word_embed_proj_dim")
    return standard_shape(
        {"tie_word_embeddings": True, "intermediate_size": raw["ffn_dim"]} | dict(raw),
        rope=NO_ROPE,
        norm_eps=1e-5,
        norm="layer",
        activation=read_activation({"activation_function": "relu"} | dict(raw), "activation_function"),
        is_gated=False,
        position_offset=2,
        layers=_unrotated(int(raw["num_hidden_layers"])),
        intermediate_size=int(raw["ffn_dim"]),
    )


def _unrotated(num_layers: int) -> tuple[LayerShape, ...]:
    return (LayerShape(rope=None),) * num_layers


FAMILIES = (
    Family("GPT2LMHeadModel", "GPT-2, DistilGPT-2", read_gpt2, GPT2, gguf=("gpt2",)),
    Family("OPTForCausalLM", "OPT but for its 350M", read_opt, OPT),
)
