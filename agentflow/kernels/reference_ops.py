"""The kernels written for clarity, with plain loops; every faster implementation is tested against them.

``AGENTFLOW_KERNELS=reference`` runs a whole server on them.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from agentflow.kernels.decoder_weights import DecoderWeights
from agentflow.kernels.inputs import (
    AttentionBatch,
    IntArray,
    LinearWeight,
    ReqToToken,
    TreeAttention,
)
from agentflow.kernels.linear.reference_linear import ReferenceLinear
from agentflow.kernels.torch_ops import QUEUES_WORK as QUEUES_WORK
from agentflow.kernels.torch_ops import ruled_attention as ruled_attention
from agentflow.kernels.torch_ops import sampler as sampler
from agentflow.kernels.torch_ops import static_plans as static_plans


linear = ReferenceLinear()


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    wide = x.float()
    from_mean = wide - wide.mean(dim=-1, keepdim=True)
    normed = from_mean / torch.sqrt(from_mean.square().mean(dim=-1, keepdim=True) + eps)
    return (normed * weight.float() + bias.float()).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    normed = wide / torch.sqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = residual + x
    return rms_norm(total, weight, eps), total


def rope_and_write(qkv: Tensor, cos: Tensor, sin: Tensor, kv_layer: Tensor, write_slots: Tensor) -> Tensor:
    _, _, num_kv_heads, head_dim = kv_layer.shape
    num_heads = qkv.shape[1] - 2 * num_kv_heads
    turned, values = qkv[:, :-num_kv_heads], qkv[:, -num_kv_heads:]
    rotated = turned * cos + turned.roll(head_dim // 2, -1) * sin
    for row, slot in enumerate(write_slots.tolist()):
        kv_layer[slot, 0] = rotated[row, num_heads:]
        kv_layer[slot, 1] = values[row]
    return rotated[:, :num_heads]


def plan_attention(batch: AttentionBatch, dtype: torch.dtype, device: torch.device) -> AttentionBatch:
    return batch


def whole_forward(weights: DecoderWeights, head: LinearWeight) -> None:
    return None


def attention(q: Tensor, kv_layer: Tensor, plan: AttentionBatch, scale: float) -> Tensor:
    out = torch.empty_like(q)
    row = 0
    both_ways = [False] * len(plan.req_rows) if plan.both_ways is None else plan.both_ways.tolist()
    for req_row, query_len, kv_len, sees_all in zip(
        plan.req_rows, plan.query_lens, plan.kv_lens, both_ways, strict=True
    ):
        slots = torch.from_numpy(plan.req_to_token[req_row, :kv_len].copy()).to(q.device)
        seen = kv_layer[slots]
        for num_seen in range(int(kv_len - query_len) + 1, int(kv_len) + 1):
            out[row] = _attend(q[row], seen if sees_all else seen[:num_seen], scale)
            row += 1
    if plan.trees is not None:
        _attend_trees(out[row:], q[row:], kv_layer, plan.req_to_token, plan.trees, scale)
    return out.flatten(1)


def segment_attention(q: Tensor, kv: Tensor, starts: IntArray, first: int, scale: float) -> Tensor:
    out = torch.empty_like(q)
    for row in range(len(q)):
        segment = int(np.searchsorted(starts, first + row, side="right")) - 1
        out[row] = _attend(q[row], kv[starts[segment] : starts[segment + 1]], scale)
    return out.flatten(1)


def _attend_trees(
    out: Tensor, q: Tensor, kv_layer: Tensor, req_to_token: ReqToToken, trees: TreeAttention, scale: float
) -> None:
    row = 0
    for req_row, prefix_len, num_rows in zip(
        trees.req_rows, trees.prefix_lens, trees.query_lens, strict=True
    ):
        prefix = req_to_token[req_row, :prefix_len].tolist()
        for _ in range(int(num_rows)):
            slots = prefix + trees.paths[row, : trees.path_lens[row]].tolist()
            out[row] = _attend(q[row], kv_layer[slots], scale)
            row += 1


def _attend(q: Tensor, kv: Tensor, scale: float) -> Tensor:
    """Attends with one row, q [heads, head_dim], to kv [seen, 2, kv_heads, head_dim]."""
    group = q.shape[0] // kv.shape[2]
    out = torch.empty_like(q)
    for head in range(q.shape[0]):
        keys, values = kv[:, 0, head // group].float(), kv[:, 1, head // group].float()
        scores = keys @ q[head].float() * scale
        weights = torch.exp(scores - scores.max())
        out[head] = (weights @ values / weights.sum()).to(q.dtype)
    return out
