"""The kernels in torch operations, for every device.

In order: norms and RoPE, and attention by the groups of an ``AttentionPlan``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from agentflow.kernels.attention_plan import AttentionPlan, Group
from agentflow.kernels.attention_plan import plan_attention as plan_groups
from agentflow.kernels.decoder_weights import DecoderWeights
from agentflow.kernels.inputs import AttentionBatch, IntArray, LinearWeight
from agentflow.kernels.linear.torch_linear import TorchLinear
from agentflow.kernels.sampling.torch_sampler import TorchSampler


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return torch.nn.functional.layer_norm(x, weight.shape, weight, bias, eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.nn.functional.rms_norm(x, x.shape[-1:], eps=eps).mul_(weight)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = residual.add_(x)
    return rms_norm(total, weight, eps), total


def rope_and_write(qkv: Tensor, cos: Tensor, sin: Tensor, kv_layer: Tensor, write_slots: Tensor) -> Tensor:
    _, _, num_kv_heads, head_dim = kv_layer.shape
    num_heads = qkv.shape[1] - 2 * num_kv_heads
    rotated = qkv[:, : num_heads + num_kv_heads]
    swapped = rotated.roll(head_dim // 2, -1).mul_(sin)
    torch.add(rotated * cos, swapped, out=rotated)
    kv_layer.index_copy_(0, write_slots, qkv[:, num_heads:].view(-1, 2, num_kv_heads, head_dim))
    return qkv[:, :num_heads]


def plan_attention(batch: AttentionBatch, dtype: torch.dtype, device: torch.device) -> AttentionPlan:
    return plan_groups(batch, dtype, device)


def static_plans(
    num_rows: Sequence[int],
    num_heads: int,
    num_kv_heads: int,
    device: torch.device,
    windows: Sequence[int] = (0,),
) -> None:
    return None


QUEUES_WORK = False
sampler = TorchSampler()
linear = TorchLinear()


def whole_forward(weights: DecoderWeights, head: LinearWeight) -> None:
    return None


ruled_attention = None


def attention(q: Tensor, kv_layer: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
    out = q.new_empty(q.shape, dtype=torch.float32)
    lse = out.new_empty(q.shape[:2])
    for group in plan.tails:  # the repeated rows of a group have equal results
        part_out, part_lse = attend_group(q, kv_layer, group, scale, attend)
        out.index_copy_(0, group.rows, part_out)
        lse.index_copy_(0, group.rows, part_lse)
    for group in plan.shared_groups:
        part_out, part_lse = attend_group(q, kv_layer, group, scale, attend)
        own_out, own_lse = out.index_select(0, group.rows), lse.index_select(0, group.rows)
        weight = torch.sigmoid(part_lse - own_lse).unsqueeze(-1)
        out.index_copy_(0, group.rows, own_out.lerp_(part_out, weight))
        lse.index_copy_(0, group.rows, torch.logaddexp(own_lse, part_lse))
    return out.to(q.dtype).flatten(1)


def segment_attention(q: Tensor, kv: Tensor, starts: IntArray, first: int, scale: float) -> Tensor:
    end = first + len(q)
    begins, ends = segments_between(starts, first, end)
    lengths = ends - begins
    if begins[0] == first and ends[-1] == end and (lengths == lengths[0]).all():
        return _equal_segments(q, kv[first:end], len(lengths), scale)
    parts = [
        _equal_segments(q[max(a - first, 0) : min(b, end) - first], kv[a:b], 1, scale)
        for a, b in zip(begins.tolist(), ends.tolist(), strict=True)
    ]
    return torch.cat(parts)


def segments_between(starts: IntArray, first: int, end: int) -> tuple[IntArray, IntArray]:
    """Returns the begins and the ends of the segments with rows from ``first`` up to ``end``."""
    low = int(np.searchsorted(starts, first, side="right")) - 1
    high = int(np.searchsorted(starts, end, side="left"))
    return starts[low:high], starts[low + 1 : high + 1]


def _equal_segments(q: Tensor, kv: Tensor, num: int, scale: float) -> Tensor:
    _, num_heads, head_dim = q.shape
    keys, values = kv.view(num, -1, 2, num_heads, head_dim).permute(2, 0, 3, 1, 4)
    queries = q.reshape(num, -1, num_heads, head_dim).transpose(1, 2)
    out = torch.nn.functional.scaled_dot_product_attention(queries, keys, values, scale=scale)
    return out.transpose(1, 2).reshape(len(q), -1)


Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None, float], tuple[Tensor, Tensor]]


def attend_group(
    q: Tensor, kv_layer: Tensor, group: Group, scale: float, attend: Attend
) -> tuple[Tensor, Tensor]:
    """Attends from each chunk of N to its slots. The L rows of the query heads that share a KV head are the
    queries of one product, so that K and V are read once for them. Returns float32 [N * L, heads, head_dim],
    and the log-sum-exp of the scores, [N * L, heads]."""
    _, _, num_kv_heads, head_dim = kv_layer.shape
    n, num_heads = group.num_chunks, q.shape[1]
    queries_per_head = num_heads // num_kv_heads
    kv = _gathered(kv_layer, group.slots, q.dtype).view(n, -1, 2, num_kv_heads, head_dim)
    queries = q.index_select(0, group.rows).view(n, -1, num_kv_heads, queries_per_head, head_dim)
    queries = queries.permute(0, 2, 3, 1, 4).reshape(n, num_kv_heads, -1, head_dim)
    mask = None if group.mask is None else group.mask.repeat(1, 1, queries_per_head, 1)
    out, lse = attend(queries, kv[:, :, 0].transpose(1, 2), kv[:, :, 1].transpose(1, 2), mask, scale)
    out = out.reshape(n, num_heads, -1, head_dim).transpose(1, 2)
    lse = lse.reshape(n, num_heads, -1).transpose(1, 2)
    return out.reshape(-1, num_heads, head_dim).float(), lse.reshape(-1, num_heads)


def _gathered(kv_layer: Tensor, slots: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the keys and values of some slots, 8-bit floats in ``dtype``."""
    if kv_layer.dtype != torch.float8_e4m3fn:
        return kv_layer.index_select(0, slots)
    codes = kv_layer.view(torch.uint8).index_select(0, slots)
    return codes.view(kv_layer.dtype).to(dtype)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Computes softmax attention, and the log-sum-exp of its scores for merging.

    Args:
        q: [batch, heads, queries, head_dim].
        k: [batch, heads, keys, head_dim].
        v: [batch, heads, keys, head_dim].
        mask: added to the scores, or None.
        scale: multiplies the scores.

    Returns:
        [batch, heads, queries, head_dim] and float32 [batch, heads, queries].
    """
    if q.device.type != "cpu":
        return attend_dense(q, k, v, mask, scale)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, attn_mask=mask, scale=scale
    )
    return out, lse


def attend_dense(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, cap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """``attend`` in plain tensor algebra, with all scores in memory as float32. The arguments and results are
    the same. With a ``cap``, a score is ``cap * tanh(score / cap)``."""
    scores = torch.matmul(q, k.transpose(-1, -2)).float() * scale
    if cap:
        scores = scores.div_(cap).tanh_().mul_(cap)
    if mask is not None:
        scores += mask
    lse = scores.logsumexp(dim=-1)
    weights = scores.sub_(lse.unsqueeze(-1)).exp_()
    return torch.matmul(weights.to(v.dtype), v), lse
