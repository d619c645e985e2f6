"""The formulas of quantised matrices: from the tensors of a file to values, or to blocks that the native
kernels multiply.

A value is ``(code - zero) * scale``. Each output has a scale and a zero point for each group of inputs. AWQ
(Lin et al. 2023, arXiv 2306.00978) and GPTQ (Frantar et al. 2022, arXiv 2210.17323) have groups of 32 to 128
inputs, or one group of all inputs. GPTQ with "act order" quantises the inputs in the order of their
importance, so a separate tensor stores the group of each input. MXFP4 (OCP Microscaling Formats 1.0) has
floats of 4 bits in groups of 32, whose scales are powers of two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentflow.engine.models.weights.quantising import BLOCK_SIZE, quantised
from agentflow.kernels.inputs import BlockMatrix

AWQ_ORDER: Final = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place in a word of each of 8 adjacent outputs."""
# The doubled values of MXFP4's codes: integers that fit into 5 bits.
_E2M1_DOUBLED: Final = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
_E8M0_BIAS: Final = 127
_SLICE = 1 << 22  # the values that are converted in one slice


@dataclass(frozen=True, slots=True)
class GroupedMatrix:
    """A matrix [out, in]."""

    codes: Tensor  # [out, in]: uint8, or floats of 8 bits
    scales: Tensor  # [out, groups] float32
    zeros: Tensor | None  # [out, groups] float32; None for floats
    group_size: int  # inputs in a group; the last group may have fewer
    bits: int  # in a code
    group_of: Tensor | None = None  # [in] int64: the group of each input; None: groups are adjacent inputs

    def __post_init__(self) -> None:
        (num_out, num_in), num_groups = self.codes.shape, self.scales.shape[-1]
        fits = self.scales.shape[0] == num_out and num_groups * self.group_size >= num_in
        if self.zeros is not None:
            fits = fits and self.zeros.shape == self.scales.shape
        if self.group_of is not None:
            fits = fits and self.group_of.shape == (num_in,)
            fits = fits and int(self.group_of.min()) >= 0 and int(self.group_of.max()) < num_groups
        if not fits:
            raise ValueError(
                f"{num_out} x {num_in} codes, scales {tuple(self.scales.shape)}"
                + ("" if self.zeros is None else f", zero points {tuple(self.zeros.shape)}")
            )

    def dequantised(self) -> Tensor:
        """Returns the values, float32 [out, in]."""
        num_out, num_in = self.codes.shape
        group_of = torch.arange(num_in) // self.group_size if self.group_of is None else self.group_of
        out = torch.empty(num_out, num_in)
        step = max(1, _SLICE // num_in)
        for first in range(0, num_out, step):
            rows = slice(first, first + step)
            values = self.codes[rows].float()
            if self.zeros is not None:
                values -= self.zeros[rows].index_select(1, group_of)
            torch.mul(values, self.scales[rows].index_select(1, group_of), out=out[rows])
        return out

    def blocks(self, *, is_symmetric: bool) -> BlockMatrix | None:
        """Returns the matrix in blocks of 32; None if the number of inputs is not a multiple of 32. The codes
        are kept if groups are adjacent inputs in whole blocks, and codes have at most 4 bits, or 8 bits with
        zero points in the middle. Otherwise the values are rounded to 8 bits. ``is_symmetric``: zero points
        are expected to be in the middle."""
        num_out, num_in = self.codes.shape
        if num_in % BLOCK_SIZE:
            return None
        if self.zeros is None or self.group_of is not None or self.group_size % BLOCK_SIZE:
            return quantised(self.dequantised(), "Q8_0")
        num_blocks = num_in // BLOCK_SIZE
        group_of = torch.arange(num_blocks) * BLOCK_SIZE // self.group_size
        scales = self.scales.half().index_select(1, group_of).unsqueeze(2)
        codes = self.codes.view(num_out, num_blocks, BLOCK_SIZE)
        if self.bits == 8:
            if bool((self.zeros != 128).any()):
                return quantised(self.dequantised(), "Q8_0")
            return _joined("Q8_0", scales, codes ^ 0x80)
        half = BLOCK_SIZE // 2
        nibbles = codes[..., :half] | codes[..., half:] << 4
        if is_symmetric and self.bits == 4 and bool((self.zeros == 8).all()):
            return _joined("Q4_0", scales, nibbles)
        mins = (-self.zeros * self.scales.half().float()).half().index_select(1, group_of).unsqueeze(2)
        return _joined("Q4_1", scales, mins, nibbles)


def _joined(block_type: str, *parts: Tensor) -> BlockMatrix:
    """Joins ``parts`` [out, blocks, values] into blocks, in their order within each block."""
    joined = torch.cat([part.contiguous().view(torch.uint8) for part in parts], dim=2)
    num_out, num_blocks, _ = joined.shape
    rows: NDArray[np.uint8] = joined.view(num_out, -1).numpy()
    return BlockMatrix(block_type, rows, (num_out, num_blocks * BLOCK_SIZE))


def unpacked(words: Tensor, bits: int) -> Tensor:
    """Unpacks int32 words [..., n] to uint8 [..., n * 32 / bits], the lowest bits of each word first."""
    data = words.contiguous().view(torch.uint8)
    if bits == 8:
        return data
    parts = [data >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)]
    return torch.stack(parts, dim=-1).flatten(-2)


