"""Plans the attention of a batch for ``torch_ops``, once for all layers.

The planner divides a request's keys into runs that it shares with other requests, and an unshared tail.

* A *context part* is a run of slots that all of its query rows see completely: a prefix that requests share,
  or the cached part of a long prefill chunk. It is read once for all of its rows and merged with the other
  parts by log-sum-exp (the idea of Hydragen, arXiv 2402.05099, and of FlashInfer's cascade attention).
* A *single group* has one row per decoding request. Its tails are gathered and padded to the longest.
* A *short group* has chunks of a few rows, such as tokens that a grammar has forced. The tail of each chunk
  is gathered once for all of its rows, with a causal mask. The rows of a tree (``TreeAttention``) are such a
  chunk, with a mask for their paths; a long prefix of a tree is a context part of all its rows.
* A *causal group* has prefill chunks: row i of a chunk sees rows 0 to i.

Every row is in exactly one single, short or causal group, and in any number of context parts.

Sizes are rounded to a few values, because oneDNN compiles a matrix product for each new number of rows.
Flash attention on CPUs divides queries, from about 64 on, into blocks of up to 256, and keys into blocks of
512, and compiles two products for each pair of sizes. Compiling takes a millisecond, and most of the memory
stays allocated: 0.7 MB for a product with a weight, 0.1 to 0.4 MB for attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentflow.kernels.inputs import (
    AttentionBatch,
    IntArray,
    ReqToToken,
    TreeAttention,
    side_by_side,
    tree_block,
)

# Positions along a dimension: a slice if they are consecutive, which needs no copy.
Index = slice | Tensor


@dataclass(slots=True, frozen=True)
class ContextPart:
    """Query rows that all see the same slots. To round the size, the last slot is repeated."""

    rows: Index
    num_rows: int
    slots: Index
    num_slots: int
    mask: Tensor | None  # [1, 1, 1, num_slots], 0 or -inf: hides the repeated slots


@dataclass(slots=True, frozen=True)
class SingleGroup:
    """Rows with an equal number of slots each.

    A row with fewer keys repeats its last slot: a slot of another request may never have been written.
    """

    rows: Index
    num_rows: int
    slots: Index  # [num_rows * num_slots], row after row
    num_slots: int  # of each row
    mask: Tensor | None  # [num_rows, 1, 1, num_slots], 0 or -inf: hides the repeated slots


@dataclass(slots=True, frozen=True)
class ShortGroup:
    """Chunks with equal numbers of rows and slots. A chunk with fewer rows repeats its last row, a chunk with
    fewer keys its last slot."""

    rows: Index  # [num_chunks * num_rows], chunk after chunk
    slots: Index  # [num_chunks * num_slots], chunk after chunk
    num_chunks: int
    num_rows: int  # of each chunk
    num_slots: int  # of each chunk
    mask: Tensor  # [num_chunks, 1, num_rows, num_slots], 0 or -inf
    repeated: dict[int, Tensor] = field(default_factory=dict)  # the results of ``mask_for``, by ``times``

    def mask_for(self, times: int) -> Tensor:
        """Returns the mask for several copies of each chunk's rows, end to end. The first layer computes
        it."""
        found = self.repeated.get(times)
        if found is None:
            found = self.repeated[times] = self.mask.repeat(1, 1, times, 1)
        return found


@dataclass(slots=True, frozen=True)
class CausalGroup:
    """Chunks with equal numbers of rows. A chunk with fewer rows repeats its last row; the causal mask hides
    the repetitions from the other rows."""

    rows: Index  # [num_chunks * num_rows], chunk after chunk
    slots: Index  # of the rows, in the same order
    num_chunks: int
    num_rows: int  # of each chunk


@dataclass(slots=True, frozen=True)
class AttentionPlan(AttentionBatch):
    """A batch with its parts."""

    singles: Sequence[SingleGroup]
    shorts: Sequence[ShortGroup]
    causals: Sequence[CausalGroup]
    contexts: Sequence[ContextPart]
    # [T]: the index of each row of the batch in the concatenated rows of singles, shorts and causals. None if
    # the orders are the same.
    order: Tensor | None


@dataclass(slots=True, frozen=True)
class SharedRun:
    """Columns ``start`` to ``end`` of ``req_to_token``, equal for all ``members`` (request indices)."""

    members: IntArray
    start: int
    end: int


def find_shared_runs(
    req_to_token: NDArray[np.int32], req_rows: IntArray, limits: IntArray, least_saving: int, step: int = 1
) -> tuple[list[SharedRun], IntArray]:
    """Finds the shared runs that are worth a context part, and the column at which each request's tail
    starts.

    Requests with equal slots form a tree; the search walks it from the root. A run that n requests share
    saves (n - 1) times its length of reads. If the saving is too small, the run stays with its requests'
    tails or is joined to a longer run below it. The runs of one request are consecutive and start at column
    0. The search reads only the shared part of the table: requests that share nothing cost one comparison of
    their first slots.

    Args:
        req_to_token: the slots of each request, [requests, columns].
        req_rows: the requests' rows in the table.
        limits: the number of leading columns of each request that can be shared.
        least_saving: the fewest tokens that a run must save.
        step: the lengths of runs are multiples of it; remainders are joined like runs that save too little.
    """
    runs: list[SharedRun] = []
    tails = np.zeros(len(req_rows), dtype=np.int64)
    pending = [(np.arange(len(req_rows)), 0)] if len(req_rows) > 1 else []
    while pending:
        members, depth = pending.pop()
        members = members[limits[members] > depth]
        for siblings in _equal_groups(members, req_to_token[req_rows[members], depth]):
            common = req_to_token[req_rows[siblings], depth : int(limits[siblings].min())]
            differs = (common != common[0]).any(axis=0)
            end = depth + (int(differs.argmax()) if differs.any() else len(differs))
            start = int(tails[siblings[0]])
            length = (end - start) // step * step
            if length and (len(siblings) - 1) * length >= least_saving:
                runs.append(SharedRun(siblings, start, start + length))
                tails[siblings] = start + length
            pending.append((siblings, end))
    return runs, tails


def _equal_groups(members: IntArray, keys: NDArray[np.int32]) -> list[IntArray]:
    """Returns the groups of two or more members with equal keys, each in ascending order."""
    if len(members) < 2:
        return []
    by_key = np.argsort(keys, kind="stable")
    bounds = np.flatnonzero(np.diff(keys[by_key])) + 1
    if len(bounds) + 1 == len(members):
        return []
    return [members[group] for group in np.split(by_key, bounds) if len(group) > 1]


TILE_ROWS = 16  # of an AMX tile
MAX_STEP = 64


def whole_tiles(size: int) -> int:
    """Rounds a number of queries up to a multiple of ``TILE_ROWS``."""
    return -(-size // TILE_ROWS) * TILE_ROWS


def rounded_up(size: int) -> int:
    """Rounds a number of rows or keys up, by less than 16 or a quarter, so that fewer sizes occur.

    >>> [rounded_up(size) for size in (1, 17, 100, 130, 500)]
    [16, 32, 112, 160, 512]
    """
    step = min(MAX_STEP, max(TILE_ROWS, (1 << size.bit_length()) // 8))
    return -(-size // step) * step


def rounded_down(size: int) -> int:
    """Rounds down to a multiple of ``MAX_STEP``."""
    return size // MAX_STEP * MAX_STEP


# The cost of each further part of a layer, in tokens of gathered and attended KV: 0.1 ms, measured on AVX2.
PART_OVERHEAD = 1000
# Tokens gathered for one single group of several rows: they fit a shared CPU cache.
MAX_GATHERED = 16384
# Rows and slots of several trees in one chunk. More would be wasted: the rows of a tree also attend to the
# other trees' slots, which the mask hides.
MAX_PACKED_ROWS = 64
MAX_PACKED_SLOTS = 512
# The most rows of a chunk in a short group. A longer chunk is worth a context part.
MAX_SHORT_ROWS = 32
# Above this number, the rows of such a chunk are rounded up to a multiple of it.
SHORT_STEP = 4


def plan_attention(
    req_to_token: ReqToToken,
    req_rows: IntArray,
    query_lens: IntArray,
    kv_lens: IntArray,
    *,
    dtype: torch.dtype,
    device: torch.device,
    trees: TreeAttention | None = None,
    part_overhead: int = PART_OVERHEAD,
    max_gathered: int = MAX_GATHERED,
    run_step: int = MAX_STEP,
) -> AttentionPlan:
    """Plans the attention of a batch.

    Args:
        req_to_token: as in ``AttentionBatch``, and so are the next three and ``trees``.
        req_rows: the requests' rows in the table.
        query_lens: the number of rows of each request.
        kv_lens: the number of keys of each request.
        dtype: the dtype of the queries.
        device: the device of the plan's tensors.
        trees: the trees whose rows follow the requests' rows.
        part_overhead: the cost of a part, in tokens.
        max_gathered: the most tokens that are gathered for one single group of several rows.
        run_step: the lengths of shared runs are multiples of it.
    """
    planner = _Planner(req_to_token, req_rows, query_lens, kv_lens, trees, dtype, device)
    return planner.plan(part_overhead, max_gathered, run_step)


class _Planner:
    def __init__(
        self,
        req_to_token: ReqToToken,
        req_rows: IntArray,
        query_lens: IntArray,
        kv_lens: IntArray,
        trees: TreeAttention | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.req_to_token = req_to_token
        self.req_rows = req_rows
        self.query_lens = query_lens
        self.kv_lens = kv_lens
        self.cached = kv_lens - query_lens
        self.trees = trees
        self.num_requests = len(req_rows)
        if trees is not None:  # each tree is one more request, with its prefix in the cache
            self.req_rows = np.concatenate((req_rows, trees.req_rows))
            self.query_lens = np.concatenate((query_lens, trees.query_lens))
            self.cached = np.concatenate((self.cached, trees.prefix_lens))
        self.dtype = dtype
        self.device = device
        self.first_rows = np.cumsum(self.query_lens) - self.query_lens
        self.group_rows: list[IntArray] = []  # rows of the groups so far; -1 for padding
        self.contexts: list[ContextPart] = []

    def plan(self, part_overhead: int, max_gathered: int, run_step: int) -> AttentionPlan:
        runs, starts = find_shared_runs(
            self.req_to_token, self.req_rows, self.cached, part_overhead, run_step
        )
        for run in runs:
            self._add_context(run)
        num = self.num_requests
        lasts = {tree: self._add_prefix(tree, starts, part_overhead) for tree in range(num, len(starts))}
        cached, query_lens = self.cached[:num], self.query_lens[:num]
        alone = query_lens == 1
        alone[[request for request in lasts.values() if request is not None]] = False
        singles = self._single_groups(np.flatnonzero(alone), starts, max_gathered)
        is_short = (query_lens > 1) & (query_lens <= MAX_SHORT_ROWS) & (cached > starts[:num])
        shorts = self._short_groups(np.flatnonzero(is_short), starts, max_gathered)
        shorts += self._tree_groups(lasts, starts)
        chunks = np.flatnonzero((query_lens > 1) & ~is_short)
        for r in chunks[cached[chunks] > starts[chunks]]:
            self._add_cached(int(r), int(starts[r]), int(cached[r]))
        causals = self._causal_groups(chunks)
        return AttentionPlan(
            self.req_to_token,
            self.req_rows[:num],
            query_lens,
            self.kv_lens,
            self.trees,
            singles,
            shorts,
            causals,
            self.contexts,
            self._order(),
        )

    def _add_context(self, run: SharedRun) -> None:
        """Adds a context part for all rows of the run's requests."""
        rows = _ranges(self.first_rows[run.members], self.query_lens[run.members])
        length = run.end - run.start
        column = np.arange(rounded_up(length))
        slots = self.req_to_token[self.req_rows[run.members[0]], run.start + column.clip(max=length - 1)]
        mask = self._mask((column < length)[None, None, None]) if length < len(column) else None
        part = ContextPart(self._index(rows), len(rows), self._index(slots), len(slots), mask)
        self.contexts.append(part)

    def _add_cached(self, request: int, start: int, end: int) -> None:
        """Adds the cached part of a chunk as two parts: the largest rounded size without a mask, and the rest
        under a mask. One part under a mask was measured to cost more."""
        middle = start + rounded_down(end - start)
        for first, last in ((start, middle), (middle, end)):
            if last > first:
                self._add_context(SharedRun(np.array([request]), first, last))

    def _add_prefix(self, tree: int, starts: IntArray, part_overhead: int) -> int | None:
        """Adds a part for the rest of a tree's prefix except its last token, if the part saves more than it
        costs. A request of this batch that computes the last token sees the same slots and shares the part;
        returns that request, or None."""
        members, last = [tree], None
        for request in np.flatnonzero(self.req_rows[: self.num_requests] == self.req_rows[tree]).tolist():
            if self.query_lens[request] == 1 and starts[request] == starts[tree]:
                members, last = [request, tree], request
        start = int(starts[tree])
        end = start + rounded_down(int(self.cached[tree]) - 1 - start)
        # Otherwise the tree's chunk gathers the prefix once. With AMX this was measured to save 2 ms in a
        # forward pass over a prefix of 1,000 tokens, and nothing at about 2,000.
        if end - start > 2 * part_overhead:
            self._add_context(SharedRun(np.array(members), start, end))
            starts[members] = end
        return last

    def _tree_groups(self, lasts: dict[int, int | None], starts: IntArray) -> list[ShortGroup]:
        """Groups the trees in order, several small ones per chunk. ``lasts``: for each tree the request that
        shares its prefix, from ``_add_prefix``."""
        groups: list[ShortGroup] = []
        packed: list[int] = []
        rows = slots = 0
        for tree in lasts:
            own_rows = int(self.query_lens[tree])
            own_slots = own_rows + int(self.cached[tree] - starts[tree])
            if packed and (rows + own_rows > MAX_PACKED_ROWS or slots + own_slots > MAX_PACKED_SLOTS):
                groups.append(self._tree_group(packed, lasts, starts))
                packed, rows, slots = [], 0, 0
            packed.append(tree)
            rows, slots = rows + own_rows, slots + own_slots
        if packed:
            groups.append(self._tree_group(packed, lasts, starts))
        return groups

    def _tree_group(self, members: list[int], lasts: dict[int, int | None], starts: IntArray) -> ShortGroup:
        trees, num = self.trees, self.num_requests
        assert trees is not None
        rows: list[int] = []
        slots: list[IntArray] = []
        blocks: list[NDArray[np.bool_]] = []
        for tree in members:
            last, first = lasts[tree], int(self.first_rows[tree])
            end = first + int(self.query_lens[tree])
            rows += [*([] if last is None else [int(self.first_rows[last])]), *range(first, end)]
            first_node = int(self.first_rows[num])
            head = self.req_to_token[self.req_rows[tree], starts[tree] : self.cached[tree]]
            paths = trees.paths[first - first_node : end - first_node]
            own_slots, visible = tree_block(head, paths, 0 if last is None else 1)
            slots.append(own_slots)
            blocks.append(visible)
        all_rows, all_slots = np.array(rows), np.concatenate(slots)
        num_rows, num_slots = whole_tiles(len(all_rows)), rounded_up(len(all_slots))
        padding = (0, num_rows - len(all_rows))
        self.group_rows.append(np.pad(all_rows, padding, constant_values=-1))
        all_rows = np.pad(all_rows, padding, mode="edge")
        all_slots = np.pad(all_slots, (0, num_slots - len(all_slots)), mode="edge")
        mask = self._mask(side_by_side(blocks, num_rows, num_slots)[None, None])
        return ShortGroup(self._index(all_rows), self._index(all_slots), 1, num_rows, num_slots, mask)

    def _single_groups(self, requests: IntArray, starts: IntArray, max_gathered: int) -> list[SingleGroup]:
        """Groups rows with tails of similar length."""
        lens = self.kv_lens[requests] - starts[requests]
        return [
            self._single_group(requests[group], starts[requests[group]], lens[group])
            for group in _similar_groups(lens, max_gathered)
        ]

    def _single_group(self, requests: IntArray, starts: IntArray, lens: IntArray) -> SingleGroup:
        longest = int(lens.max())
        columns = np.arange(longest)
        mask = None
        if int(lens.min()) < longest:
            mask = self._mask((columns < lens[:, None])[:, None, None])
        rows = self.first_rows[requests]
        self.group_rows.append(rows)
        slots = self._tails(requests, starts, lens, longest)
        return SingleGroup(self._index(rows), len(rows), self._index(slots), longest, mask)

    def _tails(self, requests: IntArray, starts: IntArray, lens: IntArray, num: int) -> NDArray[np.int32]:
        """Returns ``num`` slots per request: its tail, with the last slot repeated."""
        columns = starts[:, None] + np.minimum(np.arange(num), (lens - 1)[:, None])
        return self.req_to_token[self.req_rows[requests][:, None], columns].ravel()

    def _short_groups(self, requests: IntArray, starts: IntArray, max_gathered: int) -> list[ShortGroup]:
        """Groups chunks with tails of similar length."""
        lens = self.kv_lens[requests] - starts[requests]
        return [
            self._short_group(requests[group], starts[requests[group]], lens[group])
            for group in _similar_groups(lens, max_gathered)
        ]

    def _short_group(self, requests: IntArray, starts: IntArray, lens: IntArray) -> ShortGroup:
        query_lens = self.query_lens[requests]
        num_rows = int(query_lens.max())
        if num_rows > SHORT_STEP:
            num_rows += -num_rows % SHORT_STEP
        num_slots = rounded_up(int(lens.max()))
        row = np.minimum(np.arange(num_rows), (query_lens - 1)[:, None])
        rows = self.first_rows[requests][:, None] + row
        self.group_rows.append(np.where(np.arange(num_rows) < query_lens[:, None], rows, -1).ravel())
        num_seen = (self.cached[requests] - starts)[:, None] + row + 1
        mask = self._mask((np.arange(num_slots) < num_seen[:, :, None])[:, None])
        slots = self._index(self._tails(requests, starts, lens, num_slots))
        return ShortGroup(self._index(rows.ravel()), slots, len(requests), num_rows, num_slots, mask)

    def _causal_groups(self, chunks: IntArray) -> list[CausalGroup]:
        """Groups chunks of similar length, longest first."""
        by_length = chunks[np.argsort(-self.query_lens[chunks], kind="stable")]
        lens = self.query_lens[by_length]
        groups, first = [], 0
        while first < len(by_length):
            longest = int(lens[first])
            end = int(np.searchsorted(-lens, -(longest - longest // 4), side="right"))
            group = np.sort(by_length[first:end])
            last, num_rows = (self.query_lens[group] - 1)[:, None], whole_tiles(longest)
            columns = np.minimum(np.arange(num_rows), last)
            rows = self.first_rows[group][:, None] + columns
            self.group_rows.append(np.where(np.arange(num_rows) <= last, rows, -1).ravel())
            rows = rows.ravel()
            columns = columns + self.cached[group][:, None]
            slots = self.req_to_token[self.req_rows[group][:, None], columns].ravel()
            groups.append(CausalGroup(self._index(rows), self._index(slots), len(group), num_rows))
            first = end
        return groups

    def _order(self) -> Tensor | None:
        rows = self.group_rows[0] if len(self.group_rows) == 1 else np.concatenate(self.group_rows)
        num_rows = int(self.query_lens.sum())
        if len(rows) == num_rows and np.array_equal(rows, np.arange(num_rows)):
            return None
        order = np.empty(num_rows, dtype=np.int64)
        real = np.flatnonzero(rows >= 0)
        order[rows[real]] = real
        return self._tensor(order)

    def _index(self, values: NDArray[np.int32] | IntArray) -> Index:
        first, last = int(values[0]), int(values[-1])
        if last - first == len(values) - 1 and bool((np.diff(values) == 1).all()):
            return slice(first, last + 1)
        return self._tensor(values)

    def _mask(self, seen: NDArray[np.bool_]) -> Tensor:
        return self._tensor(np.where(seen, np.float32(0), np.float32(-np.inf))).to(self.dtype)

    def _tensor(self, values: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.device)


def _similar_groups(lens: IntArray, max_gathered: int) -> list[IntArray]:
    """Groups indices of similar lengths, to be padded to the longest of the group. A group of several indices
    has at most ``max_gathered`` slots. If possible, returns one group in the original order."""
    if not len(lens):
        return []
    longest = int(lens.max())
    if _is_similar(int(lens.min()), longest) and len(lens) * longest <= max_gathered:
        return [np.arange(len(lens))]
    by_length = np.argsort(-lens, kind="stable")
    groups, first = [], 0
    while first < len(lens):
        longest = int(lens[by_length[first]])
        shorter = np.searchsorted(-lens[by_length], -_shortest_similar(longest), side="right")
        end = min(int(shorter), first + max(1, max_gathered // longest))
        groups.append(by_length[first:end])
        first = end
    return groups


def _shortest_similar(longest: int) -> int:
    """Returns the smallest length that is worth padding to ``longest`` instead of starting another group."""
    return longest // 2 - 64


def _is_similar(shortest: int, longest: int) -> bool:
    return shortest >= _shortest_similar(longest)


def _ranges(starts: IntArray, lens: IntArray) -> IntArray:
    """Returns the numbers from starts[i] to starts[i] + lens[i] - 1 for every i, concatenated."""
    ends = np.cumsum(lens)
    numbers: IntArray = np.arange(int(ends[-1])) + np.repeat(starts - (ends - lens), lens)
    return numbers
