"""The plan of a batch on the device: for one forward pass, or at fixed addresses for captured graphs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from agentflow.kernels.attention.groups import MaskedPlans
from agentflow.kernels.inputs import AttentionBatch
from agentflow.kernels.triton_ops.attention.units import (
    NARROW_BESIDE_WIDE,
    PROGRAMS,
    UNIT_COLUMNS,
    Groups,
    Units,
    block_rows,
    joined_slots,
    make_units,
)
from agentflow.kernels.triton_ops.device_limits import num_processors
from agentflow.kernels.uploads import ALIGNMENT, upload


@dataclass(frozen=True, slots=True)
class DeviceUnits:
    """The arrays of ``Units`` on a device, and the table of slots to which the units refer."""

    narrow: Tensor
    wide: Tensor
    rows: Tensor
    at: Tensor
    lows: Tensor
    partial: Tensor
    nodes: Tensor
    ends: Tensor
    merged_rows: Tensor
    merged_bounds: Tensor
    num_partials: int
    table: Tensor  # [any, any]


@dataclass(frozen=True, slots=True)
class TritonPlan(AttentionBatch):
    """A batch with its groups."""

    groups: Groups
    device: torch.device
    # The units on the device, by the numbers of query and KV heads and the window. The first layer with these
    # numbers makes them for all layers.
    cut_units: dict[tuple[int, int, int], DeviceUnits]
    masked: MaskedPlans  # for layers that the kernels cannot compute

    def units(self, num_heads: int, num_kv_heads: int, window: int = 0) -> DeviceUnits:
        """Returns the units for layers with these numbers of heads and this window."""
        shape = (num_heads, num_kv_heads, window)
        found = self.cut_units.get(shape)
        if found is None:
            processors = num_processors(self.device) / num_kv_heads
            units = make_units(self.groups, num_heads // num_kv_heads, processors, window)
            found = self.cut_units[shape] = self._moved(units)
        return found

    def _moved(self, units: Units) -> DeviceUnits:
        """Copies all arrays to the device in one transfer."""
        names = [f.name for f in fields(units)]
        arrays, table = [getattr(units, name) for name in names], self.device_table
        if table is None:
            *tensors, only_row = upload([*arrays, joined_slots(self)], self.device)
            table = only_row.as_strided((1, len(only_row)), (0, 1))
        else:
            tensors = upload(arrays, self.device)
        named = dict(zip(names, tensors, strict=True))
        return DeviceUnits(**named, num_partials=units.num_partials, table=table)


_ALIGNED = ALIGNMENT // 4
"""The alignment of arrays, in elements."""


@dataclass(frozen=True, slots=True)
class LaunchForm:
    """The launches of a captured graph: for ``num_rows`` rows, and for each window with or without wide
    tiles."""

    num_rows: int
    has_wide: tuple[bool, ...]


class TritonGraphPlans:
    """Buffers at fixed addresses on a GPU for the units of decode batches, one batch at a time, which
    captured graphs read. Unused units and rows of a form are empty. The slots are read from the table on the
    device.

    Args:
        num_rows: the numbers of rows of the forms, ascending.
        num_heads: the query heads of a layer.
        num_kv_heads: the KV heads of a layer.
        device: where the buffers are.
        windows: the windows that layers use; 0: none.
    """

    def __init__(
        self,
        num_rows: Sequence[int],
        num_heads: int,
        num_kv_heads: int,
        device: torch.device,
        windows: Sequence[int] = (0,),
    ) -> None:
        self._num_rows = tuple(num_rows)
        shape = num_heads, num_kv_heads
        self._units = {
            (*shape, window): _GraphUnits(num_rows[-1], *shape, device, window) for window in windows
        }

    def forms(self) -> list[LaunchForm]:
        """Returns the most frequent forms, the most frequent first."""
        num = len(self._units)
        return [LaunchForm(rows, (has_wide,) * num) for has_wide in (False, True) for rows in self._num_rows]

    def update(self, plan: TritonPlan) -> LaunchForm | None:
        """Queues a copy of the plan of a decode batch to the device. Returns its form; None if the plan does
        not fit, or if the device has no table of slots."""
        num_rows = len(plan.query_lens)
        bucket = next((size for size in self._num_rows if size >= num_rows), None)
        if bucket is None or plan.trees is not None or int(plan.query_lens.max()) > 1:
            return None
        if plan.device_table is None:
            return None
        has_wide = []
        for units in self._units.values():
            if (is_wide := units.update(plan.groups, bucket)) is None:
                return None
            has_wide.append(is_wide)
        return LaunchForm(bucket, tuple(has_wide))

    def capture_with(self, form: LaunchForm, plan: TritonPlan) -> TritonPlan:
        """Returns a plan with the buffers as its units, to capture the form's graph. The graph reads the
        plan's table on the device."""
        table = plan.device_table
        assert table is not None
        cut_units = {
            key: units.launched(form.num_rows, has_wide, table)
            for (key, units), has_wide in zip(self._units.items(), form.has_wide, strict=True)
        }
        return replace(plan, cut_units=cut_units)


