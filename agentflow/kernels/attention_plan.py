"""Decides, once per batch, how its attention is computed; every layer then reuses the plan.

A request's keys are cut into runs that it shares with other requests and a tail of its own.

* A *context part* is a run of slots that all of its query rows see whole: the prefix that requests
  share, or what a long prefill chunk finds in the cache. It is read once for all of its rows, with
  no mask, and merged with the rest by log-sum-exp (the idea of Hydragen, arXiv 2402.05099, and of
  the cascade attention of FlashInfer).
* A *single group* holds rows that stand alone, one per decoding request: their tails are gathered
  side by side and padded to the longest.
* A *causal group* holds prefill chunks: row i of a chunk sees its rows 0 to i.
* *Branch rows* are nodes of trees below a prefix (``Branches``). The prefix is a context part for all of
  its rows, and the path down to each a single row's tail.

Every row is in exactly one single or causal group, and in any number of context parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentflow.kernels.branches import Branches, continue_in_paths
from agentflow.kernels.shared_runs import SharedRun, find_shared_runs

IntArray = NDArray[np.int64]
PageTable = NDArray[np.int32]
Index = slice | Tensor
"""Positions along a dimension: a slice where they are consecutive, which costs no copy."""

PART_OVERHEAD = 1000
"""What one more part costs in a layer, in tokens of gathered and attended KV (measured on AVX2: a
tenth of a millisecond)."""
MAX_GATHERED = 16384
"""Tokens gathered at once for a single group of several rows: what stays in a shared cache."""


@dataclass(slots=True, frozen=True)
class ContextPart:
    """``num_rows`` query rows that all see ``num_slots`` slots, none masked."""

    rows: Index
    num_rows: int
    slots: Index
    num_slots: int


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
class CausalGroup:
    """``num_chunks`` chunks of ``num_rows`` rows each: ``rows`` and ``slots`` are flat, chunk after
    chunk. A shorter chunk repeats its last row; the causal mask hides that from its other rows."""

    rows: Index
    slots: Index
    num_chunks: int
    num_rows: int


@dataclass(slots=True, frozen=True)
class AttentionPlan:
    """The parts, and the batch they were made from (for the reference).

    ``order`` [T]: where each row of the batch stands in the groups' rows laid end to end, singles
    first; None where that is the batch's own order.
    """

    page_table: PageTable
    page_rows: IntArray
    query_lens: IntArray
    kv_lens: IntArray
    branches: Branches | None
    singles: Sequence[SingleGroup]
    causals: Sequence[CausalGroup]
    contexts: Sequence[ContextPart]
    order: Tensor | None


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
) -> AttentionPlan:
    """The plan for R requests: ``page_table[page_rows[r], :kv_lens[r]]`` are the slots of request r,
    of which the last ``query_lens[r]`` belong to its rows in this batch. ``branches``: of the rows after
    those. ``dtype``: of the queries."""
    planner = _Planner(page_table, page_rows, query_lens, kv_lens, branches, dtype, device)
    return planner.plan(part_overhead, max_gathered)


class _SingleRows(NamedTuple):
    """Rows that stand alone. Each sees ``lens`` slots: first ``heads`` of its owner's row of the page table,
    from column ``starts`` on, then (a branch row) those of its path. Owners are requests, then trees."""

    rows: IntArray
    owners: IntArray
    starts: IntArray
    heads: IntArray
    lens: IntArray

    def chosen(self, index: IntArray) -> _SingleRows:
        return _SingleRows(*[values[index] for values in self])


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
        self.branches = branches
        self.cached = kv_lens - query_lens
        if branches is not None:  # each tree comes like one more request, of which the prefix is cached
            self.page_rows = np.concatenate((page_rows, branches.page_rows))
            self.query_lens = np.concatenate((query_lens, branches.query_lens))
            self.cached = np.concatenate((self.cached, branches.prefix_lens))
        self.num_requests = len(page_rows)
        self.dtype = dtype
        self.device = device
        self.first_rows = np.cumsum(self.query_lens) - self.query_lens
        self.group_rows: list[IntArray] = []  # of the groups made so far; -1 where a row is padding
        self.contexts: list[ContextPart] = []

    def plan(self, part_overhead: int, max_gathered: int) -> AttentionPlan:
        runs, starts = find_shared_runs(self.page_table, self.page_rows, self.cached, part_overhead)
        for run in runs:
            self._add_context(run)
        for tree in range(self.num_requests, len(self.page_rows)):
            self._add_prefix(tree, starts, part_overhead)
        num = self.num_requests
        cached, query_lens = self.cached[:num], self.query_lens[:num]
        tails = self.kv_lens - starts[:num]
        # A chunk is taken apart into single rows where reading its keys once for each of its rows
        # costs less than one more part.
        apart = (query_lens == 1) | ((cached > starts[:num]) & ((query_lens - 1) * tails <= part_overhead))
        singles = self._single_groups(np.flatnonzero(apart), starts, max_gathered)
        chunks = np.flatnonzero(~apart)
        for r in chunks[cached[chunks] > starts[chunks]]:
            self._add_context(SharedRun(np.array([r]), int(starts[r]), int(cached[r])))
        causals = self._causal_groups(chunks)
        return AttentionPlan(
            self.page_table,
            self.page_rows[:num],
            query_lens,
            self.kv_lens,
            self.branches,
            singles,
            causals,
            self.contexts,
            self._order(),
        )

    def _add_context(self, run: SharedRun) -> None:
        """One context part for all rows of the run's requests."""
        rows = _ranges(self.first_rows[run.members], self.query_lens[run.members])
        slots = self.page_table[self.page_rows[run.members[0]], run.start : run.end]
        self.contexts.append(ContextPart(self._index(rows), len(rows), self._index(slots), len(slots)))

    def _add_prefix(self, tree: int, starts: IntArray, part_overhead: int) -> None:
        """A part for what is left of a tree's prefix, if it is worth one. The row of the prefix's last token
        sees the same but for itself: where it stands alone, it shares the part."""
        members, start, end = np.array([tree]), int(starts[tree]), int(self.cached[tree])
        last = np.flatnonzero(self.page_rows[: self.num_requests] == self.page_rows[tree])
        if len(last) and self.query_lens[last[0]] == 1 and starts[last[0]] == start:
            members, end = np.append(last, members), end - 1
        if (int(self.query_lens[members].sum()) - 1) * (end - start) >= part_overhead and end > start:
            self._add_context(SharedRun(members, start, end))
            starts[members] = end

    def _single_groups(self, requests: IntArray, starts: IntArray, max_gathered: int) -> list[SingleGroup]:
        """Groups of rows whose tails are of like length. A chunk taken apart counts as many rows."""
        singles = self._single_rows(requests, starts)
        if not len(singles.rows):
            return []
        lens = singles.lens
        longest = int(lens.max())
        if _alike(int(lens.min()), longest) and len(lens) * longest <= max_gathered:
            return [self._single_group(singles)]
        by_length = np.argsort(-lens, kind="stable")
        groups, first = [], 0
        while first < len(lens):
            longest = int(lens[by_length[first]])
            shorter = np.searchsorted(-lens[by_length], -_shortest_alike(longest), side="right")
            end = min(int(shorter), first + max(1, max_gathered // longest))
            groups.append(self._single_group(singles.chosen(by_length[first:end])))
            first = end
        return groups

    def _single_rows(self, requests: IntArray, starts: IntArray) -> _SingleRows:
        """The rows of the requests, and all branch rows."""
        query_lens = self.query_lens[requests]
        rows = _ranges(self.first_rows[requests], query_lens)
        owners = np.repeat(requests, query_lens)
        heads = _ranges(self.cached[requests], query_lens) + 1 - starts[owners]
        if self.branches is None:
            return _SingleRows(rows, owners, starts[owners], heads, heads)
        trees = np.arange(self.num_requests, len(self.page_rows))
        nodes = _ranges(self.first_rows[trees], self.query_lens[trees])
        of_nodes = np.repeat(trees, self.query_lens[trees])
        prefixes = (self.cached - starts)[of_nodes]
        owners = np.concatenate((owners, of_nodes))
        lens = np.concatenate((heads, prefixes + self.branches.path_lens))
        heads = np.concatenate((heads, prefixes))
        return _SingleRows(np.concatenate((rows, nodes)), owners, starts[owners], heads, lens)

    def _single_group(self, singles: _SingleRows) -> SingleGroup:
        rows, owners, starts, heads, lens = singles
        longest = int(lens.max())
        columns = np.arange(longest)
        mask = None
        if int(lens.min()) < longest:
            hidden = np.where(columns < lens[:, None], np.float32(0), np.float32(-np.inf))
            mask = self._tensor(hidden).to(self.dtype)[:, None, None, :]
        columns = starts[:, None] + np.minimum(columns, (heads - 1)[:, None])
        slots = self.page_table[self.page_rows[owners][:, None], columns]
        if self.branches is not None:
            in_trees = np.flatnonzero(owners >= self.num_requests)
            nodes = rows[in_trees] - self.first_rows[self.num_requests]
            continue_in_paths(slots, in_trees, heads[in_trees], self.branches, nodes)
        self.group_rows.append(rows)
        return SingleGroup(self._index(rows), len(rows), self._index(slots.ravel()), longest, mask)

    def _causal_groups(self, chunks: IntArray) -> list[CausalGroup]:
        """Groups of chunks of like length, longest first."""
        by_length = chunks[np.argsort(-self.query_lens[chunks], kind="stable")]
        lens = self.query_lens[by_length]
        groups, first = [], 0
        while first < len(by_length):
            longest = int(lens[first])
            end = int(np.searchsorted(-lens, -(longest - longest // 4), side="right"))
            group = np.sort(by_length[first:end])
            last = (self.query_lens[group] - 1)[:, None]
            columns = np.minimum(np.arange(longest), last)
            rows = self.first_rows[group][:, None] + columns
            self.group_rows.append(np.where(np.arange(longest) <= last, rows, -1).ravel())
            rows = rows.ravel()
            columns = columns + self.cached[group][:, None]
            slots = self.page_table[self.page_rows[group][:, None], columns].ravel()
            groups.append(CausalGroup(self._index(rows), self._index(slots), len(group), longest))
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

    def _tensor(self, values: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.device)


def _shortest_alike(longest: int) -> int:
    """The least length that is padded to ``longest`` rather than given a group of its own."""
    return longest // 2 - 64


def _alike(shortest: int, longest: int) -> bool:
    return shortest >= _shortest_alike(longest)


def _ranges(starts: IntArray, lens: IntArray) -> IntArray:
    """The numbers starts[i] to starts[i] + lens[i] - 1 of all i, end to end."""
    if not len(lens):
        return lens
    ends = np.cumsum(lens)
    numbers: IntArray = np.arange(int(ends[-1])) + np.repeat(starts - (ends - lens), lens)
    return numbers
