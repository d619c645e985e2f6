"""Plans the attention of a batch for the Triton kernels: tiles of rows over segments of keys.

A *group* is a set of rows and the run of keys to which they attend: the tail of one request, a prefix that
several requests share, the nodes of a tree. Groups are cut into *units*, one program of the kernel for each
KV head: a tile of rows over a segment of keys. If a row has a single unit, the unit writes the row's result;
otherwise the partial results of its units are merged by log-sum-exp. Prefixes that requests share are
computed once for all of them, at every level of the tree (Hydragen, arXiv 2402.05099, has one level), and
long contexts are split over the processors (Flash-Decoding).

One rule defines the keys to which a row attends, in texts and in trees: row i is at place ``at[i]`` and
attends to the keys j with ``j <= at[i] < ends[j]``. In a text, a key is visible to all later rows. The nodes
of a tree are numbered depth first, and a key is visible to its subtree. In a layer with a window, a row
attends only to the keys after ``position - window``; units skip keys to which none of their rows attends.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from agentflow.kernels.attention.shared_runs import shared_runs, with_trees
from agentflow.kernels.inputs import AttentionBatch, IntArray, TreeAttention

Int32 = NDArray[np.int32]

KEY_STEP = 64
"""Segments of keys start at multiples of this."""
LEAST_SEGMENT = 128
"""The fewest keys of a segment: merging shorter segments costs more than the division saves."""
PROGRAMS = 2
"""Programs for each multiprocessor if all tiles have one size: enough to hide latencies and to balance
different lengths."""
WIDE_BESIDE_NARROW, NARROW_BESIDE_WIDE, LEAST_BESIDE_WIDE = 1, 6, 256
"""The same if there are tiles of both sizes, and the fewest keys of a segment of the narrow ones: one program
with a wide tile, bound by arithmetic, leaves room for others, which are short so that they end together."""
LEAST_SAVING = 256
"""A run of keys is shared if that saves at least this number of reads."""
MAX_SHARED_ROWS = 16
"""The most rows of a chunk that shares reads. Longer chunks are compute-bound, and merging would cost
more."""
EVERYWHERE = np.iinfo(np.int32).max
"""The entry in ``ends`` of a key to which all later rows attend."""
UNIT_COLUMNS = 9
"""The columns of a unit: first entry, number of rows, the group's first column in the table, start and end of
its keys in the group, end of the keys to which all of its rows attend, the group's first element of ``nodes``
and ``ends`` (-1: its keys are in the table), start of the keys to which all of its rows attend, and the
group's row in the table."""


@dataclass(frozen=True, slots=True)
class Group:
    """Rows, and the run of keys to which they attend."""

    rows: IntArray  # their indices in the batch
    at: IntArray  # the place of each row
    positions: IntArray  # the position of each row in its text, counted from the first key
    num_keys: int
    table_row: int = 0  # the row of the table that has the slots of the keys
    first_column: int = 0  # the column of the first key
    nodes: Int32 | None = None  # the slots of keys that are not in the table; None: a text
    ends: Int32 | None = None  # for each of ``nodes``, the place from which on rows do not attend to it


@dataclass(frozen=True, slots=True)
class Groups:
    """All groups of a batch."""

    single_rows: IntArray  # the rows of groups of one row, which attends to all keys of its group
    single_table_rows: IntArray  # for each such group, the row of the table that has its slots
    single_columns: IntArray  # the column of its first key
    single_lens: IntArray  # the number of its keys
    others: Sequence[Group]


def find_groups(batch: AttentionBatch) -> Groups:
    """Finds the groups of a batch. Each pair of a row and a key to which it attends is in exactly one group.
    Groups refer to ``device_table``, or if there is none, to a table with ``joined_slots`` as its only
    row."""
    trees, num = batch.trees, len(batch.req_rows)
    req_rows, query_lens, cached = with_trees(batch)
    is_tree = np.arange(len(req_rows)) >= num
    limits = np.where((query_lens <= MAX_SHARED_ROWS) | is_tree, cached, 0)
    runs, starts = shared_runs(batch, req_rows, limits, LEAST_SAVING)
    ends = np.where(is_tree, cached, cached + query_lens)
    table_rows, columns = req_rows, starts
    if batch.device_table is None:
        table_rows, columns = np.zeros_like(req_rows), np.cumsum(ends) - ends + starts
    firsts = np.cumsum(query_lens) - query_lens
    positions = _positions(batch, query_lens, cached, firsts)
    others = []
    for run in runs:
        counts = query_lens[run.members]
        rows = np.arange(int(counts.sum())) + np.repeat(
            firsts[run.members] - np.cumsum(counts) + counts, counts
        )
        reader, num_keys = run.members[0], run.end - run.start
        column = int(columns[reader] - starts[reader]) + run.start
        places = np.full(len(rows), num_keys - 1)
        others.append(
            Group(rows, places, positions[rows] - run.start, num_keys, int(table_rows[reader]), column)
        )
    is_single = (query_lens == 1) & ~is_tree
    singles = np.flatnonzero(is_single)
    for r in np.flatnonzero(~is_single).tolist():
        rows = np.arange(firsts[r], firsts[r] + query_lens[r])
        num_keys = int(ends[r] - starts[r])
        places = (
            np.arange(len(rows)) + cached[r] - starts[r]
            if not is_tree[r]
            else np.full(len(rows), num_keys - 1)
        )
        if num_keys:
            own = positions[rows] - starts[r]
            others.append(Group(rows, places, own, num_keys, int(table_rows[r]), int(columns[r])))
        if is_tree[r] and trees is not None:
            depths = positions[rows] - cached[r]
            others.append(_nodes(rows, depths, trees, int(firsts[r] - firsts[num])))
    lens = ends[singles] - starts[singles]
    return Groups(firsts[singles], table_rows[singles], columns[singles], lens, others)


