"""The copy of the scheduler's table of slots that kernels read on a device."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentflow.engine.batch import Batch, IntArray
from agentflow.engine.models.table_copy import TableCopy


class DeviceTable:
    """A copy of the scheduler's table on a device. Batches change it in the order of the device's queue, so
    an earlier batch never reads the changes of a later one.

    Args:
        shape: the rows and columns to allocate. A batch with a larger table allocates new memory.
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
        """[rows, columns] int32, for kernels that are queued after ``write_slots``."""
        self._copy.forget()

    def sized_for(self, batch: Batch) -> Tensor:
        """Returns ``slots``, after allocating a larger table if the batch needs one."""
        num_rows, num_columns = batch.req_to_token.shape
        if num_rows > self.slots.shape[0] or num_columns > self.slots.shape[1]:
            self._make(max(num_rows, self.slots.shape[0]), max(num_columns, self.slots.shape[1]))
        return self.slots

    def forget(self) -> None:
        """See ``TableCopy``."""
        self._copy.forget()

    def changes(self, batch: Batch) -> dict[str, IntArray | NDArray[np.int32]]:
        """Returns the arrays that ``write_slots`` needs on the device before the batch runs."""
        changes = self._copy.changes(batch)
        places = changes.rows * self.slots.shape[1] + changes.columns
        return {"table_places": places, "table_slots": changes.slots}


def write_slots(table: Tensor, arrived: Mapping[str, Tensor]) -> None:
    """Queues the changes of a table on a device. ``arrived``: the arrays of ``DeviceTable.changes``, uploaded
    to that device."""
    # Some places occur twice, with the same slot.
    table.view(-1).index_copy_(0, arrived["table_places"], arrived["table_slots"])
