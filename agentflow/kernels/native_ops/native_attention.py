"""Attention on the team's threads."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from agentflow.kernels.attention.backend import AttentionBackend, AttentionRule
from agentflow.kernels.inputs import AttentionBatch, IntArray
from agentflow.kernels.native_ops.structures import array_address, native_batch, pointer
from agentflow.kernels.native_ops.team import is_bf16, team


class NativeAttention(AttentionBackend):
    """``AttentionBackend`` of the native kernels, which plan a batch themselves."""

    def plan(self, batch: AttentionBatch, dtype: torch.dtype, device: torch.device) -> AttentionBatch:
        return batch

    def attend(
        self,
        q: Tensor,
        kv_layer: Tensor,
        plan: AttentionBatch,
        rule: AttentionRule,
        sinks: Tensor | None = None,
    ) -> Tensor:
        _, num_heads, head_dim = q.shape
        sinks = None if sinks is None else sinks.to(q.dtype)
        if q.stride()[1:] != (head_dim, 1):
            q = q.contiguous()
        out = q.new_empty(q.shape[0], num_heads * head_dim)
        team().af_attention(
            *(is_bf16(q), q.data_ptr(), q.stride(0), kv_layer.data_ptr(), native_batch(plan)),
            *(num_heads, kv_layer.shape[2], head_dim, rule.scale, rule.window, rule.cap),
            *(pointer(sinks), out.data_ptr()),
        )
        return out

    def attend_segments(self, q: Tensor, kv: Tensor, starts: IntArray, first: int, scale: float) -> Tensor:
        num_rows, num_heads, head_dim = q.shape
        q = _with_whole_rows(q)
        kv = _with_whole_rows(kv)
        starts = np.ascontiguousarray(starts, dtype=np.int64)
        out = q.new_empty(num_rows, num_heads * head_dim)
        team().af_segment_attention(
            *(is_bf16(q), q.data_ptr(), q.stride(0), kv.data_ptr(), kv.stride(0)),
            *(array_address(starts), len(starts) - 1, first, first + num_rows),
            *(num_heads, head_dim, scale, out.data_ptr()),
        )
        return out


def _with_whole_rows(x: Tensor) -> Tensor:
    """Returns x, or a copy of it, in which each x[i] is contiguous."""
    return x if x[:1].is_contiguous() else x.contiguous()
