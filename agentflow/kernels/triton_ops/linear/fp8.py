"""Products with weights in 8-bit floats (e4m3) with a scale for each output.

The codes are [outputs, inputs], the layout of torch's products of 8-bit floats. Up to ``MAX_ROWS`` rows are
not rounded: a kernel converts the weights in registers, without loss. More rows are rounded to 8-bit floats,
with a scale for each row, and multiplied by torch, on GPUs that support it; on other devices they are
multiplied by weights that are dequantised in slices.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from agentflow.kernels.inputs import BlockMatrix, QuantisedPanels
from agentflow.kernels.triton_ops.interpreted import dot, from_fp8, to_fp8
from agentflow.kernels.triton_ops.linear.split_products import divide, finish

logger = logging.getLogger(__name__)

MAX_ROWS = 64
"""The most rows of a fused product in the rows' dtype. Larger products are limited by arithmetic, in which
8-bit floats are twice as fast."""
LARGEST = 448.0
COLUMN_STEP = 128
"""Outputs are padded to a multiple of this."""
LEAST_CAPABILITY = (8, 9)
"""The first compute capability with 8-bit floats: Ada, then Hopper."""
_CHUNK = 256  # the most rows of a fused product; more rows are divided
_BLOCK_IN = 128  # inputs in a step
_LEAST_STEPS = 4  # in a part of the inputs
_SLICE = 1 << 25  # the values that are dequantised in one slice


@functools.cache
def has_fp8(device: torch.device) -> bool:
    """Whether a device can compute with 8-bit floats. The first call for a GPU compiles and runs kernels."""
    if device.type != "cuda":
        return True  # the interpreter does
    if torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
        return False
    try:
        return _multiplies_ones(device)
    except Exception as error:  # of Triton, its compiler, or the driver
        logger.warning("a kernel for 8-bit floats fails: %s", error)
        return False


def _multiplies_ones(device: torch.device) -> bool:
    codes = torch.full((COLUMN_STEP, 32), 0x38, dtype=torch.uint8, device=device)
    scales = torch.full((COLUMN_STEP,), 2.0, device=device)
    counters = torch.zeros(COLUMN_STEP // 32, dtype=torch.int32, device=device)
    part = QuantisedPanels("fp8", codes.view(torch.float8_e4m3fn), COLUMN_STEP, scales, counters)
    rows = torch.ones(2 * MAX_ROWS, 32, dtype=torch.bfloat16, device=device)
    products = [multiply(rows[:num], part, 32, rows.dtype) for num in (1, 2 * MAX_ROWS)]
    return all(bool((product == 64.0).all()) for product in products)


@functools.cache
def _has_scaled_products(device: torch.device) -> bool:
    """Whether torch multiplies 8-bit floats with a scale for each row and column on this device."""
    if device.type != "cuda":
        return False
    codes = torch.full((32, 32), 0x38, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    ones = torch.ones(32, 1, device=device)
    try:
        product = _scaled_product(codes, ones, codes, ones)
        return bool((product == 32.0).all())
    except RuntimeError as error:
        logger.warning("long prompts use dequantised weights, because torch's product fails: %s", error)
        return False


def packed(parts: Sequence[BlockMatrix], device: torch.device) -> QuantisedPanels:
    """Packs matrices of the type "F8_E4M3" with the same input as one weight."""
    num_in, num_out = parts[0].shape[1], sum(part.shape[0] for part in parts)
    num_columns = -(-num_out // COLUMN_STEP) * COLUMN_STEP
    codes = torch.zeros((num_columns, num_in), dtype=torch.uint8, device=device)
    scales = torch.ones(num_columns, dtype=torch.float32, device=device)
    first = 0
    for part in parts:
        rows = torch.from_numpy(part.rows)
        some = slice(first, first + part.shape[0])
        codes[some].copy_(rows[:, 4:])
        scales[some].copy_(rows[:, :4].contiguous().view(torch.float32)[:, 0])
        first = some.stop
    # One counter for each tile of a fused product: 64 outputs, or 128 outputs in up to 4 blocks of rows.
    counters = torch.zeros(num_columns // 32, dtype=torch.int32, device=device)
    return QuantisedPanels("fp8", codes.view(torch.float8_e4m3fn), num_out, scales, counters)


def dequantised_rows(part: QuantisedPanels, numbers: Tensor | range, dtype: torch.dtype) -> Tensor:
    """Returns some rows of W. ``numbers``: their indices, as int64 or a range with a step of 1."""
    codes, scales = part.panels.view(torch.uint8), part.scales
    assert scales is not None
    if isinstance(numbers, range):
        rows, of_rows = codes[numbers.start : numbers.stop], scales[numbers.start : numbers.stop]
    else:
        rows, of_rows = codes.index_select(0, numbers), scales.index_select(0, numbers)
    return rows.view(torch.float8_e4m3fn).float().mul_(of_rows.unsqueeze(1)).to(dtype)


def multiply(
    x: Tensor,
    part: QuantisedPanels,
    num_in: int,
    dtype: torch.dtype,
    bias: Tensor | None = None,
    added: Tensor | None = None,
) -> Tensor:
    """Returns x Wᵀ + b.

    Args:
        x: [T, in]; the values of each row must be adjacent.
        part: W.
        num_in: The number of inputs.
        dtype: The type of the result.
        bias: b, [out].
        added: [T, out] added to the result.

    Returns:
        [T, out]
    """
    num_rows, num_out = len(x), part.num_panels
    if num_rows > MAX_ROWS and dtype == x.dtype:
        if _has_scaled_products(x.device):
            product = _multiply_rounded(x, part)
        else:
            product = _multiply_slices(x, part, num_in)
        if bias is not None:
            product = product.add_(bias)
        return product if added is None else product.add_(added)
    out = torch.empty((num_rows, num_out), dtype=dtype, device=x.device)
    for first in range(0, num_rows, _CHUNK):
        rows = slice(first, first + _CHUNK)
        _multiply_fused(x[rows], part, num_in, out[rows], bias, None if added is None else added[rows])
    return out


def _multiply_slices(x: Tensor, part: QuantisedPanels, num_in: int) -> Tensor:
    out = torch.empty((len(x), part.num_panels), dtype=x.dtype, device=x.device)
    step = max(1, _SLICE // num_in)
    for first in range(0, part.num_panels, step):
        columns = range(first, min(first + step, part.num_panels))
        weight = dequantised_rows(part, columns, x.dtype)
        out[:, columns.start : columns.stop] = torch.nn.functional.linear(x, weight)
    return out


def _multiply_rounded(x: Tensor, part: QuantisedPanels) -> Tensor:
    assert part.scales is not None
    num_columns = -(-part.num_panels // 16) * 16  # torch needs multiples of 16
    rows, row_scales = round_rows(x)
    product = _scaled_product(rows, row_scales, part.panels[:num_columns], part.scales[:num_columns])
    if num_columns > part.num_panels:
        product = product[:, : part.num_panels].contiguous()
    return product.to(x.dtype)


def _scaled_product(rows: Tensor, row_scales: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """Multiplies 8-bit floats: [T, in] and [out, in] to [T, out] in bfloat16, the only type of result that
    torch supports for such scales on all GPUs. ``row_scales`` [T, 1]."""
    return torch._scaled_mm(
        rows, codes.t(), scale_a=row_scales, scale_b=scales.view(1, -1), out_dtype=torch.bfloat16
    )


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds rows to 8-bit floats. Returns their codes, and the scale of each row as float32 [T, 1]."""
    num_rows, num_in = x.shape
    codes = torch.empty((num_rows, num_in), dtype=torch.uint8, device=x.device)
    scales = torch.empty((num_rows, 1), dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(num_in)
    if num_rows:
        _round_rows[(num_rows,)](
            x, codes, scales, num_in, x.stride(0), LARGEST=LARGEST, BLOCK=block,
            num_warps=min(max(block // 512, 1), 16),
        )  # fmt: skip
    return codes.view(torch.float8_e4m3fn), scales


@triton.jit
def _round_rows(x, codes, scales, num_in, row_stride, LARGEST: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    inputs = tl.arange(0, BLOCK)
    is_input = inputs < num_in
    values = tl.load(x + row * row_stride + inputs, mask=is_input, other=0.0).to(tl.float32)
    highest = tl.max(tl.abs(values), 0)
    scale = tl.where(highest == 0.0, 1.0, highest / LARGEST)
    tl.store(scales + row, scale)
    tl.store(codes + row * num_in + inputs, to_fp8(values / scale), mask=is_input)


def _multiply_fused(
    x: Tensor, part: QuantisedPanels, num_in: int, out: Tensor, bias: Tensor | None, added: Tensor | None
) -> None:
    assert part.scales is not None
    assert part.counters is not None
    num_rows, (num_columns, _) = len(x), part.panels.shape
    block_rows, block_columns, at_once, num_warps = (16, 64, 4, 4) if num_rows <= 16 else (64, 128, 2, 8)
    row_blocks, column_blocks = -(-num_rows // block_rows), -(-part.num_panels // block_columns)
    divided = divide(row_blocks, column_blocks, -(-num_in // _BLOCK_IN), _LEAST_STEPS, at_once, x.device)
    _multiply[divided[:3]](
        x, part.panels.view(torch.uint8), part.scales, x if bias is None else bias,
        x if added is None else added, out, divided.sums(x, num_columns), part.counters,
        num_rows, num_in, part.num_panels, num_columns, divided.part_steps, divided.num_parts,
        x.stride(0), 0 if added is None else added.stride(0), out.stride(0),
        HAS_BIAS=bias is not None, HAS_ADDED=added is not None, IS_SPLIT=divided.num_parts > 1,
        IS_EVEN=num_in % _BLOCK_IN == 0, BLOCK_ROWS=block_rows, BLOCK_COLUMNS=block_columns,
        BLOCK_IN=_BLOCK_IN, num_warps=num_warps, num_stages=3,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows", "num_out", "part_steps", "num_parts"])
def _multiply(
    x, codes, scales, bias, added, out, partial, counters,
    num_rows, num_in, num_out, num_columns, part_steps, num_parts, row_stride, added_stride, out_stride,
    HAS_BIAS: tl.constexpr, HAS_ADDED: tl.constexpr, IS_SPLIT: tl.constexpr, IS_EVEN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_IN: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    inner = tl.arange(0, BLOCK_IN)
    is_row = rows < num_rows
    first = tl.program_id(2) * part_steps
    end = tl.minimum(first + part_steps, tl.cdiv(num_in, BLOCK_IN))
    tile = codes + columns.to(tl.int64)[:, None] * num_in + inner[None, :]
    tile_of_x = x + rows.to(tl.int64)[None, :] * row_stride + inner[:, None]
    sums = tl.zeros([BLOCK_COLUMNS, BLOCK_ROWS], dtype=tl.float32)
    for step in range(first, end):
        start = step * BLOCK_IN
        if IS_EVEN:
            weights = tl.load(tile + start)
            inputs = tl.load(tile_of_x + start, mask=is_row[None, :], other=0.0)
        else:
            is_input = start + inner < num_in
            weights = tl.load(tile + start, mask=is_input[None, :], other=0)
            inputs = tl.load(tile_of_x + start, mask=is_row[None, :] & is_input[:, None], other=0.0)
        sums += dot(from_fp8(weights, x.dtype.element_ty), inputs)
    sums *= tl.load(scales + columns)[:, None]
    finish(
        sums, out, bias, added, partial, counters, rows, columns, is_row, num_rows, num_out, num_columns,
        num_parts, added_stride, out_stride, HAS_BIAS, HAS_ADDED, IS_SPLIT, BLOCK_ROWS, BLOCK_COLUMNS,
    )  # fmt: skip
