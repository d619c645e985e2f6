"""Products with matrices in blocks of quantised values, which are dequantised in registers.

Every type of blocks becomes codes of 4 or 8 bits, in groups of 32 inputs with a scale, and with a minimum or
a second scale if the type has one: a weight is ``scale * code + minimum``. A *step* is two groups, 64 inputs.
The 32 bytes of an output in a tile are adjacent to the bytes of the next output, so that the threads of a
program read a tile of outputs in consecutive loads of 16 bytes:

* 8 bits: ``[groups, outputs, 32]``, signed codes.
* 4 bits: ``[steps, outputs, 32]``, the first group of the step in the lower bits, the second in the upper.

A word of 32 bits has the float16 scales of a step's groups, ``[steps, outputs]``; another has their minimums,
or for types with a scale for 16 inputs, the scales of the second halves.

Up to ``MAX_ROWS`` rows, even a single one, are multiplied on tensor cores, because that takes the fewest
instructions. More rows are multiplied by torch, with weights that are dequantised in slices. A product with
few outputs is split over its inputs (``split_products``). ``fp8`` multiplies matrices of 8-bit floats.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from agentflow.kernels.inputs import BlockMatrix, LinearWeight, QuantisedPanels
from agentflow.kernels.triton_ops.interpreted import dot, rounded
from agentflow.kernels.triton_ops.linear import fp8
from agentflow.kernels.triton_ops.linear.split_products import divide, finish

MAX_ROWS = 256
"""The most rows of a fused product. For more rows, reading dequantised weights costs less than dequantising
tiles again for each block of rows."""
COLUMN_STEP = 128
"""Outputs are padded to a multiple of this."""
_STEP = 64  # inputs
_LEAST_STEPS = 4  # in a part of the inputs
_SLICE = 1 << 25  # the values that are dequantised or unpacked in one slice


class _Format(NamedTuple):
    bits: int
    second: str = ""  # the second word of a step: "minimums", "halves" or "" (none)


FORMATS = {
    "int4": _Format(4, "minimums"),
    "int8": _Format(8),
    "int8_min": _Format(8, "minimums"),
    "int8_halves": _Format(8, "halves"),
}
_FORMAT_OF_TYPE = {
    **dict.fromkeys(("Q4_0", "Q4_1", "Q4_K"), "int4"),
    **dict.fromkeys(("Q8_0", "Q5_0", "IQ4_NL"), "int8"),
    **dict.fromkeys(("Q5_1", "Q5_K"), "int8_min"),
    "Q6_K": "int8_halves",
}
BLOCK_TYPES = tuple(_FORMAT_OF_TYPE)
_FORMAT_OF_TYPE |= {"F8_E4M3": "fp8"}  # if the device ``has_fp8``
_IQ4_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def pack_blocks(
    parts: Sequence[BlockMatrix], bias: Tensor | None, *, gated: bool, device: torch.device
) -> LinearWeight | None:
    """Like ``LinearMethod.pack_blocks``."""
    if not all(part.type in _FORMAT_OF_TYPE for part in parts):
        return None
    stacked: list[list[BlockMatrix]] = []
    for part in parts:  # adjacent parts of one format become one product
        if stacked and _FORMAT_OF_TYPE[stacked[-1][0].type] == _FORMAT_OF_TYPE[part.type]:
            stacked[-1].append(part)
        else:
            stacked.append([part])
    quantised = tuple(_packed(same, device) for same in stacked)
    num_out = sum(part.shape[0] for part in parts)
    return LinearWeight(None, None, bias, (num_out, parts[0].shape[1]), quantised, gated)


def _packed(parts: Sequence[BlockMatrix], device: torch.device) -> QuantisedPanels:
    if parts[0].type == "F8_E4M3":
        return fp8.packed(parts, device)
    name, num_in = _FORMAT_OF_TYPE[parts[0].type], parts[0].shape[1]
    layout, num_steps = FORMATS[name], -(-num_in // _STEP)
    num_out = sum(part.shape[0] for part in parts)
    num_columns = -(-num_out // COLUMN_STEP) * COLUMN_STEP
    codes = torch.zeros((num_steps * (layout.bits // 4), num_columns, 32), dtype=torch.int8, device=device)
    words = torch.zeros((2 if layout.second else 1, num_steps, num_columns), dtype=torch.int32, device=device)
    halves = words.view(torch.float16).view(*words.shape, 2)
    first = 0
    for part in parts:
        step = max(1, _SLICE // num_in)
        for begin in range(0, part.shape[0], step):
            rows = torch.from_numpy(part.rows[begin : begin + step].copy()).to(device)
            some = slice(first + begin, first + begin + len(rows))
            values, *scales = _unpacked(part.type, rows)
            if values.shape[1] % 2:  # an empty group fills the last step
                values = torch.nn.functional.pad(values, (0, 0, 0, 1))
                scales = [torch.nn.functional.pad(scale, (0, 1)) for scale in scales]
            values = values.view(torch.int8)
            if layout.bits == 4:
                values = values[:, ::2] | values[:, 1::2] << 4
            codes[:, some] = values.transpose(0, 1)
            for number, scale in enumerate(scales):
                halves[number, :, some] = scale.half().view(len(rows), num_steps, 2).transpose(0, 1)
        first += part.shape[0]
    # One counter for each tile of a product: 128 outputs in up to 4 blocks of rows.
    counters = torch.zeros(num_columns // 32, dtype=torch.int32, device=device)
    return QuantisedPanels(name, codes, num_out, words, counters)


def _unpacked(block_type: str, rows: Tensor) -> tuple[Tensor, ...]:
    """Returns the codes of rows of blocks [rows, bytes] as uint8 or int8 [rows, groups, 32], their scales as
    float32 [rows, groups], and their minimums or second scales if the format has them."""
    sizes = {"Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q5_1": 24, "Q8_0": 34, "IQ4_NL": 18}
    sizes |= {"Q4_K": 144, "Q5_K": 176, "Q6_K": 210}
    blocks = rows.view(len(rows), -1, sizes[block_type])

    def half(at: int) -> Tensor:
        return blocks[..., at : at + 2].contiguous().view(torch.float16).float()[..., 0]

    def nibbles(at: int) -> Tensor:
        both = blocks[..., at : at + 16]
        return torch.cat((both & 0x0F, both >> 4), dim=-1)

    def fifth_bits(at: int) -> Tensor:
        shifts = torch.arange(8, dtype=torch.uint8, device=rows.device)
        return (blocks[..., at : at + 4].unsqueeze(-1) >> shifts & 1).flatten(-2) << 4

    match block_type:
        case "Q8_0":
            return blocks[..., 2:].contiguous().view(torch.int8), half(0)
        case "Q4_0":
            return nibbles(2), half(0), -8 * half(0)
        case "IQ4_NL":
            table = torch.tensor(_IQ4_NL, dtype=torch.int8, device=rows.device)
            return table[nibbles(2).int()], half(0)
        case "Q4_1":
            return nibbles(4), half(0), half(2)
        case "Q5_0":
            return (nibbles(6) | fifth_bits(2)).view(torch.int8) - 16, half(0)
        case "Q5_1":
            return nibbles(8) | fifth_bits(4), half(0), half(2)
        case "Q6_K":
            return _unpacked_q6(blocks, half(208))
    scales, mins = _scales_and_mins(blocks[..., 4:16])
    at = 48 if block_type == "Q5_K" else 16
    lead = blocks.shape[:2]
    pairs = blocks[..., at : at + 128].reshape(*lead, 4, 32)
    codes = torch.stack((pairs & 0x0F, pairs >> 4), dim=-2).flatten(-3, -2)  # [rows, blocks, 8, 32]
    if block_type == "Q5_K":
        shifts = torch.arange(8, dtype=torch.uint8, device=rows.device).unsqueeze(1)
        codes |= (blocks[..., 16:48].unsqueeze(-2) >> shifts & 1) << 4
    scale, least = half(0).unsqueeze(-1) * scales, -half(2).unsqueeze(-1) * mins
    return codes.flatten(1, 2), scale.flatten(1), least.flatten(1)


def _scales_and_mins(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Unpacks the 8 scales and 8 minimums of 6 bits in 12 bytes of a K block: [..., 8] each."""
    first, second, third = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = torch.cat((first & 63, (third & 0x0F) | first >> 6 << 4), dim=-1)
    mins = torch.cat((second & 63, third >> 4 | second >> 6 << 4), dim=-1)
    return scales.float(), mins.float()


