"""Reads ``config.json`` of a Hugging Face folder, or what a GGUF file says instead: the shape of a decoder.

``read_config`` finds the model's family by its architecture (``families``), and the family reads the shape.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from agentflow.engine.models.rope import RopeConfig
from agentflow.engine.store.gguf.file import find_gguf, open_gguf
from agentflow.errors import BadModelFolder, UnknownModel

Activation = Literal["silu", "gelu_tanh", "gelu", "relu", "clamped_swiglu"]
RawConfig = Mapping[str, Any]
"""The object in ``config.json``."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What differs between the layers of a decoder. ``window``: the tokens that a row sees (0: all).
    ``rope``: "global", "local" (``DecoderConfig.local_rope``) or None for no rotation. ``is_sparse``: the
    layer has experts."""

    window: int = 0
    rope: Literal["global", "local"] | None = "global"
    is_sparse: bool = False


@dataclass(frozen=True, slots=True)
class ExpertsShape:
    """A mixture of experts (Shazeer et al. 2017, arXiv 1701.06538). ``intermediate_size``: of each expert.
    ``normalises``: the weights of the ``num_used`` experts of a token add up to 1. ``num_shared``: experts in
    one MLP that computes every token. ``scale``: of the weights. ``num_groups``: a token uses experts of the
    best ``num_used_groups`` of them only."""

    num_experts: int
    num_used: int
    intermediate_size: int
    normalises: bool = True
    num_shared: int = 0
    scale: float = 1.0
    num_groups: int = 1
    num_used_groups: int = 1


@dataclass(frozen=True, slots=True)
class LatentShape:
    """Latent attention (``latent_attention``). ``q_rank``, ``kv_rank``: of the latents of queries (0: none)
    and of keys and values. ``plain_dim``, ``rotated_dim``: of the parts of a query or key. ``value_dim``: of
    a value."""

    q_rank: int
    kv_rank: int
    plain_dim: int
    rotated_dim: int
    value_dim: int

    @property
    def pool_dim(self) -> int:
        """Of the only KV head in the pool."""
        return self.kv_rank + self.rotated_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """The shape of a decoder. ``max_context``: the longest sequence, in tokens.

    ``layers``: one for each layer, or none if all are plain. ``norm``: RMS norm, the same with its weights
    stored less 1, or layer norm. ``qk_norm``: queries and keys are normed before they are rotated, in each
    head or in whole rows. ``activation``: of the MLP, whose gate ``is_gated`` says. ``attention_scale``: 0
    for ``head_dim ** -0.5``. ``attention_cap``, ``logit_cap``: of the scores and logits (0: none).
    ``embedding_scale``: factor of the embeddings. ``position_offset``: of the row of position 0 in a table
    of learned positions (None: no table). ``latent``: latent attention; then ``num_kv_heads`` is 1, and
    ``head_dim`` is that of the pool."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    max_context: int
    tie_word_embeddings: bool
    rope: RopeConfig
    end_token_ids: tuple[int, ...] = ()
    local_rope: RopeConfig | None = None
    layers: tuple[LayerShape, ...] = ()
    norm: Literal["rms", "rms_less_one", "layer"] = "rms"
    qk_norm: Literal["", "head", "row"] = ""
    activation: Activation = "silu"
    is_gated: bool = True
    attention_scale: float = 0.0
    attention_cap: float = 0.0
    logit_cap: float = 0.0
    embedding_scale: float = 1.0
    position_offset: int | None = None
    experts: ExpertsShape | None = None
    has_sinks: bool = False
    latent: LatentShape | None = None

    @property
    def rotated_dim(self) -> int:
        """The part of a head that a rope applies to."""
        return self.latent.rotated_dim if self.latent else self.head_dim

    @property
    def is_llama_shaped(self) -> bool:
        """Whether the fused forward pass of the Llama family can run it."""
        may_differ = ("end_token_ids", "qk_norm")
        has_defaults = all(
            getattr(self, one.name) == one.default
            for one in fields(self)
            if one.default is not MISSING and one.name not in may_differ
        )
        return has_defaults and self.qk_norm != "row" and self.rope.is_plain

    def layer(self, index: int) -> LayerShape:
        """The shape of one layer."""
        return self.layers[index] if self.layers else LayerShape()


def read_json(file: Path) -> dict[str, Any] | None:
    """The object in a JSON file, or None where there is no file."""
    try:
        content = json.loads(file.read_text("utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise BadModelFolder(f"{file} cannot be read: {error}", param=file.name) from error
    if not isinstance(content, dict):
        raise BadModelFolder(f"{file} must hold a JSON object", param=file.name)
    return content


def read_folder(folder: Path) -> tuple[RawConfig, RawConfig]:
    """``config.json`` and ``generation_config.json`` of a model folder; of a GGUF file, the config that it
    stands for. ``UnknownModel`` if there is no folder, ``BadModelFolder`` if it has no config."""
    if (file := find_gguf(folder)) is not None:
        return open_gguf(file).config, {}
    if not folder.is_dir():
        raise UnknownModel(f"there is no model folder {folder}: give a folder that holds config.json")
    raw = read_json(folder / "config.json")
    if raw is None:
        raise BadModelFolder(
            f"{folder} has no config.json: it is not a Hugging Face model folder", param="config.json"
        )
    return raw, read_json(folder / "generation_config.json") or {}


def architectures_of(raw: RawConfig) -> list[Any]:
    """The config's architectures; older configs have one name instead of a list."""
    names = raw.get("architectures") or []
    return names if isinstance(names, list) else [names]


def end_token_ids(raw: RawConfig, generation: RawConfig) -> tuple[int, ...]:
    """The tokens that end a text, from both files, as some models list different ones in each."""
    found: dict[int, None] = {}
    for source in (generation, raw):
        ids = source.get("eos_token_id")
        ids = ids if isinstance(ids, list) else [] if ids is None else [ids]
        found.update(dict.fromkeys(int(token) for token in ids))
    return tuple(found)
