"""Split products with quantised weights: each program computes a part of the inputs, and the last program to
finish adds the parts, always in the same order."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from agentflow.kernels.triton_ops.device_limits import num_processors
from agentflow.kernels.triton_ops.interpreted import rounded


class Division(NamedTuple):
    """The division of a product into programs: each computes a tile of the result over a part of the
    inputs."""

    row_blocks: int
    column_blocks: int
    num_parts: int
    part_steps: int  # the steps of a part; the last part may have fewer

    def sums(self, x: Tensor, num_columns: int) -> Tensor:
        """Returns memory for the sums of all parts; an arbitrary tensor if there is only one part."""
        if self.num_parts == 1:
            return x
        shape = (self.num_parts, len(x), num_columns)
        return torch.empty(shape, dtype=torch.float32, device=x.device)


def divide(
    row_blocks: int, column_blocks: int, num_steps: int, least_steps: int, at_once: int, device: torch.device
) -> Division:
    """Divides ``num_steps`` steps of inputs so that all programs run concurrently: a few programs that start
    when the others end would nearly double the time.

    Args:
        row_blocks: the number of blocks of rows.
        column_blocks: the number of blocks of outputs.
        num_steps: the number of steps of inputs.
        least_steps: the fewest steps in a part.
        at_once: the programs that run concurrently on a multiprocessor.
        device: the device.
    """
    num_parts = at_once * num_processors(device) // (row_blocks * column_blocks)
    num_parts = max(1, min(num_parts, num_steps // least_steps))
    part_steps = -(-num_steps // num_parts)
    return Division(row_blocks, column_blocks, -(-num_steps // part_steps), part_steps)


@triton.jit
def finish(
    sums, out, bias, added, partial, counters, rows, columns, is_row, num_rows, num_out, num_columns,
    num_parts, added_stride, out_stride,
    HAS_BIAS: tl.constexpr, HAS_ADDED: tl.constexpr, IS_SPLIT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Stores a tile of a product, or adds it to the tiles of the other parts of the inputs. The axes of the
    launch are blocks of rows, blocks of columns, and parts."""
    is_stored = is_row[None, :] & (columns < num_out)[:, None]
    if IS_SPLIT:
        place = partial + rows[None, :].to(tl.int64) * num_columns + columns[:, None]
        part_size = num_rows * num_columns.to(tl.int64)
        tl.store(place + tl.program_id(2) * part_size, sums, mask=is_row[None, :])
        tl.debug_barrier()  # all threads must have stored their sums before the part is counted
        counter = counters + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        if tl.atomic_add(counter, 1) == num_parts - 1:
            total = tl.zeros([BLOCK_COLUMNS, BLOCK_ROWS], dtype=tl.float32)
            for number in range(num_parts):
                total += tl.load(
                    place + number * part_size, mask=is_row[None, :], other=0.0, cache_modifier=".cg"
                )
            tl.store(counter, 0)  # for the next product
            _store(
                total, out, bias, added, rows, columns, is_stored, out_stride, added_stride,
                HAS_BIAS, HAS_ADDED,
            )  # fmt: skip
    else:
        _store(
            sums, out, bias, added, rows, columns, is_stored, out_stride, added_stride, HAS_BIAS, HAS_ADDED
        )


@triton.jit
def _store(
    sums, out, bias, added, rows, columns, is_stored, out_stride, added_stride,
    HAS_BIAS: tl.constexpr, HAS_ADDED: tl.constexpr,
):  # fmt: skip
    if HAS_BIAS:
        sums += tl.load(bias + columns[:, None] + 0 * rows[None, :], mask=is_stored, other=0.0).to(tl.float32)
    result = rounded(sums, out.dtype.element_ty)
    if HAS_ADDED:
        place = added + rows[None, :].to(tl.int64) * added_stride + columns[:, None]
        more = tl.load(place, mask=is_stored, other=0.0).to(tl.float32)
        result = rounded(result.to(tl.float32) + more, out.dtype.element_ty)
    tl.store(out + rows[None, :].to(tl.int64) * out_stride + columns[:, None], result, mask=is_stored)
