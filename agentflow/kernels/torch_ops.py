"""The quick kernels, made of few torch operations each. Tuned for CPUs, and right on a GPU too.

One step of a small model runs thousands of operations that take microseconds each, so what counts
besides bytes and FLOPs is their number.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from agentflow.kernels.attention_plan import (
    TILE_ROWS,
    AttentionPlan,
    CausalGroup,
    ContextPart,
    Index,
    ShortGroup,
    SingleGroup,
    rounded_up,
    whole_tiles,
)
from agentflow.kernels.attention_plan import plan_attention as plan_parts
from agentflow.kernels.choice import choose as choose
from agentflow.kernels.inputs import AttentionBatch, DecoderWeights, LinearWeight


@functools.cache
def _packs_float32() -> bool:
    """Whether oneDNN's blocked float32 layout can be had (x86, and torch built with oneDNN)."""
    return torch._C._has_mkldnn and hasattr(torch.ops.mkldnn, "_linear_pointwise")


@functools.cache
def _multiplies_bfloat16() -> bool:
    """Whether the CPU multiplies bfloat16 matrices (AVX-512 BF16, AMX). Elsewhere torch falls back
    to a scalar loop, several times slower than float32."""
    return bool(_packs_float32() and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def pack_linear(
    weight: Tensor, bias: Tensor | None, *, exact_output: bool = False, gated: bool = False
) -> LinearWeight:
    shape = (weight.shape[0], weight.shape[1])
    if weight.device.type != "cpu":
        return LinearWeight(weight.t(), None, bias, shape)
    if not _packs_float32():  # products there write the type of their operands
        return LinearWeight((weight.float() if exact_output else weight).t(), None, bias, shape)
    if weight.dtype == torch.bfloat16 and _multiplies_bfloat16():
        return LinearWeight(None, _blocked(weight), bias, shape)
    # One row is bound by reading the weight, and reads half as much of the plain one.
    keeps_plain = weight.dtype != torch.float32 and not exact_output
    return LinearWeight(weight.t() if keeps_plain else None, _blocked(weight.float()), bias, shape)


def _blocked(weight: Tensor) -> Tensor:
    # The number of rows is a hint: measured, the layout that comes out serves any number alike.
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, 16)
    return packed


def linear(x: Tensor, weight: LinearWeight) -> Tensor:
    if weight.packed is None or (x.shape[0] == 1 and weight.transposed is not None):
        return _plain_linear(x, weight)
    if weight.packed.dtype == x.dtype:
        product: Tensor = _linear_pointwise(_padded(x), weight.packed, weight.bias, "none", [], "")
        return product[: x.shape[0]]
    return exact_linear(x, weight).to(x.dtype)


def exact_linear(x: Tensor, weight: LinearWeight) -> Tensor:
    if weight.packed is None:
        return _exact_plain_linear(x, weight)
    if weight.packed.dtype == torch.bfloat16:
        return _two_term_linear(x, weight)
    bias = None if weight.bias is None else weight.bias.float()
    product: Tensor = _linear_pointwise(_padded(x.float()), weight.packed, bias, "none", [], "")
    return product[: x.shape[0]]


def _padded(x: Tensor) -> Tensor:
    """With rows of zeros, so that few numbers of rows occur."""
    num_rows = x.shape[0]
    return x if num_rows <= TILE_ROWS else _with_rows(x, rounded_up(num_rows))


def _with_rows(x: Tensor, num_rows: int) -> Tensor:
    num_missing = num_rows - x.shape[-2]
    return torch.nn.functional.pad(x, (0, 0, 0, num_missing)) if num_missing else x


def _two_term_linear(x: Tensor, weight: LinearWeight) -> Tensor:
    """The product to about 16 bits from kernels that can only write bfloat16: rounded once, and then
    what the rounding lost. The second pass subtracts the first from its float32 sums before they are
    rounded. Measured for the default model's head: two thirds of the time of a float32 product."""
    padded = _padded(x)
    rounded = _linear_pointwise(padded, weight.packed, weight.bias, "none", [], "")
    lost = _linear_pointwise_binary(padded, rounded, weight.packed, weight.bias, "sub")
    product: Tensor = rounded.float().add_(lost)
    return product[: x.shape[0]]


def _plain_linear(x: Tensor, weight: LinearWeight) -> Tensor:
    assert weight.transposed is not None
    if weight.bias is None:
        return torch.mm(x, weight.transposed)
    return torch.addmm(weight.bias, x, weight.transposed)


def _exact_plain_linear(x: Tensor, weight: LinearWeight) -> Tensor:
    """GPUs form sums in float32 in any case, and can write them as they are."""
    assert weight.transposed is not None
    if x.is_cuda and x.dtype != torch.float32:
        product = torch.mm(x, weight.transposed, out_dtype=torch.float32)
    else:
        product = torch.mm(x.float(), weight.transposed.float())
    return product if weight.bias is None else product.add_(weight.bias)


