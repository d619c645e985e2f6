"""Gemma (arXiv 2403.08295), Gemma 2 (arXiv 2408.00118) and Gemma 3 (arXiv 2503.19786).

They scale embeddings. Gemma 2 and 3 have norms around each block, and windows in half or more of the layers.
Gemma 2 caps scores and logits. Gemma 3 norms queries and keys, and its layers with windows have a separate
rope."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from agentflow.engine.models.config import DecoderConfig, RawConfig
from agentflow.engine.models.families.family import Family, WeightNames, read_ropes, standard_shape, windowed
from agentflow.errors import BadModelFolder

NAMES = WeightNames(
    attention_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    output_norm="post_feedforward_layernorm",
)


def _shape(raw: RawConfig, **changes: Any) -> DecoderConfig:
    if raw.get("use_bidirectional_attention"):
        raise BadModelFolder(
            "attention in both directions is not supported", param="use_bidirectional_attention"
        )
    return standard_shape(
        raw,
        norm="rms_less_one",
        embedding_scale=int(raw["hidden_size"]) ** 0.5,
        **changes,
    )


def read_gemma(raw: RawConfig) -> DecoderConfig:
    """Replaces the exact GELU, which is in published configs by mistake: the models were trained with the
    approximation."""
    is_wrong = raw["hidden_act"] == "gelu"
    return _shape({**raw, "hidden_act": "gelu_pytorch_tanh"} if is_wrong else raw)


def _scores(raw: RawConfig) -> dict[str, float]:
    return {
        "attention_scale": float(raw.get("query_pre_attn_scalar", 256)) ** -0.5,
        "attention_cap": float(raw.get("attn_logit_softcapping") or 0),
        "logit_cap": float(raw.get("final_logit_softcapping") or 0),
    }


def read_gemma2(raw: RawConfig) -> DecoderConfig:
    """Every other layer has a window."""
    return _shape(raw, layers=windowed(raw, lambda i: i % 2 == 0), **_scores(raw))


def read_gemma3(raw: RawConfig) -> DecoderConfig:
    """Five layers of six have a window and the local rope."""
    pattern = int(raw.get("_sliding_window_pattern") or raw.get("sliding_window_pattern") or 6)
    rope, local_rope = read_ropes(raw, raw["rope_local_base_freq"])
    return _shape(
        raw,
        layers=windowed(raw, lambda i: (i + 1) % pattern != 0, sliding="local"),
        rope=rope,
        local_rope=local_rope,
        qk_norm="head",
        **_scores(raw),
    )


def _text_names(prefix: str, head: str) -> WeightNames:
    ignored = tuple(
        f"{before}{part}." for before in ("", "model.") for part in ("vision_tower", "multi_modal_projector")
    )
    return replace(
        NAMES,
        embedding=f"{prefix}embed_tokens",
        layers=f"{prefix}layers.{{}}.",
        final_norm=f"{prefix}norm",
        head=head,
        ignored_parts=ignored,
    )


FAMILIES = (
    Family("GemmaForCausalLM", "Gemma, CodeGemma", read_gemma, gguf=("gemma",)),
    Family("Gemma2ForCausalLM", "Gemma 2", read_gemma2, NAMES, gguf=("gemma2",)),
    Family(
        "VaultGemmaForCausalLM",
        "VaultGemma",
        read_gemma2,
        replace(NAMES, attention_norm="", output_norm=""),
    ),
    Family("Gemma3ForCausalLM", "Gemma 3 for text", read_gemma3, NAMES, gguf=("gemma3",)),
    Family(
        "Gemma3ForConditionalGeneration",
        "Gemma 3: text and images",
        read_gemma3,
        _text_names("language_model.model.", "language_model.lm_head"),
        (_text_names("model.language_model.", "lm_head"),),
    ),
)
