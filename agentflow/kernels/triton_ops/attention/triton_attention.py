"""Attention on a GPU: by units of work, or by torch if the units cannot express it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from agentflow.kernels.attention.backend import AttentionBackend, AttentionRule
from agentflow.kernels.attention.groups import MaskedPlans
from agentflow.kernels.attention.masked_attention import masked_attention
from agentflow.kernels.inputs import MAX_HEAD_DIM, AttentionBatch
from agentflow.kernels.triton_ops.attention.device_plan import TritonGraphPlans, TritonPlan
from agentflow.kernels.triton_ops.attention.paged_attention import attend
from agentflow.kernels.triton_ops.attention.units import find_groups


class TritonAttention(AttentionBackend):
    """``AttentionBackend`` of the Triton kernels."""

    def plan(self, batch: AttentionBatch, dtype: torch.dtype, device: torch.device) -> TritonPlan:
        table, rows, groups = batch.req_to_token, batch.req_rows, find_groups(batch)
        masked = MaskedPlans(batch, device)
        return TritonPlan(
            *(table, rows, batch.query_lens, batch.kv_lens, batch.trees, groups, device, {}, masked),
            both_ways=batch.both_ways,
            shared=batch.shared,
            device_table=batch.device_table,
        )

    def graph_plans(
        self,
        num_rows: Sequence[int],
        num_heads: int,
        num_kv_heads: int,
        device: torch.device,
        windows: Sequence[int] = (0,),
    ) -> TritonGraphPlans:
        return TritonGraphPlans(num_rows, num_heads, num_kv_heads, device, windows)

    def attend(
        self, q: Tensor, kv_layer: Tensor, plan: TritonPlan, rule: AttentionRule, sinks: Tensor | None = None
    ) -> Tensor:
        num_heads, num_kv_heads, window = q.shape[1], kv_layer.shape[2], rule.window
        is_deep = window > 0 and plan.trees is not None and int(plan.trees.path_lens.max()) > window
        # Units have no depths for the keys of a tree, and no rows that attend to later keys.
        if is_deep or q.shape[2] > MAX_HEAD_DIM or plan.both_ways is not None:
            return masked_attention(q, kv_layer, plan.masked.of(window), rule, sinks)
        if q.stride(2) != 1:
            q = q.contiguous()
        return attend(q, kv_layer, plan.units(num_heads, num_kv_heads, window), rule.scale, rule.cap, sinks)
