"""Products of rows with one of several matrices each, in one launch: the experts of a mixture.

A program multiplies a block of assignments with the same matrix (``row_blocks``) by some of its outputs, so a
matrix without rows is not read. Matrices are not copied: a table has their distances from the first one.
Weights are the left operand, so that a block may have as few as 16 rows. The activation of a gated product is
computed in registers: a tile has the gates of some outputs in its upper half, and their factors in its lower
half. As in MegaBlocks (Gale et al. 2022, arXiv 2211.15841), rows are not padded to the size of the largest
group, and no rows are dropped.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from agentflow.kernels.activations import CLAMP_ALPHA, CLAMP_LIMIT
from agentflow.kernels.inputs import LinearWeight
from agentflow.kernels.triton_ops.early_start import early_start, take_turn
from agentflow.kernels.triton_ops.interpreted import dot, from_fp8, rounded
from agentflow.kernels.triton_ops.linear.quantised import FORMATS, dequantised
from agentflow.kernels.triton_ops.linear.row_blocks import RowBlocks

_ALPHA = tl.constexpr(CLAMP_ALPHA)
_LIMIT = tl.constexpr(CLAMP_LIMIT)
_ALIGNED = 16  # in values; then loads of 16 bytes are aligned


@dataclass(frozen=True, slots=True)
class StackedWeight:
    """Matrices of one shape and format, their scales and their biases."""

    format: str  # "dense", "fp8", or a key of ``quantised.FORMATS``
    shape: tuple[int, int]  # (out, in) of each matrix
    # The values or codes, the scales and the bias of the first matrix.
    values: Tensor
    scales: Tensor | None
    bias: Tensor | None
    # [3, matrices] int64: the distances of each matrix, its scales and its bias from the first, in values.
    offsets: Tensor
    is_aligned: bool  # the distances of matrices are multiples of ``_ALIGNED``
    owned: tuple[Tensor, ...]  # all tensors, which must live as long as this record

    @property
    def num(self) -> int:
        """The number of matrices."""
        return self.offsets.shape[1]


def stacked(weights: Sequence[LinearWeight]) -> StackedWeight | None:
    """Returns weights as one record; None if they differ in more than their values."""
    parts = [_tensors(weight) for weight in weights]
    first = parts[0]
    if first is None:
        return None
    name, tensors = first
    columns: list[list[Tensor]] = [[], [], []]
    for weight, part in zip(weights, parts, strict=True):
        if part is None or part[0] != name or weight.shape != weights[0].shape:
            return None
        for own, like, column in zip(part[1], tensors, columns, strict=True):
            if (own is None) != (like is None):
                return None
            if own is not None and like is not None:
                if own.shape != like.shape or own.dtype != like.dtype or not own.is_contiguous():
                    return None
                column.append(own)
    distances = [_distances(column) if column else [0] * len(weights) for column in columns]
    assert tensors[0] is not None
    return StackedWeight(
        *(name, weights[0].shape, tensors[0], tensors[1], tensors[2]),
        offsets=torch.tensor(distances, dtype=torch.int64).to(tensors[0].device),
        is_aligned=all(distance % _ALIGNED == 0 for distance in distances[0]),
        owned=tuple(tensor for column in columns for tensor in column),
    )


def _tensors(weight: LinearWeight) -> tuple[str, tuple[Tensor | None, ...]] | None:
    """Returns the format of a weight, and its values, scales and bias; None if it has several formats."""
    if weight.transposed is not None:
        return "dense", (weight.transposed.t(), None, weight.bias)
    if len(weight.quantised) != 1:
        return None
    [part] = weight.quantised
    values = part.panels.view(torch.uint8) if part.format == "fp8" else part.panels
    return part.format, (values, part.scales, weight.bias)


def _distances(tensors: Sequence[Tensor]) -> list[int]:
    first, size = tensors[0].data_ptr(), tensors[0].element_size()
    return [(tensor.data_ptr() - first) // size for tensor in tensors]


class Tile(NamedTuple):
    """The sizes of a program."""

    rows: int
    columns: int  # rows of W; in a gated product, twice the outputs
    inputs: int  # in a step
    num_warps: int


def block_size(num_assignments: int, num_matrices: int, dtype: torch.dtype) -> int:
    """Returns the number of rows in a block: somewhat more than a matrix has on average, so that only one
    block reads most matrices."""
    average = num_assignments / num_matrices
    size = 16
    while size < 1.5 * average and size < (32 if dtype == torch.float32 else 128):
        size *= 2
    return size


def tile_for(num_rows: int, dtype: torch.dtype, weight_format: str) -> Tile:
    """Returns the tile for blocks of this size. Most registers hold the float32 sums."""
    if weight_format in FORMATS:
        return Tile(num_rows, 128 if num_rows < 128 else 64, 32, 4)
    if dtype == torch.float32:
        return Tile(num_rows, 64, 32, 4)
    return {
        16: Tile(16, 64, 128, 4),
        32: Tile(32, 64, 128, 4),
        64: Tile(64, 128, 64, 4),
        128: Tile(128, 256, 64, 8),
    }[num_rows]


@functools.cache
def _shared_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return 1 << 16
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", 96 << 10))


def num_stages(tile: Tile, dtype: torch.dtype, device: torch.device) -> int:
    """Returns the number of steps with loads in flight: at most 4, if they fit into shared memory."""
    of_step = (tile.rows + tile.columns) * tile.inputs * dtype.itemsize
    return max(1, min(4, (_shared_bytes(device) - (4 << 10)) // of_step))


def multiply_grouped(
    x: Tensor,
    weight: StackedWeight,
    blocks: RowBlocks,
    num_used: int,
    *,
    activation: str | None = None,
) -> Tensor:
    """Multiplies each assignment by its matrix.

    Args:
        x: with an activation, the rows, [T, in]: assignment a is for row ``a // num_used``. Without an
            activation, a row for each place of the sorted assignments, [T * num_used, in].
        weight: the matrices.
        blocks: the sorted assignments.
        num_used: the number of assignments of a row.
        activation: "silu" or "clamped_swiglu", for a gated product.

    Returns:
        With an activation, a row for each place, [T * num_used, out / 2]; without, a row for each assignment,
        [T * num_used, out]. Rows without a matrix have arbitrary values.
    """
    (num_out, num_in), device = weight.shape, x.device
    is_gated, num_assignments = activation is not None, blocks.order.numel()
    num_outputs = num_out // 2 if is_gated else num_out
    out = torch.empty((num_assignments, num_outputs), dtype=x.dtype, device=device)
    tile = tile_for(blocks.size, x.dtype, weight.format)
    columns = tile.columns // 2 if is_gated else tile.columns
    grid = blocks.num_blocks, -(-num_outputs // columns)
    given = (
        *(x, weight.values, x if weight.scales is None else weight.scales),
        *(x if weight.bias is None else weight.bias, weight.offsets, blocks.blocks, blocks.order, out),
        *(blocks.num_blocks, weight.num, num_used, num_in, num_outputs, x.stride(0)),
    )
    shared = {
        "ACTIVATION": activation or "",
        "HAS_BIAS": weight.bias is not None,
        "IS_ALIGNED": weight.is_aligned,
        "BLOCK_ROWS": tile.rows,
        "BLOCK_COLUMNS": tile.columns,
        "num_warps": tile.num_warps,
        **early_start(device, num_assignments // num_used),
    }
    if weight.format in FORMATS:
        layout = FORMATS[weight.format]
        _multiply_grouped_blocks[grid](
            *given, weight.values.shape[1], -(-num_in // 64), BITS=layout.bits, SECOND=layout.second,
            num_stages=4 if tile.rows < 64 else 3, **shared,
        )  # fmt: skip
    else:
        _multiply_grouped[grid](
            *given, IS_FP8=weight.format == "fp8", IS_EVEN=num_in % tile.inputs == 0, BLOCK_IN=tile.inputs,
            STAGES=num_stages(tile, x.dtype, device), **shared,
        )  # fmt: skip
    return out


@triton.jit
def _rows_of_block(
    blocks, order, num_blocks, num_used, num_outputs, ACTIVATION: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Returns the first place and the end of a program's block, its assignments, the rows of x and the
    outputs of the weight. Places and outputs past the end repeat the last one and are not stored, so that
    loads need no mask for them."""
    first = tl.load(blocks + num_blocks + tl.program_id(0))
    end = tl.load(blocks + 2 * num_blocks + tl.program_id(0))
    places = tl.minimum(first + tl.arange(0, BLOCK_ROWS), end - 1)
    assignments = tl.load(order + places)
    column = tl.arange(0, BLOCK_COLUMNS)
    if ACTIVATION != "":
        rows = assignments // num_used
        outputs = tl.program_id(1) * (BLOCK_COLUMNS // 2) + column % (BLOCK_COLUMNS // 2)
        columns = tl.minimum(outputs, num_outputs - 1)
        columns += tl.where(column >= BLOCK_COLUMNS // 2, num_outputs, 0)
    else:
        rows = places
        columns = tl.minimum(tl.program_id(1) * BLOCK_COLUMNS + column, num_outputs - 1)
    return first, end, assignments, rows.to(tl.int64), columns


@triton.jit
def _store_block(
    sums, bias, offsets, out, matrix, num_matrices, first, end, assignments, columns, num_outputs,
    ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Adds the bias, computes the activation, and stores the result: by place, or by assignment."""
    if HAS_BIAS:
        bias_offset = tl.load(offsets + 2 * num_matrices + matrix)
        sums += tl.load(bias + bias_offset + columns).to(tl.float32)[:, None]
    dtype = out.dtype.element_ty
    result = rounded(sums, dtype)
    places = first + tl.arange(0, BLOCK_ROWS)
    if ACTIVATION != "":
        halves = tl.reshape(result, [2, BLOCK_COLUMNS // 2, BLOCK_ROWS])
        gate, up = tl.split(tl.permute(halves, [1, 2, 0]))
        result = _gated(gate.to(tl.float32), up.to(tl.float32), dtype, ACTIVATION)
        outputs = tl.program_id(1) * (BLOCK_COLUMNS // 2) + tl.arange(0, BLOCK_COLUMNS // 2)
        rows = places
    else:
        outputs = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
        rows = assignments
    tl.store(
        out + rows.to(tl.int64)[None, :] * num_outputs + outputs[:, None],
        result, mask=(places < end)[None, :] & (outputs < num_outputs)[:, None],
    )  # fmt: skip


@triton.jit
def _gated(gate, up, dtype: tl.constexpr, ACTIVATION: tl.constexpr):
    """Returns the activation of gates times their factors."""
    if ACTIVATION == "silu":
        return rounded(rounded(gate / (1.0 + tl.exp(-gate)), dtype).to(tl.float32) * up, dtype)
    # Comparisons keep NaN, which minimums and maximums may drop.
    gate = tl.where(gate > _LIMIT, _LIMIT, gate)
    up = tl.where(up > _LIMIT, _LIMIT, tl.where(up < -_LIMIT, -_LIMIT, up))
    swish = rounded(gate / (1.0 + tl.exp(-gate * _ALPHA)), dtype).to(tl.float32)
    return rounded(rounded(up + 1.0, dtype).to(tl.float32) * swish, dtype)


@triton.jit(do_not_specialize=["num_blocks", "num_matrices", "num_used"])
def _multiply_grouped(
    x, weight, scales, bias, offsets, blocks, order, out,
    num_blocks, num_matrices, num_used, num_in, num_outputs, row_stride,
    IS_FP8: tl.constexpr, ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, IS_EVEN: tl.constexpr,
    IS_ALIGNED: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_IN: tl.constexpr,
    STAGES: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    """Multiplies with dense matrices, or with 8-bit floats that have a scale for each output."""
    take_turn(IS_EARLY)
    matrix = tl.load(blocks + tl.program_id(0))
    if matrix < 0:  # an unused block of the launch
        return
    first, end, assignments, rows, columns = _rows_of_block(
        blocks, order, num_blocks, num_used, num_outputs, ACTIVATION, BLOCK_ROWS, BLOCK_COLUMNS
    )
    offset = tl.load(offsets + matrix)
    if IS_ALIGNED:
        offset = tl.multiple_of(offset, 16)
    inner = tl.arange(0, BLOCK_IN)
    tile = weight + offset + columns.to(tl.int64)[:, None] * num_in + inner[None, :]
    tile_of_x = x + rows[None, :] * row_stride + inner[:, None]
    sums = tl.zeros([BLOCK_COLUMNS, BLOCK_ROWS], dtype=tl.float32)
    for start in tl.range(0, num_in, BLOCK_IN, num_stages=STAGES):
        if IS_EVEN:
            values = tl.load(tile + start)
            inputs = tl.load(tile_of_x + start)
        else:
            is_input = start + inner < num_in
            values = tl.load(tile + start, mask=is_input[None, :], other=0)
            inputs = tl.load(tile_of_x + start, mask=is_input[:, None], other=0.0)
        if IS_FP8:
            values = from_fp8(values, x.dtype.element_ty)
        sums += dot(values, inputs)
    if IS_FP8:
        sums *= tl.load(scales + tl.load(offsets + num_matrices + matrix) + columns)[:, None]
    _store_block(
        sums, bias, offsets, out, matrix, num_matrices, first, end, assignments, columns, num_outputs,
        ACTIVATION, HAS_BIAS, BLOCK_ROWS, BLOCK_COLUMNS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_blocks", "num_matrices", "num_used", "num_steps"])
def _multiply_grouped_blocks(
    x, codes, words, bias, offsets, blocks, order, out,
    num_blocks, num_matrices, num_used, num_in, num_outputs, row_stride, num_columns, num_steps,
    BITS: tl.constexpr, SECOND: tl.constexpr, ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr,
    IS_ALIGNED: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    """Multiplies with blocks of quantised values, in the layout of ``quantised``."""
    take_turn(IS_EARLY)
    matrix = tl.load(blocks + tl.program_id(0))
    if matrix < 0:
        return
    first, end, assignments, rows, columns = _rows_of_block(
        blocks, order, num_blocks, num_used, num_outputs, ACTIVATION, BLOCK_ROWS, BLOCK_COLUMNS
    )
    offset = tl.load(offsets + matrix)
    if IS_ALIGNED:
        offset = tl.multiple_of(offset, 16)
    inner = tl.arange(0, 32)
    wide = num_columns.to(tl.int64)
    tile = codes + offset + columns[:, None] * 32 + inner[None, :]
    word = words + tl.load(offsets + num_matrices + matrix) + columns[:, None]
    tile_of_x = x + rows[None, :] * row_stride + inner[:, None]
    sums = tl.zeros([BLOCK_COLUMNS, BLOCK_ROWS], dtype=tl.float32)
    for step in range(num_steps):
        at = step * wide
        first_words = tl.load(word + at)
        second_words = first_words
        if SECOND != "":
            second_words = tl.load(word + num_steps * wide + at)
        if BITS == 4:
            both = tl.load(tile + at * 32)
        for number in tl.static_range(2):
            if BITS == 4:
                values = both.to(tl.uint8, bitcast=True) & (15 << (4 * number))
            else:
                values = tl.load(tile + (2 * at + number * wide) * 32)
            weights = dequantised(values, first_words, second_words, number, BITS, SECOND)
            start = step * 64 + number * 32
            inputs = tl.load(tile_of_x + start, mask=(start + inner < num_in)[:, None], other=0.0)
            sums += dot(rounded(weights, x.dtype.element_ty), inputs)
    _store_block(
        sums, bias, offsets, out, matrix, num_matrices, first, end, assignments, columns, num_outputs,
        ACTIVATION, HAS_BIAS, BLOCK_ROWS, BLOCK_COLUMNS,
    )  # fmt: skip
