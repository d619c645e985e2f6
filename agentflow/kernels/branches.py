"""The rows of a batch that are nodes of trees below a prefix, as the kernels are given them."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]


class Branches(Protocol):
    """The last B rows of a batch, tree after tree. Each sees the whole prefix of its tree, then the nodes
    above it, then itself.

    Of G trees: ``page_table[page_rows[g], :prefix_lens[g]]`` are the slots of the prefix, and
    ``query_lens[g]`` the number of rows. Of the rows: ``paths[b, :path_lens[b]]`` are the slots of the nodes
    above, from the top, and its own, which all further columns repeat.
    """

    @property
    def page_rows(self) -> IntArray: ...
    @property
    def prefix_lens(self) -> IntArray: ...
    @property
    def query_lens(self) -> IntArray: ...
    @property
    def paths(self) -> IntArray: ...
    @property
    def path_lens(self) -> IntArray: ...


def continue_in_paths(
    slots: NDArray[np.int32], rows: IntArray, heads: IntArray, branches: Branches, branch_rows: IntArray
) -> None:
    """In ``slots`` [n, any], of which row ``rows[i]`` is right up to column ``heads[i]``, goes on with the
    path of ``branch_rows[i]``, and with its last slot after that."""
    columns = np.arange(slots.shape[1])
    in_path = columns - heads[:, None]
    clipped = np.clip(in_path, 0, branches.paths.shape[1] - 1)
    tails = np.take_along_axis(branches.paths[branch_rows], clipped, axis=1)
    slots[rows] = np.where(in_path < 0, slots[rows], tails)
