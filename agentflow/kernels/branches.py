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


def tree_block(
    head: NDArray[np.int32], paths: IntArray, num_above: int
) -> tuple[IntArray, NDArray[np.bool_]]:
    """The slots of the rows of one tree, and which row sees which of them. All rows see ``head``; the first
    ``num_above`` nothing else, and each of the others its path."""
    nodes, places = np.unique(paths, return_inverse=True)
    visible = np.zeros((num_above + len(paths), len(head) + len(nodes)), dtype=np.bool_)
    visible[:, : len(head)] = True
    rows = np.arange(num_above, len(visible))
    visible[rows[:, None], len(head) + places.reshape(paths.shape)] = True
    return np.concatenate((head, nodes)), visible