def joined_slots(batch: AttentionBatch) -> Int32:
    """Returns the slots of each request, and then of each tree's prefix, one after another."""
    reads = [*zip(batch.req_rows.tolist(), batch.kv_lens.tolist(), strict=True)]
    if batch.trees is not None:
        reads += zip(batch.trees.req_rows.tolist(), batch.trees.prefix_lens.tolist(), strict=True)
    return np.concatenate([batch.req_to_token[row, :length] for row, length in reads])


def _positions(batch: AttentionBatch, query_lens: IntArray, cached: IntArray, firsts: IntArray) -> IntArray:
    """Returns the position of each row in its text."""
    positions = np.repeat(cached, query_lens)
    num_text_rows = int(batch.query_lens.sum())
    positions[:num_text_rows] += np.arange(num_text_rows) - np.repeat(
        firsts[: len(batch.query_lens)], batch.query_lens
    )
    if batch.trees is not None:
        positions[num_text_rows:] += batch.trees.path_lens - 1
    return positions


def _nodes(rows: IntArray, depths: IntArray, trees: TreeAttention, first: int) -> Group:
    """Returns the nodes of one tree as a group, numbered depth first. ``depths``: the depth of each row.
    ``first``: the index of the tree's first row among the rows of all trees."""
    paths, lens = trees.paths[first : first + len(rows)], trees.path_lens[first : first + len(rows)]
    paths = paths[:, : int(lens.max())]
    lowest = int(paths.min())
    parent_of = np.full(int(paths.max()) - lowest + 1, -1, dtype=np.int64)
    is_edge = np.arange(1, paths.shape[1]) < lens[:, None]
    parent_of[paths[:, 1:][is_edge] - lowest] = paths[:, :-1][is_edge] - lowest
    nodes = np.unique(paths) - lowest
    children: dict[int, list[int]] = {}
    for node, parent in zip(nodes.tolist(), parent_of[nodes].tolist(), strict=True):
        children.setdefault(parent, []).append(node)
    order: list[int] = []
    pending = children[-1]
    while pending:
        order.append(pending.pop())
        pending += children.get(order[-1], ())
    place_of = np.empty(len(parent_of), dtype=np.int64)
    place_of[order] = np.arange(len(order))
    ends = np.arange(1, len(order) + 1, dtype=np.int32)
    for place in range(len(order) - 1, -1, -1):
        parent = parent_of[order[place]]
        if parent >= 0:
            ends[place_of[parent]] = max(ends[place_of[parent]], ends[place])
    own = paths[np.arange(len(rows)), lens - 1] - lowest
    slots = np.array(order, dtype=np.int32) + np.int32(lowest)
    return Group(rows, place_of[own], depths, len(slots), nodes=slots, ends=ends)


def block_rows(queries_per_kv: int) -> tuple[int, int]:
    """Returns the sizes of a narrow and a wide tile, in pairs of a row and a query head."""
    narrow = max(16, 1 << (queries_per_kv - 1).bit_length())
    return narrow, max(64, narrow)


