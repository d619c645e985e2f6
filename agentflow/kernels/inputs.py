"""What the rows of a batch attend to, as every implementation of attention is given it.

The rows of a batch that are nodes of trees below a prefix, as the kernels are given them.

How a token is chosen from each row of logits, as the kernels are given it.

The weights of a Llama-shaped model, laid out for the kernels that run it.

What one forward pass of a whole model is given.

The weight of one linear layer, in the layouts that its kernels want.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

IntArray = NDArray[np.int64]


class TreeAttention(Protocol):
    """The last B rows of a batch, tree after tree. Each sees the whole prefix of its tree, then the nodes
    above it, then itself.

    Of G trees: ``req_to_token[req_rows[g], :prefix_lens[g]]`` are the slots of the prefix, and
    ``query_lens[g]`` the number of rows. Of the rows: ``paths[b, :path_lens[b]]`` are the slots of the nodes
    above, from the top, and its own, which all further columns repeat.
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


def tree_block(
    head: NDArray[np.int32], paths: IntArray, num_above: int
) -> tuple[IntArray, NDArray[np.bool_]]:
    """The slots of the rows of one tree, and which row sees which of them. All rows see ``head``; the first
    ``num_above`` nothing else, and each of the others its path."""
    # As np.unique does it, without sorting: paths of long choices repeat their slots again and again.
    lowest = int(paths.min())
    is_node = np.zeros(int(paths.max()) - lowest + 1, dtype=np.bool_)
    is_node[paths - lowest] = True
    nodes = np.flatnonzero(is_node)
    place_of = np.empty(len(is_node), dtype=np.int64)
    place_of[nodes] = np.arange(len(nodes))
    visible = np.zeros((num_above + len(paths), len(head) + len(nodes)), dtype=np.bool_)
    visible[:, : len(head)] = True
    rows = np.arange(num_above, len(visible))
    visible[rows[:, None], len(head) + place_of[paths - lowest]] = True
    return np.concatenate((head, nodes + lowest)), visible


def side_by_side(blocks: Sequence[NDArray[np.bool_]], num_rows: int, num_slots: int) -> NDArray[np.bool_]:
    """What the rows of several trees see of all their slots, laid end to end: their own. Further rows see
    what the last one sees, and nobody sees further slots."""
    seen = np.zeros((num_rows, num_slots), dtype=np.bool_)
    row = column = 0
    for block in blocks:
        height, width = block.shape
        seen[row : row + height, column : column + width] = block
        row, column = row + height, column + width
    seen[row:] = seen[row - 1]
    return seen


FloatArray = NDArray[np.float32]


@dataclass(slots=True, frozen=True)
class ChoiceRows:
    """S rows. ``targets``: -1, or the token that is chosen whatever the logits are. ``temperatures``: 0 takes
    the likeliest, the first of equals. ``top_ks``: 0 keeps all. ``uniforms``: the number in [0, 1) that
    decides, of rows with a temperature. ``masked_rows`` [M] and ``mask_words`` [M, any]: the only tokens that
    these rows may choose, as bits of 32-bit words, the first token lowest; None where no row has a mask."""

    targets: IntArray
    temperatures: FloatArray
    top_ks: IntArray
    top_ps: FloatArray
    min_ps: FloatArray
    uniforms: NDArray[np.float64]
    masked_rows: IntArray | None = None
    mask_words: NDArray[np.uint32] | None = None


@dataclass(slots=True, frozen=True)
class LinearWeight:
    """y = x Wᵀ + b for W of shape [out, in].

    ``transposed`` [in, out]: Wᵀ, a view of W as it came, in the model's dtype; None where every
    product goes through ``packed``.
    ``packed``: W in the opaque blocked layout of oneDNN, in the model's dtype or in float32, or in the panels
    of the native kernels; None where nothing is packed.
    ``bias`` [out]: in the model's dtype.
    ``shape``: (out, in).
    """

    transposed: Tensor | None
    packed: Tensor | None
    bias: Tensor | None
    shape: tuple[int, int]

    @property
    def nbytes(self) -> int:
        """Bytes that this weight holds in memory. (An opaque tensor does not tell its own.)"""
        held = [tensor for tensor in (self.transposed, self.packed, self.bias) if tensor is not None]
        return sum(tensor.numel() * tensor.element_size() for tensor in held)


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


ReqToToken = NDArray[np.int32]


@dataclass(slots=True, frozen=True)
class AttentionBatch:
    """R requests: ``req_to_token[req_rows[r], :kv_lens[r]]`` are the slots of request r, of which the last
    ``query_lens[r]`` belong to its rows in this batch. ``trees``: of the rows after those."""

    req_to_token: ReqToToken
    req_rows: IntArray
    query_lens: IntArray
    kv_lens: IntArray
    trees: TreeAttention | None


@dataclass(frozen=True, slots=True)
class ForwardInput:
    """T rows to compute. ``token_ids``, ``positions``, ``write_slots`` [T]: what each is, where it stands in
    its sequence, and the slot its key and value go to. ``kv_layers``: the pool, layer by layer, as in
    ``Kernels.rope_and_write``. ``plan``: of the same kernels' ``plan_attention``. ``rows`` [S]: those of
    which something is wanted."""

    token_ids: IntArray
    positions: IntArray
    write_slots: IntArray
    kv_layers: tuple[Tensor, ...]
    plan: Any
    rows: IntArray
