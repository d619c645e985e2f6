"""The rows of a batch that are nodes of trees below a prefix, as the kernels are given them."""

from __future__ import annotations

from collections.abc import Sequence
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
    # As np.unique does it, without sorting: paths of long choices repeat their slots again and again.
    lowest = int(paths.min())
    is_node = np.zeros(int(paths.max()) - lowest + 1, dtype=np.bool_)
    is_node[paths - lowest] = True
    nodes = np.flatnonzero(is_node)
    place_of = np.empty(len(is_node), dtype=np.int64)
    place_of[nodes] = np.arange(len(nodes))
    visible = np.zeros((num_above + len(paths), len(head) + len(nodes)), dtype=np.bool_)
    visible[:, : len(head)] = True
    rows = np.arange(num_above, len(visible))
    visible[rows[:, None], len(head) + place_of[paths - lowest]] = True
    return np.concatenate((head, nodes + lowest)), visible


def side_by_side(blocks: Sequence[NDArray[np.bool_]], num_rows: int, num_slots: int) -> NDArray[np.bool_]:
    """What the rows of several trees see of all their slots, laid end to end: their own. Further rows see
    what the last one sees, and nobody sees further slots."""
    seen = np.zeros((num_rows, num_slots), dtype=np.bool_)
    row = column = 0
    for block in blocks:
        height, width = block.shape
        seen[row : row + height, column : column + width] = block
        row, column = row + height, column + width
    seen[row:] = seen[row - 1]
    return seen
