"""Decides, once per batch, how its attention is computed; every layer then reuses the plan.

The parts are those of ``attention_parts``.

The parts that the attention of a batch is computed in.

A request's keys are cut into runs that it shares with other requests and a tail of its own.

* A *context part* is a run of slots that all of its query rows see whole: the prefix that requests
  share, or what a long prefill chunk finds in the cache. It is read once for all of its rows and
  merged with the rest by log-sum-exp (the idea of Hydragen, arXiv 2402.05099, and of the cascade
  attention of FlashInfer).
* A *single group* holds rows that stand alone, one per decoding request: their tails are gathered
  side by side and padded to the longest.
* A *short group* holds chunks of a few rows, such as tokens that a grammar has forced: the whole tail of
  each is gathered once for all of its rows, and a mask shows to each row what comes before it.
  *Branch rows*, the nodes of trees below a prefix (``trees``), are such a chunk, too: the mask shows to
  each the nodes above it. A long prefix is a context part for all of them.
* A *causal group* holds prefill chunks: row i of a chunk sees its rows 0 to i.

Every row is in exactly one single, short or causal group, and in any number of context parts. What has many
queries has one of few sizes (``few_sizes``).

Finds the runs of slots that requests of a batch have in common: the branches of their prefix tree.

Sizes that occur, kept few: what a kernel is compiled for.

oneDNN compiles a matrix product for each number of rows that it meets. Flash attention on CPUs cuts queries,
where they are about 64 or more, into blocks of up to 256, and keys into blocks of 512, and has two products
compiled for each pair of sizes. That takes a millisecond, and most of it stays in memory for good: 0.7 MB for
a product with a weight, 0.1 to 0.4 MB for attention.
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

Index = slice | Tensor
"""Positions along a dimension: a slice where they are consecutive, which costs no copy."""


@dataclass(slots=True, frozen=True)
class ContextPart:
    """``num_rows`` query rows that all see ``num_slots`` slots. Where those are fewer than a size that occurs
    (``few_sizes``), the last is repeated, and ``mask`` [1, 1, 1, num_slots], 0 or -inf, hides that."""

    rows: Index
    num_rows: int
    slots: Index
    num_slots: int
    mask: Tensor | None


@dataclass(slots=True, frozen=True)
class SingleGroup:
    """``num_rows`` rows with ``num_slots`` slots each: ``slots`` is flat, row after row.

    A row with fewer keys repeats its own last slot, so that no foreign (perhaps never written)
    slot is read, and ``mask`` [num_rows, 1, 1, num_slots], 0 or -inf, hides the repetition.
    """

    rows: Index
    num_rows: int
    slots: Index
    num_slots: int
    mask: Tensor | None


@dataclass(slots=True, frozen=True)
class ShortGroup:
    """``num_chunks`` chunks of ``num_rows`` rows each, with ``num_slots`` slots each: ``rows`` and ``slots``
    are flat, chunk after chunk. A chunk with fewer rows repeats its last one, one with fewer keys its last
    slot.
    ``mask`` [num_chunks, 1, num_rows, num_slots], 0 or -inf."""

    rows: Index
    slots: Index
    num_chunks: int
    num_rows: int
    num_slots: int
    mask: Tensor
    repeated: dict[int, Tensor] = field(default_factory=dict)

    def mask_for(self, times: int) -> Tensor:
        """The mask for so many copies of each chunk's rows, end to end. Made in the first layer."""
        found = self.repeated.get(times)
        if found is None:
            found = self.repeated[times] = self.mask.repeat(1, 1, times, 1)
        return found


@dataclass(slots=True, frozen=True)
class CausalGroup:
    """``num_chunks`` chunks of ``num_rows`` rows each: ``rows`` and ``slots`` are flat, chunk after
    chunk. A chunk with fewer rows repeats its last one; the causal mask hides that from its other rows."""

    rows: Index
    slots: Index
    num_chunks: int
    num_rows: int


@dataclass(slots=True, frozen=True)
class AttentionPlan(AttentionBatch):
    """A batch with its parts.

    ``order`` [T]: where each row of the batch stands in the groups' rows laid end to end, singles
    first, then shorts; None where that is the batch's own order.
    """

    singles: Sequence[SingleGroup]
    shorts: Sequence[ShortGroup]
    causals: Sequence[CausalGroup]
    contexts: Sequence[ContextPart]
    order: Tensor | None


