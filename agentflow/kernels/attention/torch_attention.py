"""Attention in torch operations, on every device."""

from __future__ import annotations

import torch
from torch import Tensor

from agentflow.kernels.attention.backend import AttentionBackend, AttentionRule
from agentflow.kernels.attention.group_attention import attend, attend_group
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
        out = q.new_empty(q.shape, dtype=torch.float32)
        lse = out.new_empty(q.shape[:2])
        for group in plan.tails:  # the repeated last row of a padded chunk has equal results
            part_out, part_lse = attend_group(q, kv_layer, group, rule.scale, attend)
            out.index_copy_(0, group.rows, part_out)
            lse.index_copy_(0, group.rows, part_lse)
        for group in plan.shared_groups:
            part_out, part_lse = attend_group(q, kv_layer, group, rule.scale, attend)
            own_out, own_lse = out.index_select(0, group.rows), lse.index_select(0, group.rows)
            weight = torch.sigmoid(part_lse - own_lse).unsqueeze(-1)
            out.index_copy_(0, group.rows, own_out.lerp_(part_out, weight))
            lse.index_copy_(0, group.rows, torch.logaddexp(own_lse, part_lse))
        return out.to(q.dtype).flatten(1)
