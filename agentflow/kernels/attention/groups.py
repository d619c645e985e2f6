"""Plans the attention of a batch for torch, once for all layers.

The keys of a request are runs that it shares with other requests, and a tail. A shared run is read once for
the rows of all its requests, and merged with their tails by log-sum-exp (the idea of Hydragen, arXiv
2402.05099, and of FlashInfer's cascade attention). Tails of similar size are padded and computed together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentflow.kernels.attention.shared_runs import SharedRun, shared_runs, with_trees
from agentflow.kernels.inputs import AttentionBatch, IntArray, TreeAttention, tree_block

LEAST_SAVING = 1000
"""A run is shared if that saves at least this number of reads, about the cost of another group in each
layer."""
MAX_ROWS = 256
"""The most rows of a group. Longer chunks are cut: each block of rows reads only the keys up to its end."""
MAX_GATHERED = 16384
"""The most slots of a group, which bounds the memory of gathered keys and values and of scores. A group may
have more: the slots of a batch's new tokens, to which not all of its rows attend."""


@dataclass(slots=True, frozen=True)
class ChunkGroup:
    """N chunks with L rows and K slots each. A smaller chunk is padded with its last row and its last slot,
    because other slots may never have been written."""

    num_chunks: int  # N
    rows: Tensor  # [N * L]
    slots: Tensor  # [N * K]
    mask: Tensor | None  # [N, 1, L, K], 0 or -inf; None: each row attends to all slots


@dataclass(slots=True, frozen=True)
class AttentionPlan(AttentionBatch):
    """A batch with its groups."""

    tails: Sequence[ChunkGroup]  # each row is in exactly one group
    shared_groups: Sequence[ChunkGroup]  # a row may be in several groups
    masked: MaskedPlans  # for layers with windows, capped scores or sinks


class MaskedPlans:
    """The groups of a batch without shared runs, planned once for each window."""

    def __init__(self, batch: AttentionBatch, device: torch.device) -> None:
        self._batch = batch
        self._device = device
        self._plans: dict[int, Sequence[ChunkGroup]] = {}

    def of(self, window: int) -> Sequence[ChunkGroup]:
        """Returns the groups for a window, in tokens; 0: no limit."""
        if window not in self._plans:
            num_trees = 0 if self._batch.trees is None else len(self._batch.trees.req_rows)
            starts = np.zeros(len(self._batch.req_rows) + num_trees, dtype=np.int64)
            self._plans[window] = plan_tails(self._batch, starts, torch.float32, self._device, window=window)
        return self._plans[window]


def plan_groups(
    batch: AttentionBatch,
    dtype: torch.dtype,
    device: torch.device,
    *,
    least_saving: int = LEAST_SAVING,
    max_gathered: int = MAX_GATHERED,
) -> AttentionPlan:
    """Plans the attention of a batch.

    Args:
        batch: the batch.
        dtype: the dtype of the masks.
        device: the device of the plan's tensors.
        least_saving: the fewest tokens that a shared run must save.
        max_gathered: the most slots of a group.
    """
    table = batch.req_to_token
    req_rows, query_lens, cached = with_trees(batch)
    runs, starts = shared_runs(batch, req_rows, cached, least_saving)
    # A long tail to which all rows of a request attend is treated as a run with one member.
    for member in np.flatnonzero(cached - starts > max_gathered):
        runs.append(SharedRun(np.array([member]), int(starts[member]), int(cached[member])))
        starts[member] = cached[member]
    first_rows = np.cumsum(query_lens) - query_lens
    groups = []
    for run in (part for whole in runs for part in whole.parts(max_gathered)):
        rows = np.concatenate([np.arange(query_lens[r]) + first_rows[r] for r in run.members])
        slots = table[req_rows[run.members[0]], run.start : run.end]
        groups += [
            _group([_Chunk(rows[i : i + MAX_ROWS], slots, True)], dtype, device)
            for i in range(0, len(rows), MAX_ROWS)
        ]
    tails = plan_tails(batch, starts, dtype, device, max_gathered=max_gathered)
    return AttentionPlan(
        *(table, batch.req_rows, batch.query_lens, batch.kv_lens, batch.trees, tails, groups),
        MaskedPlans(batch, device),
        both_ways=batch.both_ways,
    )


def plan_tails(
    batch: AttentionBatch,
    starts: IntArray,
    dtype: torch.dtype,
    device: torch.device,
    *,
    window: int = 0,
    max_gathered: int = MAX_GATHERED,
) -> list[ChunkGroup]:
    """Plans the attention of each row to the keys of its request or tree, from a given column on.

    Args:
        batch: the batch.
        starts: the first column of each request, and then of each tree.
        dtype: the dtype of the masks.
        device: the device of the groups' tensors.
        window: the number of tokens to which a row attends, including itself; 0: all.
        max_gathered: the most slots of a group of several chunks.
    """
    chunks = [*_text_chunks(batch, starts, window)]
    if batch.trees is not None:
        chunks += _tree_chunks(batch, batch.trees, starts[len(batch.req_rows) :], window)
    return [_group(similar, dtype, device) for similar in _similar_chunks(chunks, max_gathered)]


