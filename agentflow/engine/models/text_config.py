"""The part of ``config.json`` that describes the text model of a model that also reads images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

# Published configs leave out values that equal the defaults of the class that wrote them.
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
    }
}


def text_config(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns ``text_config`` with its defaults and the architectures of the whole model; ``raw`` if it has
    none."""
    part = raw.get("text_config")
    if not part:
        return raw
    given = {name: value for name, value in part.items() if value is not None}
    defaults = _DEFAULTS.get(str(part.get("model_type")), {})
    tied = {"tie_word_embeddings": raw["tie_word_embeddings"]} if "tie_word_embeddings" in raw else {}
    return {**defaults, **tied, **given, "architectures": raw.get("architectures")}
