"""The weights and parameters of a decoder, layer by layer. The native kernels use the whole record in one
call; other forward passes use its parts kernel by kernel.

``DecoderWeights`` contains ``LayerWeights``, which contain ``LinearWeight``s, ``Norm``s and an ``Mlp`` or
``Experts``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass

from torch import Tensor

from agentflow.kernels.activations import Activation
from agentflow.kernels.inputs import LinearWeight
from agentflow.kernels.ranks import Ranks


@dataclass(frozen=True, slots=True)
class Norm:
    """RMS norm, or layer norm if there is a bias."""

    weight: Tensor  # [size], or [heads, size] if each head has a separate weight
    bias: Tensor | None  # the same shape
    eps: float
    is_less_one: bool = False  # the weight is stored minus 1


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embeddings of the first ``2 * len(frequencies)`` dimensions of each head."""

    frequencies: Tensor  # [rotated dimensions / 2] float32: radians per position
    amplitude: float = 1.0  # the factor of cosines and sines
    axes: Tensor | None = None  # [frequencies] int64: the axis of the positions; None: there is one axis


@dataclass(frozen=True, slots=True)
class Mlp:
    """A dense MLP."""

    gate_up: LinearWeight  # packed with its gate; only the first product if there is none
    down: LinearWeight


@dataclass(frozen=True, slots=True)
class Routing:
    """How the experts of a row are chosen by their scores."""

    num_used: int  # experts for each row
    normalises: bool = True  # the weights of a row's experts add up to 1
    scale: float = 1.0  # the factor of the weights
    num_groups: int = 1  # the groups into which the experts are divided
    num_used_groups: int = 1  # the best groups, from which a row's experts are chosen


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts."""

    router: LinearWeight  # computes the scores of the experts
    routing: Routing
    experts: Sequence[Mlp]
    shared: Mlp | None = None  # computes every row


@dataclass(frozen=True, slots=True)
class LatentWeights:
    """The weights of latent attention (``latent_attention``)."""

    kv_rank: int  # the size of the latent of a key and its value
    plain_dim: int  # the part of a query or key that does not rotate
    # Computes the latents of the queries, or the queries if they have no latents; the latent of keys and
    # values; and the shared key.
    down: LinearWeight
    q_norm: Tensor | None  # the norm of the queries' latents
    q_up: LinearWeight | None  # expands the queries' latents
    kv_norm: Tensor  # the norm of the latent of keys and values
    key_up: Tensor  # [heads, plain_dim, kv_rank]
    value_up: Tensor  # [heads, kv_rank, value_dim]
    eps: float = 1e-6  # of both norms; the config's value applies only to other norms


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One layer. A norm is None if the family does not have it."""

    input_norm: Norm | None
    qkv: LinearWeight | LatentWeights  # queries, keys and values in one product
    q_norm: Norm | None = None  # over a query head, or over all query heads together, by its size
    k_norm: Norm | None = None
    sinks: Tensor | None = None  # [heads]: scores without values (``AttentionBackend.attend``)
    output: LinearWeight  # the output projection of the attention
    attention_norm: Norm | None = None  # the norm of the attention's output
    mlp_norm: Norm | None
    mlp: Mlp | Experts
    output_norm: Norm | None = None  # the norm of the MLP's output
    window: int = 0  # the number of tokens to which a row attends; 0: all
    rope: int | None = 0  # the index in ``DecoderWeights.ropes``; None: heads do not rotate


@dataclass(frozen=True, slots=True)
class RankPart:
    """One rank's part of a model (tensor parallelism): some of the heads, of the inner dimensions of each
    MLP, and of the vocabulary."""

    ranks: Ranks
    first_token: int  # the token of the first row of the rank's embedding and head
    token_counts: tuple[int, ...]  # the size of each rank's part of the vocabulary

    @property
    def vocab_size(self) -> int:
        """The size of the whole vocabulary."""
        return sum(self.token_counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderWeights:
    """A decoder without its head."""

    embedding: LinearWeight  # [vocabulary, hidden_size], from ``LinearMethod.pack_embedding``
    layers: Sequence[LayerWeights]
    final_norm: Norm
    ropes: Sequence[Rope]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    embedding_scale: float = 1.0  # the factor of the embeddings, rounded to the model's dtype
    positions: Tensor | None = None  # [positions, hidden_size]: added to the embeddings
    position_offset: int = 0  # the row of ``positions`` for position 0
    attention_scale: float  # the factor of the scores
    attention_cap: float = 0.0  # the soft cap of the scores; 0: none
    logit_scale: float = 1.0
    logit_cap: float = 0.0  # the soft cap of the scaled logits; 0: none
    activation: Activation = "silu"  # in the MLPs
    is_gated: bool = True  # the MLPs have a gate
    # The attention and the MLP of a layer read the same residual, and both outputs are added to it. Otherwise
    # the MLP reads the sum of residual and attention.
    is_parallel: bool = False
    part: RankPart | None = None  # the part that the other fields describe; None: the whole model

    @property
    def nbytes(self) -> int:
        """The memory of all weights, in bytes."""
        return sum(_sizes(self))


def _sizes(record: object) -> Iterator[int]:
    """Yields the bytes of all weights in a record."""
    if isinstance(record, Tensor | LinearWeight):
        yield record.nbytes
    elif isinstance(record, Sequence) and not isinstance(record, str):
        for part in record:
            yield from _sizes(part)
    elif is_dataclass(record):
        for field in fields(record):
            yield from _sizes(getattr(record, field.name))
