"""Encodes a medium in slices of about equal work, so that other requests wait only for a slice.

A slice is half a layer for some rows of a part, or a piece of the work before or after the layers. The
division depends only on the medium, so the features do not depend on how many slices run together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from agentflow.engine.models.vision.pieces import Pieces, even_parts
from agentflow.engine.models.vision.tower import Arrays, Features, TileRange, Tower


class TowerEncoding:
    """A ``MediaEncoding`` of a tower.

    Args:
        tower: the tower.
        arrays: the medium's arrays.
        slice_flops: the operations of a slice to aim for.
        done: receives the features after the last slice.

    Raises:
        BadArgument: the arrays are not for this tower.
    """

    def __init__(
        self, tower: Tower, arrays: Arrays, slice_flops: float, done: Callable[[Features], None]
    ) -> None:
        self._tower = tower
        self._arrays = arrays
        self._slice_flops = slice_flops
        first, second = tower.encoder.shape.flops(1, 1024)
        parts = tower.parts(arrays, most_rows=int(slice_flops // (first + second)))
        slices = [one for part in parts for one in self._slices(part)]
        self._num_slices = sum(count for _, count in slices)
        self._flops = sum(flops for flops, _ in slices) / self._num_slices
        self._pieces = self._encode(parts, done)

    @property
    def num_slices(self) -> int:
        return self._num_slices

    @property
    def flops_per_slice(self) -> float:
        return self._flops

    @torch.inference_mode()
    def run(self, count: int) -> None:
        """Computes the next ``count`` slices."""
        for _ in range(min(count, self._num_slices)):
            next(self._pieces)
            self._num_slices -= 1
        if not self._num_slices:
            for _ in self._pieces:  # joins the parts
                raise AssertionError("an encoding has more slices than were counted")

    def _slices(self, part: TileRange) -> Iterator[tuple[float, int]]:
        """Yields the operations and the number of slices of each step of ``_encode_part``."""
        tower = self._tower
        for flops in (tower.embed_flops(part), tower.finish_flops(part)):
            yield flops, self._count(flops)
        for halves in self._layers(part):
            for flops in halves:
                yield flops, self._count(flops, part.num_rows)

    def _layers(self, part: TileRange) -> list[tuple[float, float]]:
        """Returns the operations of the halves of each layer."""
        shape = self._tower.encoder.shape
        halves = [
            shape.flops(part.num_rows, self._tower.num_seen(part, self._arrays, is_windowed=is_windowed))
            for is_windowed in ((False, True) if shape.windowed else (False,))
        ]
        return [halves[layer in shape.windowed] for layer in range(shape.num_layers)]

    def _count(self, flops: float, most: float = math.inf) -> int:
        """Returns the number of slices for these operations."""
        return int(min(most, max(1, round(flops / self._slice_flops))))

    def _encode(self, parts: list[TileRange], done: Callable[[Features], None]) -> Pieces[None]:
        made = []
        for part in parts:
            made.append((yield from self._encode_part(part)))
        done(self._tower.join(self._arrays, made))

    def _encode_part(self, part: TileRange) -> Pieces[list[Tensor]]:
        tower, arrays = self._tower, self._arrays
        kept: list[Tensor] = []
        rows = yield from tower.embed(arrays, part, self._count(tower.embed_flops(part)))
        for layer, halves in enumerate(self._layers(part)):
            computes = tower.encoder.begin_layer, tower.encoder.end_layer
            for compute, flops in zip(computes, halves, strict=True):
                for first, end in even_parts(part.num_rows, self._count(flops, part.num_rows)):
                    compute(layer, rows, first, end)
                    yield
            if layer in tower.kept_layers:
                kept.append(rows.hidden.clone())
        return (yield from tower.finish(arrays, rows, kept, self._count(tower.finish_flops(part))))
