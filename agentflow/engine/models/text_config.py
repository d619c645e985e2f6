"""The text and vision parts of the ``config.json`` of a model that reads images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

# Published configs leave out values that equal the defaults of the class that wrote them.
_LLAMA: Final[Mapping[str, Any]] = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
}
_SIGLIP: Final[Mapping[str, Any]] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 224,
    "patch_size": 16,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}
_DEFAULTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "gemma3_text": {
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131_072,
        "sliding_window": 4096,
    },
    "llama": _LLAMA,
    "mistral": {
        **_LLAMA,
        "intermediate_size": 14_336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
    },
    "qwen2": {
        **_LLAMA,
        "vocab_size": 151_936,
        "intermediate_size": 22_016,
        "max_position_embeddings": 32_768,
    },
    "idefics3": {**_SIGLIP, "hidden_size": 1152, "num_attention_heads": 16, "patch_size": 32},
    "siglip_vision_model": _SIGLIP,
    "clip_vision_model": {**_SIGLIP, "patch_size": 32, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5},
}
_KINDS: Final[Mapping[str, str]] = {"idefics3_vision": "idefics3", "smolvlm_vision": "idefics3"}
"""Other names for keys of ``_DEFAULTS``."""


def text_config(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns ``text_config`` with its defaults and the architectures of the whole model; ``raw`` if it has
    none."""
    part = raw.get("text_config")
    if not part:
        return raw
    tied = {"tie_word_embeddings": raw["tie_word_embeddings"]} if "tie_word_embeddings" in raw else {}
    return {**_defaults(part), **tied, **_given(part), "architectures": raw.get("architectures")}


def vision_config(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns ``vision_config`` with its defaults. Raises ``KeyError`` if there is none."""
    part = raw["vision_config"]
    return {**_defaults(part), **_given(part)}


def _given(part: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in part.items() if value is not None}


def _defaults(part: Mapping[str, Any]) -> Mapping[str, Any]:
    kind = str(part.get("model_type"))
    return _DEFAULTS.get(_KINDS.get(kind, kind), {})
