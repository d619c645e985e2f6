"""Encodes a medium in slices of about equal work, so that other requests wait only for a slice.

A slice is half of a layer for some of a part's rows. The division depends on the medium alone, so features do
not depend on how many slices run together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from agentflow.engine.models.vision.encoder import Rows
from agentflow.engine.models.vision.tower import Arrays, Features, Part, Tower


@dataclass(frozen=True, slots=True)
class _Slice:
    """``half`` of a layer of a part: 0 or 1, for the rows from ``first`` up to ``end``."""

    part: int
    layer: int
    half: int
    first: int
    end: int
    flops: float


class TowerEncoding:
    """A ``MediaEncoding`` of a tower.

    Args:
        tower: the tower.
        arrays: those of the medium.
        slice_flops: the wanted work of a slice.
        done: receives the features when no slice is left.

    Raises:
        BadArgument: the arrays are not those of this tower.
    """

    def __init__(
        self, tower: Tower, arrays: Arrays, slice_flops: float, done: Callable[[Features], None]
    ) -> None:
        self._tower = tower
        self._arrays = arrays
        self._done = done
        shape = tower.encoder.shape
        first, second = shape.flops(1, 1024)
        self._parts = tower.parts(arrays, most_rows=int(slice_flops // (first + second)))
        self._slices = list(_slices_of(tower, self._parts, arrays, slice_flops))
        self._flops = sum(one.flops for one in self._slices) / len(self._slices)
        self._next = 0
        self._rows: Rows | None = None
        self._kept: list[Tensor] = []
        self._made: list[list[Tensor]] = []

    @property
    def num_slices(self) -> int:
        return len(self._slices) - self._next

    @property
    def flops_per_slice(self) -> float:
        return self._flops

    @torch.inference_mode()
    def run(self, count: int) -> None:
        """Computes the next ``count`` slices."""
        for one in self._slices[self._next : self._next + count]:
            self._run(one)
            self._next += 1

    def _run(self, one: _Slice) -> None:
        tower, part = self._tower, self._parts[one.part]
        if self._rows is None:
            self._rows = tower.embed(self._arrays, part)
        rows = self._rows
        compute = tower.encoder.end_layer if one.half else tower.encoder.begin_layer
        compute(one.layer, rows, one.first, one.end)
        if not one.half or one.end < part.num_rows:
            return
        if one.layer in tower.kept_layers:
            self._kept.append(rows.hidden.clone())
        if one.layer + 1 == tower.encoder.shape.num_layers:
            self._made.append(tower.finish(self._arrays, rows, self._kept))
            self._rows, self._kept = None, []
            if len(self._made) == len(self._parts):
                self._done(tower.join(self._arrays, self._made))
                self._made = []


def _slices_of(tower: Tower, parts: list[Part], arrays: Arrays, slice_flops: float) -> Iterator[_Slice]:
    shape = tower.encoder.shape
    for number, part in enumerate(parts):
        for layer in range(shape.num_layers):
            seen = tower.num_seen(part, arrays, is_windowed=layer in shape.windowed)
            for half, flops in enumerate(shape.flops(part.num_rows, seen)):
                count = min(part.num_rows, max(1, round(flops / slice_flops)))
                bounds = [part.num_rows * i // count for i in range(count + 1)]
                for first, end in pairwise(bounds):
                    yield _Slice(number, layer, half, first, end, flops / count)
