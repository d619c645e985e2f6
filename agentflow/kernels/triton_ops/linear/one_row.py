"""Products of one row with a dense weight, which are limited by memory bandwidth.

A program computes a few outputs over all inputs, without tensor cores. Its threads keep separate sums until
the end, so that they are reduced only once. The activation of a gated MLP is part of the product.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from agentflow.kernels.inputs import LinearWeight
from agentflow.kernels.triton_ops.early_start import early_start, take_turn
from agentflow.kernels.triton_ops.interpreted import rounded


@triton.jit
def _outputs(sums, bias, added, columns, is_column, dtype: tl.constexpr, HAS_BIAS: tl.constexpr,
             HAS_ADDED: tl.constexpr):  # fmt: skip
    result = tl.sum(sums, 1)
    if HAS_BIAS:
        result += tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)
    result = rounded(result, dtype).to(tl.float32)
    if HAS_ADDED:
        more = tl.load(added + columns, mask=is_column, other=0.0).to(tl.float32)
        result = rounded(result + more, dtype).to(tl.float32)
    return result


@triton.jit
def _multiply_row(
    x, weight, bias, added, out, num_in, num_out,
    HAS_BIAS: tl.constexpr, HAS_ADDED: tl.constexpr, IS_GATED: tl.constexpr,
    BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, STAGES: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    take_turn(IS_EARLY)
    columns = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    inputs = tl.arange(0, BLOCK_IN)
    is_column = columns < num_out
    dtype = out.dtype.element_ty
    own = weight + columns.to(tl.int64)[:, None] * num_in
    own_up = weight + (columns.to(tl.int64) + num_out)[:, None] * num_in
    sums = tl.zeros([BLOCK_OUT, BLOCK_IN], dtype=tl.float32)
    up_sums = sums
    for first in tl.range(0, num_in, BLOCK_IN, num_stages=STAGES):
        is_input = first + inputs < num_in
        is_read = is_column[:, None] & is_input[None, :]
        offsets = (first + inputs)[None, :]
        # Weights are not needed again before the next step of the engine.
        values = tl.load(own + offsets, mask=is_read, other=0.0, eviction_policy="evict_first").to(tl.float32)
        row = tl.load(x + first + inputs, mask=is_input, other=0.0).to(tl.float32)[None, :]
        sums += values * row
        if IS_GATED:
            up = tl.load(own_up + offsets, mask=is_read, other=0.0, eviction_policy="evict_first")
            up_sums += up.to(tl.float32) * row
    result = _outputs(sums, bias, added, columns, is_column, dtype, HAS_BIAS, HAS_ADDED)
    if IS_GATED:
        up = _outputs(
            up_sums, bias + num_out, added + num_out, columns, is_column, dtype, HAS_BIAS, HAS_ADDED
        )
        result = rounded(result / (1.0 + tl.exp(-result)), dtype).to(tl.float32) * up
    tl.store(out + columns, rounded(result, dtype), mask=is_column)


def is_one_row(x: Tensor, weight: LinearWeight) -> bool:
    """Whether ``multiply_row`` computes this product."""
    dense = weight.transposed
    return len(x) == 1 and dense is not None and dense.t().is_contiguous() and x.is_contiguous()


def multiply_row(
    x: Tensor,
    weight: LinearWeight,
    dtype: torch.dtype,
    added: Tensor | None = None,
    *,
    is_gated: bool = False,
) -> Tensor:
    """Returns x Wᵀ + b of one row.

    Args:
        x: [1, in]
        weight: W and b.
        dtype: The type of the result.
        added: [1, out] added to the result.
        is_gated: The result is silu(first half of the outputs) times the second half.

    Returns:
        [1, out], or [1, out / 2] if ``is_gated``.
    """
    assert weight.transposed is not None
    num_out, num_in = weight.shape
    num_out = num_out // 2 if is_gated else num_out
    out = torch.empty((1, num_out), dtype=dtype, device=x.device)
    # The fastest of 21 sizes on an H100. Long sums run in fewer programs, which then need more warps.
    block_out, num_warps = (8, 8) if num_in > 8192 else (4, 4)
    block_in = 2048 // weight.transposed.element_size()
    _multiply_row[(-(-num_out // block_out),)](
        x, weight.transposed, x if weight.bias is None else weight.bias,
        x if added is None else added.contiguous(), out,
        num_in, num_out, HAS_BIAS=weight.bias is not None, HAS_ADDED=added is not None, IS_GATED=is_gated,
        BLOCK_OUT=block_out, BLOCK_IN=block_in, STAGES=3, num_warps=num_warps, **early_start(x.device, 1),
    )  # fmt: skip
    return out