@dataclass(slots=True, frozen=True)
class SharedRun:
    """Columns ``start`` to ``end`` of the page table, equal for all ``members`` (request indices)."""

    members: IntArray
    start: int
    end: int


def find_shared_runs(
    req_to_token: NDArray[np.int32], req_rows: IntArray, limits: IntArray, least_saving: int, step: int = 1
) -> tuple[list[SharedRun], IntArray]:
    """The shared runs that are worth a part of their own, and where each request's own tail starts.

    Only the first ``limits[r]`` columns of request r can be shared. Requests with equal slots form a
    tree; it is walked from the root. A run that n requests share saves (n - 1) times its length of
    reading; where that is less than ``least_saving`` tokens, the run stays with its requests' tails
    or is joined to the longer runs below it. The runs of one request are consecutive and start at
    column 0; their lengths are multiples of ``step``, and what is left over is joined likewise. The
    work is in the shared part of the table only: requests that share nothing cost one comparison of
    their first slots.
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
    """The members with equal keys, for each key that two or more have; each group ascends."""
    if len(members) < 2:
        return []
    by_key = np.argsort(keys, kind="stable")
    bounds = np.flatnonzero(np.diff(keys[by_key])) + 1
    if len(bounds) + 1 == len(members):
        return []
    return [members[group] for group in np.split(by_key, bounds) if len(group) > 1]


TILE_ROWS = 16
"""A tile of AMX has so many rows."""
MOST_STEP = 64


def whole_tiles(size: int) -> int:
    """The next multiple of ``TILE_ROWS``: numbers of queries."""
    return -(-size // TILE_ROWS) * TILE_ROWS


def rounded_up(size: int) -> int:
    """The next of fewer sizes yet, less than 16 or a quarter larger: numbers of rows and keys.

    >>> [rounded_up(size) for size in (1, 17, 100, 130, 500)]
    [16, 32, 112, 160, 512]
    """
    step = min(MOST_STEP, max(TILE_ROWS, (1 << size.bit_length()) // 8))
    return -(-size // step) * step


def rounded_down(size: int) -> int:
    """The multiple of ``MOST_STEP`` that is not larger."""
    return size // MOST_STEP * MOST_STEP


PART_OVERHEAD = 1000
"""What one more part costs in a layer, in tokens of gathered and attended KV (measured on AVX2: a
tenth of a millisecond)."""
MAX_GATHERED = 16384
"""Tokens gathered at once for a single group of several rows: what stays in a shared cache."""
MAX_PACKED_ROWS = 64
MAX_PACKED_SLOTS = 512
"""Rows and slots of several trees in one chunk: each tree's rows attend to the others' slots too, only to
hide them."""
MAX_SHORT_ROWS = 32
"""Rows of a chunk that sees its keys under a mask; more of them are worth a part of their own."""
SHORT_STEP = 4
"""Numbers of rows of such chunks are multiples of it, or less than it."""


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
    run_step: int = MOST_STEP,
) -> AttentionPlan:
    """The plan for R requests: ``req_to_token[req_rows[r], :kv_lens[r]]`` are the slots of request r,
    of which the last ``query_lens[r]`` belong to its rows in this batch. ``trees``: of the rows after
    those. ``dtype``: of the queries. ``run_step``: the lengths of shared runs are multiples of it."""
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
        if trees is not None:  # each tree counts as one more request, with its prefix in the cache
            self.req_rows = np.concatenate((req_rows, trees.req_rows))
            self.query_lens = np.concatenate((query_lens, trees.query_lens))
            self.cached = np.concatenate((self.cached, trees.prefix_lens))
        self.dtype = dtype
        self.device = device
        self.first_rows = np.cumsum(self.query_lens) - self.query_lens
        self.group_rows: list[IntArray] = []  # of the groups made so far; -1 where a row is padding
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
        """One context part for all rows of the run's requests."""
        rows = _ranges(self.first_rows[run.members], self.query_lens[run.members])
        length = run.end - run.start
        column = np.arange(rounded_up(length))
        slots = self.req_to_token[self.req_rows[run.members[0]], run.start + column.clip(max=length - 1)]
        mask = self._mask((column < length)[None, None, None]) if length < len(column) else None
        part = ContextPart(self._index(rows), len(rows), self._index(slots), len(slots), mask)
        self.contexts.append(part)

    def _add_cached(self, request: int, start: int, end: int) -> None:
        """What a chunk finds in the cache: as much as there is of a size that occurs, and the rest under a
        mask. One part under a mask was slower, by more than the second one costs."""
        middle = start + rounded_down(end - start)
        for first, last in ((start, middle), (middle, end)):
            if last > first:
                self._add_context(SharedRun(np.array([request]), first, last))

    def _add_prefix(self, tree: int, starts: IntArray, part_overhead: int) -> int | None:
        """A part for what is left of a tree's prefix but its last token, if it is worth one. Where a row of
        its own computes that token, it sees the same and shares the part: returns its request."""
        members, last = [tree], None
        for request in np.flatnonzero(self.req_rows[: self.num_requests] == self.req_rows[tree]).tolist():
            if self.query_lens[request] == 1 and starts[request] == starts[tree]:
                members, last = [request, tree], request
        start = int(starts[tree])
        end = start + rounded_down(int(self.cached[tree]) - 1 - start)
        # Otherwise the tree's chunk gathers it, once. Measured with AMX: two milliseconds less in a forward
        # over a prefix of 1,000 tokens, and no difference at about 2,000.
        if end - start > 2 * part_overhead:
            self._add_context(SharedRun(np.array(members), start, end))
            starts[members] = end
        return last

    def _tree_groups(self, lasts: dict[int, int | None], starts: IntArray) -> list[ShortGroup]:
        """Trees in their order, as many in one chunk as are small. ``lasts``: the request whose row comes
        with each."""
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
        """Groups of rows whose tails are of like length."""
        lens = self.kv_lens[requests] - starts[requests]
        return [
            self._single_group(requests[group], starts[requests[group]], lens[group])
            for group in _alike_groups(lens, max_gathered)
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
        """``num`` slots of each request's tail, by repeating its last one."""
        columns = starts[:, None] + np.minimum(np.arange(num), (lens - 1)[:, None])
        return self.req_to_token[self.req_rows[requests][:, None], columns].ravel()

    def _short_groups(self, requests: IntArray, starts: IntArray, max_gathered: int) -> list[ShortGroup]:
        """Groups of chunks whose tails are of like length."""
        lens = self.kv_lens[requests] - starts[requests]
        return [
            self._short_group(requests[group], starts[requests[group]], lens[group])
            for group in _alike_groups(lens, max_gathered)
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
        """Groups of chunks of like length, longest first."""
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


def _alike_groups(lens: IntArray, max_gathered: int) -> list[IntArray]:
    """Indices of lengths that are padded to the longest of them, together at most ``max_gathered``, unless it
    is one alone. One group in their own order, where that is possible."""
    if not len(lens):
        return []
    longest = int(lens.max())
    if _alike(int(lens.min()), longest) and len(lens) * longest <= max_gathered:
        return [np.arange(len(lens))]
    by_length = np.argsort(-lens, kind="stable")
    groups, first = [], 0
    while first < len(lens):
        longest = int(lens[by_length[first]])
        shorter = np.searchsorted(-lens[by_length], -_shortest_alike(longest), side="right")
        end = min(int(shorter), first + max(1, max_gathered // longest))
        groups.append(by_length[first:end])
        first = end
    return groups


def _shortest_alike(longest: int) -> int:
    """The least length that is padded to ``longest`` rather than given a group of its own."""
    return longest // 2 - 64


def _alike(shortest: int, longest: int) -> bool:
    return shortest >= _shortest_alike(longest)


def _ranges(starts: IntArray, lens: IntArray) -> IntArray:
    """The numbers starts[i] to starts[i] + lens[i] - 1 of all i, end to end."""
    ends = np.cumsum(lens)
    numbers: IntArray = np.arange(int(ends[-1])) + np.repeat(starts - (ends - lens), lens)
    return numbers
