"""Decides, once per batch, how its attention is computed; every layer then reuses the plan.

The parts are those of ``attention_parts``.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentflow.kernels.attention_parts import (
    AttentionPlan,
    CausalGroup,
    ContextPart,
    Index,
    ShortGroup,
    SingleGroup,
)
from agentflow.kernels.branches import Branches, side_by_side, tree_block
from agentflow.kernels.few_sizes import MOST_STEP, rounded_down, rounded_up, whole_tiles
from agentflow.kernels.inputs import IntArray, PageTable
from agentflow.kernels.shared_runs import SharedRun, find_shared_runs

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
    page_table: PageTable,
    page_rows: IntArray,
    query_lens: IntArray,
    kv_lens: IntArray,
    *,
    dtype: torch.dtype,
    device: torch.device,
    branches: Branches | None = None,
    part_overhead: int = PART_OVERHEAD,
    max_gathered: int = MAX_GATHERED,
    run_step: int = MOST_STEP,
) -> AttentionPlan:
    """The plan for R requests: ``page_table[page_rows[r], :kv_lens[r]]`` are the slots of request r,
    of which the last ``query_lens[r]`` belong to its rows in this batch. ``branches``: of the rows after
    those. ``dtype``: of the queries. ``run_step``: the lengths of shared runs are multiples of it."""
    planner = _Planner(page_table, page_rows, query_lens, kv_lens, branches, dtype, device)
    return planner.plan(part_overhead, max_gathered, run_step)


class _Planner:
    def __init__(
        self,
        page_table: PageTable,
        page_rows: IntArray,
        query_lens: IntArray,
        kv_lens: IntArray,
        branches: Branches | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.page_table = page_table
        self.page_rows = page_rows
        self.query_lens = query_lens
        self.kv_lens = kv_lens
        self.cached = kv_lens - query_lens
        self.branches = branches
        self.num_requests = len(page_rows)
        if branches is not None:  # each tree counts as one more request, with its prefix in the cache
            self.page_rows = np.concatenate((page_rows, branches.page_rows))
            self.query_lens = np.concatenate((query_lens, branches.query_lens))
            self.cached = np.concatenate((self.cached, branches.prefix_lens))
        self.dtype = dtype
        self.device = device
        self.first_rows = np.cumsum(self.query_lens) - self.query_lens
        self.group_rows: list[IntArray] = []  # of the groups made so far; -1 where a row is padding
        self.contexts: list[ContextPart] = []

    def plan(self, part_overhead: int, max_gathered: int, run_step: int) -> AttentionPlan:
        runs, starts = find_shared_runs(self.page_table, self.page_rows, self.cached, part_overhead, run_step)
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
            self.page_table,
            self.page_rows[:num],
            query_lens,
            self.kv_lens,
            self.branches,
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
        slots = self.page_table[self.page_rows[run.members[0]], run.start + column.clip(max=length - 1)]
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
        for request in np.flatnonzero(self.page_rows[: self.num_requests] == self.page_rows[tree]).tolist():
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

    def _tree_group(self, trees: list[int], lasts: dict[int, int | None], starts: IntArray) -> ShortGroup:
        branches, num = self.branches, self.num_requests
        assert branches is not None
        rows: list[int] = []
        slots: list[IntArray] = []
        blocks: list[NDArray[np.bool_]] = []
        for tree in trees:
            last, first = lasts[tree], int(self.first_rows[tree])
            end = first + int(self.query_lens[tree])
            rows += [*([] if last is None else [int(self.first_rows[last])]), *range(first, end)]
            first_node = int(self.first_rows[num])
            head = self.page_table[self.page_rows[tree], starts[tree] : self.cached[tree]]
            paths = branches.paths[first - first_node : end - first_node]
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
        return self.page_table[self.page_rows[requests][:, None], columns].ravel()

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
            slots = self.page_table[self.page_rows[group][:, None], columns].ravel()
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
