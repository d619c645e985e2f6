"""The table of slots (``req_to_token``), and what changed in it since the last batch.

Copies of the table, such as the one on a GPU, get the changes with each batch. ``KVMemory`` and the tokens of
batches write to it.
"""

from __future__ import annotations

import itertools
from typing import Final

import numpy as np

from agentflow.engine.batch import NO_CHANGES, IntArray, SlotChanges
from agentflow.engine.cache.radix_cache import SlotArray

_numbers: Final = itertools.count()
"""Numbers of changes, unique among all tables: a copy of one table must not take the changes of another."""


class SlotTable:
    """The slots of running requests by position.

    Args:
        num_rows: The most running requests.
        num_columns: The most tokens of a request.
    """

    def __init__(self, num_rows: int, num_columns: int) -> None:
        self.slots: SlotArray = np.zeros((num_rows, num_columns), dtype=np.int32)
        """[num_rows, num_columns]. Other modules read it."""
        self._written: dict[int, tuple[int, int]] = {}  # columns of rows, beside the tokens of batches
        self._number = NO_CHANGES  # of the last changes

    def row_to_write(self, row: int, first: int, end: int) -> SlotArray:
        """Returns a row, of which the caller writes the columns ``first`` to ``end`` (exclusive) before the
        next batch."""
        if first < end:
            known_first, known_end = self._written.get(row, (first, end))
            self._written[row] = min(first, known_first), max(end, known_end)
        columns: SlotArray = self.slots[row]
        return columns

    def write_tokens(self, rows: IntArray, columns: IntArray, slots: SlotArray) -> SlotChanges:
        """Writes the slots of a batch's tokens. Returns all changes since the last call; if they do not
        arrive, copies notice it by the numbers."""
        self.slots[rows, columns] = slots
        if self._written:
            # The columns between two changes are as they were, and their slots are sent again.
            spans = [(row, *span) for row, span in self._written.items()]
            self._written.clear()
            lens = [end - first for _, first, end in spans]
            rows = np.concatenate((np.repeat([row for row, _, _ in spans], lens), rows))
            columns = np.concatenate((*(np.arange(first, end) for _, first, end in spans), columns))
            slots = np.concatenate((*(self.slots[row, first:end] for row, first, end in spans), slots))
        before, self._number = self._number, next(_numbers)
        return SlotChanges(self._number, before, rows, columns, slots)
