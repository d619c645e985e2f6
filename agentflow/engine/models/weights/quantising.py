"""Rounds matrices to blocks of 32 quantised values, or rows of 8-bit floats, for models whose files are not
quantised.

The blocks are GGUF's (ggml's formats), so that the kernels read them like blocks of a file."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentflow.kernels.inputs import BlockMatrix

BLOCK_SIZE = 32
_SLICE = 1 << 22  # the values that are converted in one slice, to keep their float32 copies small


def quantised(weight: Tensor, block_type: str) -> BlockMatrix:
    """Rounds ``weight`` [out, in] to blocks of "Q8_0" (a scale and 32 signed bytes) or "Q4_1" (a scale, a
    minimum and 32 codes of 4 bits), or to rows of "F8_E4M3" (a scale and 8-bit floats). The number of inputs
    must be a multiple of 32."""
    num_out, num_in = weight.shape
    convert, size = {"Q8_0": (_q8_0, BLOCK_SIZE), "Q4_1": (_q4_1, BLOCK_SIZE), "F8_E4M3": (_e4m3, num_in)}[
        block_type
    ]
    step = max(1, _SLICE // num_in)
    slices = torch.split(weight, step)
    blocks = [convert(part.float().view(-1, size)).view(len(part), -1) for part in slices]
    rows: NDArray[np.uint8] = torch.cat(blocks).cpu().numpy()
    return BlockMatrix(block_type, rows, (num_out, num_in))


def _q8_0(blocks: Tensor) -> Tensor:
    scales = (blocks.abs().amax(dim=1, keepdim=True) / 127).half()
    codes = (blocks * _inverse(scales)).round_().clamp_(-127, 127).to(torch.int8)
    return torch.cat((scales.view(torch.uint8), codes.view(torch.uint8)), dim=1)


def _q4_1(blocks: Tensor) -> Tensor:
    low, high = blocks.aminmax(dim=1, keepdim=True)
    scales, mins = ((high - low) / 15).half(), low.half()
    codes = ((blocks - mins.float()) * _inverse(scales)).round_().clamp_(0, 15).to(torch.uint8)
    half = BLOCK_SIZE // 2
    nibbles = codes[:, :half] | codes[:, half:] << 4
    return torch.cat((scales.view(torch.uint8), mins.view(torch.uint8), nibbles), dim=1)


def _e4m3(rows: Tensor) -> Tensor:
    scales = rows.abs().amax(dim=1, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
    scales = torch.where(scales > 0, scales, 1.0)
    # Rounding could exceed the largest code, which would give NaN.
    codes = (rows / scales).clamp_(-448.0, 448.0).to(torch.float8_e4m3fn)
    return torch.cat((scales.view(torch.uint8), codes.view(torch.uint8)), dim=1)


def _inverse(scales: Tensor) -> Tensor:
    wide = scales.float()
    return torch.where(wide > 0, 1 / wide, 0)
