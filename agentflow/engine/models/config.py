"""Reads the shape of a decoder from ``config.json`` of a Hugging Face folder, or from a GGUF file.

``read_config`` finds the model's family by its architecture (``families``), and the family reads the shape.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from agentflow.engine.models.rope import RopeConfig
from agentflow.engine.store.gguf.file import find_gguf, open_gguf
from agentflow.engine.store.model_folder import read_object
from agentflow.errors import BadModelFolder, UnknownModel
from agentflow.kernels.activations import Activation

RawConfig = Mapping[str, Any]
"""The object in ``config.json``."""
LayerRope = Literal["global", "local"] | None
"""The rope of a layer: ``DecoderConfig.rope`` or ``local_rope``, or none."""
NormKind = Literal["rms", "rms_less_one", "layer", "layer_unbiased"]
"""rms_less_one: weights are stored minus 1; layer_unbiased: layer norms without biases."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The properties that differ between the layers of a decoder."""

    window: int = 0  # the number of tokens that a row sees; 0: all
    rope: LayerRope = "global"
    is_sparse: bool = False  # the layer has experts


@dataclass(frozen=True, slots=True)
class ExpertsShape:
    """A mixture of experts (Shazeer et al. 2017, arXiv 1701.06538)."""

    num_experts: int
    num_used: int  # experts for each token
    intermediate_size: int  # of each expert
    normalises: bool = True  # the weights of the experts of a token add up to 1
    num_shared: int = 0  # experts that compute every token, joined in one MLP
    scale: float = 1.0  # the factor of the experts' weights
    num_groups: int = 1  # the groups into which the experts are divided
    num_used_groups: int = 1  # the best groups, from which a token's experts are chosen


@dataclass(frozen=True, slots=True)
class LatentShape:
    """The sizes of latent attention (``latent_attention``)."""

    q_rank: int  # the size of a query's latent; 0: there is none
    kv_rank: int  # the size of the latent of a key and its value
    plain_dim: int  # the part of a query or key that does not rotate
    rotated_dim: int  # the part that rotates
    value_dim: int  # the size of a value

    @property
    def pool_dim(self) -> int:
        """The size of the only KV head in the pool."""
        return self.kv_rank + self.rotated_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """The shape of a decoder."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int  # 1 with latent attention
    head_dim: int  # with latent attention: the size of the KV head in the pool
    norm_eps: float
    output_norm_eps: float = 0.0  # for norms of the outputs of attention and MLP; 0: ``norm_eps``
    max_context: int  # the longest sequence, in tokens
    tie_word_embeddings: bool  # the head is the embedding
    rope: RopeConfig
    end_token_ids: tuple[int, ...] = ()
    local_rope: RopeConfig | None = None  # for the layers whose ``rope`` is "local"
    rope_axes: tuple[int, ...] = ()  # the axis of the positions for each frequency; empty: there is one axis
    layers: tuple[LayerShape, ...] = ()  # one for each layer; empty if all are plain
    norm: NormKind = "rms"
    # The norm of queries and keys before rotation: over each head, over whole rows, or over each head with
    # separate weights (layer norms without biases).
    qk_norm: Literal["", "head", "row", "each_head"] = ""
    activation: Activation = "silu"  # in the MLP
    is_gated: bool = True  # the MLP has a gate
    is_parallel: bool = False  # attention and MLP of a layer read the same residual
    attention_scale: float = 0.0  # 0: ``head_dim ** -0.5``
    attention_cap: float = 0.0  # the soft cap of the scores; 0: none
    logit_scale: float = 1.0
    logit_cap: float = 0.0  # the soft cap of the scaled logits; 0: none
    embedding_scale: float = 1.0  # the factor of the embeddings
    # The row of position 0 in the table of learned positions; None: there is no table.
    position_offset: int | None = None
    experts: ExpertsShape | None = None  # for the layers with ``is_sparse``
    has_sinks: bool = False
    latent: LatentShape | None = None  # latent attention

    @property
    def rotated_dim(self) -> int:
        """The number of dimensions of a head to which a rope applies."""
        return self.latent.rotated_dim if self.latent else self.head_dim

    def layer(self, index: int) -> LayerShape:
        """The shape of one layer."""
        return self.layers[index] if self.layers else LayerShape()


def read_folder(folder: Path) -> tuple[RawConfig, RawConfig]:
    """Returns ``config.json`` and ``generation_config.json`` of a model folder, or the equivalent config of a
    GGUF file. Raises ``UnknownModel`` if there is no folder, ``BadModelFolder`` if it has no config."""
    if (file := find_gguf(folder)) is not None:
        return copy.deepcopy(open_gguf(file).config), {}
    if not folder.is_dir():
        raise UnknownModel(f"there is no model folder {folder}: give a folder that holds config.json")
    raw = read_object(folder / "config.json")
    if raw is None:
        raise BadModelFolder(
            f"{folder} has no config.json: it is not a Hugging Face model folder", param="config.json"
        )
    return raw, read_object(folder / "generation_config.json") or {}


def read_architectures(raw: RawConfig) -> list[Any]:
    """Returns the architectures in a config; older configs have one name instead of a list."""
    names = raw.get("architectures") or []
    return names if isinstance(names, list) else [names]


def end_token_ids(raw: RawConfig, generation: RawConfig) -> tuple[int, ...]:
    """Returns the tokens that end a text, from both files: some models list different tokens in each."""
    found: dict[int, None] = {}
    for source in (generation, raw):
        ids = source.get("eos_token_id")
        ids = ids if isinstance(ids, list) else [] if ids is None else [ids]
        found.update(dict.fromkeys(int(token) for token in ids))
    return tuple(found)
