"""Reads ``config.json`` of a Hugging Face folder: the sizes of a model of the Llama family."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentflow.engine.models.rope import RopeConfig, read_rope
from agentflow.errors import BadModelFolder, UnknownModel

# Each architecture, with its default head_dim if that is not derived from hidden_size.
_ARCHITECTURES: Mapping[str, int | None] = {
    "LlamaForCausalLM": None,
    "MistralForCausalLM": None,
    "Qwen2ForCausalLM": None,
    "Qwen3ForCausalLM": 128,
}


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """The sizes of a decoder. ``max_context``: the longest sequence, in tokens."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_context: int
    tie_word_embeddings: bool
    rope: RopeConfig
    end_token_ids: tuple[int, ...]

    @property
    def has_qk_norm(self) -> bool:
        """Whether queries and keys are normed in each head before they are rotated (Qwen3)."""
        return self.architecture == "Qwen3ForCausalLM"


def read_config(folder: Path) -> LlamaConfig:
    """The model's config. ``UnknownModel`` if there is no folder; ``BadModelFolder`` if the model is not
    supported."""
    if not folder.is_dir():
        raise UnknownModel(f"there is no model folder {folder}: give a folder that holds config.json")
    raw = _read_json(folder / "config.json")
    if raw is None:
        raise BadModelFolder(
            f"{folder} has no config.json: it is not a Hugging Face model folder", param="config.json"
        )
    try:
        return _parse(raw, _read_json(folder / "generation_config.json") or {})
    except BadModelFolder as error:
        raise BadModelFolder(f"{folder}: {error}", param=error.param) from None
    except KeyError as error:
        raise BadModelFolder(
            f"{folder}: config.json does not give {error}", param=str(error.args[0])
        ) from None
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        message = f"{folder}: config.json holds a value of the wrong kind: {error}"
        raise BadModelFolder(message, param="config.json") from error


def _read_json(file: Path) -> dict[str, Any] | None:
    """The object in a JSON file, or None where there is no file."""
    try:
        content = json.loads(file.read_text("utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise BadModelFolder(f"{file} cannot be read: {error}", param=file.name) from error
    if not isinstance(content, dict):
        raise BadModelFolder(f"{file} must hold a JSON object", param=file.name)
    return content


def _parse(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> LlamaConfig:
    architecture = _architecture(raw)
    hidden_size, num_heads = int(raw["hidden_size"]), int(raw["num_attention_heads"])
    head_dim = int(raw.get("head_dim") or _ARCHITECTURES[architecture] or hidden_size // num_heads)
    max_context = int(raw["max_position_embeddings"])
    _refuse_unsupported(raw, max_context)
    num_kv_heads = int(raw.get("num_key_value_heads") or num_heads)
    if num_heads % num_kv_heads or head_dim % 2:
        raise ValueError(f"{num_heads} heads over {num_kv_heads} KV heads of size {head_dim}")
    return LlamaConfig(
        architecture=architecture,
        vocab_size=int(raw["vocab_size"]),
        hidden_size=hidden_size,
        intermediate_size=int(raw["intermediate_size"]),
        num_layers=int(raw["num_hidden_layers"]),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        max_context=max_context,
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        rope=read_rope(raw),
        end_token_ids=_end_token_ids(raw, generation),
    )


def _architecture(raw: Mapping[str, Any]) -> str:
    names = raw.get("architectures") or []
    names = names if isinstance(names, list) else [names]
    if len(names) == 1 and names[0] in _ARCHITECTURES:
        return str(names[0])
    found = ", ".join(map(str, names)) or f"none (model_type {raw.get('model_type')!r})"
    known = ", ".join(_ARCHITECTURES)
    raise BadModelFolder(f"its architecture is {found}; only {known} can be run", param="architectures")


def _refuse_unsupported(raw: Mapping[str, Any], max_context: int) -> None:
    if raw.get("hidden_act", "silu") not in ("silu", "swish"):
        raise BadModelFolder(
            f"the activation {raw['hidden_act']!r} is not supported, only 'silu'", param="hidden_act"
        )
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unknown")
        message = f"its weights are quantised ({method}): give the unquantised model"
        raise BadModelFolder(message, param="quantization_config")
    window = raw.get("sliding_window")
    # Mistral's window is always active, Llama has none, and the Qwen models have a switch.
    is_on = bool(raw.get("use_sliding_window", raw.get("model_type") == "mistral"))
    if is_on and window is not None and int(window) < max_context:
        message = f"sliding-window attention (sliding_window {window}) is not supported"
        raise BadModelFolder(message, param="sliding_window")


def _end_token_ids(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    """The tokens that end a text, from both files, as some models list different ones in each."""
    found: dict[int, None] = {}
    for source in (generation, raw):
        ids = source.get("eos_token_id")
        ids = ids if isinstance(ids, list) else [] if ids is None else [ids]
        found.update(dict.fromkeys(int(token) for token in ids))
    return tuple(found)
