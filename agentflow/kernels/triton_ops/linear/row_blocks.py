"""Rows sorted by the matrix that multiplies them, on the device: the experts of a mixture, or adapters.

An *assignment* is a row and one of its matrices. Assignments to the same matrix become adjacent, in the order
of the rows, and are cut into blocks of a fixed size. A launch has as many blocks as any assignments could
need; unused blocks end immediately. So the launches of a step depend only on its number of rows, and can be
captured in a graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from agentflow.kernels.triton_ops.early_start import early_start, take_turn

_CHUNK = 4096
"""The most assignments that a program reads together."""


@dataclass(frozen=True, slots=True)
class RowBlocks:
    """Blocks of assignments with the same matrix."""

    # [3, blocks] int32: the matrix (-1: the block is empty), and the first place and the end in ``order``.
    blocks: Tensor
    order: Tensor  # [assignments] int32: the sorted assignments, without those that have no matrix
    size: int  # the number of rows in a block

    @property
    def num_blocks(self) -> int:
        return self.blocks.shape[1]


def most_blocks(num_assignments: int, num_matrices: int, size: int) -> int:
    """Returns the most blocks that assignments to ``num_matrices`` different matrices can need."""
    return min(num_matrices, num_assignments) + num_assignments // size


def sorted_rows(
    matrices: Tensor, num_matrices: int, size: int, num_different: int | None = None
) -> RowBlocks:
    """Sorts assignments by their matrix.

    Args:
        matrices: the matrix of each assignment, int32; -1: none.
        num_matrices: the number of all matrices.
        size: the number of rows in a block.
        num_different: the most different matrices of the assignments; None: ``num_matrices``.
    """
    num, device = matrices.numel(), matrices.device
    num_blocks = most_blocks(num, num_matrices if num_different is None else num_different, size)
    blocks = torch.empty((3, num_blocks), dtype=torch.int32, device=device)
    order = torch.empty(num, dtype=torch.int32, device=device)
    chunk = min(_CHUNK, max(32, triton.next_power_of_2(num)))
    if num:
        _sort[(num_matrices,)](
            matrices, blocks, order, num, num_matrices, num_blocks, BLOCK_ROWS=size,
            BINS=max(32, triton.next_power_of_2(num_matrices)), CHUNK=chunk,
            num_warps=4 if chunk <= 1024 else 8, **early_start(device, num),
        )  # fmt: skip
    return RowBlocks(blocks, order, size)


@triton.jit(do_not_specialize=["num", "num_matrices", "num_blocks"])
def _sort(
    matrices, blocks, order, num, num_matrices, num_blocks,
    BLOCK_ROWS: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    """Sorts assignments. Each program counts the assignments to all matrices, and places the assignments to
    one matrix: no program waits for another, and the order is the same in every run."""
    take_turn(IS_EARLY)
    matrix = tl.program_id(0)
    bins = tl.arange(0, BINS)
    within = tl.arange(0, CHUNK)
    counts = tl.zeros([BINS], dtype=tl.int32)
    for begin in range(0, num, CHUNK):
        found = tl.load(matrices + begin + within, mask=begin + within < num, other=-1)
        counts += tl.histogram(tl.maximum(found, 0), BINS, mask=found >= 0)
    num_own = tl.sum(tl.where(bins == matrix, counts, 0), 0)
    first = tl.sum(tl.where(bins < matrix, counts, 0), 0)
    needed = (counts + BLOCK_ROWS - 1) // BLOCK_ROWS
    first_block = tl.sum(tl.where(bins < matrix, needed, 0), 0)
    num_needed = (num_own + BLOCK_ROWS - 1) // BLOCK_ROWS
    for number in range(num_needed):
        place = blocks + first_block + number
        tl.store(place, matrix)
        tl.store(place + num_blocks, first + number * BLOCK_ROWS)
        tl.store(place + 2 * num_blocks, tl.minimum(first + (number + 1) * BLOCK_ROWS, first + num_own))
    if matrix == num_matrices - 1:
        for number in range(first_block + num_needed, num_blocks):
            tl.store(blocks + number, -1)
    if num_own > 0:
        for begin in range(0, num, CHUNK):
            found = tl.load(matrices + begin + within, mask=begin + within < num, other=-1)
            is_own = found == matrix
            ranks = tl.cumsum(is_own.to(tl.int32), 0)
            tl.store(order + first + ranks - 1, begin + within, mask=is_own)
            first += tl.sum(is_own.to(tl.int32), 0)
