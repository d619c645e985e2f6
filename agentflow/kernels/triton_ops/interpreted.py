"""Products, rounding and 8-bit floats that are also correct under Triton's interpreter.

The interpreter multiplies the bit patterns of bfloat16 as integers, and truncates instead of rounding, both
without an error. 8-bit floats are e4m3 (Micikevicius et al. 2022, arXiv 2209.05433): a sign, 4 bits of
exponent and 3 of mantissa, up to 448, without infinity. Kernels load and store them as bytes.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs

IS_INTERPRETED = tl.constexpr(knobs.runtime.interpret)


@triton.jit
def dot(a, b):
    """Returns the product of two tiles, with float32 sums."""
    if IS_INTERPRETED:  # products of bfloat16 are exact in float32
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """Rounds float32 to ``dtype``, to nearest even."""
    if IS_INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        x = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def to_fp8(x):
    """Rounds float32 to 8-bit floats, to nearest even; larger values become the largest one. Returns their
    bytes."""
    if IS_INTERPRETED:
        bits = x.to(tl.uint32, bitcast=True)
        size = tl.where(tl.abs(x) < 448.0, tl.abs(x), 448.0)
        whole = size.to(tl.uint32, bitcast=True)
        normal = ((whole + 0x7FFFF + ((whole >> 20) & 1)) >> 20) - (120 << 3)
        # Below 2^-6, values are multiples of 2^-9, to which adding 2^14 rounds.
        tiny = (size + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
        code = tl.where(size < 0.015625, tiny, normal)
        code = tl.where(x == x, code, 0x7F)
        return (((bits >> 24) & 0x80) | code).to(tl.uint8)
    return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def from_fp8(codes, dtype: tl.constexpr):
    """Converts 8-bit floats, given as bytes, to a wider type, without loss."""
    if IS_INTERPRETED:
        bits = codes.to(tl.uint32)
        tiny = (bits & 7).to(tl.float32) * 0.001953125
        normal = (((bits & 0x7F) << 20) + (120 << 23)).to(tl.float32, bitcast=True)
        size = tl.where((bits & 0x78) == 0, tiny, normal)
        size = tl.where((bits & 0x7F) == 0x7F, float("nan"), size)
        return tl.where(bits >= 0x80, -size, size).to(dtype)
    return codes.to(tl.float8e4nv, bitcast=True).to(dtype)
