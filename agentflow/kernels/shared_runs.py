"""Finds the prefixes that the requests of a batch share, so that attention reads them once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agentflow.kernels.inputs import AttentionBatch, IntArray


def with_trees(batch: AttentionBatch) -> tuple[IntArray, IntArray, IntArray]:
    """Returns the row in the table, the number of rows to compute and the number of cached tokens of each
    request, and then of each tree: a tree is like one more request, with its prefix in the cache."""
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


def find_shared_runs(
    req_to_token: NDArray[np.int32], req_rows: IntArray, limits: IntArray, least_saving: int
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
            if end > start and (len(siblings) - 1) * (end - start) >= least_saving:
                runs.append(SharedRun(siblings, start, end))
                tails[siblings] = end
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
