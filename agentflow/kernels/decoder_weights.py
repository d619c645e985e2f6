"""The weights of a Llama-shaped model, laid out for the kernels that run it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from torch import Tensor

from agentflow.kernels.linear_weight import LinearWeight


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer's weights. ``qkv``: queries, keys and values in one product; ``gate_up``:
    both halves of the gated MLP. ``q_norm`` and ``k_norm`` [head_dim]: Qwen3 only."""

    input_norm: Tensor
    qkv: LinearWeight
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: LinearWeight
    mlp_norm: Tensor
    gate_up: LinearWeight
    down: LinearWeight

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for f in fields(self) if (part := getattr(self, f.name)) is not None)


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """Everything from token ids to the last hidden states. ``embedding`` [vocabulary, hidden_size];
    ``frequencies`` [head_dim / 2] float32: of the rotary embeddings, in radians per position."""

    embedding: Tensor
    layers: Sequence[LayerWeights]
    final_norm: Tensor
    frequencies: Tensor
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
