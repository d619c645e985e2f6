"""A vision tower with its connector: from the arrays of a medium to the rows that stand in a prompt.

A tower divides a medium into *parts*, such as tiles, that are encoded one after another. Each kind of tower
embeds the patches of a part, and makes features from its encoded rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentflow.engine.media.settings import PixelScaling
from agentflow.engine.models.vision.encoder import Encoder, Rows
from agentflow.errors import BadArgument

Arrays = Mapping[str, NDArray[Any]]
"""``PreparedMedium.arrays``."""


@dataclass(frozen=True, slots=True)
class Features:
    """What replaces the embeddings of a medium's tokens: row ``MediaRun.first + i`` is that of token i."""

    rows: Tensor  # [tokens, hidden_size of the text model]
    deep: Tensor | None = None  # [L, tokens, hidden_size]: as ``GivenRows.deep``

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes + (0 if self.deep is None else self.deep.nbytes)


@dataclass(frozen=True, slots=True)
class Part:
    """The tiles or frames from ``first`` up to ``end``, with ``num_rows`` rows in the encoder."""

    first: int
    end: int
    num_rows: int


class Tower(ABC):
    """The weights of a tower.

    ``kept_layers``: the layers whose results ``finish`` needs, in addition to the last one's.
    ``num_deep``: of ``Features``.
    """

    kept_layers: Sequence[int] = ()
    num_deep: int = 0

    def __init__(
        self, encoder: Encoder, scaling: PixelScaling, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.encoder = encoder
        self._scaling = scaling
        self.dtype, self.device = dtype, device

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """The size of all weights."""

    @abstractmethod
    def parts(self, arrays: Arrays, most_rows: int) -> list[Part]:
        """Divides a medium. A part has one tile, or several that have at most ``most_rows`` rows together.
        Raises ``BadArgument`` if the arrays are not those of this tower."""

    def num_seen(self, part: Part, arrays: Arrays, *, is_windowed: bool) -> float:
        """Returns how many rows a row of a part sees, in the mean."""
        return part.num_rows / (part.end - part.first)

    @abstractmethod
    def embed(self, arrays: Arrays, part: Part) -> Rows:
        """Returns the rows of a part before the first layer."""

    @abstractmethod
    def finish(self, arrays: Arrays, rows: Rows, kept: Sequence[Tensor]) -> list[Tensor]:
        """Returns the features of a part, and then those of each of ``kept`` that becomes deep ones."""

    def join(self, arrays: Arrays, parts: Sequence[list[Tensor]]) -> Features:
        """Returns the features of a medium from the results of its parts."""
        rows, *deep = [torch.cat(each) for each in zip(*parts, strict=True)]
        return Features(rows, torch.stack(deep) if deep else None)

    def scaled(self, pixels: NDArray[Any]) -> Tensor:
        """Returns pixels [tiles, 3, height, width] as the tower reads them. Only bytes are scaled."""
        values = torch.from_numpy(np.ascontiguousarray(pixels)).to(self.device)
        if pixels.dtype == np.uint8:
            scaling = self._scaling
            mean, std = (
                torch.tensor(each, device=self.device).view(1, 3, 1, 1)
                for each in (scaling.mean, scaling.std)
            )
            values = (values.float() * scaling.factor - mean) / std
        return values.to(self.dtype)


def square_tiles(arrays: Arrays, side: int) -> NDArray[Any]:
    """Returns ``pixels`` [tiles, 3, side, side]. Raises ``BadArgument`` if they have another shape."""
    pixels = arrays.get("pixels")
    if pixels is None or pixels.ndim != 4 or not len(pixels) or pixels.shape[1:] != (3, side, side):
        shape = None if pixels is None else pixels.shape
        raise BadArgument(
            f"image: the model reads tiles of {side} by {side} pixels, and they have the shape {shape}",
            param="image",
        )
    return pixels


def equal_parts(num_tiles: int, rows_per_tile: int, most_rows: int) -> list[Part]:
    """Divides tiles with equal numbers of rows."""
    step = max(1, most_rows // rows_per_tile)
    ends = [min(first + step, num_tiles) for first in range(0, num_tiles, step)]
    firsts = [0, *ends[:-1]]
    return [Part(a, b, (b - a) * rows_per_tile) for a, b in zip(firsts, ends, strict=True)]


def patches_of(tiles: Tensor, side: int) -> Tensor:
    """Cuts tiles [n, 3, height, width] into patches [n, rows * columns, 3 * side * side], row by row."""
    n, channels, height, width = tiles.shape
    grid = tiles.view(n, channels, height // side, side, width // side, side)
    return grid.permute(0, 2, 4, 1, 3, 5).reshape(n, -1, channels * side * side)


def starts_of(num_segments: int, length: int) -> NDArray[np.int64]:
    """Returns ``Rows.starts`` for segments of one length."""
    return np.arange(num_segments + 1, dtype=np.int64) * length
