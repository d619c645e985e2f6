"""The attention of one group of rows to their slots, in torch operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from agentflow.kernels.attention.groups import ChunkGroup

Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None, float], tuple[Tensor, Tensor]]


def attend_groups(
    q: Tensor,
    kv_layer: Tensor,
    tails: Sequence[ChunkGroup],
    shared_groups: Sequence[ChunkGroup],
    scale: float,
    attend: Attend,
) -> tuple[Tensor, Tensor]:
    """Attends from each row to the slots of all its groups, merged by log-sum-exp.

    Args:
        q: [rows, heads, head_dim] the queries.
        kv_layer: The layer's part of the KV pool.
        tails: As in ``AttentionPlan``.
        shared_groups: As in ``AttentionPlan``.
        scale: Of the scores.
        attend: The attention of dense tensors, as ``attend``.

    Returns:
        float32 [rows, heads, head_dim], and the log-sum-exp of the scores, [rows, heads].
    """
    out = q.new_empty(q.shape, dtype=torch.float32)
    lse = out.new_empty(q.shape[:2])
    for group in tails:  # the repeated rows of a group have equal results
        part_out, part_lse = attend_group(q, kv_layer, group, scale, attend)
        out.index_copy_(0, group.rows, part_out)
        lse.index_copy_(0, group.rows, part_lse)
    for group in shared_groups:
        part_out, part_lse = attend_group(q, kv_layer, group, scale, attend)
        own_out, own_lse = out.index_select(0, group.rows), lse.index_select(0, group.rows)
        weight = torch.sigmoid(part_lse - own_lse).unsqueeze(-1)
        out.index_copy_(0, group.rows, own_out.lerp_(part_out, weight))
        lse.index_copy_(0, group.rows, torch.logaddexp(own_lse, part_lse))
    return out, lse


def attend_group(
    q: Tensor, kv_layer: Tensor, group: ChunkGroup, scale: float, attend: Attend
) -> tuple[Tensor, Tensor]:
    """Attends from each of N chunks of L rows to its slots. All rows of the query heads that share a KV head
    are the queries of one product, which reads K and V once.

    Args:
        q: [rows, heads, head_dim] the queries of all groups.
        kv_layer: The layer's part of the KV pool.
        group: The chunks.
        scale: Of the scores.
        attend: The attention of dense tensors, as ``attend``.

    Returns:
        float32 [N * L, heads, head_dim], and the log-sum-exp of the scores, [N * L, heads].
    """
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
    """Returns the keys and values of some slots. Converts 8-bit floats to ``dtype``."""
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
    if mask is None:
        mask = mask_of_few(q, k.shape[2])
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, attn_mask=mask, scale=scale
    )
    return out, lse


def mask_of_few(q: Tensor, num_keys: int) -> Tensor | None:
    """Returns a mask that hides none of a few keys, to be added to the scores; None for more keys or on a
    GPU. Without a mask, torch's attention on CPUs takes the keys for hidden if no score is a number, and
    returns zeros: it drops NaN from the maximum of fewer scores than a vector has."""
    return q.new_zeros(1, 1, 1, num_keys) if num_keys < 16 and q.device.type == "cpu" else None


def attend_dense(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, cap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Like ``attend``, in plain tensor algebra, with all scores in memory as float32. With a ``cap``, a score
    is ``cap * tanh(score / cap)``."""
    scores = torch.matmul(q, k.transpose(-1, -2)).float() * scale
    if cap:
        scores = scores.div_(cap).tanh_().mul_(cap)
    if mask is not None:
        scores += mask
    lse = scores.logsumexp(dim=-1)
    weights = scores.sub_(lse.unsqueeze(-1)).exp_()
    return torch.matmul(weights.to(v.dtype), v), lse