@functools.cache
def _eps_tensor(eps: float, device: torch.device) -> Tensor:
    return torch.tensor(eps, dtype=torch.float32, device=device)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    scale = torch.addcmul(_eps_tensor(eps, x.device), norm, norm, value=1 / x.shape[-1]).rsqrt_()
    if x.dtype == torch.float32:
        return torch.mul(wide, scale).mul_(weight)
    return wide.mul_(scale).to(x.dtype).mul_(weight)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = residual.add_(x)
    return rms_norm(total, weight, eps), total


def gated_linear(x: Tensor, weight: LinearWeight) -> Tensor:
    gate, up = linear(x, weight).chunk(2, dim=-1)
    return torch.nn.functional.silu(gate).mul_(up)


def rope_and_write(qkv: Tensor, cos: Tensor, sin: Tensor, kv_layer: Tensor, write_slots: Tensor) -> Tensor:
    _, _, num_kv_heads, head_dim = kv_layer.shape
    num_heads = qkv.shape[1] - 2 * num_kv_heads
    rotated = qkv[:, : num_heads + num_kv_heads]
    swapped = rotated.roll(head_dim // 2, -1).mul_(sin)
    torch.add(rotated * cos, swapped, out=rotated)
    kv_layer.index_copy_(0, write_slots, qkv[:, num_heads:].view(-1, 2, num_kv_heads, head_dim))
    return qkv[:, :num_heads]


def plan_attention(batch: AttentionBatch, dtype: torch.dtype, device: torch.device) -> AttentionPlan:
    return plan_parts(
        batch.req_to_token,
        batch.req_rows,
        batch.query_lens,
        batch.kv_lens,
        dtype=dtype,
        device=device,
        trees=batch.trees,
    )


def whole_forward(weights: DecoderWeights, head: LinearWeight) -> None:
    return None


def attention(q: Tensor, kv_layer: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
    parts = [_attend_singles(q, kv_layer, group, scale) for group in plan.singles]
    parts += [_attend_short_chunks(q, kv_layer, group, scale) for group in plan.shorts]
    parts += [_attend_chunks(q, kv_layer, group, scale) for group in plan.causals]
    out = _in_order([part_out for part_out, _ in parts], plan.order)
    if plan.contexts:
        lse = _in_order([part_lse for _, part_lse in parts], plan.order)
        out = out.float()
        for context in plan.contexts:
            _merge_context(out, lse, q, kv_layer, context, scale)
    return out.to(q.dtype).reshape(q.shape[0], -1)


def _in_order(parts: list[Tensor], order: Tensor | None) -> Tensor:
    joined = parts[0] if len(parts) == 1 else torch.cat(parts)
    return joined if order is None else joined.index_select(0, order)


def _take(x: Tensor, index: Index) -> Tensor:
    return x[index] if isinstance(index, slice) else x.index_select(0, index)


def _attend_singles(q: Tensor, kv_layer: Tensor, group: SingleGroup, scale: float) -> tuple[Tensor, Tensor]:
    """Each row over its own slots. The query heads that share a KV head stand where flash attention
    has a sequence of queries, so that K and V are read once for them. Gives [n, heads, head_dim]
    and the log-sum-exp [n, heads] of the scores."""
    _, _, num_kv_heads, head_dim = kv_layer.shape
    n, queries_per_head = group.num_rows, q.shape[1] // num_kv_heads
    kv = _take(kv_layer, group.slots).view(n, group.num_slots, 2, num_kv_heads, head_dim)
    queries = _take(q, group.rows).view(n, num_kv_heads, queries_per_head, head_dim)
    keys, values = kv[:, :, 0].transpose(1, 2), kv[:, :, 1].transpose(1, 2)
    out, lse = attend(queries, keys, values, group.mask, False, scale)
    return out.reshape(n, -1, head_dim), lse.reshape(n, -1)


def _attend_short_chunks(
    q: Tensor, kv_layer: Tensor, group: ShortGroup, scale: float
) -> tuple[Tensor, Tensor]:
    """Each chunk over its own slots, under the mask. The query heads that share a KV head stand one after the
    other, each with all of the chunk's rows. Gives [chunks * rows, heads, head_dim] and the log-sum-exp
    [chunks * rows, heads]."""
    _, _, num_kv_heads, head_dim = kv_layer.shape
    n, length, queries_per_head = group.num_chunks, group.num_rows, q.shape[1] // num_kv_heads
    kv = _take(kv_layer, group.slots).view(n, group.num_slots, 2, num_kv_heads, head_dim)
    queries = _take(q, group.rows).view(n, length, num_kv_heads, queries_per_head, head_dim)
    queries = queries.permute(0, 2, 3, 1, 4).reshape(n, num_kv_heads, -1, head_dim)
    keys, values = kv[:, :, 0].transpose(1, 2), kv[:, :, 1].transpose(1, 2)
    out, lse = attend(queries, keys, values, group.mask_for(queries_per_head), False, scale)
    out = out.reshape(n, -1, length, head_dim).transpose(1, 2)
    lse = lse.reshape(n, -1, length).transpose(1, 2)
    return out.reshape(n * length, -1, head_dim), lse.reshape(n * length, -1)


def _attend_chunks(q: Tensor, kv_layer: Tensor, group: CausalGroup, scale: float) -> tuple[Tensor, Tensor]:
    """Each chunk over its own rows, causally. KV heads are the batch of flash attention, and the
    query heads that share one its heads, with K and V repeated by a stride of 0. Gives
    [chunks * rows, heads, head_dim] and the log-sum-exp [chunks * rows, heads]."""
    _, _, num_kv_heads, head_dim = kv_layer.shape
    n, length = group.num_chunks, group.num_rows
    queries_per_head = q.shape[1] // num_kv_heads
    kv = _take(kv_layer, group.slots).view(n, length, 2, num_kv_heads, head_dim)
    queries = _take(q, group.rows).view(n, length, num_kv_heads, queries_per_head, head_dim)
    queries = queries.permute(0, 2, 3, 1, 4).reshape(-1, queries_per_head, length, head_dim)
    shape = (n * num_kv_heads, queries_per_head, length, head_dim)
    keys = kv[:, :, 0].transpose(1, 2).reshape(-1, 1, length, head_dim).expand(shape)
    values = kv[:, :, 1].transpose(1, 2).reshape(-1, 1, length, head_dim).expand(shape)
    out, lse = attend(queries, keys, values, None, True, scale)
    out = out.view(n, -1, length, head_dim).transpose(1, 2)
    lse = lse.reshape(n, -1, length).transpose(1, 2)
    return out.reshape(n * length, -1, head_dim), lse.reshape(n * length, -1)


def _merge_context(
    out: Tensor, lse: Tensor, q: Tensor, kv_layer: Tensor, part: ContextPart, scale: float
) -> None:
    """Attend to a part that its rows see whole, and merge the result into ``out`` and ``lse``."""
    _, _, num_kv_heads, head_dim = kv_layer.shape
    n, queries_per_head = part.num_rows, q.shape[1] // num_kv_heads
    num_queries = n * queries_per_head
    kv = _take(kv_layer, part.slots)
    queries = _take(q, part.rows).view(n, num_kv_heads, queries_per_head, head_dim).transpose(0, 1)
    queries = queries.reshape(1, num_kv_heads, num_queries, head_dim)
    queries = _with_rows(queries, whole_tiles(num_queries))
    keys, values = kv[:, 0].transpose(0, 1).unsqueeze(0), kv[:, 1].transpose(0, 1).unsqueeze(0)
    part_out, part_lse = attend(queries, keys, values, part.mask, False, scale)
    part_out, part_lse = part_out[0, :, :num_queries], part_lse[0, :, :num_queries]
    part_out = part_out.reshape(num_kv_heads, n, queries_per_head, head_dim).transpose(0, 1)
    part_out = part_out.reshape(n, -1, head_dim)
    part_lse = part_lse.reshape(num_kv_heads, n, queries_per_head).transpose(0, 1).reshape(n, -1)
    merged_out, merged_lse = _take(out, part.rows), _take(lse, part.rows)
    share = torch.sigmoid(part_lse - merged_lse).unsqueeze(-1)
    merged_out.lerp_(part_out.float(), share)
    torch.logaddexp(merged_lse, part_lse, out=merged_lse)
    if not isinstance(part.rows, slice):
        out.index_copy_(0, part.rows, merged_out)
        lse.index_copy_(0, part.rows, merged_lse)


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Softmax attention and the log-sum-exp of its scores, for merging.

    ``q`` [batch, heads, queries, head_dim], ``k`` and ``v`` [batch, heads, keys, head_dim], ``mask``
    added to the scores. Gives [batch, heads, queries, head_dim] and float32 [batch, heads, queries].
    """
    if q.device.type != "cpu":
        return attend_dense(q, k, v, mask, is_causal, scale)
    out, lse = _flash(q, k, v, 0.0, is_causal, attn_mask=mask, scale=scale)
    return out, lse


def attend_dense(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """``attend`` in plain tensor algebra: the scores are held whole, in float32."""
    scores = torch.matmul(q, k.transpose(-1, -2)).float() * scale
    if mask is not None:
        scores += mask
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu_(1)
        scores.masked_fill_(hidden, -math.inf)
    lse = scores.logsumexp(dim=-1)
    weights = scores.sub_(lse.unsqueeze(-1)).exp_()
    return torch.matmul(weights.to(v.dtype), v), lse


# Overloads named in full: choosing one by its arguments takes longer than some of the kernels.
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_linear_pointwise: Any = torch.ops.mkldnn._linear_pointwise.default if _packs_float32() else None
_linear_pointwise_binary: Any = torch.ops.mkldnn._linear_pointwise.binary if _packs_float32() else None
