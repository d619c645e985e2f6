"""Norms, rotary embeddings and the gated activation, fused so that each row is read and written once.

Intermediate results are rounded to the model's dtype as ``RowOps`` defines it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from agentflow.kernels.rows.torch_rows import TorchRows
from agentflow.kernels.triton_ops.early_start import early_start, take_turn
from agentflow.kernels.triton_ops.interpreted import rounded, to_fp8


@triton.jit
def _rms_norm(
    x, residual, weight, out, eps, size, row_stride, head_stride, num_heads,
    HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    take_turn(IS_EARLY)
    number = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    is_column = columns < size
    place = x + number // num_heads * row_stride + number % num_heads * head_stride + columns
    wide = tl.load(place, mask=is_column, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        there = residual + number * size + columns
        total = rounded(wide + tl.load(there, mask=is_column, other=0.0).to(tl.float32), x.dtype.element_ty)
        tl.store(there, total, mask=is_column)
        wide = total.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / size + eps)
    normed = rounded(wide * scale, x.dtype.element_ty).to(tl.float32)
    factors = tl.load(weight + columns, mask=is_column, other=0.0).to(tl.float32)
    tl.store(out + number * size + columns, rounded(normed * factors, out.dtype.element_ty), mask=is_column)


def _norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    out: Tensor,
    eps: float,
    row_stride: int,
    head_stride: int,
    num_heads: int,
) -> None:
    size = x.shape[-1]
    if not x.numel():
        return
    block = triton.next_power_of_2(size)
    _rms_norm[(x.numel() // size,)](
        x, x if residual is None else residual, weight, out, eps, size, row_stride, head_stride, num_heads,
        HAS_RESIDUAL=residual is not None, BLOCK=block, num_warps=min(max(block // 512, 1), 8),
        **early_start(x.device, len(x)),
    )  # fmt: skip


@triton.jit
def _rope_and_write(
    qkv, cos, sin, kv_layer, write_slots, row_stride, slot_stride, num_heads, num_kv_heads,
    HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_HEADS: tl.constexpr, IS_FP8: tl.constexpr,
    IS_EARLY: tl.constexpr,
):  # fmt: skip
    take_turn(IS_EARLY)
    row = tl.program_id(0).to(tl.int64)
    heads = tl.arange(0, BLOCK_HEADS)
    dims = tl.arange(0, BLOCK_HALF)
    is_dim = dims < HALF
    dtype = qkv.dtype.element_ty
    c0 = tl.load(cos + row * 2 * HALF + dims, mask=is_dim, other=0.0).to(tl.float32)[None, :]
    c1 = tl.load(cos + row * 2 * HALF + HALF + dims, mask=is_dim, other=0.0).to(tl.float32)[None, :]
    s0 = tl.load(sin + row * 2 * HALF + dims, mask=is_dim, other=0.0).to(tl.float32)[None, :]
    s1 = tl.load(sin + row * 2 * HALF + HALF + dims, mask=is_dim, other=0.0).to(tl.float32)[None, :]
    slot = tl.load(write_slots + row)
    num_written = tl.where(slot >= 0, num_kv_heads, 0)  # a padding row of a captured graph has no slot

    place = qkv + row * row_stride + heads[:, None] * (2 * HALF) + dims[None, :]
    is_rotated = (heads < num_heads + num_kv_heads)[:, None] & is_dim[None, :]
    first = tl.load(place, mask=is_rotated, other=0.0).to(tl.float32)
    second = tl.load(place + HALF, mask=is_rotated, other=0.0).to(tl.float32)
    new_first = rounded(
        rounded(first * c0, dtype).to(tl.float32) + rounded(second * s0, dtype).to(tl.float32), dtype
    )
    new_second = rounded(
        rounded(second * c1, dtype).to(tl.float32) + rounded(first * s1, dtype).to(tl.float32), dtype
    )
    is_query = (heads < num_heads)[:, None] & is_dim[None, :]
    tl.store(place, new_first, mask=is_query)
    tl.store(place + HALF, new_second, mask=is_query)

    is_key = ((heads >= num_heads) & (heads < num_heads + num_written))[:, None] & is_dim[None, :]
    key_place = kv_layer + slot * slot_stride + (heads - num_heads)[:, None] * (2 * HALF) + dims[None, :]
    if IS_FP8:
        tl.store(key_place, to_fp8(new_first.to(tl.float32)), mask=is_key)
        tl.store(key_place + HALF, to_fp8(new_second.to(tl.float32)), mask=is_key)
    else:
        tl.store(key_place, new_first, mask=is_key)
        tl.store(key_place + HALF, new_second, mask=is_key)

    is_value = (heads < num_written)[:, None] & is_dim[None, :]
    values = place + (num_heads + num_kv_heads) * (2 * HALF)
    value_place = kv_layer + slot * slot_stride + (num_kv_heads + heads)[:, None] * (2 * HALF) + dims[None, :]
    first_values = tl.load(values, mask=is_value, other=0.0)
    second_values = tl.load(values + HALF, mask=is_value, other=0.0)
    if IS_FP8:
        tl.store(value_place, to_fp8(first_values.to(tl.float32)), mask=is_value)
        tl.store(value_place + HALF, to_fp8(second_values.to(tl.float32)), mask=is_value)
    else:
        tl.store(value_place, first_values, mask=is_value)
        tl.store(value_place + HALF, second_values, mask=is_value)


@triton.jit
def _silu_and_multiply(gate_up, out, size, BLOCK: tl.constexpr, IS_EARLY: tl.constexpr):
    take_turn(IS_EARLY)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < size
    gate = tl.load(gate_up + row * 2 * size + columns, mask=is_column, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * size + size + columns, mask=is_column, other=0.0).to(tl.float32)
    dtype = gate_up.dtype.element_ty
    activated = rounded(gate / (1.0 + tl.exp(-gate)), dtype).to(tl.float32)
    tl.store(out + row * size + columns, rounded(activated * up, dtype), mask=is_column)


def silu_and_multiply(gate_up: Tensor) -> Tensor:
    """Returns silu(first half) times the second half of ``gate_up`` [T, 2 n]: [T, n]."""
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_rows, size), dtype=gate_up.dtype, device=gate_up.device)
    if num_rows:
        _silu_and_multiply[(num_rows, -(-size // 1024))](
            gate_up.contiguous(), out, size, BLOCK=1024, **early_start(gate_up.device, num_rows)
        )
    return out


class TritonRows(TorchRows):
    """``RowOps`` of the Triton kernels. torch computes layer norms."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.stride(-1) != 1 or x.dim() > 3:
            x = x.contiguous().view(-1, x.shape[-1])
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        num_heads, head_stride = (x.shape[1], x.stride(1)) if x.dim() == 3 else (1, 0)
        _norm(x, None, weight, out, eps, x.stride(0), head_stride, num_heads)
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        x, residual = x.contiguous(), residual.contiguous()
        out = torch.empty_like(x)
        _norm(x, residual, weight, out, eps, x.shape[-1], 0, 1)
        return out, residual

    def rope_and_write(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, kv_layer: Tensor, write_slots: Tensor
    ) -> Tensor:
        num_rows, num_all, head_dim = qkv.shape
        num_kv_heads = kv_layer.shape[2]
        num_heads = num_all - 2 * num_kv_heads
        is_fp8 = kv_layer.dtype == torch.float8_e4m3fn
        kv_layer = kv_layer.view(torch.uint8) if is_fp8 else kv_layer
        if num_rows:
            _rope_and_write[(num_rows,)](
                qkv, cos, sin, kv_layer, write_slots, qkv.stride(0), kv_layer.stride(0), num_heads,
                num_kv_heads,
                HALF=head_dim // 2, BLOCK_HALF=triton.next_power_of_2(head_dim // 2),
                BLOCK_HEADS=triton.next_power_of_2(num_heads + num_kv_heads), IS_FP8=is_fp8,
                enable_fp_fusion=False, **early_start(qkv.device, num_rows),
            )  # fmt: skip
        return qkv[:, :num_heads]
