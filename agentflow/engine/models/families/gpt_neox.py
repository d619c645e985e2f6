"""GPT-J (Wang and Komatsuzaki 2021) and GPT-NeoX (arXiv 2204.06745): parallel blocks, layer norms, rotation
of a part of each head."""

from __future__ import annotations

from dataclasses import replace

from agentflow.engine.models.config import DecoderConfig, RawConfig
from agentflow.engine.models.families.family import Family, WeightNames, read_activation, standard_shape

GPTJ = WeightNames(
    embedding="transformer.wte",
    layers="transformer.h.{}.",
    final_norm="transformer.ln_f",
    input_norm="ln_1",
    qkv=("attn.q_proj", "attn.k_proj", "attn.v_proj"),
    output="attn.out_proj",
    mlp_norm="ln_1",
    gate_up=("mlp.fc_in",),
    down="mlp.fc_out",
    has_pairs=True,
    ignored=("attn.bias", "attn.masked_bias"),
)
NEOX = WeightNames(
    embedding="gpt_neox.embed_in",
    layers="gpt_neox.layers.{}.",
    final_norm="gpt_neox.final_layer_norm",
    head="embed_out",
    qkv=("attention.query_key_value",),
    output="attention.dense",
    gate_up=("mlp.dense_h_to_4h",),
    down="mlp.dense_4h_to_h",
    is_fused_by_head=True,
    ignored=("rotary_emb.inv_freq", "attention.bias", "attention.masked_bias"),
)
NEOX_GGUF = WeightNames(qkv=("self_attn.qkv_proj",), gate_up=("mlp.up_proj",))


def read_gptj(raw: RawConfig) -> DecoderConfig:
    """The attention and the MLP have the same norm; the head has a bias."""
    hidden_size, num_heads = int(raw["n_embd"]), int(raw["n_head"])
    num_rotated = int(raw.get("rotary_dim") or hidden_size // num_heads)
    return standard_shape(
        {
            "hidden_size": hidden_size,
            "intermediate_size": raw.get("n_inner") or 4 * hidden_size,
            "num_hidden_layers": raw["n_layer"],
            "num_attention_heads": num_heads,
            "max_position_embeddings": raw["n_positions"],
            "partial_rotary_factor": num_rotated / (hidden_size // num_heads),
            **{name: raw[name] for name in ("architectures", "vocab_size")},
            "tie_word_embeddings": raw.get("tie_word_embeddings", False),
        },
        norm="layer",
        norm_eps=float(raw.get("layer_norm_epsilon", 1e-5)),
        activation=read_activation({"activation_function": "gelu_new"} | dict(raw), "activation_function"),
        is_gated=False,
        is_parallel=True,
    )


def read_gpt_neox(raw: RawConfig) -> DecoderConfig:
    """Some models are not parallel."""
    raw = {
        "hidden_act": "gelu",
        "partial_rotary_factor": raw.get("rotary_pct", 0.25),
        "rope_theta": raw.get("rotary_emb_base", 10_000.0),
        **raw,
        "num_key_value_heads": None,
    }
    return standard_shape(
        raw,
        norm="layer",
        norm_eps=float(raw.get("layer_norm_eps", 1e-5)),
        activation=read_activation(raw, "hidden_act"),
        is_gated=False,
        is_parallel=bool(raw.get("use_parallel_residual", True)),
    )


FAMILIES = (
    Family("GPTJForCausalLM", "GPT-J", read_gptj, GPTJ),
    Family(
        "GPTNeoXForCausalLM",
        "GPT-NeoX, Pythia, Dolly 2",
        read_gpt_neox,
        NEOX,
        (replace(NEOX, head="lm_head"), NEOX_GGUF),
        gguf=("gptneox",),
    ),
)
