"""A batch in one message, for ranks that compute it without sampling.

The message has the length of each array, then the arrays, all in 64-bit integers: only the arrays that a
forward pass needs. Each rank keeps a copy of the table of slots, so a message has only the changes since the
last message.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from agentflow.engine.batch import Batch, IntArray, SampledRows, TreeAttention
from agentflow.engine.models.table_copy import TableCopy

_NUM_ARRAYS: Final = 18


class StepWriter:
    """Writes messages on rank 0."""

    def __init__(self) -> None:
        self._copies = TableCopy()  # of all other ranks: their copies are equal

    def message(self, batch: Batch) -> bytes:
        """Returns the message for a batch, which must have no adapters, no media and no pending tokens. Ranks
        must receive all messages, in this order."""
        assert batch.adapters is None
        assert batch.media is None
        assert batch.pending is None
        table, trees = batch.req_to_token, batch.trees
        arrays = [batch.token_ids, batch.positions, batch.write_slots, batch.sampled.rows]
        arrays += [batch.req_rows, batch.query_lens, batch.kv_lens, np.array([batch.num_decode])]
        if trees is None:
            arrays += [np.zeros(0, dtype=np.int64)] * 5
        else:
            arrays += [trees.req_rows, trees.prefix_lens, trees.query_lens, trees.path_lens]
            arrays.append(trees.paths.ravel())
        changes = self._copies.changes(batch)
        arrays += [np.array(table.shape), changes.rows * table.shape[1] + changes.columns]
        arrays.append(changes.slots.astype(np.int64))
        sizes = [number for end, rows in batch.shared for number in (end, len(rows))]
        arrays.append(np.array(sizes, dtype=np.int64))
        arrays.append(np.concatenate([np.zeros(0, dtype=np.int64), *(rows for _, rows in batch.shared)]))
        lengths = [len(array) for array in arrays]
        return np.concatenate([lengths, *arrays]).astype(np.int64).tobytes()


class StepReader:
    """Reads messages on another rank."""

    def __init__(self) -> None:
        self._table: NDArray[np.int32] = np.zeros((0, 0), dtype=np.int32)

    def batch(self, message: bytes) -> Batch:
        """Returns the batch of a message. Its sampled rows have no parameters."""
        numbers = np.frombuffer(message, dtype=np.int64).copy()
        lengths, rest = numbers[:_NUM_ARRAYS], numbers[_NUM_ARRAYS:]
        arrays: list[IntArray] = np.split(rest, np.cumsum(lengths)[:-1])
        tokens, positions, write_slots, sampled = arrays[:4]
        req_rows, query_lens, kv_lens, num_decode = arrays[4:8]
        shape, places, slots, sizes, readers = arrays[13:]
        if self._table.shape != tuple(shape):
            self._table = np.zeros(shape, dtype=np.int32)
        self._table.ravel()[places] = slots
        ends, counts = sizes.reshape(-1, 2).T
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
            shared=[*zip(ends.tolist(), np.split(readers, np.cumsum(counts)), strict=False)],
        )


def _without_parameters(rows: IntArray) -> SampledRows:
    zeros, ones = np.zeros(len(rows), dtype=np.int64), np.ones(len(rows), dtype=np.float32)
    seeds = np.zeros(len(rows), dtype=np.uint64)
    return SampledRows(rows, zeros - 1, 0 * ones, ones, zeros, 0 * ones, seeds, zeros, needs_logprobs=False)
