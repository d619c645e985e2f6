"""The tower of Gemma 3 (arXiv 2503.19786): SigLIP, and an average of its patches to a fixed number of
tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from agentflow.engine.media.settings import PixelScaling
from agentflow.engine.models.config import RawConfig
from agentflow.engine.models.forward.decoder import apply_norm
from agentflow.engine.models.vision.encoder import Rows
from agentflow.engine.models.vision.pieces import Pieces, by_rows
from agentflow.engine.models.vision.siglip import TileEncoder, TileTower, below_tower, load_tiles, read_tiles
from agentflow.engine.models.vision.tower import Arrays, TileRange, product_flops
from agentflow.engine.models.vision.weights import TowerWeights
from agentflow.engine.store.config_parts import text_config, vision_config
from agentflow.errors import BadModelFolder
from agentflow.kernels.decoder_weights import Norm
from agentflow.kernels.inputs import LinearWeight

MAX_TOKENS: Final = 1_024
"""The most tokens of an image. They attend to each other, so one step of the engine computes all of them."""


class Gemma3Tower(TileTower):
    """The tower.

    Args:
        tiles: the encoder.
        norm: the norm of the averages.
        projection: from the normed averages to the text model.
        pool: the patches on the side of a token.
        scaling: the scaling of pixels.
    """

    def __init__(
        self, tiles: TileEncoder, norm: Norm, projection: LinearWeight, pool: int, scaling: PixelScaling
    ) -> None:
        super().__init__(tiles, scaling)
        self._norm, self._projection = norm, projection
        self._pool = pool

    @property
    def nbytes(self) -> int:
        return self._tiles.nbytes + self._projection.nbytes

    def finish_flops(self, part: TileRange) -> float:
        return product_flops(part.num_rows // self._pool**2, self._projection)

    def finish(self, arrays: Arrays, rows: Rows, kept: Sequence[Tensor], count: int) -> Pieces[list[Tensor]]:
        patches = self._tiles.patches_in(rows.hidden)
        grid = self._tiles.shape.grid
        squares = patches.transpose(1, 2).reshape(len(patches), -1, grid, grid)
        means = torch.nn.functional.avg_pool2d(squares, self._pool, self._pool)
        tokens = means.flatten(2).transpose(1, 2).flatten(0, 1)
        return [(yield from by_rows(self._project, tokens, count))]

    def _project(self, tokens: Tensor) -> Tensor:
        kernels = self._tiles.kernels
        return kernels.linear.multiply(apply_norm(tokens, self._norm, kernels), self._projection)


def load_gemma3(weights: TowerWeights, raw: RawConfig, scaling: PixelScaling) -> Gemma3Tower:
    """Loads the tower and the projection of a model."""
    shape, hidden = read_tiles(vision_config(raw)), int(text_config(raw)["hidden_size"])
    num_tokens = int(raw.get("mm_tokens_per_image") or 256)
    side = math.isqrt(num_tokens)
    if side < 1 or side**2 != num_tokens or shape.grid % side:
        raise BadModelFolder(
            f"mm_tokens_per_image is {num_tokens}, into which {shape.grid} by {shape.grid} patches cannot be "
            "pooled",
            param="mm_tokens_per_image",
        )
    if num_tokens > MAX_TOKENS:
        raise BadModelFolder(
            f"mm_tokens_per_image is {num_tokens:,}, and at most {MAX_TOKENS:,} are supported, because one "
            "step computes all tokens of an image: take a model with fewer",
            param="mm_tokens_per_image",
        )
    tiles = load_tiles(below_tower(weights), shape, is_normed=True)
    projector = weights.below("multi_modal_projector.", "model.multi_modal_projector.")
    size = shape.encoder.hidden_size
    matrix = projector.tensor("mm_input_projection_weight", size, hidden).t().contiguous()
    norm = projector.norm("mm_soft_emb_norm", size, shape.eps, is_rms=True)
    return Gemma3Tower(
        tiles,
        replace(norm, is_less_one=True),
        weights.kernels.linear.pack(matrix, None),
        shape.grid // side,
        scaling,
    )