@dataclass(frozen=True, slots=True)
class Units:
    """The units of a batch, for one number of query heads per KV head. An *entry* is a row of a unit."""

    narrow: Int32  # [units, UNIT_COLUMNS]: the units with narrow tiles
    wide: Int32  # [units, UNIT_COLUMNS]: the units with wide tiles
    rows: Int32  # [entries]: the row's index in the batch
    at: Int32  # [entries]: the row's place
    lows: Int32  # [entries]: the row attends only to keys after this; empty without a window
    partial: Int32  # [entries]: the index of the row's partial result; -1: the unit has all of its keys
    nodes: Int32  # [nodes of all trees]: their slots
    ends: Int32  # [nodes of all trees]
    merged_rows: Int32  # [M]: the rows with partial results
    merged_bounds: Int32  # [M + 1]: row m has the partial results bounds[m] to bounds[m + 1], exclusive

    @property
    def num_partials(self) -> int:
        return int(self.merged_bounds[-1])


def make_units(groups: Groups, queries_per_kv: int, processors: float, window: int = 0) -> Units:
    """Cuts groups into units.

    Args:
        groups: the groups of a batch.
        queries_per_kv: the number of query heads per KV head.
        processors: the number of multiprocessors per KV head.
        window: the number of tokens to which a row attends, including itself; 0: all.
    """
    narrow_rows, wide_rows = block_rows(queries_per_kv)
    narrow: list[_Tiles] = [_single_tiles(groups, window)]
    wide: list[_Tiles] = []
    num_nodes = 0
    for group in groups.others:
        is_wide = len(group.rows) * queries_per_kv > narrow_rows
        height = max(1, (wide_rows if is_wide else narrow_rows) // queries_per_kv)
        (wide if is_wide else narrow).append(_tiles(group, height, num_nodes, window))
        num_nodes += 0 if group.nodes is None else len(group.nodes)
    tiles = _joined(narrow)
    if wide:
        # A batch always has the tiles of single rows, of which there may be none.
        in_wide = PROGRAMS if not len(tiles.counts) else WIDE_BESIDE_NARROW
        beside = _in_segments(tiles, processors * NARROW_BESIDE_WIDE, LEAST_BESIDE_WIDE)
        before = len(beside.rows)
        parts = [beside, _in_segments(_joined(wide), processors * in_wide, LEAST_SEGMENT, before, fits=True)]
    else:
        parts = [_in_segments(tiles, processors * PROGRAMS, LEAST_SEGMENT)]
    nodes = [group.nodes for group in groups.others if group.nodes is not None]
    ends = [group.ends for group in groups.others if group.ends is not None]
    return _numbered(parts, nodes, ends, has_window=window > 0)


@dataclass(frozen=True, slots=True)
class _Tiles:
    """Tiles of one size. An entry is a row of a tile; the other arrays have one value for each tile."""

    rows: IntArray  # [entries]: the row's index in the batch
    at: IntArray  # [entries]: the row's place
    lows: IntArray  # [entries]: the last key before the row's window
    firsts: IntArray  # its first entry
    counts: IntArray  # the number of its rows
    key_starts: IntArray  # the start of the keys to which any of its rows attends, a multiple of KEY_STEP
    full_starts: IntArray  # the start of the keys to which all of its rows attend, a multiple of KEY_STEP
    key_ends: IntArray  # the end of the keys to which any of its rows attends
    full_ends: IntArray  # the end of the keys to which all of its rows attend
    table_rows: IntArray  # the row of the table that has its slots
    columns: IntArray  # the column of its group's first key
    first_nodes: IntArray  # its group's first element of ``nodes``; -1: its keys are in the table


def _starts(lowest: IntArray, highest: IntArray) -> tuple[IntArray, IntArray]:
    """Returns the starts of the keys to which any row of a tile attends, and to which all rows attend.
    ``lowest``, ``highest``: the least and the largest of the last keys before the windows of its rows."""
    first, full = np.maximum(lowest + 1, 0), np.maximum(highest + 1, 0)
    return first // KEY_STEP * KEY_STEP, -(-full // KEY_STEP) * KEY_STEP


def _single_tiles(groups: Groups, window: int) -> _Tiles:
    """Returns the tiles of single rows, together: most batches have hundreds of them and nothing else."""
    lens, num = groups.single_lens, len(groups.single_rows)
    lows = lens - 1 - (window or EVERYWHERE)
    return _Tiles(
        *(groups.single_rows, lens - 1, lows, np.arange(num), np.ones(num, dtype=np.int64)),
        *(*_starts(lows, lows), lens, lens),
        *(groups.single_table_rows, groups.single_columns, np.full(num, -1)),
    )


def _tiles(group: Group, height: int, num_nodes: int, window: int) -> _Tiles:
    """Cuts a group into tiles of ``height`` rows. ``num_nodes``: the nodes of the groups before it."""
    num_rows = len(group.rows)
    firsts = np.arange(0, num_rows, height)
    key_ends = np.maximum.reduceat(group.at, firsts) + 1
    full_ends = np.minimum.reduceat(group.at, firsts) + 1 if group.ends is None else np.zeros_like(key_ends)
    lows = group.positions - (window or EVERYWHERE)
    starts = _starts(np.minimum.reduceat(lows, firsts), np.maximum.reduceat(lows, firsts))
    places = (group.table_row, group.first_column, -1 if group.nodes is None else num_nodes)
    return _Tiles(
        *(group.rows, group.at, lows, firsts, np.minimum(height, num_rows - firsts), *starts),
        *(key_ends, full_ends, *(np.full(len(firsts), place) for place in places)),
    )


def _joined(parts: Sequence[_Tiles]) -> _Tiles:
    """Joins the tiles of several groups."""
    if len(parts) == 1:
        return parts[0]
    shifts = np.cumsum([0, *(len(part.rows) for part in parts)]).tolist()
    parts = [replace(part, firsts=part.firsts + shift) for part, shift in zip(parts, shifts, strict=False)]
    return _Tiles(*(np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(_Tiles)))


@dataclass(frozen=True, slots=True)
class _Part:
    """The units with tiles of one size."""

    units: IntArray  # [units, UNIT_COLUMNS]
    rows: IntArray  # [entries]: the row's index in the batch
    at: IntArray  # [entries]: the row's place
    lows: IntArray  # [entries]: the last key before the row's window


def _in_segments(
    tiles: _Tiles, num_programs: float, least: int, num_entries: int = 0, *, fits: bool = False
) -> _Part:
    """Cuts the keys of tiles into segments of similar lengths. The longest come first, so that short ones
    fill the processors at the end.

    Args:
        tiles: the tiles of one size.
        num_programs: about the number of segments; there are more if there are more tiles.
        least: the fewest keys of a segment.
        num_entries: the entries of the units before these.
        fits: there are no more segments than programs, unless there are more tiles.
    """
    lens = np.maximum(tiles.key_ends - tiles.key_starts, 0)
    segment = max(least, math.ceil(int(lens.sum()) / max(1.0, num_programs)))
    wanted = np.maximum(1, lens // segment if fits else -(-lens // segment))
    sizes = -(-lens // wanted)
    sizes = np.maximum(1, -(-sizes // KEY_STEP)) * KEY_STEP
    pieces = -(-lens // sizes)
    which = np.repeat(np.arange(len(lens)), pieces)
    begins = (np.arange(len(which)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * sizes[which]
    begins += tiles.key_starts[which]
    ends = np.minimum(begins + sizes[which], tiles.key_ends[which])
    order = np.argsort(begins - ends, kind="stable")
    which, begins, ends = which[order], begins[order], ends[order]
    counts = tiles.counts[which]
    entries = np.cumsum(counts) - counts
    own = np.repeat(tiles.firsts[which] - entries, counts) + np.arange(int(counts.sum()))
    full_begins = np.clip(tiles.full_starts[which], begins, ends)
    full_ends = np.clip(tiles.full_ends[which] // KEY_STEP * KEY_STEP, full_begins, ends)
    units = np.stack(
        (
            *(num_entries + entries, counts, tiles.columns[which], begins, ends, full_ends),
            *(tiles.first_nodes[which], full_begins, tiles.table_rows[which]),
        ),
        axis=1,
    )
    return _Part(units, tiles.rows[own], tiles.at[own], tiles.lows[own])


def _numbered(
    parts: Sequence[_Part],
    nodes: Sequence[Int32],
    ends: Sequence[Int32],
    *,
    has_window: bool,
) -> Units:
    """Joins the narrow and the wide units, if there are any, and numbers the partial results of rows that are
    in several units, row by row."""
    rows = np.concatenate([part.rows for part in parts])
    counts = np.bincount(rows)
    is_partial = counts[rows] > 1
    partial = np.full(len(rows), -1)
    by_row = np.flatnonzero(is_partial)[np.argsort(rows[is_partial], kind="stable")]
    partial[by_row] = np.arange(len(by_row))
    merged = np.flatnonzero(counts > 1)
    narrow, *wide = (part.units.astype(np.int32) for part in parts)
    return Units(
        narrow=narrow,
        wide=wide[0] if wide else narrow[:0],
        rows=rows.astype(np.int32),
        at=np.concatenate([part.at for part in parts]).astype(np.int32),
        lows=np.concatenate([part.lows[: len(part.lows) * has_window] for part in parts]).astype(np.int32),
        partial=partial.astype(np.int32),
        nodes=np.concatenate([*nodes, np.zeros(0, dtype=np.int32)]),
        ends=np.concatenate([*ends, np.zeros(0, dtype=np.int32)]),
        merged_rows=merged.astype(np.int32),
        merged_bounds=np.concatenate(([0], np.cumsum(counts[merged]))).astype(np.int32),
    )
