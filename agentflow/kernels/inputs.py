"""What the kernels receive: a model's weights, and the batch of one forward pass.

The weights are a ``DecoderWeights`` of ``LayerWeights`` of ``LinearWeight``s. A batch is a ``ForwardInput``;
it has one row per token to compute. An ``Adapter`` changes the products of some rows. ``AttentionBatch``
describes what each row attends to; its last rows may belong to trees (``TreeAttention``). ``ChoiceRows``
describes how to choose a token for each row of logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float32]
ReqToToken = NDArray[np.int32]


@dataclass(slots=True, frozen=True)
class BlockMatrix:
    """A matrix [out, in] in blocks of quantised values, as GGUF files store them. ``type``: ggml's name, such
    as "Q4_K". ``rows`` [out, bytes of a row] uint8. ``is_mapped``: these are pages of a file, which may be
    released as they are read."""

    type: str
    rows: NDArray[np.uint8]
    shape: tuple[int, int]
    is_mapped: bool = False


@dataclass(slots=True, frozen=True)
class QuantisedPanels:
    """Adjacent panels of the native kernels in one of ``native_structures.PANEL_FORMATS``."""

    format: str
    panels: Tensor
    num_panels: int


@dataclass(slots=True, frozen=True)
class LinearWeight:
    """y = x Wᵀ + b for W of shape [out, in].

    ``transposed`` [in, out]: Wᵀ, a view of the original W, in the model's dtype; None if every product uses
    ``packed``.
    ``packed``: W in oneDNN's opaque blocked layout, in the model's dtype or float32, or in the panels of the
    native kernels; None if W is not packed.
    ``quantised``: W as quantised panels, instead of ``packed``.
    ``bias`` [out]: in the model's dtype.
    ``shape``: (out, in).
    """

    transposed: Tensor | None
    packed: Tensor | None
    bias: Tensor | None
    shape: tuple[int, int]
    quantised: tuple[QuantisedPanels, ...] = ()

    @property
    def nbytes(self) -> int:
        """The memory of this weight, in bytes; an opaque tensor does not report its own."""
        tensors = [tensor for tensor in (self.transposed, self.packed, self.bias) if tensor is not None]
        tensors += [part.panels for part in self.quantised]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The weights of one decoder layer. ``qkv``: queries, keys and values in one product. ``gate_up``: both
    halves of the gated MLP. ``q_norm`` and ``k_norm`` [head_dim]: only in Qwen3."""

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
class LowRankPart:
    """``up`` [outputs of the part, rank], without a bias, for the outputs from ``first_output`` on."""

    up: LinearWeight
    first_output: int


@dataclass(frozen=True, slots=True)
class LowRank:
    """A change of W [out, in], in the model's dtype: ``up`` times the rows of ``down`` [all ranks, in] with
    the part's ranks, for each part."""

    down: LinearWeight
    parts: tuple[LowRankPart, ...]

    @property
    def nbytes(self) -> int:
        return self.down.nbytes + sum(part.up.nbytes for part in self.parts)


@dataclass(frozen=True, slots=True)
class LayerAdapter:
    """What an adapter (LoRA) changes in one layer. None: it leaves that product as it is."""

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
    """The rows of a batch that use one adapter, ascending. ``sampled``: those among ``ForwardInput.rows``,
    numbered as these."""

    adapter: Adapter
    rows: IntArray
    sampled: IntArray


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """The weights of a Llama-shaped model, without its head. ``embedding`` [vocabulary, hidden_size]: from
    ``Kernels.pack_embedding``.
    ``frequencies`` [head_dim / 2] float32: those of the rotary embeddings, in radians per position."""

    embedding: LinearWeight
    layers: Sequence[LayerWeights]
    final_norm: Tensor
    frequencies: Tensor
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float


@dataclass(frozen=True, slots=True)
class ForwardInput:
    """T rows to compute. ``token_ids``, ``positions``, ``write_slots`` [T]: each row's token, its position in
    the sequence, and the slot for its key and value. ``kv_layers``: the KV pool, layer by layer, as in
    ``Kernels.rope_and_write``. ``plan``: from ``plan_attention`` of the same kernels. ``rows`` [S]: the rows
    whose hidden states or tokens the forward pass returns. ``adapters``: one entry for each that is in use;
    no row is in two."""

    token_ids: IntArray
    positions: IntArray
    write_slots: IntArray
    kv_layers: tuple[Tensor, ...]
    plan: Any
    rows: IntArray
    adapters: Sequence[AdapterRows] = ()


@dataclass(slots=True, frozen=True)
class AttentionBatch:
    """R requests. ``req_to_token[req_rows[r], :kv_lens[r]]`` are the slots of request r, of which the last
    ``query_lens[r]`` belong to its rows in this batch. ``trees`` describes the rows after these."""

    req_to_token: ReqToToken
    req_rows: IntArray
    query_lens: IntArray
    kv_lens: IntArray
    trees: TreeAttention | None


class TreeAttention(Protocol):
    """The last B rows of a batch, tree after tree. Each row attends to the prefix of its
    tree, to its ancestors, and to itself.

    For each of G trees, ``req_to_token[req_rows[g], :prefix_lens[g]]`` are the slots of the prefix, and
    ``query_lens[g]`` is the number of rows. For each row, ``paths[b, :path_lens[b]]`` are the slots of its
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
    """How to choose a token for each of S rows. ``targets``: a token to take whatever the logits are, or -1.
    ``temperatures``: 0 takes the likeliest token, the lowest id of equals. ``top_ks``: 0 keeps all.
    ``uniforms``: the random number in [0, 1) for a row with a temperature. ``masked_rows`` [M] and
    ``mask_words`` [M, any]: the allowed tokens of these rows as bits of 32-bit words, lowest bit first; None
    if no row has a mask."""

    targets: IntArray
    temperatures: FloatArray
    top_ks: IntArray
    top_ps: FloatArray
    min_ps: FloatArray
    uniforms: NDArray[np.float64]
    masked_rows: IntArray | None = None
    mask_words: NDArray[np.uint32] | None = None


def tree_block(
    head: NDArray[np.int32], paths: IntArray, num_above: int
) -> tuple[IntArray, NDArray[np.bool_]]:
    """Returns the slots that the rows of one tree attend to, and the visibility of each slot to each row. All
    rows see ``head``; the first ``num_above`` see nothing else, and each of the others sees its path."""
    # np.unique without the sorting: the paths of long choices have the same slots many times.
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
    """Returns a block-diagonal mask: the rows of each tree see only its own slots. Padding rows repeat the
    last row, and no row sees padding slots."""
    seen = np.zeros((num_rows, num_slots), dtype=np.bool_)
    row = column = 0
    for block in blocks:
        height, width = block.shape
        seen[row : row + height, column : column + width] = block
        row, column = row + height, column + width
    seen[row:] = seen[row - 1]
    return seen
