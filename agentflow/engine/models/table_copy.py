"""Finds the changes that a copy of the scheduler's table of slots needs before a batch.

There are copies on a device and in the processes of other ranks. A copy gets the changes of the table with
each batch, in the order of the batches. If a batch was lost because its launch failed, the copy gets the
whole rows of later batches.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from agentflow.engine.batch import NO_CHANGES, Batch, SlotChanges


class TableCopy:
    """Tracks which rows of a copy are up to date, and finds the changes that a batch needs."""

    def __init__(self) -> None:
        self._number = NO_CHANGES  # the number of the last changes that the copy got
        self._is_known: NDArray[np.bool_] = np.zeros(0, dtype=np.bool_)  # by row: it is up to date

    def forget(self) -> None:
        """Marks all rows as outdated: the copy may have missed changes."""
        self._number = NO_CHANGES
        self._is_known[:] = False

    def changes(self, batch: Batch) -> SlotChanges:
        """Returns the changes that make the copy equal to the batch's table wherever the batch reads it. The
        copy must get them: later changes assume them."""
        table, given = batch.req_to_token, batch.changes
        if len(self._is_known) < len(table):
            self._is_known = np.zeros(len(table), dtype=np.bool_)
        if given is None or given.before != self._number:
            self.forget()
        rows, lens = batch.req_rows, batch.kv_lens
        if batch.trees is not None:
            rows, lens = (
                np.concatenate((rows, batch.trees.req_rows)),
                np.concatenate((lens, batch.trees.prefix_lens)),
            )
        if given is not None:
            self._number = given.number
            if self._is_known[rows].all():
                return given
        is_new = ~self._is_known[rows]
        rows, lens = rows[is_new], lens[is_new]
        parts = [table[row, :length] for row, length in zip(rows.tolist(), lens.tolist(), strict=True)]
        columns = np.arange(int(lens.sum())) - np.repeat(np.cumsum(lens) - lens, lens)
        whole = SlotChanges(
            *(NO_CHANGES, NO_CHANGES, np.repeat(rows, lens), columns),
            np.concatenate([np.zeros(0, dtype=np.int32), *parts]),
        )
        if given is None:
            return whole
        self._is_known[rows] = True
        return SlotChanges(
            *(given.number, given.before),
            np.concatenate((whole.rows, given.rows)),
            np.concatenate((whole.columns, given.columns)),
            np.concatenate((whole.slots, given.slots)),
        )