class _GraphUnits:
    """The buffers for the layers with one window. ``most``: the most rows. The other arguments are as in
    ``TritonGraphPlans``."""

    def __init__(
        self,
        most: int,
        num_heads: int,
        num_kv_heads: int,
        device: torch.device,
        window: int,
    ) -> None:
        self._device, self._window = device, window
        self._queries_per_kv = num_heads // num_kv_heads
        self._processors = num_processors(device) / num_kv_heads
        narrow, wide = self._capacity(most, True)
        narrow_rows, wide_rows = (
            max(1, size // self._queries_per_kv) for size in block_rows(self._queries_per_kv)
        )
        self._num_entries = narrow * narrow_rows + wide * wide_rows
        sizes = {
            "narrow": narrow * UNIT_COLUMNS,
            "wide": wide * UNIT_COLUMNS,
            "rows": self._num_entries,
            "at": self._num_entries,
            "lows": self._num_entries if window else 0,
            "partial": self._num_entries,
            "nodes": 1,
            "ends": 1,
            "merged_rows": most,
            "merged_bounds": most + 1,
        }
        rounded = [-(-size // _ALIGNED) * _ALIGNED for size in sizes.values()]
        firsts = np.cumsum([0, *rounded]).tolist()
        self._places = {
            name: slice(first, first + size)
            for (name, size), first in zip(sizes.items(), firsts, strict=False)
        }
        self._buffer = torch.zeros(firsts[-1], dtype=torch.int32, device=device)

    def _capacity(self, num_rows: int, has_wide: bool) -> tuple[int, int]:
        """Returns the numbers of narrow and wide units of a form with this number of rows."""
        cuts = math.ceil(PROGRAMS * self._processors)
        beside = math.ceil(NARROW_BESIDE_WIDE * self._processors) if has_wide else cuts
        return num_rows + beside, num_rows // 4 + cuts if has_wide else 0

    def update(self, groups: Groups, bucket: int) -> bool | None:
        """Makes units for a form of ``bucket`` rows, and queues their copy to the device. Returns whether
        some are wide; None if they do not fit."""
        units = make_units(groups, self._queries_per_kv, self._processors, self._window)
        narrow, wide = self._capacity(bucket, len(units.wide) > 0)
        if len(units.narrow) > narrow or len(units.wide) > wide or len(units.rows) > self._num_entries:
            return None
        # torch keeps pinned memory until the copy has ended, so the next plan uses other memory.
        staged = torch.empty(len(self._buffer), dtype=torch.int32, pin_memory=self._device.type == "cuda")
        host = staged.numpy()
        for name, place in self._places.items():
            values = getattr(units, name).reshape(-1)
            fill = values[-1] if name == "merged_bounds" else 0
            host[place.start : place.start + len(values)] = values
            host[place.start + len(values) : place.stop] = fill
        self._buffer.copy_(staged, non_blocking=True)
        return len(units.wide) > 0

    def launched(self, num_rows: int, has_wide: bool, table: Tensor) -> DeviceUnits:
        """Returns the units that the graph of a form launches."""
        narrow, wide = self._capacity(num_rows, has_wide)
        tensors = {name: self._buffer[place] for name, place in self._places.items()}
        tensors["narrow"] = tensors["narrow"].view(-1, UNIT_COLUMNS)[:narrow]
        tensors["wide"] = tensors["wide"].view(-1, UNIT_COLUMNS)[:wide]
        tensors["merged_rows"] = tensors["merged_rows"][:num_rows]
        tensors["merged_bounds"] = tensors["merged_bounds"][: num_rows + 1]
        return DeviceUnits(**tensors, num_partials=self._num_entries, table=table)
