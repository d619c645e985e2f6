"""Chooses the shared prefixes of a batch that are worth reading once for all their requests."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from agentflow.kernels.inputs import AttentionBatch, IntArray, SharedPrefix


def with_trees(batch: AttentionBatch) -> tuple[IntArray, IntArray, IntArray]:
    """Returns the row in the table, the number of rows to compute and the number of cached tokens of each
    request, and then of each tree: a tree is like another request, with its prefix in the cache."""
    cached, trees = batch.kv_lens - batch.query_lens, batch.trees
    if trees is None:
        return batch.req_rows, batch.query_lens, cached
    return (
        np.concatenate((batch.req_rows, trees.req_rows)),
        np.concatenate((batch.query_lens, trees.query_lens)),
        np.concatenate((cached, trees.prefix_lens)),
    )


@dataclass(slots=True, frozen=True)
class SharedRun:
    """Columns ``start`` to ``end`` of ``req_to_token``, equal for all ``members`` (request indices)."""

    members: IntArray
    start: int
    end: int

    def parts(self, length: int) -> list[SharedRun]:
        """Divides the run into parts of at most this length."""
        starts = range(self.start, self.end, length)
        return [SharedRun(self.members, start, min(start + length, self.end)) for start in starts]


def shared_runs(
    batch: AttentionBatch, req_rows: IntArray, limits: IntArray, least_saving: int
) -> tuple[list[SharedRun], IntArray]:
    """Returns the shared runs that are worth a separate group, and the column at which the tail of each
    request starts.

    A run that n requests share saves (n - 1) times its length of reads. If that is too little, the run stays
    in its requests' tails, or becomes a part of a longer run. The runs of one request are consecutive and
    start at column 0. The time depends on the number of ``shared`` prefixes, not on their lengths.

    Args:
        batch: the batch.
        req_rows: the row in the table of each request and tree, from ``with_trees``.
        limits: the number of leading columns of each request and tree that can be shared.
        least_saving: the fewest tokens that a run must save.
    """
    tails = np.zeros(len(req_rows), dtype=np.int64)
    own = _own_prefixes(req_rows, limits)
    # The longest prefix of each set of requests: some readers of a prefix may not be in the batch.
    longest: dict[bytes, tuple[int, IntArray]] = {}
    is_reader = np.zeros(len(batch.req_to_token), dtype=np.bool_)
    for end, rows in [*batch.shared, *own]:
        if not own and (len(rows) - 1) * end < least_saving:
            continue
        is_reader[rows] = True
        members = np.flatnonzero(is_reader[req_rows] & (limits >= end))
        is_reader[rows] = False
        if len(members) > 1:
            key = members.tobytes()
            if key not in longest or longest[key][0] < end:
                longest[key] = end, members
    runs: list[SharedRun] = []
    for end, members in sorted(longest.values(), key=lambda prefix: (prefix[0], -len(prefix[1]))):
        start = int(tails[members[0]])
        if end > start and (len(members) - 1) * (end - start) >= least_saving:
            runs.append(SharedRun(members, start, end))
            tails[members] = end
    return runs, tails


def _own_prefixes(req_rows: IntArray, limits: IntArray) -> list[SharedPrefix]:
    """Returns the prefixes that the parts of one request share, if it is divided or has a tree."""
    counts = np.bincount(req_rows)
    if counts.max(initial=0) < 2:
        return []
    found = []
    for row in np.flatnonzero(counts > 1):
        ends = np.unique(np.sort(limits[req_rows == row])[:-1])
        found += [(end, np.array([row])) for end in ends.tolist() if end]
    return found
