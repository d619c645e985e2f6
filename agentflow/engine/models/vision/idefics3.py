"""The tower of Idefics3 (arXiv 2408.12637) and SmolVLM (arXiv 2504.05299): SigLIP, then squares of patches
that become one token each (pixel shuffle)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from agentflow.engine.media.settings import PixelScaling
from agentflow.engine.models.config import RawConfig
from agentflow.engine.models.vision.encoder import Rows
from agentflow.engine.models.vision.pieces import Pieces, by_rows
from agentflow.engine.models.vision.siglip import TileEncoder, TileTower, load_tiles, read_tiles
from agentflow.engine.models.vision.tower import Arrays, TileRange, product_flops
from agentflow.engine.models.vision.weights import TowerWeights
from agentflow.engine.store.config_parts import text_config, vision_config
from agentflow.kernels.inputs import LinearWeight


class Idefics3Tower(TileTower):
    """The tower.

    Args:
        tiles: the encoder.
        connector: [hidden_size of the text model, scale * scale * hidden_size].
        scale: the patches on the side of a token.
        scaling: the scaling of pixels.
    """

    def __init__(
        self, tiles: TileEncoder, connector: LinearWeight, scale: int, scaling: PixelScaling
    ) -> None:
        super().__init__(tiles, scaling)
        self._connector = connector
        self._scale = scale

    @property
    def nbytes(self) -> int:
        return self._tiles.nbytes + self._connector.nbytes

    def finish_flops(self, part: TileRange) -> float:
        return product_flops(part.num_rows // self._scale**2, self._connector)

    def finish(self, arrays: Arrays, rows: Rows, kept: Sequence[Tensor], count: int) -> Pieces[list[Tensor]]:
        patches = self._tiles.patches_in(rows.hidden)
        grid, scale = self._tiles.shape.grid, self._scale
        squares = patches.view(len(patches), grid // scale, scale, grid // scale, scale, -1)
        tokens = squares.transpose(2, 3).reshape(-1, scale * scale * patches.shape[-1])
        kernels = self._tiles.kernels
        multiply = kernels.linear.multiply
        return [(yield from by_rows(lambda some: multiply(some, self._connector), tokens, count))]


def load_idefics3(weights: TowerWeights, raw: RawConfig, scaling: PixelScaling) -> Idefics3Tower:
    """Loads the tower and the connector of a model."""
    shape, scale = read_tiles(vision_config(raw)), int(raw.get("scale_factor", 2))
    if scale < 1 or shape.grid % scale:
        raise ValueError(f"scale_factor is {scale}, and a tile has {shape.grid} patches on a side")
    tiles = load_tiles(
        weights.below("model.vision_model."), shape, is_normed=True, order=_positions(shape.grid)
    )
    size = scale * scale * shape.encoder.hidden_size
    connector = weights.below("model.connector.").linear(
        "modality_projection.proj", int(text_config(raw)["hidden_size"]), size
    )
    return Idefics3Tower(tiles, connector, scale, scaling)


def _positions(grid: int) -> Tensor:
    """Returns the row in the table of positions for each patch of a whole tile. A patch is at a fraction of
    the side, and a row covers an interval of fractions. At their bounds, rounding in float32 decides, as in
    the released code."""
    bounds = torch.arange(1 / grid, 1.0, 1 / grid)
    fractions = (torch.arange(grid, dtype=torch.float32) * (1.0 / torch.tensor(grid))).clamp(max=1.0 - 1e-6)
    places = torch.bucketize(fractions, bounds, right=True)
    return (places[:, None] * grid + places).flatten()
