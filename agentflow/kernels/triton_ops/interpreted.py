"""Products and rounding that are also correct under Triton's interpreter.

The interpreter multiplies the bit patterns of bfloat16 as integers, and truncates where it should round, both
without an error.
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
