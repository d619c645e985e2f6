"""Plans the attention of a batch for torch, once for all layers.

The keys of a request are runs that it shares with other requests, and a tail. A shared run is read once for
the rows of all its requests, and merged with their tails by log-sum-exp (the idea of Hydragen, arXiv
2402.05099, and of FlashInfer's cascade attention). Tails of similar size are padded and computed together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

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


class RowGroups(NamedTuple):
    """The groups of a batch's rows, as in ``AttentionPlan``."""

    tails: Sequence[ChunkGroup]
    shared_groups: Sequence[ChunkGroup]


class MaskedPlans:
    """The groups of a batch, made once for each window.

    Args:
        batch: the batch.
        device: the device of the groups' tensors.
        whole: the groups without a window; None: made when they are needed.
        max_gathered: the most slots of a group, as in ``plan_groups``.
    """

    def __init__(
        self,
        batch: AttentionBatch,
        device: torch.device,
        whole: RowGroups | None = None,
        *,
        max_gathered: int = MAX_GATHERED,
    ) -> None:
        self._batch = batch
        self._device = device
        self._max_gathered = max_gathered
        self._plans = {} if whole is None else {0: whole}

    def of(self, window: int) -> RowGroups:
        """Returns the groups for a window, in tokens; 0: no limit."""
        if window not in self._plans:
            arguments = self._batch, torch.float32, self._device
            if window:
                made = _plan_window(*arguments, window, self._max_gathered)
            else:
                made = _plan_whole(*arguments, LEAST_SAVING, self._max_gathered)
            self._plans[window] = made
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
    whole = _plan_whole(batch, dtype, device, least_saving, max_gathered)
    return AttentionPlan(
        *(batch.req_to_token, batch.req_rows, batch.query_lens, batch.kv_lens, batch.trees, *whole),
        MaskedPlans(batch, device, whole, max_gathered=max_gathered),
        both_ways=batch.both_ways,
    )


def _plan_whole(
    batch: AttentionBatch, dtype: torch.dtype, device: torch.device, least_saving: int, max_gathered: int
) -> RowGroups:
    """Plans the attention of each row to its whole text."""
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
        slots = batch.req_to_token[req_rows[run.members[0]], run.start : run.end]
        groups += [
            _group([_Chunk(rows[i : i + MAX_ROWS], slots, True)], dtype, device)
            for i in range(0, len(rows), MAX_ROWS)
        ]
    chunks = [*_text_chunks(batch, starts)]
    if batch.trees is not None:
        chunks += _tree_chunks(batch, batch.trees, starts[len(batch.req_rows) :])
    tails = [_group(similar, dtype, device) for similar in _similar_chunks(chunks, max_gathered)]
    return RowGroups(tails, groups)


def _plan_window(
    batch: AttentionBatch, dtype: torch.dtype, device: torch.device, window: int, max_gathered: int
) -> RowGroups:
    """Plans the attention of each row to the last ``window`` tokens of its text, itself included. Of a long
    window, the middle that all rows of a chunk see is attended to in parts."""
    windows = [*_text_windows(batch, window)]
    if batch.trees is not None:
        windows += _tree_windows(batch, batch.trees, window)
    chunks, middles = [], []
    for one in windows:
        if len(one.middle) <= max_gathered:
            chunks.append(one.whole())
            continue
        chunks.append(one.edges)
        for i in range(0, len(one.middle), max_gathered):
            middles.append(_Chunk(one.edges.rows, one.middle[i : i + max_gathered], True))
    tails = [_group(similar, dtype, device) for similar in _similar_chunks(chunks, max_gathered)]
    return RowGroups(tails, [_group([middle], dtype, device) for middle in middles])


@dataclass(slots=True, frozen=True)
class _Chunk:
    """Rows of one request or tree, their slots, and a mask: the slots to which each row attends."""

    rows: IntArray
    slots: IntArray | NDArray[np.int32]
    seen: NDArray[np.bool_] | bool  # [rows, slots], or True


@dataclass(slots=True, frozen=True)
class _Window:
    """The slots that the rows of a request or tree see through their windows: ``middle``, which all of them
    see, and the others. Each row sees one of these."""

    edges: _Chunk
    middle: NDArray[np.int32]

    def whole(self) -> _Chunk:
        """The rows with all their slots."""
        is_seen = np.ones((len(self.edges.rows), len(self.middle)), dtype=np.bool_)
        slots = np.concatenate((self.middle, self.edges.slots), dtype=np.int64)
        return _Chunk(self.edges.rows, slots, np.concatenate((is_seen, self.edges.seen), axis=1))


