"""Parallel attention and MLP, which read the same residual, with layer norms: GPT-J (Wang and Komatsuzaki
2021), GPT-NeoX (arXiv 2204.06745), Falcon (arXiv 2311.16867), StableLM (arXiv 2402.17834) and Command R
(Cohere 2024; Command A: arXiv 2504.00698). Some models of these families have sequential blocks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from agentflow.engine.models.config import DecoderConfig, LayerRope, RawConfig
from agentflow.engine.models.families.family import Family, WeightNames, gpt_fields, standard_shape, windowed
from agentflow.errors import BadModelFolder

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
FALCON = WeightNames(  # sequential blocks
    embedding="transformer.word_embeddings",
    layers="transformer.h.{}.",
    final_norm="transformer.ln_f",
    qkv=("self_attention.query_key_value",),
    output="self_attention.dense",
    gate_up=("mlp.dense_h_to_4h",),
    down="mlp.dense_4h_to_h",
    is_fused_by_head=True,
)
STABLELM = WeightNames(q_norm="self_attn.q_layernorm.norms.{}", k_norm="self_attn.k_layernorm.norms.{}")
COHERE = WeightNames(mlp_norm="input_layernorm", has_pairs=True)
# GGUF files have queries, keys and values in order.
NEOX_GGUF = WeightNames(qkv=("self_attn.qkv_proj",), gate_up=("mlp.up_proj",))
FALCON_GGUF = replace(NEOX_GGUF, input_norm="self_attn.norm", mlp_norm="mlp.norm")


def read_gptj(raw: RawConfig) -> DecoderConfig:
    """Reads the shape. Attention and MLP share a norm; the head has a bias."""
    fields = gpt_fields(raw)
    head_dim = int(raw["n_embd"]) // int(raw["n_head"])
    fields["partial_rotary_factor"] = int(raw["rotary_dim"] or head_dim) / head_dim
    return standard_shape(fields, norm="layer", is_gated=False, is_parallel=True)


def read_gpt_neox(raw: RawConfig) -> DecoderConfig:
    """Reads the shape. Some models have sequential blocks."""
    fields = {
        **raw,
        "partial_rotary_factor": raw.get("rotary_pct", 0.25),
        "rope_theta": raw.get("rotary_emb_base", 10_000.0),
        "num_key_value_heads": None,
    }
    is_parallel = bool(raw.get("use_parallel_residual", True))
    return standard_shape(fields, norm="layer", is_gated=False, is_parallel=is_parallel)


def read_falcon(raw: RawConfig) -> DecoderConfig:
    """Reads the shape. In the first models, attention and MLP share a norm, and all heads share one KV head.
    The "new decoder architecture" may have two norms, and has several KV heads."""
    if raw.get("alibi"):
        raise BadModelFolder("ALiBi is not supported, only rotary positions", param="alibi")
    is_new = bool(raw.get("new_decoder_architecture"))
    num_kv_heads = raw.get("num_kv_heads")
    if not is_new and raw["multi_query"]:
        num_kv_heads = 1
    hidden_size = int(raw["hidden_size"])
    fields = {
        **raw,
        "intermediate_size": raw.get("ffn_hidden_size") or 4 * hidden_size,
        "num_key_value_heads": num_kv_heads,
    }
    is_parallel = is_new or bool(raw.get("parallel_attn", True))
    return standard_shape(fields, norm="layer", is_gated=False, is_parallel=is_parallel)


def read_stablelm(raw: RawConfig) -> DecoderConfig:
    """Reads the shape. A part of each head rotates. Large models have parallel blocks, and a norm for each
    head of queries and keys."""
    return standard_shape(
        raw,
        norm="layer",
        qk_norm="each_head" if raw.get("qk_layernorm") else "",
        is_parallel=bool(raw.get("use_parallel_residual", False)),
    )


def _cohere(raw: RawConfig, **changes: Any) -> DecoderConfig:
    """Reads a shape with norms without biases, scaled logits and parallel blocks."""
    return standard_shape(
        raw,
        norm="layer_unbiased",
        logit_scale=float(raw["logit_scale"]),
        is_parallel=True,
        **changes,
    )


def read_cohere(raw: RawConfig) -> DecoderConfig:
    """Reads the shape. Command R+ norms each head of queries and keys with separate weights."""
    return _cohere(raw, qk_norm="each_head" if raw.get("use_qk_norm") else "")


def read_cohere2(raw: RawConfig) -> DecoderConfig:
    """Reads the shape. Three of four layers have windows, and the others do not rotate."""
    pattern = int(raw.get("sliding_window_pattern") or 4)
    sliding: LayerRope = None if raw["sliding_window"] is None else "global"
    layers = windowed(raw, lambda i: (i + 1) % pattern != 0, sliding=sliding, full=None)
    return _cohere(raw, layers=layers)


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
    Family(
        "FalconForCausalLM",
        "Falcon 7B to 180B, Falcon 2",
        read_falcon,
        FALCON,
        (
            replace(FALCON, mlp_norm="input_layernorm"),
            replace(FALCON, input_norm="ln_attn", mlp_norm="ln_mlp"),
            FALCON_GGUF,
            replace(FALCON_GGUF, input_norm="mlp.norm"),
        ),
        gguf=("falcon",),
    ),
    Family(
        "StableLmForCausalLM",
        "StableLM 3B, StableLM 2",
        read_stablelm,
        STABLELM,
        (replace(STABLELM, mlp_norm="input_layernorm"),),  # parallel blocks
        gguf=("stablelm",),
    ),
    Family("CohereForCausalLM", "Command R, Command R+, Aya 23", read_cohere, COHERE, gguf=("command-r",)),
    Family("Cohere2ForCausalLM", "Command R7B, Command A", read_cohere2, COHERE, gguf=("cohere2",)),
)