def awq_matrix(qweight: Tensor, qzeros: Tensor, scales: Tensor) -> GroupedMatrix:
    """Reads AWQ's "gemm" version: codes of 4 bits in words [in, out / 8], zero points of 4 bits in words
    [groups, out / 8], both with interleaved outputs, and scales [groups, out]."""

    def in_order(words: Tensor) -> Tensor:
        codes = unpacked(words, 4)
        return codes.view(len(codes), -1, 8)[..., list(AWQ_ORDER)].view(len(codes), -1).t()

    codes = in_order(qweight).contiguous()
    zeros = in_order(qzeros).float()
    return GroupedMatrix(codes, scales.t().float(), zeros, _group_size(codes, scales), 4)


def gptq_matrix(
    qweight: Tensor, qzeros: Tensor, scales: Tensor, g_idx: Tensor | None, bits: int, zero_offset: int
) -> GroupedMatrix:
    """Reads a matrix of GPTQ.

    Args:
        qweight: words of codes, [in * bits / 32, out].
        qzeros: words of zero points, [groups, out * bits / 32].
        scales: [groups, out].
        g_idx: the group of each input, [in]; None: groups are adjacent inputs.
        bits: the bits of a code.
        zero_offset: added to the stored zero points.
    """
    codes = unpacked(qweight.t(), bits)
    zeros = unpacked(qzeros, bits).t().float() + zero_offset
    group_size = _group_size(codes, scales)
    group_of = None
    if g_idx is not None and not torch.equal(g_idx.long(), torch.arange(len(g_idx)) // group_size):
        group_of = g_idx.long()
    return GroupedMatrix(codes, scales.t().float(), zeros, group_size, bits, group_of)


def packed_matrix(
    words: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    g_idx: Tensor | None,
    shape: tuple[int, int],
    bits: int,
) -> GroupedMatrix:
    """Reads a matrix of compressed-tensors.

    Args:
        words: codes to which the middle was added, [out, in * bits / 32].
        scale: [out, groups].
        zero_point: packed along the outputs, or signed bytes [out, groups]; None: the middle.
        g_idx: the group of each input, [in]; None: groups are adjacent inputs.
        shape: (out, in).
        bits: the bits of a code.
    """
    num_out, num_in = shape
    middle = 1 << bits - 1
    codes = unpacked(words, bits)[:, :num_in].contiguous()
    scales = scale.float().reshape(-1, scale.shape[-1]).expand(num_out, -1)
    if zero_point is None:
        zeros = torch.full(scales.shape, float(middle))
    elif zero_point.dtype == torch.int32:
        zeros = unpacked(zero_point.t(), bits)[:, :num_out].t().float()
    else:
        zeros = zero_point.float().reshape(num_out, -1) + middle
    group_size = -(-num_in // scales.shape[1])
    group_of = None if g_idx is None or int(g_idx.min()) < 0 else g_idx.long()
    return GroupedMatrix(codes, scales, zeros, group_size, bits, group_of)


def scaled_matrix(
    weight: Tensor, scale: Tensor, zero_point: Tensor | None, block: tuple[int, int] | None
) -> GroupedMatrix:
    """Reads bytes or floats of 8 bits [out, in]. There is one scale, or one for each output [out, 1] or
    [out], for each group of inputs [out, groups], or for each block of ``block`` outputs and inputs."""
    num_out, num_in = weight.shape

    def by_output(values: Tensor) -> Tensor:
        values = values.float()
        if values.ndim == 2 and block is not None and values.numel() > 1:
            return values.repeat_interleave(block[0], dim=0)[:num_out]
        return values.reshape(-1, values.shape[1] if values.ndim == 2 else 1).expand(num_out, -1)

    scales = by_output(scale)
    group_size = -(-num_in // scales.shape[1])
    if block is not None and scale.ndim == 2 and scale.numel() > 1:
        group_size = block[1]
    if weight.dtype != torch.int8:
        return GroupedMatrix(weight, scales, None, group_size, 8)
    zeros = torch.zeros_like(scales) if zero_point is None else by_output(zero_point)
    return GroupedMatrix(weight.view(torch.uint8) ^ 0x80, scales, zeros + 128, group_size, 8)


def _group_size(codes: Tensor, scales: Tensor) -> int:
    return -(-codes.shape[1] // scales.shape[0])


def mxfp4_values(blocks: Tensor, scales: Tensor) -> Tensor:
    """Returns the values of MXFP4, float32 [..., groups * 32].

    Args:
        blocks: bytes with two codes each, the lower bits first, [..., groups, 16].
        scales: the exponents of the scales, [..., groups].
    """
    codes = torch.stack((blocks & 0x0F, blocks >> 4), dim=-1).flatten(-2)
    halves = torch.tensor(_E2M1_DOUBLED, dtype=torch.float32)[codes.int()]
    return torch.ldexp(halves, scales.int().unsqueeze(-1) - (_E8M0_BIAS + 1)).flatten(-2)


def mxfp4_blocks(blocks: Tensor, scales: Tensor) -> BlockMatrix:
    """Converts a matrix of MXFP4, blocks [out, groups, 16] and scales [out, groups], to blocks of 5 bits.
    Exact for scales of at least 2 ** -23."""
    return _mxfp4(torch.stack((blocks & 0x0F, blocks >> 4), dim=-1).flatten(-2), scales)


def gguf_mxfp4_blocks(rows: NDArray[np.uint8]) -> BlockMatrix:
    """Like ``mxfp4_blocks``, from the rows of a GGUF file. A block is a scale and 16 bytes; their lower bits
    are the first 16 codes."""
    stored = torch.from_numpy(rows.copy()).view(len(rows), -1, 1 + BLOCK_SIZE // 2)
    return _mxfp4(torch.cat((stored[..., 1:] & 0x0F, stored[..., 1:] >> 4), dim=-1), stored[..., 0])


def _mxfp4(codes: Tensor, scales: Tensor) -> BlockMatrix:
    """Returns blocks of 5 bits. ``codes`` [out, groups, 32], ``scales`` [out, groups]."""
    codes = (torch.tensor(_E2M1_DOUBLED) + 16).to(torch.uint8)[codes.int()]
    half = BLOCK_SIZE // 2
    nibbles = (codes[..., :half] & 0x0F) | (codes[..., half:] & 0x0F) << 4
    bits = (codes >> 4).view(*codes.shape[:-1], 4, 8) << torch.arange(8, dtype=torch.uint8)
    upper = bits.sum(dim=-1, dtype=torch.uint8)
    amounts = torch.ldexp(torch.ones(scales.shape), scales.int() - (_E8M0_BIAS + 1)).half().unsqueeze(-1)
    return _joined("Q5_0", amounts, upper, nibbles)