@dataclass(slots=True, frozen=True)
class _TextBlock:
    """Rows of one request's new tokens."""

    request: int
    req_row: int
    rows: IntArray
    first: int  # the position of the first row
    last: int  # the end of the positions that they may see


def _text_blocks(batch: AttentionBatch) -> Iterator[_TextBlock]:
    row = 0
    both_ways = np.zeros(len(batch.req_rows), bool) if batch.both_ways is None else batch.both_ways
    for request, (req_row, query_len, kv_len, sees_all) in enumerate(
        zip(
            batch.req_rows.tolist(),
            batch.query_lens.tolist(),
            batch.kv_lens.tolist(),
            both_ways.tolist(),
            strict=True,
        )
    ):
        for first in range(kv_len - query_len, kv_len, MAX_ROWS):
            end = min(first + MAX_ROWS, kv_len)
            rows = np.arange(row, row + end - first)
            yield _TextBlock(request, req_row, rows, first, kv_len if sees_all else end)
            row += end - first


def _text_chunks(batch: AttentionBatch, starts: IntArray) -> Iterator[_Chunk]:
    for block in _text_blocks(batch):
        begin = int(starts[block.request])
        positions = block.first + np.arange(len(block.rows))[:, None]
        seen = np.arange(begin, block.last) <= positions
        if batch.both_ways is not None and batch.both_ways[block.request]:
            seen[:] = True
        yield _Chunk(block.rows, batch.req_to_token[block.req_row, begin : block.last], seen)


def _text_windows(batch: AttentionBatch, window: int) -> Iterator[_Window]:
    for block in _text_blocks(batch):
        end = block.first + len(block.rows)
        begin = max(0, block.first - window + 1)
        middle = min(max(0, end - window), block.first)  # from here up to the first row, all rows see all
        columns = np.concatenate((np.arange(begin, middle), np.arange(block.first, block.last)))
        positions = np.arange(block.first, end)[:, None]
        seen = columns > positions - window
        if batch.both_ways is None or not batch.both_ways[block.request]:
            seen &= columns <= positions
        table = batch.req_to_token[block.req_row]
        yield _Window(_Chunk(block.rows, table[columns], seen), table[middle : block.first])


def _tree_blocks(batch: AttentionBatch, trees: TreeAttention) -> Iterator[tuple[int, slice, IntArray]]:
    """The blocks of each tree's rows: the tree, the rows among all trees' rows, and among the batch's."""
    first_row, first = int(batch.query_lens.sum()), 0
    for tree, num_rows in enumerate(trees.query_lens.tolist()):
        for begin in range(first, first + num_rows, MAX_ROWS):
            rows = slice(begin, min(begin + MAX_ROWS, first + num_rows))
            yield tree, rows, first_row + np.arange(rows.start, rows.stop)
        first += num_rows


def _tree_chunks(batch: AttentionBatch, trees: TreeAttention, starts: IntArray) -> Iterator[_Chunk]:
    for tree, block, rows in _tree_blocks(batch, trees):
        prefix = batch.req_to_token[trees.req_rows[tree], starts[tree] : trees.prefix_lens[tree]]
        yield _Chunk(rows, *tree_block(prefix, trees.paths[block]))


def _tree_windows(batch: AttentionBatch, trees: TreeAttention, window: int) -> Iterator[_Window]:
    for tree, block, rows in _tree_blocks(batch, trees):
        prefix_len, depths = int(trees.prefix_lens[tree]), trees.path_lens[block]
        # A row of depth d is at the position prefix_len + d - 1.
        begin = min(max(0, prefix_len + int(depths.min()) - window), prefix_len)
        middle = min(max(0, prefix_len + int(depths.max()) - window), prefix_len)
        prefix = batch.req_to_token[trees.req_rows[tree]]
        slots, seen = tree_block(prefix[begin:middle], trees.paths[block])
        # A column is a position, in the prefix and in the paths after it.
        columns = np.minimum(np.arange(trees.paths.shape[1]), depths[:, None] - 1)
        position_of = np.zeros(int(slots.max()) + 1, dtype=np.int64)
        position_of[trees.paths[block]] = prefix_len + columns
        position = np.arange(begin, begin + len(slots))
        position[middle - begin :] = position_of[slots[middle - begin :]]
        seen &= position > (prefix_len + depths - 1)[:, None] - window
        yield _Window(_Chunk(rows, slots, seen), prefix[middle:prefix_len])


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