def _unpacked_q6(blocks: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Unpacks blocks with two halves of 4 groups. Group q of a half has its lower bits in 32 of the half's 64
    bytes, and its upper bits in bits 2 q and 2 q + 1 of 32 other bytes."""
    lead = blocks.shape[:2]
    lower = blocks[..., :128].reshape(*lead, 2, 2, 32)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device).unsqueeze(1)
    upper = blocks[..., 128:192].reshape(*lead, 2, 1, 32) >> shifts & 3
    codes = torch.cat((lower & 0x0F, lower >> 4), dim=-2) | upper << 4
    scales = blocks[..., 192:208].contiguous().view(torch.int8).float() * scale.unsqueeze(-1)
    values = (codes.view(torch.int8) - 32).flatten(1, 3)
    return values, scales[..., ::2].flatten(1), scales[..., 1::2].flatten(1)


@triton.jit
def _half(words, NUMBER: tl.constexpr):
    """Returns the lower (0) or the upper (1) half of 32-bit words as float32."""
    bits = (words >> (16 * NUMBER)) & 0xFFFF
    return bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def dequantised(
    codes, first_words, second_words, NUMBER: tl.constexpr, BITS: tl.constexpr, SECOND: tl.constexpr
):
    """Returns the weights of group ``NUMBER`` of a step as float32. ``codes``: [columns, 32]. The words:
    [columns, 1]."""
    scale = _half(first_words, NUMBER)
    if BITS == 4 and NUMBER == 1:  # the upper bits of a byte were not shifted
        scale *= 0.0625
    if SECOND == "halves":
        is_second = (tl.arange(0, 32) >= 16)[None, :]
        scale = tl.where(is_second, _half(second_words, NUMBER), scale)
    weights = codes.to(tl.float32) * scale
    if SECOND == "minimums":
        weights += _half(second_words, NUMBER)
    return weights


@triton.jit(do_not_specialize=["num_rows", "num_out", "num_steps", "part_steps", "num_parts"])
def _multiply(
    x, codes, words, bias, added, out, partial, counters,
    num_rows, num_in, num_out, num_columns, num_steps, part_steps, num_parts, row_stride, added_stride,
    out_stride,
    BITS: tl.constexpr, SECOND: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_ADDED: tl.constexpr,
    IS_SPLIT: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    row_block = tl.program_id(0)
    column_block = tl.program_id(1)
    part = tl.program_id(2)
    rows = row_block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = column_block * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    inner = tl.arange(0, 32)
    is_row = rows < num_rows
    first = part * part_steps
    end = tl.minimum(first + part_steps, num_steps)
    wide = num_columns.to(tl.int64)
    plane = num_steps * wide
    tile = codes + columns[:, None] * 32 + inner[None, :]
    word = words + columns[:, None]
    sums = tl.zeros([BLOCK_COLUMNS, BLOCK_ROWS], dtype=tl.float32)
    for step in range(first, end):
        at = step * wide
        first_words = tl.load(word + at)
        second_words = first_words
        if SECOND != "":
            second_words = tl.load(word + plane + at)
        if BITS == 4:
            both = tl.load(tile + at * 32)
        for number in tl.static_range(2):
            if BITS == 4:
                values = both.to(tl.uint8, bitcast=True) & (15 << (4 * number))
            else:
                values = tl.load(tile + (2 * at + number * wide) * 32)
            inputs = step * 64 + number * 32 + inner
            weights = dequantised(values, first_words, second_words, number, BITS, SECOND)
            columns_of_x = tl.load(
                x + rows.to(tl.int64)[None, :] * row_stride + inputs[:, None],
                mask=is_row[None, :] & (inputs < num_in)[:, None], other=0.0,
            )  # fmt: skip
            sums += dot(rounded(weights, x.dtype.element_ty), columns_of_x)
    finish(
        sums, out, bias, added, partial, counters, rows, columns, is_row, num_rows, num_out, num_columns,
        num_parts, added_stride, out_stride, HAS_BIAS, HAS_ADDED, IS_SPLIT, BLOCK_ROWS, BLOCK_COLUMNS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows", "num_steps"])
def _dequantise(
    numbers, codes, words, out, num_rows, num_in, num_columns, num_steps,
    HAS_NUMBERS: tl.constexpr, BITS: tl.constexpr, SECOND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    step = tl.program_id(1).to(tl.int64)
    inner = tl.arange(0, 32)
    is_row = rows < num_rows
    columns = rows.to(tl.int64)
    if HAS_NUMBERS:
        columns = tl.load(numbers + rows, mask=is_row, other=0)
    at = step * num_columns + columns[:, None]
    first_words = tl.load(words + at, mask=is_row[:, None], other=0)
    second_words = first_words
    if SECOND != "":
        second_words = tl.load(
            words + num_steps * num_columns.to(tl.int64) + at, mask=is_row[:, None], other=0
        )
    for number in tl.static_range(2):
        if BITS == 4:
            values = tl.load(codes + at * 32 + inner[None, :], mask=is_row[:, None], other=0)
            values = values.to(tl.uint8, bitcast=True) & (15 << (4 * number))
        else:
            place = codes + (at + (step + number) * num_columns) * 32 + inner[None, :]
            values = tl.load(place, mask=is_row[:, None], other=0)
        weights = dequantised(values, first_words, second_words, number, BITS, SECOND)
        inputs = step * 64 + number * 32 + inner
        tl.store(
            out + rows[:, None].to(tl.int64) * num_in + inputs[None, :],
            rounded(weights, out.dtype.element_ty), mask=is_row[:, None] & (inputs < num_in)[None, :],
        )  # fmt: skip


def dequantised_rows(
    part: QuantisedPanels, num_in: int, numbers: Tensor | range, dtype: torch.dtype
) -> Tensor:
    """Returns some rows of W, [rows, num_in]. ``numbers``: their indices, as int64 or a range with a step of
    1."""
    if part.format == "fp8":
        return fp8.dequantised_rows(part, numbers, dtype)
    layout, codes = FORMATS[part.format], part.panels
    assert part.scales is not None
    words, first = part.scales, 0
    if isinstance(numbers, range):
        first = numbers.start
    out = torch.empty((len(numbers), num_in), dtype=dtype, device=codes.device)
    if len(numbers) and num_in:
        _dequantise[(-(-len(numbers) // 64), words.shape[1])](
            numbers if isinstance(numbers, Tensor) else codes, codes[:, first:], words[:, :, first:], out,
            len(numbers), num_in, codes.shape[1], words.shape[1], HAS_NUMBERS=isinstance(numbers, Tensor),
            BITS=layout.bits, SECOND=layout.second, BLOCK=64,
        )  # fmt: skip
    return out


def multiply(x: Tensor, weight: LinearWeight, dtype: torch.dtype, added: Tensor | None = None) -> Tensor:
    """Returns x Wᵀ + b as ``dtype``, plus ``added``: [T, in] to [T, out]."""
    num_rows, (num_out, num_in) = len(x), weight.shape
    x = x if x.stride(-1) == 1 else x.contiguous()
    if [part.format for part in weight.quantised] == ["fp8"]:
        return fp8.multiply(x, weight.quantised[0], num_in, dtype, weight.bias, added)
    out = torch.empty((num_rows, num_out), dtype=dtype, device=x.device)
    if not num_rows:
        return out
    begin = 0
    for part in weight.quantised:
        columns = slice(begin, begin + part.num_panels)
        of_part = (
            None if weight.bias is None else weight.bias[columns],
            None if added is None else added[:, columns],
        )
        if part.format == "fp8":
            out[:, columns] = fp8.multiply(x, part, num_in, dtype, *of_part)
        elif num_rows > MAX_ROWS and dtype == x.dtype:
            _multiply_slices(x, part, num_in, out[:, columns], *of_part)
        else:
            for first in range(0, num_rows, MAX_ROWS):
                rows = slice(first, first + MAX_ROWS)
                of_rows = None if of_part[1] is None else of_part[1][rows]
                _multiply_fused(x[rows], part, num_in, out[rows, columns], of_part[0], of_rows)
        begin = columns.stop
    return out


def _multiply_slices(
    x: Tensor, part: QuantisedPanels, num_in: int, out: Tensor, bias: Tensor | None, added: Tensor | None
) -> None:
    step = max(1, _SLICE // num_in // COLUMN_STEP) * COLUMN_STEP
    for first in range(0, part.num_panels, step):
        columns = range(first, min(first + step, part.num_panels))
        some = slice(columns.start, columns.stop)
        weight = dequantised_rows(part, num_in, columns, x.dtype)
        product = torch.nn.functional.linear(x, weight, None if bias is None else bias[some])
        out[:, some] = product if added is None else product.add_(added[:, some])


def _multiply_fused(
    x: Tensor, part: QuantisedPanels, num_in: int, out: Tensor, bias: Tensor | None, added: Tensor | None
) -> None:
    assert part.scales is not None
    assert part.counters is not None
    num_rows, layout = len(x), FORMATS[part.format]
    num_steps, num_columns = part.scales.shape[1:]
    block_rows, block_columns, at_once = (16, 128, 4) if num_rows <= 16 else (64, 128, 2)
    row_blocks, column_blocks = -(-num_rows // block_rows), -(-part.num_panels // block_columns)
    divided = divide(row_blocks, column_blocks, num_steps, _LEAST_STEPS, at_once, x.device)
    _multiply[divided[:3]](
        x, part.panels, part.scales, x if bias is None else bias, x if added is None else added, out,
        divided.sums(x, num_columns), part.counters, num_rows, num_in, part.num_panels, num_columns,
        num_steps, divided.part_steps, divided.num_parts,
        x.stride(0), 0 if added is None else added.stride(0), out.stride(0),
        BITS=layout.bits, SECOND=layout.second, HAS_BIAS=bias is not None, HAS_ADDED=added is not None,
        IS_SPLIT=divided.num_parts > 1, BLOCK_ROWS=block_rows, BLOCK_COLUMNS=block_columns,
        num_warps=4, num_stages=4,
    )  # fmt: skip
