"""A batch in one message, for ranks that compute it and sample nothing.

The message has only the numbers that a forward pass needs, all of 64 bits, behind their counts. Of the table
of slots it has the changes since the last message: each end keeps a copy of the table.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from agentflow.engine.batch import Batch, IntArray, SampledRows, TreeAttention

_NUM_ARRAYS: Final = 16


class StepWriter:
    """The end of rank 0."""

    def __init__(self) -> None:
        self._sent: NDArray[np.int32] = np.zeros((0, 0), dtype=np.int32)

    def message(self, batch: Batch) -> bytes:
        """Returns the message for a batch. All messages must arrive, in this order. The batch must have no
        adapters, no media and no pending tokens."""
        assert batch.adapters is None
        assert batch.media is None
        assert batch.pending is None
        table, trees = batch.req_to_token, batch.trees
        if self._sent.shape != table.shape:
            self._sent = np.zeros_like(table)
        changes = [self._change(table, *row) for row in zip(batch.req_rows, batch.kv_lens, strict=True)]
        arrays = [batch.token_ids, batch.positions, batch.write_slots, batch.sampled.rows]
        arrays += [batch.req_rows, batch.query_lens, batch.kv_lens, np.array([batch.num_decode])]
        if trees is None:
            arrays += [np.zeros(0, dtype=np.int64)] * 5
        else:
            changes += [
                self._change(table, *row) for row in zip(trees.req_rows, trees.prefix_lens, strict=True)
            ]
            arrays += [trees.req_rows, trees.prefix_lens, trees.query_lens, trees.path_lens]
            arrays.append(trees.paths.ravel())
        arrays.append(np.array(table.shape))
        places = [(row, first, len(slots)) for row, first, slots in changes if len(slots)]
        arrays.append(np.array(places, dtype=np.int64).ravel())
        arrays.append(np.concatenate([np.zeros(0, np.int64), *(slots for _, _, slots in changes)]))
        lengths = [len(array) for array in arrays]
        return np.concatenate([lengths, *arrays]).astype(np.int64).tobytes()

    def _change(self, table: NDArray[np.int32], row: int, length: int) -> tuple[int, int, NDArray[np.int32]]:
        """Returns a row, and its slots from the first one that the other end does not have."""
        now, before = table[row, :length], self._sent[row, :length]
        differs = now != before
        first = int(differs.argmax()) if length else 0
        if not length or not differs[first]:
            return row, 0, now[:0]
        before[first:] = now[first:]
        return row, first, now[first:]


class StepReader:
    """The end of another rank."""

    def __init__(self) -> None:
        self._table: NDArray[np.int32] = np.zeros((0, 0), dtype=np.int32)

    def batch(self, message: bytes) -> Batch:
        """Returns the batch of a message. Its sampled rows have no parameters."""
        numbers = np.frombuffer(message, dtype=np.int64).copy()
        lengths, rest = numbers[:_NUM_ARRAYS], numbers[_NUM_ARRAYS:]
        arrays: list[IntArray] = np.split(rest, np.cumsum(lengths)[:-1])
        tokens, positions, write_slots, sampled = arrays[:4]
        req_rows, query_lens, kv_lens, num_decode = arrays[4:8]
        shape, places, slots = arrays[13:16]
        self._apply((int(shape[0]), int(shape[1])), places.reshape(-1, 3), slots)
        trees = None
        if len(arrays[8]):
            tree_rows, prefix_lens, tree_query_lens, path_lens, paths = arrays[8:13]
            paths = paths.reshape(len(path_lens), -1)
            trees = TreeAttention(tree_rows, prefix_lens, tree_query_lens, paths, path_lens)
        return Batch(
            *(tokens, positions, write_slots, self._table),
            *(req_rows, query_lens, kv_lens, int(num_decode[0])),
            _without_parameters(sampled),
            trees,
        )

    def _apply(self, shape: tuple[int, int], places: IntArray, slots: IntArray) -> None:
        if self._table.shape != shape:
            self._table = np.zeros(shape, dtype=np.int32)
        done = 0
        for row, first, count in places.tolist():
            self._table[row, first : first + count] = slots[done : done + count]
            done += count


def _without_parameters(rows: IntArray) -> SampledRows:
    zeros, ones = np.zeros(len(rows), dtype=np.int64), np.ones(len(rows), dtype=np.float32)
    seeds = np.zeros(len(rows), dtype=np.uint64)
    return SampledRows(rows, zeros - 1, 0 * ones, ones, zeros, 0 * ones, seeds, zeros, needs_logprobs=False)
