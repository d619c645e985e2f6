"""Attention in torch operations, on every device."""

from __future__ import annotations

import torch
from torch import Tensor

from agentflow.kernels.attention.backend import AttentionBackend, AttentionRule
from agentflow.kernels.attention.group_attention import attend, attend_groups
from agentflow.kernels.attention.groups import AttentionPlan, plan_groups
from agentflow.kernels.attention.masked_attention import masked_attention
from agentflow.kernels.inputs import AttentionBatch


class TorchAttention(AttentionBackend):
    """``AttentionBackend`` in torch operations."""

    def plan(self, batch: AttentionBatch, dtype: torch.dtype, device: torch.device) -> AttentionPlan:
        return plan_groups(batch, dtype, device)

    def attend(
        self,
        q: Tensor,
        kv_layer: Tensor,
        plan: AttentionPlan,
        rule: AttentionRule,
        sinks: Tensor | None = None,
    ) -> Tensor:
        if rule.window or rule.cap or sinks is not None:
            return masked_attention(q, kv_layer, plan.masked.of(rule.window), rule, sinks)
        out, _ = attend_groups(q, kv_layer, plan.tails, plan.shared_groups, rule.scale, attend)
        return out.to(q.dtype).flatten(1)
