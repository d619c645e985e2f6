"""The towers of Qwen2.5-VL (arXiv 2502.13923) and Qwen3-VL (arXiv 2511.21631): images of any size in patches
with rotary positions on two axes. A square of patches becomes one token.

Qwen2.5-VL attends to windows in most layers. Qwen3-VL adds learned positions, resized from a square table,
and adds the results of some layers to the first layers of the text model (DeepStack). In videos, a patch
spans two frames, and the patches of the same frames attend to each other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentflow.engine.media.settings import PixelScaling
from agentflow.engine.models.config import RawConfig
from agentflow.engine.models.families.family import read_activation
from agentflow.engine.models.forward.decoder import apply_norm
from agentflow.engine.models.rope import rope_angles
from agentflow.engine.models.vision.encoder import Encoder, EncoderShape, Rows
from agentflow.engine.models.vision.pieces import Pieces, even_parts
from agentflow.engine.models.vision.tower import EMBED_FACTOR, Arrays, TileRange, Tower, product_flops
from agentflow.engine.models.vision.weights import LayerNames, TowerWeights
from agentflow.engine.store.config_parts import text_config, vision_config
from agentflow.errors import BadArgument, BadModelFolder
from agentflow.kernels.decoder_weights import Norm
from agentflow.kernels.inputs import LinearWeight
from agentflow.kernels.platforms import Kernels

_EPS = 1e-6
_THETA = 10_000.0


@dataclass(frozen=True, slots=True)
class PatchShape:
    """The sizes of patches."""

    patch: int  # the side of a patch, in pixels
    frames: int  # the frames that a patch spans
    merge: int  # the patches on the side of a token
    window: int  # the tokens on the side of a window; 0: there are no windows

    @property
    def kernel(self) -> tuple[int, ...]:
        """The shape of a patch."""
        return 3, self.frames, self.patch, self.patch


@dataclass(frozen=True, slots=True)
class Merger:
    """Makes tokens from squares of patches."""

    norm: Norm  # over a patch, or over a whole square
    first: LinearWeight
    second: LinearWeight

    @property
    def nbytes(self) -> int:
        return self.first.nbytes + self.second.nbytes

    def __call__(self, squares: Tensor, kernels: Kernels) -> Tensor:
        """Turns [tokens, merge * merge * hidden_size] into [tokens, hidden_size of the text model]."""
        size = squares.shape[1]
        normed = apply_norm(squares.view(-1, len(self.norm.weight)), self.norm, kernels)
        inner = kernels.linear.multiply(normed.view(-1, size), self.first, activation="gelu")
        return kernels.linear.multiply(inner, self.second)


class QwenTower(Tower):
    """The tower.

    Args:
        encoder: the layers.
        shape: the sizes of patches.
        patches: the product that embeds a patch.
        positions: [side * side, hidden_size]: the learned positions of a square; None: there are none.
        merger: makes tokens.
        deep: the layers whose results are deep features, with their mergers.
        kernels: the implementation that packed the weights.
        scaling: the scaling of pixels.
        dtype, device: the type and device of the weights.
    """

    def __init__(
        self,
        encoder: Encoder,
        shape: PatchShape,
        patches: LinearWeight,
        positions: Tensor | None,
        merger: Merger,
        deep: Sequence[tuple[int, Merger]],
        kernels: Kernels,
        scaling: PixelScaling,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(encoder, scaling, dtype, device)
        self.kept_layers = [layer for layer, _ in deep]
        self.num_deep = len(deep)
        self._shape = shape
        self._patches = patches
        self._positions = positions
        self._merger = merger
        self._deep = [merger for _, merger in deep]
        self._kernels = kernels

    @property
    def nbytes(self) -> int:
        positions = 0 if self._positions is None else self._positions.nbytes
        mergers = sum(merger.nbytes for merger in (self._merger, *self._deep))
        return self.encoder.nbytes + self._patches.nbytes + positions + mergers

    def parts(self, arrays: Arrays, most_rows: int) -> list[TileRange]:
        num_times, rows, columns = self._grid(arrays)
        step = max(1, most_rows // (rows * columns))
        firsts = range(0, num_times, step)
        ends = [min(first + step, num_times) for first in firsts]
        return [TileRange(a, b, (b - a) * rows * columns) for a, b in zip(firsts, ends, strict=True)]

    def num_seen(self, part: TileRange, arrays: Arrays, *, is_windowed: bool) -> float:
        if not is_windowed:
            return super().num_seen(part, arrays, is_windowed=False)
        _, rows, columns = self._grid(arrays)
        return rows * columns / max(1, len(self._windows(rows, columns)[1]) - 1)

    def embed_flops(self, part: TileRange) -> float:
        return EMBED_FACTOR * product_flops(part.num_rows, self._patches)

    def embed(self, arrays: Arrays, part: TileRange, count: int) -> Pieces[Rows]:
        shape, (_, rows, columns) = self._shape, self._grid(arrays)
        num_times, line = part.end - part.first, shape.merge * columns  # line: the patches in a row of tokens
        frames = arrays["pixels"][shape.frames * part.first : shape.frames * part.end]
        places = self._places(rows, columns)
        made: list[Tensor] = []
        for first, end in even_parts(rows // shape.merge, count):
            if first < end:
                side = shape.merge * shape.patch
                patches = self._cut(self.scaled(frames[:, :, first * side : end * side]), num_times)
                lines = self._kernels.linear.multiply(patches, self._patches)
                lines = lines.view(num_times, (end - first) * line, -1)
                if self._positions is not None:
                    some = places[:, first * line : end * line]
                    lines = lines + _resized(self._positions, some, (rows, columns)).to(lines.dtype)
                made.append(lines)
            yield
        hidden = torch.cat(made, dim=1).flatten(0, 1)
        windows = None
        order, starts = self._windows(rows, columns)
        if shape.window:
            hidden = self._reordered(hidden, order, num_times)
            places = self._reordered(places.t(), order, 1).t()
            windows = np.concatenate([starts[:-1] + i * rows * columns for i in range(num_times)])
            windows = np.append(windows, part.num_rows)
        angles = self._angles(places)
        return Rows(
            hidden,
            np.arange(num_times + 1, dtype=np.int64) * rows * columns,
            windows,
            (angles[0].repeat(num_times, 1, 1), angles[1].repeat(num_times, 1, 1)),
        )

    def _cut(self, pixels: Tensor, num_times: int) -> Tensor:
        """Cuts frames, or lines of them, [frames, 3, height, width] into patches [patches, size], square by
        square."""
        shape = self._shape
        if len(pixels) == 1:
            pixels = pixels.expand(shape.frames, -1, -1, -1)
        side = shape.merge * shape.patch
        rows, columns = pixels.shape[2] // side, pixels.shape[3] // side
        squares = rows, shape.merge, shape.patch, columns, shape.merge, shape.patch
        grid = pixels.reshape(num_times, shape.frames, 3, *squares)
        patches = grid.permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
        return patches.reshape(num_times * rows * columns * shape.merge**2, -1)

    def finish_flops(self, part: TileRange) -> float:
        products = [one for merger in (self._merger, *self._deep) for one in (merger.first, merger.second)]
        return product_flops(part.num_rows // self._shape.merge**2, *products)

    def finish(self, arrays: Arrays, rows: Rows, kept: Sequence[Tensor], count: int) -> Pieces[list[Tensor]]:
        num_tokens = len(rows.hidden) // self._shape.merge**2
        squares = [hidden.view(num_tokens, -1) for hidden in (rows.hidden, *kept)]
        parts: list[list[Tensor]] = [[] for _ in squares]
        for first, end in even_parts(num_tokens, count):
            if first < end:
                for merger, some, tokens in zip((self._merger, *self._deep), squares, parts, strict=True):
                    tokens.append(merger(some[first:end], self._kernels))
            yield
        made = [torch.cat(tokens) for tokens in parts]
        if self._shape.window:
            _, num_rows, columns = self._grid(arrays)
            order = self._windows(num_rows, columns)[0].argsort()
            num_times = len(rows.hidden) // (num_rows * columns)
            made = [tokens.view(num_times, -1, tokens.shape[-1])[:, order].flatten(0, 1) for tokens in made]
        return made

    def _grid(self, arrays: Arrays) -> tuple[int, int, int]:
        """Returns the number of patches in time, height and width. Raises ``BadArgument`` if the arrays do
        not fit them."""
        shape, pixels, grid = self._shape, arrays.get("pixels"), arrays.get("grid")
        sizes = () if grid is None else tuple(grid.ravel().tolist())
        if (
            pixels is None
            or len(sizes) != 3
            or min(sizes) < 1
            or sizes[1] % shape.merge
            or sizes[2] % shape.merge
        ):
            raise BadArgument("image: the model needs pixels and their grid of patches", param="image")
        num_times, rows, columns = sizes
        frames = {num_times * shape.frames} | ({1} if num_times == 1 else set())
        if pixels.ndim != 4 or pixels.shape[0] not in frames:
            raise BadArgument(f"image: {num_times} patches in time do not fit its frames", param="image")
        if pixels.shape[1:] != (3, rows * shape.patch, columns * shape.patch):
            raise BadArgument(
                f"image: {rows} by {columns} patches of {shape.patch} pixels do not fit {pixels.shape}",
                param="image",
            )
        return num_times, rows, columns

    def _places(self, rows: int, columns: int) -> Tensor:
        """Returns the row and the column of each patch, [2, patches], square by square."""
        merge = self._shape.merge
        grid = torch.stack(torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij"))
        squares = grid.view(2, rows // merge, merge, columns // merge, merge)
        return squares.transpose(2, 3).reshape(2, -1).to(self.device)

    def _windows(self, rows: int, columns: int) -> tuple[Tensor, NDArray[np.int64]]:
        """Returns the tokens of one time in the order of windows, the first patch of each window, and the
        number of patches."""
        side, merge = self._shape.window, self._shape.merge
        num_rows, num_columns = rows // merge, columns // merge
        if not side:
            return torch.arange(num_rows * num_columns), np.array([0, rows * columns])
        tokens = np.arange(num_rows * num_columns).reshape(num_rows, num_columns)
        blocks = [
            tokens[top : top + side, left : left + side].ravel()
            for top in range(0, num_rows, side)
            for left in range(0, num_columns, side)
        ]
        starts = np.cumsum([0, *(len(block) for block in blocks)]) * merge**2
        return torch.from_numpy(np.concatenate(blocks)).to(self.device), starts

    def _reordered(self, values: Tensor, order: Tensor, num_times: int) -> Tensor:
        """Returns the rows [num_times * patches, any] with the tokens of each time in ``order``."""
        squares = values.reshape(num_times, len(order), self._shape.merge**2, -1)
        return squares[:, order].reshape(len(values), -1)

    def _angles(self, places: Tensor) -> tuple[Tensor, Tensor]:
        quarter = self.encoder.shape.head_dim // 4
        exponents = torch.arange(quarter, dtype=torch.float32, device=self.device) / quarter
        frequencies = (1.0 / _THETA**exponents).repeat(2)
        of_frequencies = places.repeat_interleave(quarter, dim=0).t()
        return rope_angles(of_frequencies, frequencies, torch.float32)


def _resized(table: Tensor, places: Tensor, size: tuple[int, int]) -> Tensor:
    """Returns the position embeddings of patches at ``places`` [2, n] of an image, from a square table that
    is resized bilinearly to ``size`` with aligned corners: [n, hidden_size] in float32."""
    side = math.isqrt(len(table))
    total: Tensor | None = None
    low, shares = [], []
    for place, length in zip(places, size, strict=True):
        at = place.float() * (side - 1) / max(length - 1, 1)
        low.append(at.floor().long())
        shares.append(at - at.floor())
    for down in (0, 1):
        for right in (0, 1):
            row, column = (low[0] + down).clamp(max=side - 1), (low[1] + right).clamp(max=side - 1)
            share = (shares[0] if down else 1 - shares[0]) * (shares[1] if right else 1 - shares[1])
            part = table[row * side + column].float() * share.unsqueeze(1)
            total = part if total is None else total + part
    assert total is not None
    return total


def _read_encoder(vision: RawConfig, *, is_gated: bool) -> EncoderShape:
    hidden, heads, depth = int(vision["hidden_size"]), int(vision["num_heads"]), int(vision["depth"])
    if min(hidden, heads, depth) < 1 or hidden % heads or hidden // heads % 4:
        raise ValueError(f"{heads} heads in {hidden} dimensions, {depth} layers")
    activation = read_activation(vision, "hidden_act")
    assert activation != "clamped_swiglu"
    windowed: frozenset[int] = frozenset()
    if is_gated:
        windowed = frozenset(range(depth)) - {int(layer) for layer in vision["fullatt_block_indexes"]}
    return EncoderShape(
        hidden_size=hidden,
        intermediate_size=int(vision["intermediate_size"]),
        num_layers=depth,
        num_heads=heads,
        activation=activation,
        is_gated=is_gated,
        windowed=windowed,
    )


def _read_patches(vision: RawConfig, window: int) -> PatchShape:
    patch, merge = int(vision["patch_size"]), int(vision["spatial_merge_size"])
    frames = int(vision["temporal_patch_size"])
    if min(patch, merge, frames) < 1:
        raise ValueError(f"patches of {patch} pixels and {frames} frames, {merge} on the side of a token")
    return PatchShape(patch, frames, merge, window // merge // patch)


def load_qwen2_5(weights: TowerWeights, raw: RawConfig, scaling: PixelScaling) -> QwenTower:
    """Loads the tower of Qwen2.5-VL."""
    vision, weights = vision_config(raw), weights.below("visual.", "model.visual.")
    shape = _read_encoder(vision, is_gated=True)
    patches = _read_patches(vision, int(vision["window_size"]))
    if not patches.window:
        raise ValueError("window_size is smaller than a token")
    gate_up = "mlp.gate_proj", "mlp.up_proj"
    names = LayerNames("norm1", ("attn.qkv",), "attn.proj", "norm2", gate_up, "mlp.down_proj")
    size = patches.merge**2 * shape.hidden_size
    merger = Merger(
        weights.norm("merger.ln_q", shape.hidden_size, _EPS, is_rms=True),
        weights.linear("merger.mlp.0", size, size),
        weights.linear("merger.mlp.2", int(text_config(raw)["hidden_size"]), size),
    )
    layers = [
        weights.below(f"blocks.{i}.").layer(shape, _EPS, names, is_rms=True) for i in range(shape.num_layers)
    ]
    return QwenTower(
        Encoder(shape, weights.kernels, layers),
        patches,
        weights.patches("patch_embed.proj", shape.hidden_size, *patches.kernel),
        None,
        merger,
        (),
        weights.kernels,
        scaling,
        weights.dtype,
        weights.device,
    )


def load_qwen3(weights: TowerWeights, raw: RawConfig, scaling: PixelScaling) -> QwenTower:
    """Loads the tower of Qwen3-VL."""
    vision, weights = vision_config(raw), weights.below("model.visual.", "visual.")
    text = text_config(raw)
    shape, patches = _read_encoder(vision, is_gated=False), _read_patches(vision, 0)
    num_positions = int(vision["num_position_embeddings"])
    if num_positions < 1 or math.isqrt(num_positions) ** 2 != num_positions:
        raise ValueError(f"num_position_embeddings is {num_positions}, which is not a square number")
    deep = [int(layer) for layer in vision["deepstack_visual_indexes"]]
    if sorted(set(deep)) != deep or not set(deep).issubset(range(shape.num_layers)):
        raise BadModelFolder(
            f"deepstack_visual_indexes must be layers of the tower in order, not {deep}",
            param="deepstack_visual_indexes",
        )
    if len(deep) >= int(text["num_hidden_layers"]):
        raise BadModelFolder(
            "the text model has too few layers for deepstack_visual_indexes", param="deepstack_visual_indexes"
        )
    hidden, size = int(text["hidden_size"]), patches.merge**2 * shape.hidden_size

    def merger(name: str, *, norms_squares: bool) -> Merger:
        below = weights.below(f"{name}.")
        return Merger(
            below.norm("norm", size if norms_squares else shape.hidden_size, _EPS),
            below.linear("linear_fc1", size, size),
            below.linear("linear_fc2", hidden, size),
        )

    names = LayerNames("norm1", ("attn.qkv",), "attn.proj", "norm2", ("mlp.linear_fc1",), "mlp.linear_fc2")
    layers = [weights.below(f"blocks.{i}.").layer(shape, _EPS, names) for i in range(shape.num_layers)]
    return QwenTower(
        Encoder(shape, weights.kernels, layers),
        patches,
        weights.patches("patch_embed.proj", shape.hidden_size, *patches.kernel),
        weights.tensor("pos_embed.weight", num_positions, shape.hidden_size),
        merger("merger", norms_squares=False),
        [(layer, merger(f"deepstack_merger_list.{i}", norms_squares=True)) for i, layer in enumerate(deep)],
        weights.kernels,
        scaling,
        weights.dtype,
        weights.device,
    )
