"""The layers of a vision transformer (Dosovitskiy et al. 2020, arXiv 2010.11929), in parts that can be
computed one by one.

A layer has two halves. The first half computes queries, keys and values of some rows. The second attends from
some rows to all rows of their segments, in both directions, and computes the rest; it needs the first half
for all rows of the segments. A segment is an image, a tile, or a window of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from agentflow.engine.models.forward.decoder import apply_norm
from agentflow.kernels.activations import PlainActivation
from agentflow.kernels.decoder_weights import Norm
from agentflow.kernels.inputs import IntArray, LinearWeight
from agentflow.kernels.platforms import Kernels


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderShape:
    """The sizes of an encoder."""

    hidden_size: int
    intermediate_size: int
    num_layers: int  # the layers to compute
    num_heads: int
    activation: PlainActivation
    is_gated: bool = False  # the MLP has a gate
    windowed: frozenset[int] = frozenset()  # the layers that attend to windows only

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    def flops(self, num_rows: int, num_seen: float) -> tuple[float, float]:
        """Returns the operations of each half of a layer for rows that attend to ``num_seen`` rows each."""
        hidden, num_matrices = self.hidden_size, 3 if self.is_gated else 2
        later = hidden * hidden + num_matrices * hidden * self.intermediate_size + 2 * num_seen * hidden
        return 6.0 * num_rows * hidden * hidden, 2.0 * num_rows * later


@dataclass(frozen=True, slots=True)
class EncoderLayer:
    """The weights of a layer."""

    input_norm: Norm
    qkv: LinearWeight
    output: LinearWeight
    mlp_norm: Norm
    up: LinearWeight  # packed with its gate, if there is one
    down: LinearWeight

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (self.qkv, self.output, self.up, self.down))


@dataclass(slots=True)
class Rows:
    """Rows that are encoded together. Each layer changes ``hidden``.

    ``starts`` [S + 1]: the first row of each segment, and the number of rows. ``windows``: the same for the
    windows of ``windowed`` layers. ``angles``: cos and sin [rows, 1, head_dim] of the rotary embeddings, in
    the layout of ``rope_angles``.
    """

    hidden: Tensor  # [rows, hidden_size]
    starts: IntArray
    windows: IntArray | None = None
    angles: tuple[Tensor, Tensor] | None = None
    qkv: Tensor = field(init=False)  # queries, keys and values in one layer: [rows, 3, heads, head_dim]


class Encoder:
    """The layers of a tower.

    Args:
        shape: the sizes.
        kernels: the implementation that packed the weights.
        layers: the weights.
    """

    def __init__(self, shape: EncoderShape, kernels: Kernels, layers: Sequence[EncoderLayer]) -> None:
        self.shape = shape
        self._kernels = kernels
        self._layers = layers

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self._layers)

    def begin_layer(self, index: int, rows: Rows, first: int, end: int) -> None:
        """Computes the first half of a layer for rows ``first`` to ``end`` (exclusive)."""
        layer, shape, hidden = self._layers[index], self.shape, rows.hidden
        normed = apply_norm(hidden[first:end], layer.input_norm, self._kernels)
        qkv = self._kernels.linear.multiply(normed, layer.qkv).view(-1, 3, shape.num_heads, shape.head_dim)
        if rows.angles is not None:
            cos, sin = (part[first:end].unsqueeze(1) for part in rows.angles)
            turned = qkv[:, :2]
            turned.copy_(turned * cos + turned.roll(shape.head_dim // 2, -1) * sin)
        if end - first == len(hidden):
            rows.qkv = qkv
            return
        if index == 0 and first == 0:
            rows.qkv = qkv.new_empty(len(hidden), *qkv.shape[1:])
        rows.qkv[first:end].copy_(qkv)

    def end_layer(self, index: int, rows: Rows, first: int, end: int) -> None:
        """Computes the second half of a layer for rows ``first`` to ``end`` (exclusive)."""
        layer, hidden = self._layers[index], rows.hidden[first:end]
        is_windowed = index in self.shape.windowed and rows.windows is not None
        starts = rows.windows if is_windowed and rows.windows is not None else rows.starts
        queries, kv, scale = rows.qkv[first:end, 0], rows.qkv[:, 1:], self.shape.head_dim**-0.5
        attended = self._kernels.attention.attend_segments(queries, kv, starts, first, scale)
        self._kernels.linear.add_product(hidden, attended, layer.output)
        normed = apply_norm(hidden, layer.mlp_norm, self._kernels)
        inner = self._kernels.linear.multiply(normed, layer.up, activation=self.shape.activation)
        self._kernels.linear.add_product(hidden, inner, layer.down)
