"""The media features that a runner holds, and the rows of a batch that they replace."""

from __future__ import annotations

import torch

from agentflow.engine.batch import BatchMedia
from agentflow.engine.media_run import MediaPiece, PreparedMedium
from agentflow.engine.models.vision.encoding import TowerEncoding
from agentflow.engine.models.vision.tower import Features, Tower
from agentflow.kernels.inputs import GivenRows

CPU_SLICE_FLOPS = 4e9
"""About 10 ms on two cores without matrix units."""
GPU_SLICE_FLOPS = 4e11


class MediaFeatures:
    """The features of media, by identity.

    Args:
        tower: computes features.
        hidden_size: of the text model.
    """

    def __init__(self, tower: Tower, hidden_size: int) -> None:
        self.tower = tower
        self._row_bytes = hidden_size * tower.dtype.itemsize * (1 + tower.num_deep)
        is_cpu = tower.device.type == "cpu"
        self.slice_flops = CPU_SLICE_FLOPS if is_cpu else GPU_SLICE_FLOPS
        """The operations of a slice of an encoding to aim for."""
        self._features: dict[str, Features] = {}

    def encode(self, medium: PreparedMedium) -> TowerEncoding:
        """Returns the encoding of a medium, of which nothing is computed yet."""

        def keep(features: Features) -> None:
            self._features[medium.identity] = features

        return TowerEncoding(self.tower, medium.arrays, self.slice_flops, keep)

    def nbytes(self, medium: PreparedMedium) -> int:
        """The memory of the medium's features."""
        pieces = [piece for piece in medium.pieces if isinstance(piece, MediaPiece)]
        return self._row_bytes * max([piece.first + len(piece.positions[0]) for piece in pieces], default=0)

    def drop(self, identity: str) -> None:
        self._features.pop(identity, None)

    def given_rows(self, media: BatchMedia) -> GivenRows | None:
        """Returns the batch's rows that belong to media, and the positions of all rows on the axes of the
        rope if the axes differ; None if no row belongs to a medium."""
        rows = (media.of_tokens >= 0).nonzero()[0]
        if not len(rows):
            return None  # text has the same position on all axes
        is_single = (media.rope_positions == media.rope_positions[0]).all()
        axis_positions = None if is_single else media.rope_positions
        of_rows, feature_rows = media.of_tokens[rows], media.feature_rows[rows]
        values = deep = None
        for number, identity in enumerate(media.identities):
            own = (of_rows == number).nonzero()[0]
            features = self._features[identity]
            at = torch.from_numpy(feature_rows[own]).to(features.rows.device)
            if len(own) == len(rows):
                values = features.rows.index_select(0, at)
                deep = None if features.deep is None else features.deep.index_select(1, at)
                break
            to = torch.from_numpy(own).to(features.rows.device)
            if values is None:
                values = features.rows.new_empty(len(rows), features.rows.shape[1])
                if features.deep is not None:
                    deep = features.deep.new_empty(len(features.deep), *values.shape)
            values.index_copy_(0, to, features.rows.index_select(0, at))
            if deep is not None and features.deep is not None:
                deep.index_copy_(1, to, features.deep.index_select(1, at))
        assert values is not None
        return GivenRows(rows, values, deep, axis_positions)