@dataclass(slots=True, frozen=True)
class _Chunk:
    """Rows of one request or tree, their slots, and a mask: the slots to which each row attends."""

    rows: IntArray
    slots: IntArray | NDArray[np.int32]
    seen: NDArray[np.bool_] | bool  # [rows, slots], or True


def _text_chunks(batch: AttentionBatch, starts: IntArray, window: int) -> Iterator[_Chunk]:
    row = 0
    both_ways = np.zeros(len(batch.req_rows), bool) if batch.both_ways is None else batch.both_ways
    for req_row, query_len, kv_len, sees_all, start in zip(
        batch.req_rows.tolist(),
        batch.query_lens.tolist(),
        batch.kv_lens.tolist(),
        both_ways.tolist(),
        starts.tolist(),
        strict=False,
    ):
        for first in range(kv_len - query_len, kv_len, MAX_ROWS):
            end = min(first + MAX_ROWS, kv_len)
            begin = max(start, first - window + 1) if window else start
            last = kv_len if sees_all else end
            positions, columns = np.arange(first, end)[:, None], np.arange(begin, last)
            seen = (columns <= positions) | sees_all
            if window:
                seen &= columns > positions - window
            yield _Chunk(np.arange(row, row + end - first), batch.req_to_token[req_row, begin:last], seen)
            row += end - first


def _tree_chunks(
    batch: AttentionBatch, trees: TreeAttention, starts: IntArray, window: int
) -> Iterator[_Chunk]:
    first_row, first = int(batch.query_lens.sum()), 0
    for req_row, prefix_len, num_rows, start in zip(
        trees.req_rows.tolist(),
        trees.prefix_lens.tolist(),
        trees.query_lens.tolist(),
        starts.tolist(),
        strict=True,
    ):
        for begin in range(first, first + num_rows, MAX_ROWS):
            rows = slice(begin, min(begin + MAX_ROWS, first + num_rows))
            slots, seen = tree_block(batch.req_to_token[req_row, start:prefix_len], trees.paths[rows])
            if window:
                depths = trees.path_lens[rows]
                # A column is a position, both in the prefix and in the paths after it.
                columns = np.minimum(np.arange(trees.paths.shape[1]), depths[:, None] - 1)
                position_of = np.zeros(int(slots.max()) + 1, dtype=np.int64)
                position_of[trees.paths[rows]] = prefix_len + columns
                position = np.arange(start, start + len(slots))
                position[prefix_len - start :] = position_of[slots[prefix_len - start :]]
                seen &= position > (prefix_len + depths - 1)[:, None] - window
            yield _Chunk(first_row + np.arange(rows.start, rows.stop), slots, seen)
        first += num_rows


def _similar_chunks(chunks: Sequence[_Chunk], max_gathered: int) -> Iterator[list[_Chunk]]:
    """Groups chunks of similar size, to be padded to the largest. A chunk is padded to less than twice its
    rows and about twice its slots, because each group costs several operations in every layer."""
    similar: list[_Chunk] = []
    for chunk in sorted(chunks, key=lambda c: (len(c.rows).bit_length(), len(c.slots)), reverse=True):
        if similar:
            largest, num = similar[0], len(similar) + 1
            is_similar = (
                len(chunk.rows).bit_length() == len(largest.rows).bit_length()
                and len(largest.slots) <= 2 * len(chunk.slots) + 128
            )
            if (
                not is_similar
                or num * len(largest.rows) > MAX_ROWS
                or num * len(largest.slots) > max_gathered
            ):
                yield similar
                similar = []
        similar.append(chunk)
    if similar:
        yield similar


def _group(chunks: Sequence[_Chunk], dtype: torch.dtype, device: torch.device) -> ChunkGroup:
    num_rows, num_slots = max(len(c.rows) for c in chunks), max(len(c.slots) for c in chunks)
    rows = np.empty((len(chunks), num_rows), dtype=np.int64)
    slots = np.empty((len(chunks), num_slots), dtype=np.int64)
    seen = np.zeros((len(chunks), 1, num_rows, num_slots), dtype=np.bool_)
    for i, chunk in enumerate(chunks):
        length, width = len(chunk.rows), len(chunk.slots)
        rows[i, :length], rows[i, length:] = chunk.rows, chunk.rows[-1]
        slots[i, :width], slots[i, width:] = chunk.slots, chunk.slots[-1]
        seen[i, 0, :length, :width] = chunk.seen
        seen[i, 0, length:] = seen[i, 0, length - 1]
    mask = None
    if not seen.all():
        mask = torch.from_numpy(np.where(seen, np.float32(0), np.float32(-np.inf))).to(device, dtype)
    return ChunkGroup(
        len(chunks),
        torch.from_numpy(rows.ravel()).to(device),
        torch.from_numpy(slots.ravel()).to(device),
        mask,
    )
