"""The table of slots on a device, which kernels read there."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentflow.engine.batch import Batch, IntArray
from agentflow.engine.models.table_copy import TableCopy


class DeviceTable:
    """A copy of the scheduler's table on a device, which batches change in the order of its queue: an earlier
    batch reads the table as it was.

    Args:
        shape: of the table, rows and columns. Larger tables need new memory.
        device: where the copy is.
    """

    def __init__(self, shape: tuple[int, int], device: torch.device) -> None:
        self._device = device
        self._copy = TableCopy()
        self._make(*shape)

    def _make(self, num_rows: int, num_columns: int) -> None:
        # Rows begin at multiples of 16 columns, for which Triton compiles one kernel.
        shape = max(num_rows, 1), -(-max(num_columns, 1) // 16) * 16
        self.slots = torch.zeros(shape, dtype=torch.int32, device=self._device)
        """[rows, columns] int32, for kernels behind ``write_slots``."""
        self._copy.forget()

    def sized_for(self, batch: Batch) -> Tensor:
        """Returns ``slots``, which is new memory if the batch's table is larger."""
        num_rows, num_columns = batch.req_to_token.shape
        if num_rows > self.slots.shape[0] or num_columns > self.slots.shape[1]:
            self._make(max(num_rows, self.slots.shape[0]), max(num_columns, self.slots.shape[1]))
        return self.slots

    def forget(self) -> None:
        """See ``TableCopy``."""
        self._copy.forget()

    def changes(self, batch: Batch) -> dict[str, IntArray | NDArray[np.int32]]:
        """Returns the arrays that ``write_slots`` needs on the device, before the batch."""
        changes = self._copy.changes(batch)
        places = changes.rows * self.slots.shape[1] + changes.columns
        return {"table_places": places, "table_slots": changes.slots}


def write_slots(table: Tensor, arrived: Mapping[str, Tensor]) -> None:
    """Changes a table on a device, behind the work before. ``arrived``: there, the arrays of
    ``DeviceTable.changes``."""
    # Some places occur twice, with one slot.
    table.view(-1).index_copy_(0, arrived["table_places"], arrived["table_slots"])
