"""Images of any resolution in tiles, as LLaVA-NeXT and LLaVA-OneVision cut them.

The processor chooses the resolution of a list that wastes least. The image fills it in one direction, and has
borders in the other. The tower drops the features of the borders, and adds a token at the end of each row.

Liu et al., "LLaVA-NeXT: Improved reasoning, OCR, and world knowledge", 2024.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from agentflow.engine.media.processors.pixels import (
    Bytes,
    ProcessorOptions,
    Size,
    channels_first,
    cut_squares,
    resize,
)
from agentflow.errors import BadModelFolder

if TYPE_CHECKING:
    from PIL.Image import Image


NEXT_RESOLUTIONS: Final[Sequence[Size]] = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))
_SIDES: Final = range(384, 2_305, 384)
ONEVISION_RESOLUTIONS: Final[Sequence[Size]] = tuple((height, width) for height in _SIDES for width in _SIDES)
"""The defaults of ``image_grid_pinpoints``, also in the config of the model."""


def read_resolutions(options: ProcessorOptions, default: Sequence[Size], side: int) -> list[Size]:
    """Returns the resolutions that an image can have, all multiples of the tile's ``side``."""
    found = options.settings.get("image_grid_pinpoints") or default
    try:
        resolutions = [(int(height), int(width)) for height, width in found]
    except (TypeError, ValueError):
        resolutions = []
    if not resolutions or any(min(size) < side or size[0] % side or size[1] % side for size in resolutions):
        raise BadModelFolder(
            f"{options.file}: image_grid_pinpoints must be pairs of multiples of {side}, the side of a tile"
        )
    return resolutions


def choose_grid(size: Size, resolutions: Sequence[Size], side: int) -> Size:
    """Returns the rows and columns of tiles in the resolution that keeps most pixels of the image, then in
    the one with the least border, then in the first."""
    height, width = size

    def worth(resolution: Size) -> tuple[int, int]:
        scale = min(resolution[1] / width, resolution[0] / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        return kept, kept - resolution[0] * resolution[1]

    rows, columns = max(resolutions, key=worth)
    return rows // side, columns // side


def cut_tiles(image: Image, grid: Size, side: int, resample: int) -> Bytes:
    """Returns [tiles, 3, side, side]: the whole image, distorted to a square, then the tiles row by row."""
    height, width = grid[0] * side, grid[1] * side
    scale_x, scale_y = width / image.width, height / image.height
    if scale_x < scale_y:
        inner = min(math.ceil(image.height * scale_x), height), width
    else:
        inner = height, min(math.ceil(image.width * scale_y), width)
    whole = channels_first(resize(image, (side, side), resample))
    pixels = np.zeros((3, height, width), dtype=np.uint8)
    top, left = (height - inner[0]) // 2, (width - inner[1]) // 2
    pixels[:, top : top + inner[0], left : left + inner[1]] = channels_first(resize(image, inner, resample))
    return np.concatenate([whole[None], cut_squares(pixels, side)])


def features_without_border(size: Size, grid: Size, patches: int) -> Size:
    """Returns the rows and columns of features of an image without its borders.

    Args:
        size: the height and width of the image.
        grid: the rows and columns of tiles.
        patches: the features on the side of a tile.
    """
    rows, columns = grid[0] * patches, grid[1] * patches
    height, width = size
    if width / height > columns / rows:
        kept = int(round(height * (columns / width), 7))
        rows -= (rows - kept) // 2 * 2
    else:
        kept = int(round(width * (rows / height), 7))
        columns -= (columns - kept) // 2 * 2
    return rows, columns


def fewer_features(size: Size, most: int) -> Size:
    """Returns the rows and columns to which features are reduced: about ``most``, if there are far more."""
    ratio = math.sqrt(size[0] * size[1] / most)
    return (int(size[0] // ratio), int(size[1] // ratio)) if ratio > 1.1 else size
