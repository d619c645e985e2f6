"""The inputs of the kernels: matrices, and the batch of one forward pass.

A batch is a ``ForwardInput`` with one row per token to compute. An ``Adapter`` changes the products of some
rows. ``AttentionBatch`` has the positions to which each row attends; its last rows may belong to trees
(``TreeAttention``). ``ChoiceRows`` describes how to choose a token for each row of logits, and
``Likelihoods`` has the log-probabilities that requests need.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float32]
ReqToToken = NDArray[np.int32]
SharedPrefix = tuple[int, IntArray]
"""A number of columns, and the rows of ``req_to_token`` in which these first columns are equal."""

MAX_HEAD_DIM = 256
"""The largest head in the Triton kernels of attention. Larger heads are not computed in graphs."""


@dataclass(slots=True, frozen=True)
class BlockMatrix:
    """A matrix in blocks of quantised values, as GGUF files store them, or in 8-bit floats."""

    # ggml's name, such as "Q4_K", or "F8_E4M3": a row is a float32 scale, then an 8-bit float for each input.
    type: str
    rows: NDArray[np.uint8]  # [out, bytes of a row]
    shape: tuple[int, int]  # (out, in)
    is_mapped: bool = False  # ``rows`` is mapped from a file: pages may be released after reading


@dataclass(slots=True, frozen=True)
class QuantisedPanels:
    """Adjacent panels of the native kernels, or adjacent outputs on a GPU, in one format."""

    format: str  # in ``native_ops.structures.PANEL_FORMATS`` or ``triton_ops.linear.quantised``
    panels: Tensor
    num_panels: int  # on a GPU, the number of outputs
    scales: Tensor | None = None  # only on a GPU, where the panels have only codes
    counters: Tensor | None = None  # only on a GPU: the finished parts of a product; 0 between products


@dataclass(slots=True, frozen=True)
class LinearWeight:
    """y = x Wᵀ + b for W of shape [out, in]."""

    # [in, out]: Wᵀ, as a view of W in the model's dtype or float32; None if W is packed or quantised.
    transposed: Tensor | None
    packed: Tensor | None  # W in the panels of the native kernels; None if W is not packed
    bias: Tensor | None  # [out], in the model's dtype
    shape: tuple[int, int]  # (out, in)
    quantised: tuple[QuantisedPanels, ...] = ()  # W as quantised panels, instead of ``packed``
    is_gated: bool = False  # the first half of the outputs are the gates of the second half

    @property
    def nbytes(self) -> int:
        """The memory of this weight, in bytes."""
        tensors = [tensor for tensor in (self.transposed, self.packed, self.bias) if tensor is not None]
        for part in self.quantised:
            tensors += [each for each in (part.panels, part.scales, part.counters) if each is not None]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@dataclass(frozen=True, slots=True)
class LowRankPart:
    """The second matrix of a low-rank change, for a range of outputs."""

    up: LinearWeight  # [outputs of the part, rank], without a bias
    first_output: int


@dataclass(frozen=True, slots=True)
class LowRank:
    """A change of W [out, in], in the model's dtype: each part adds its ``up`` times its rows of ``down``."""

    down: LinearWeight  # [ranks of all parts, in]
    parts: tuple[LowRankPart, ...]

    @property
    def nbytes(self) -> int:
        return self.down.nbytes + sum(part.up.nbytes for part in self.parts)


@dataclass(frozen=True, slots=True)
class LayerAdapter:
    """The changes of one layer's products by an adapter (LoRA). None: the product is unchanged."""

    qkv: LowRank | None = None
    output: LowRank | None = None
    gate_up: LowRank | None = None
    down: LowRank | None = None


@dataclass(frozen=True, eq=False)
class Adapter:
    """The changes of all layers."""

    layers: tuple[LayerAdapter, ...]

    @property
    def nbytes(self) -> int:
        """The memory of its weights, in bytes."""
        changes = (getattr(layer, f.name) for layer in self.layers for f in fields(layer))
        return sum(change.nbytes for change in changes if change is not None)


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """The rows of a batch that use one adapter."""

    adapter: Adapter
    rows: IntArray  # ascending
    sampled: IntArray  # the indices in ``ForwardInput.rows`` of rows that use the adapter


@dataclass(frozen=True, slots=True)
class GivenRows:
    """Rows whose embeddings are given, such as rows of images, and the positions of all rows.

    ``deep``: after layer i, ``deep[i]`` is added to the hidden states of these rows (DeepStack: Meng et al.
    2024, arXiv 2406.04334). L is less than the number of layers.
    """

    rows: IntArray  # [E], ascending
    values: Tensor  # [E, hidden_size], in the model's dtype and on its device
    deep: Tensor | None = None  # [L, E, hidden_size]
    # [A, T]: the positions of all rows on the axes of the rope; None: ``ForwardInput.positions`` on all axes.
    axis_positions: IntArray | None = None


