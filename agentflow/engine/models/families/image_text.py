"""The common parts of families that read images and text. Their text model is one of the other families."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from agentflow.engine.models.config import DecoderConfig, RawConfig
from agentflow.engine.models.families.family import WeightNames
from agentflow.engine.models.families.llama import read_llama, read_mistral, read_qwen2, read_qwen3
from agentflow.engine.models.text_config import text_config
from agentflow.errors import BadModelFolder

_READERS: Final[dict[str, Callable[[RawConfig], DecoderConfig]]] = {
    "llama": read_llama,
    "mistral": read_mistral,
    "qwen2": read_qwen2,
    "qwen3": read_qwen3,
}


def read_text_config(raw: RawConfig) -> DecoderConfig:
    """Reads the text model of a config with ``text_config``."""
    part = text_config(raw)
    kind = str(part.get("model_type") or "llama")
    if kind not in _READERS:
        raise BadModelFolder(
            f"its text model is {kind!r}, and only {', '.join(_READERS)} can be run with images",
            param="text_config",
        )
    return _READERS[kind](part)


def text_names(prefix: str, head: str, *vision: str) -> WeightNames:
    """Returns the names of a text model below a prefix. ``vision``: the beginnings of the names of all other
    tensors, which the tower takes."""
    return WeightNames(
        embedding=f"{prefix}embed_tokens",
        layers=f"{prefix}layers.{{}}.",
        final_norm=f"{prefix}norm",
        head=head,
        ignored_parts=vision,
    )
