"""SigLIP (Zhai et al. 2023, arXiv 2303.15343) and CLIP (Radford et al. 2021, arXiv 2103.00020): encoders of
square tiles with learned positions. CLIP has a class token in front, and a norm before the first layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from agentflow.engine.media.settings import PixelScaling
from agentflow.engine.models.config import RawConfig
from agentflow.engine.models.families.family import read_activation
from agentflow.engine.models.forward.decoder import apply_norm
from agentflow.engine.models.vision.encoder import Encoder, EncoderShape, Rows
from agentflow.engine.models.vision.pieces import Pieces, even_parts
from agentflow.engine.models.vision.tower import EMBED_FACTOR, Arrays, TileRange, Tower, product_flops
from agentflow.engine.models.vision.weights import LayerNames, TowerWeights
from agentflow.errors import BadArgument, BadModelFolder
from agentflow.kernels.activations import PlainActivation
from agentflow.kernels.decoder_weights import Norm
from agentflow.kernels.inputs import LinearWeight
from agentflow.kernels.platforms import Kernels


@dataclass(frozen=True, slots=True)
class TileShape:
    """The sizes of an encoder of square tiles."""

    encoder: EncoderShape
    side: int  # the side of a tile, in pixels
    patch: int  # the side of a patch, in pixels
    eps: float
    has_class: bool  # a class token precedes the patches

    @property
    def grid(self) -> int:
        """The number of patches on a side."""
        return self.side // self.patch

    @property
    def num_rows(self) -> int:
        return self.grid**2 + self.has_class

    def with_layers(self, count: int) -> TileShape:
        """Returns the shape with only the first ``count`` layers."""
        return replace(self, encoder=replace(self.encoder, num_layers=count))


def read_tiles(vision: RawConfig) -> TileShape:
    """Reads ``vision_config``."""
    hidden, heads = int(vision["hidden_size"]), int(vision["num_attention_heads"])
    side, patch = int(vision["image_size"]), int(vision["patch_size"])
    if min(hidden, heads, side, patch, int(vision["num_hidden_layers"])) < 1 or hidden % heads:
        raise ValueError(f"{heads} heads in {hidden} dimensions, patches of {patch} in {side} pixels")
    if int(vision.get("num_channels", 3)) != 3:
        raise BadModelFolder("images must have 3 channels", param="num_channels")
    return TileShape(
        EncoderShape(
            hidden_size=hidden,
            intermediate_size=int(vision["intermediate_size"]),
            num_layers=int(vision["num_hidden_layers"]),
            num_heads=heads,
            activation=plain_activation(vision),
        ),
        side,
        patch,
        float(vision["layer_norm_eps"]),
        vision.get("model_type") == "clip_vision_model",
    )


def plain_activation(vision: RawConfig) -> PlainActivation:
    """Reads ``hidden_act``."""
    name = read_activation(vision, "hidden_act")
    assert name != "clamped_swiglu"
    return name


@dataclass(frozen=True, slots=True)
class TileEncoder:
    """The weights of an encoder of tiles: its layers, and the parts before and after them."""

    shape: TileShape
    encoder: Encoder
    patches: LinearWeight
    positions: Tensor  # [rows, hidden_size], with the class token added
    first_norm: Norm | None
    last_norm: Norm | None
    kernels: Kernels

    @property
    def nbytes(self) -> int:
        return self.encoder.nbytes + self.patches.nbytes + self.positions.nbytes

    def embed(
        self, tiles: NDArray[Any], scaled: Callable[[NDArray[Any]], Tensor], count: int
    ) -> Pieces[Tensor]:
        """Embeds tiles [n, 3, side, side] as rows [n * rows, hidden_size], in ``count`` pieces. ``scaled``:
        scales and normalises pixels."""
        shape, num_before = self.shape, int(self.shape.has_class)
        rows = self.positions.repeat(len(tiles), 1, 1)
        for first, end in even_parts(len(tiles) * shape.grid, count):
            for some, top, bottom in _blocks(first, end, shape.grid):
                pixels = scaled(tiles[some, :, top * shape.patch : bottom * shape.patch])
                patches = _cut_patches(pixels, shape.patch)
                hidden = self.kernels.linear.multiply(patches.flatten(0, 1), self.patches)
                places = slice(num_before + top * shape.grid, num_before + bottom * shape.grid)
                rows[some, places] += hidden.view(*patches.shape[:2], -1)
            yield
        flat = rows.flatten(0, 1)
        return flat if self.first_norm is None else apply_norm(flat, self.first_norm, self.kernels)

    def patches_in(self, hidden: Tensor) -> Tensor:
        """Returns the rows of the patches, tile by tile: [n, grid * grid, hidden_size]."""
        normed = hidden if self.last_norm is None else apply_norm(hidden, self.last_norm, self.kernels)
        tiles = normed.view(-1, self.shape.num_rows, normed.shape[-1])
        return tiles[:, 1:] if self.shape.has_class else tiles


def below_tower(weights: TowerWeights) -> TowerWeights:
    """Returns the tensors of the encoder in the folders of LLaVA and Gemma 3."""
    return weights.below(
        *(f"{before}vision_tower.{after}" for before in ("", "model.") for after in ("vision_model.", ""))
    )


def load_tiles(
    weights: TowerWeights, shape: TileShape, *, is_normed: bool, order: Tensor | None = None
) -> TileEncoder:
    """Loads the encoder below the prefix of ``weights``.

    Args:
        weights: the tensors.
        shape: the sizes.
        is_normed: load and apply the last norm.
        order: the row in the table of positions for each patch; None: patch i has row i.
    """
    encoder, eps = shape.encoder, shape.eps
    weights.skip("embeddings.position_ids", "head.", "post_layernorm.")
    hidden, num_rows, patch = encoder.hidden_size, shape.num_rows, shape.patch
    positions = weights.tensor("embeddings.position_embedding.weight", num_rows, hidden)
    if order is not None:
        positions = positions.index_select(0, order.to(positions.device))
    first_norm = None
    if shape.has_class:
        positions[0] += weights.tensor("embeddings.class_embedding", hidden)
        first_norm = weights.norm("pre_layrnorm", hidden, eps)
    layers = [
        weights.below(f"encoder.layers.{i}.").layer(encoder, eps, LayerNames())
        for i in range(encoder.num_layers)
    ]
    return TileEncoder(
        shape,
        Encoder(encoder, weights.kernels, layers),
        weights.patches("embeddings.patch_embedding", hidden, 3, patch, patch),
        positions,
        first_norm,
        weights.norm("post_layernorm", hidden, eps) if is_normed else None,
        weights.kernels,
    )


class TileTower(Tower):
    """A tower of tiles that are encoded independently.

    Args:
        tiles: the encoder.
        scaling: the scaling of pixels.
    """

    def __init__(self, tiles: TileEncoder, scaling: PixelScaling) -> None:
        super().__init__(tiles.encoder, scaling, tiles.positions.dtype, tiles.positions.device)
        self._tiles = tiles

    def parts(self, arrays: Arrays, most_rows: int) -> list[TileRange]:
        shape = self._tiles.shape
        num_tiles = len(square_tiles(arrays, shape.side))
        step = max(1, most_rows // shape.num_rows)
        ends = [min(first + step, num_tiles) for first in range(0, num_tiles, step)]
        return [TileRange(a, b, (b - a) * shape.num_rows) for a, b in pairwise([0, *ends])]

    def embed(self, arrays: Arrays, part: TileRange, count: int) -> Pieces[Rows]:
        hidden = yield from self._tiles.embed(arrays["pixels"][part.first : part.end], self.scaled, count)
        num_rows = self._tiles.shape.num_rows
        return Rows(hidden, np.arange(part.end - part.first + 1, dtype=np.int64) * num_rows)

    def embed_flops(self, part: TileRange) -> float:
        return EMBED_FACTOR * product_flops(part.num_rows, self._tiles.patches)


def square_tiles(arrays: Arrays, side: int) -> NDArray[Any]:
    """Returns ``pixels`` [tiles, 3, side, side]. Raises ``BadArgument`` if they have another shape."""
    pixels = arrays.get("pixels")
    if pixels is None or pixels.ndim != 4 or not len(pixels) or pixels.shape[1:] != (3, side, side):
        shape = None if pixels is None else pixels.shape
        raise BadArgument(
            f"image: the model reads tiles of {side} by {side} pixels, and the pixels have the shape {shape}",
            param="image",
        )
    return pixels


def _blocks(first: int, end: int, grid: int) -> Iterator[tuple[slice, int, int]]:
    """Divides lines ``first`` to ``end`` (exclusive) of tiles with ``grid`` lines each into blocks. Yields a
    slice of tiles, and the first and the end of the block's lines in each of them."""
    while first < end:
        tile, top = divmod(first, grid)
        num_tiles = max(1, (end - first) // grid) if top == 0 else 1
        bottom = min(grid, top + end - first)
        yield slice(tile, tile + num_tiles), top, bottom
        first += num_tiles * (bottom - top)


def _cut_patches(tiles: Tensor, side: int) -> Tensor:
    """Cuts tiles [n, 3, height, width] into patches [n, rows * columns, 3 * side * side], row by row. A
    remainder at the right edge is dropped."""
    n, channels, height, width = tiles.shape
    tiles = tiles[..., : width // side * side]
    grid = tiles.view(n, channels, height // side, side, width // side, side)
    return grid.permute(0, 2, 4, 1, 3, 5).reshape(n, -1, channels * side * side)
