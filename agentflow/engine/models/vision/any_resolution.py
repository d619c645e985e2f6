"""Joins the features of tiles to the features of an image of any resolution (Liu et al. 2024, "LLaVA-NeXT:
improved reasoning, OCR, and world knowledge").

The first tile is the whole image, made smaller. The other tiles are a grid; the borders that padded the image
to the shape of the grid are cut off. A newline token ends each row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from agentflow.engine.media.processors.anyres import best_resolution
from agentflow.engine.media.processors.pixels import Size
from agentflow.errors import BadArgument


def choose_grid(size: Size, resolutions: Sequence[Size], side: int) -> Size:
    """Returns the rows and columns of tiles for an image of ``size``."""
    rows, columns = best_resolution(size, resolutions)
    return rows // side, columns // side


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
    image = _without_border(image.reshape(rows * side, columns * side, hidden), size)
    if max_tiles:
        ratio = math.sqrt(image.shape[0] * image.shape[1] / (max_tiles * side**2))
        if ratio > 1.1:
            image = reduced(image.unsqueeze(0), (int(image.shape[0] // ratio), int(image.shape[1] // ratio)))[
                0
            ]
    ends = newline.expand(len(image), 1, hidden)
    return torch.cat((whole, torch.cat((image, ends), dim=1).flatten(0, 1)))


def _without_border(image: Tensor, size: Size) -> Tensor:
    rows, columns = image.shape[:2]
    height, width = size
    if width / height > columns / rows:
        border = (rows - int(round(height * (columns / width), 7))) // 2
        return image[border : rows - border]
    border = (columns - int(round(width * (rows / height), 7))) // 2
    return image[:, border : columns - border]


def reduced(images: Tensor, size: Size) -> Tensor:
    """Resizes features [n, rows, columns, hidden_size] bilinearly to ``size``."""
    made = torch.nn.functional.interpolate(images.permute(0, 3, 1, 2), size=size, mode="bilinear")
    return made.permute(0, 2, 3, 1)
