"""A vision tower with its connector: from the arrays of a medium to the embeddings of its tokens.

A tower divides a medium into *parts*, such as tiles, that are encoded one after another. Each kind of tower
embeds the patches of a part, and makes features from its encoded rows. Both work in pieces.
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
from agentflow.engine.models.vision.pieces import Pieces
from agentflow.kernels.inputs import LinearWeight

Arrays = Mapping[str, NDArray[Any]]
"""``PreparedMedium.arrays``."""


@dataclass(frozen=True, slots=True)
class Features:
    """The embeddings of a medium's tokens. Row ``MediaRun.first + i`` is for token i of a run."""

    rows: Tensor  # [tokens, hidden_size of the text model]
    deep: Tensor | None = None  # [L, tokens, hidden_size]: as in ``GivenRows.deep``

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes + (0 if self.deep is None else self.deep.nbytes)


@dataclass(frozen=True, slots=True)
class TileRange:
    """Tiles or frames ``first`` to ``end`` (exclusive), with ``num_rows`` rows in the encoder."""

    first: int
    end: int
    num_rows: int


EMBED_FACTOR = 2.0
"""The time to embed a patch relative to its product alone: its pixels are also scaled and moved."""


def product_flops(num_rows: int, *weights: LinearWeight) -> float:
    """Returns the operations of the products of rows with ``weights``."""
    return 2.0 * num_rows * sum(one.shape[0] * one.shape[1] for one in weights)


class Tower(ABC):
    """The weights of a tower.

    ``kept_layers``: the layers whose results ``finish`` needs, in addition to the result of the last layer.
    ``num_deep``: the number of deep features, the length of ``Features.deep``.
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
        """The size of the weights in bytes."""

    @abstractmethod
    def parts(self, arrays: Arrays, most_rows: int) -> list[TileRange]:
        """Divides a medium. A part has one tile, or several that have at most ``most_rows`` rows together.
        Raises ``BadArgument`` if the arrays are not for this tower."""

    def num_seen(self, part: TileRange, arrays: Arrays, *, is_windowed: bool) -> float:
        """Returns the mean number of rows to which a row of a part attends."""
        return part.num_rows / (part.end - part.first)

    @abstractmethod
    def embed(self, arrays: Arrays, part: TileRange, count: int) -> Pieces[Rows]:
        """Embeds a part: returns its rows before the first layer, in ``count`` pieces."""

    @abstractmethod
    def embed_flops(self, part: TileRange) -> float:
        """Returns the operations of ``embed``."""

    @abstractmethod
    def finish(self, arrays: Arrays, rows: Rows, kept: Sequence[Tensor], count: int) -> Pieces[list[Tensor]]:
        """Returns the features of a part, then its deep features if the model has some, in ``count`` pieces.
        ``kept``: the results of ``kept_layers``."""

    @abstractmethod
    def finish_flops(self, part: TileRange) -> float:
        """Returns the operations of ``finish``."""

    def join(self, arrays: Arrays, parts: Sequence[list[Tensor]]) -> Features:
        """Returns the features of a medium from the results of its parts."""
        rows, *deep = [torch.cat(each) for each in zip(*parts, strict=True)]
        return Features(rows, torch.stack(deep) if deep else None)

    def scaled(self, pixels: NDArray[Any]) -> Tensor:
        """Returns pixels [tiles, 3, height, width] as the tower reads them. Bytes are scaled and normalised;
        floats only change their type."""
        # Arrays from a message are read-only, which torch does not support.
        values = torch.from_numpy(np.require(pixels, requirements=["C", "W"])).to(self.device)
        if pixels.dtype == np.uint8:
            scaling = self._scaling
            mean, std = (
                torch.tensor(each, device=self.device).view(1, 3, 1, 1)
                for each in (scaling.mean, scaling.std)
            )
            values = (values.float() * scaling.factor - mean) / std
        return values.to(self.dtype)
