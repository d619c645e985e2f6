"""Converts an image to messages for an engine process, and back.

An image may have tens of megabytes. It is sent in parts, between which other messages may be sent, so that
neither the event loop nor another request waits for the whole image.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentflow.engine.media_run import MediaPiece, PreparedMedium
from agentflow.engine.messages import MediumHead, MediumPart

PART_BYTES = 256 * 1024


def medium_parts(medium: PreparedMedium) -> Iterator[MediumPart]:
    """Yields the messages for one image."""
    head: MediumHead | None = MediumHead(
        [(name, array.dtype.str, list(array.shape)) for name, array in medium.arrays.items()],
        [piece if isinstance(piece, str) else _written(piece) for piece in medium.pieces],
    )
    for data in _cut_pieces(medium.arrays):
        yield MediumPart(medium.identity, data, head)
        head = None
    yield MediumPart(medium.identity, b"", head, is_last=True)


def _cut_pieces(arrays: Mapping[str, NDArray[Any]]) -> Iterator[bytes]:
    for array in arrays.values():
        view = memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8))  # type: ignore[arg-type]
        for start in range(0, len(view), PART_BYTES):
            yield bytes(view[start : start + PART_BYTES])


def _written(piece: MediaPiece) -> tuple[int, bytes, int, bool]:
    positions = np.ascontiguousarray(piece.positions, dtype=np.int64)
    return len(positions), positions.tobytes(), piece.first, piece.sees_all


class MediumAssembly:
    """Assembles images from their parts."""

    def __init__(self) -> None:
        self._heads: dict[str, MediumHead] = {}
        self._data: dict[str, bytearray] = {}

    def push(self, part: MediumPart) -> PreparedMedium | None:
        """Adds the next part of an image. Returns the image after its last part, else None."""
        if part.head is not None:
            self._heads[part.identity], self._data[part.identity] = part.head, bytearray()
        self._data[part.identity] += part.data
        if not part.is_last:
            return None
        head, data = self._heads.pop(part.identity), self._data.pop(part.identity)
        arrays: dict[str, NDArray[Any]] = {}
        start = 0
        for name, kind, shape in head.arrays:
            count = int(np.prod(shape))
            arrays[name] = np.frombuffer(data, np.dtype(kind), count, start).reshape(shape)
            start += arrays[name].nbytes
        pieces = tuple([piece if isinstance(piece, str) else _read(*piece) for piece in head.pieces])
        return PreparedMedium(part.identity, arrays, pieces)


def _read(num_axes: int, positions: bytes, first: int, sees_all: bool) -> MediaPiece:
    return MediaPiece(np.frombuffer(positions, dtype=np.int64).reshape(num_axes, -1), first, sees_all)