@dataclass(frozen=True, slots=True)
class ForwardInput:
    """T rows to compute."""

    token_ids: IntArray  # [T]
    positions: IntArray  # [T], in the row's sequence
    write_slots: IntArray  # [T], for the row's key and value
    kv_layers: tuple[Tensor, ...]  # the KV pool, layer by layer, as in ``RowOps.rope_and_write``
    plan: Any  # from ``AttentionBackend.plan`` of the same kernels
    rows: IntArray  # [S]: the rows whose hidden states or tokens the forward pass returns
    adapters: Sequence[AdapterRows] = ()  # one for each adapter in use; a row is in at most one
    given_rows: GivenRows | None = None  # the token ids of these rows are arbitrary, but in the vocabulary


@dataclass(slots=True, frozen=True)
class AttentionBatch:
    """R requests. ``req_to_token[req_rows[r], :kv_lens[r]]`` are the slots of request r; the last
    ``query_lens[r]`` of them belong to its rows in this batch. A row attends to the slots up to its own. A
    request may be divided into several, in order, each with some of its rows."""

    req_to_token: ReqToToken
    req_rows: IntArray  # [R]
    query_lens: IntArray  # [R]
    kv_lens: IntArray  # [R]
    trees: TreeAttention | None  # the trees whose rows follow the requests' rows
    # [R]: the request's rows in this batch attend to each other, even to later rows. None: no rows do.
    both_ways: NDArray[np.bool_] | None = field(default=None, kw_only=True)
    # The prefixes that rows of the table share: the nodes of a tree, in any order. Their rows may include
    # rows of the table that are not in this batch.
    shared: Sequence[SharedPrefix] = field(default=(), kw_only=True)
    # [any, any] int32: the copy of ``req_to_token`` on the device, up to date when the batch runs; its rows
    # may be longer. None: the device has no copy.
    device_table: Tensor | None = field(default=None, kw_only=True)


class TreeAttention(Protocol):
    """The last B rows of a batch, tree after tree. Each row attends to the prefix of its tree, to its
    ancestors, and to itself.

    For each of G trees, ``req_to_token[req_rows[g], :prefix_lens[g]]`` are the slots of the prefix, and
    ``query_lens[g]`` is the number of rows. For each row b, ``paths[b, :path_lens[b]]`` are the slots of its
    ancestors, from the root, and its own slot, which the remaining columns repeat.
    """

    @property
    def req_rows(self) -> IntArray: ...
    @property
    def prefix_lens(self) -> IntArray: ...
    @property
    def query_lens(self) -> IntArray: ...
    @property
    def paths(self) -> IntArray: ...
    @property
    def path_lens(self) -> IntArray: ...


@dataclass(slots=True, frozen=True)
class ChoiceRows:
    """How to choose a token for each of S rows. ``Sampler.choose`` defines the order of the filters."""

    targets: IntArray  # [S]: a token to choose regardless of the logits, or -1
    temperatures: FloatArray  # [S]; 0 chooses the likeliest token; of equally likely tokens, the lowest id
    top_ks: IntArray  # [S]; 0 keeps all tokens
    top_ps: FloatArray  # [S]
    min_ps: FloatArray  # [S]
    uniforms: NDArray[np.float64]  # [S]: random numbers in [0, 1), used with a temperature
    masked_rows: IntArray | None = None  # [M]: the rows with a mask; None: no row has one
    # [M, any]: the allowed tokens of ``masked_rows``, as bits of 32-bit words, lowest bit first.
    mask_words: NDArray[np.uint32] | None = None


@dataclass(slots=True, frozen=True)
class Likelihoods:
    """Arrays that a forward pass fills with the log-probabilities of S rows, from unmodified logits. A row
    whose logits are not finite has the token ``NOT_FINITE``, and its numbers here have no meaning."""

    logprobs: FloatArray  # [S], of the row's token
    ranks: IntArray | None = None  # [S]: the number of tokens that are at least as likely as the row's token
    # [S, any]: the likeliest tokens, as in ``Sampler.likeliest``, and their log-probabilities
    top_ids: IntArray | None = None
    top_logprobs: FloatArray | None = None
    wants_top: NDArray[np.bool_] | None = None  # [S]: the rows of these two to write; None: all
    # Further tokens to score: their rows, ascending, and ids.
    scored_rows: IntArray | None = None
    scored_ids: IntArray | None = None
    scored_logprobs: FloatArray | None = None


def tree_block(head: NDArray[np.int32], paths: IntArray) -> tuple[IntArray, NDArray[np.bool_]]:
    """Returns the slots to which some rows of one tree attend, and a mask [rows, slots]. Every row attends to
    ``head`` and its path."""
    # Faster than np.unique, which sorts: the paths of long choices have the same slots many times.
    lowest = int(paths.min())
    is_node = np.zeros(int(paths.max()) - lowest + 1, dtype=np.bool_)
    is_node[paths - lowest] = True
    nodes = np.flatnonzero(is_node)
    place_of = np.empty(len(is_node), dtype=np.int64)
    place_of[nodes] = np.arange(len(nodes))
    visible = np.zeros((len(paths), len(head) + len(nodes)), dtype=np.bool_)
    visible[:, : len(head)] = True
    visible[np.arange(len(paths))[:, None], len(head) + place_of[paths - lowest]] = True
    return np.concatenate((head, nodes + lowest)), visible
