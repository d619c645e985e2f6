"""The text and vision parts of a ``config.json``, with the defaults of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from agentflow.engine.store.config_defaults import DEFAULTS, Fields

_PARTS: Final[Mapping[str, tuple[str, str]]] = {
    "gemma3": ("gemma3_text", "siglip_vision_model"),
    "idefics3": ("llama", "idefics3_vision"),
    "llava": ("llama", "clip_vision_model"),
    "llavanext": ("llama", "clip_vision_model"),
    "llavanextvideo": ("llama", "clip_vision_model"),
    "llavaonevision": ("qwen2", "siglip_vision_model"),
    "qwen25vl": ("qwen2_5_vl_text", "qwen2_5_vl_vision"),
    "qwen3vl": ("qwen3_vl_text", "qwen3_vl_vision"),
    "smolvlm": ("llama", "smolvlm_vision"),
}
"""The types of the text model and the vision tower in an architecture, where the parts do not have them."""
_KINDS: Final = {kind.removesuffix("_text").replace("_", ""): kind for kind in DEFAULTS}
_NULLABLE: Final = frozenset(
    {
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "head_dim",
        "logit_scale",
        "num_key_value_heads",
        "q_lora_rank",
        "sliding_window",
    }
)
"""The fields in which null is a value; in the other ones it is the default."""
_GPT2_NAMES: Final = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}
_OTHER_NAMES: Final[Mapping[str, Mapping[str, str]]] = {
    "deepseek_v2": {"num_experts": "n_routed_experts"},
    "falcon": {"n_embed": "hidden_size"},
    "gpt2": _GPT2_NAMES,
    "gpt_bigcode": _GPT2_NAMES,
    "gpt_neo": {"num_attention_heads": "num_heads", "num_hidden_layers": "num_layers"},
    "gpt_oss": {"num_experts": "num_local_experts"},
    "gptj": _GPT2_NAMES,
    "mixtral": {"num_experts": "num_local_experts"},
    "olmoe": {"num_local_experts": "num_experts"},
    "qwen3_moe": {"num_local_experts": "num_experts"},
}
"""Names that transformers accepts for other fields."""


def text_config(raw: Mapping[str, Any]) -> Fields:
    """Returns ``text_config``, or ``raw`` if it has none, with its defaults, its ``model_type`` and the
    architectures of the whole model."""
    name, part = _class_name(raw), dict(raw.get("text_config") or raw)
    if name in _PARTS and not raw.get("text_config"):
        part.pop("model_type", None)  # it is the type of the whole model
    if part.get("tie_word_embeddings") is None:
        part["tie_word_embeddings"] = raw.get("tie_word_embeddings")
    kind = _PARTS[name][0] if name in _PARTS else _KINDS.get(name, "")
    return {**_complete(part, kind), "architectures": raw.get("architectures")}


def vision_config(raw: Mapping[str, Any]) -> Fields:
    """Returns ``vision_config`` with its defaults. Raises ``KeyError`` if there is none."""
    return _complete(raw["vision_config"], _PARTS[_class_name(raw)][1])


def given_fields(part: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a config that have a value."""
    return {name: value for name, value in part.items() if value is not None or name in _NULLABLE}


def _complete(part: Mapping[str, Any], kind: str) -> Fields:
    """Returns a part with the defaults of its type, or of ``kind`` if its type has none."""
    if (given_kind := str(part.get("model_type"))) in DEFAULTS:
        kind = given_kind
    names = _OTHER_NAMES.get(kind, {})
    given = given_fields(part)
    given |= {names[name]: value for name, value in given.items() if name in names}
    return {**DEFAULTS.get(kind, {}), **given, "model_type": part.get("model_type") or kind}


def _class_name(raw: Mapping[str, Any]) -> str:
    """Returns the architecture's name without its head, or else the type of the model, in lower case and
    without underscores."""
    architectures = raw.get("architectures") or raw.get("model_type") or ""
    name = str(architectures[0] if isinstance(architectures, list) else architectures)
    for end in ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel", "Model"):
        name = name.removesuffix(end)
    return name.replace("_", "").lower()
