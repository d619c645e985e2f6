"""Joins the features of tiles to the features of an image of any resolution (Liu et al. 2024, "LLaVA-NeXT:
improved reasoning, OCR, and world knowledge").

The first tile is the whole image, made smaller. The other tiles are a grid; the borders that padded the image
to the shape of the grid are cut off. A newline token ends each row.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from agentflow.engine.media.processors.anyres import features_without_border, fewer_features
from agentflow.engine.media.processors.pixels import Size
from agentflow.errors import BadArgument


def pack(tiles: Tensor, size: Size, grid: Size, newline: Tensor, max_tiles: int) -> Tensor:
    """Returns the features of an image.

    Args:
        tiles: [1 + tiles of the grid, patches, hidden_size].
        size: the height and width of the image, in pixels.
        grid: the rows and columns of tiles.
        newline: [hidden_size]: the token at the end of each row.
        max_tiles: larger images are reduced to about the features of this number of tiles; 0: they are not.

    Returns:
        [tokens, hidden_size].
    """
    whole, parts = tiles[0], tiles[1:]
    if not len(parts):
        return torch.cat((whole, newline.unsqueeze(0)))
    rows, columns = grid
    if rows * columns != len(parts):
        raise BadArgument(
            f"image: its {len(parts)} tiles do not make a grid of {rows} by {columns}", param="image"
        )
    side, hidden = math.isqrt(tiles.shape[1]), tiles.shape[2]
    image = parts.view(rows, columns, side, side, hidden).transpose(1, 2)
    kept = features_without_border(size, grid, side)
    top, left = (rows * side - kept[0]) // 2, (columns * side - kept[1]) // 2
    image = image.reshape(rows * side, columns * side, hidden)[top : top + kept[0], left : left + kept[1]]
    if max_tiles and (fewer := fewer_features(kept, max_tiles * side**2)) != kept:
        image = reduced(image.unsqueeze(0), fewer)[0]
    ends = newline.expand(len(image), 1, hidden)
    return torch.cat((whole, torch.cat((image, ends), dim=1).flatten(0, 1)))


def reduced(images: Tensor, size: Size) -> Tensor:
    """Resizes features [n, rows, columns, hidden_size] bilinearly to ``size``."""
    made = torch.nn.functional.interpolate(images.permute(0, 3, 1, 2), size=size, mode="bilinear")
    return made.permute(0, 2, 3, 1)
