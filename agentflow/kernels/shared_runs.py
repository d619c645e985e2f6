"""Finds the runs of slots that requests of a batch have in common: the branches of their prefix tree."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]


@dataclass(slots=True, frozen=True)
class SharedRun:
    """Columns ``start`` to ``end`` of the page table, equal for all ``members`` (request indices)."""

    members: IntArray
    start: int
    end: int


def find_shared_runs(
    page_table: NDArray[np.int32], page_rows: IntArray, limits: IntArray, least_saving: int, step: int = 1
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
    tails = np.zeros(len(page_rows), dtype=np.int64)
    pending = [(np.arange(len(page_rows)), 0)] if len(page_rows) > 1 else []
    while pending:
        members, depth = pending.pop()
        members = members[limits[members] > depth]
        for siblings in _equal_groups(members, page_table[page_rows[members], depth]):
            common = page_table[page_rows[siblings], depth : int(limits[siblings].min())]
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
