"""Paged attention by groups for layers with a sliding window, capped scores or sinks, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from agentflow.kernels.attention.backend import AttentionRule
from agentflow.kernels.attention.group_attention import attend_dense, attend_groups
from agentflow.kernels.attention.groups import RowGroups


def masked_attention(
    q: Tensor, kv_layer: Tensor, plan: RowGroups, rule: AttentionRule, sinks: Tensor | None = None
) -> Tensor:
    """Like ``AttentionBackend.attend``, with the plan for the rule's window (``MaskedPlans``)."""

    def attend(
        queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        return attend_dense(queries.float(), keys.float(), values.float(), mask, scale, rule.cap)

    out, lse = attend_groups(q, kv_layer, *plan, rule.scale, attend)
    if sinks is not None:
        out *= torch.sigmoid(lse - sinks.float()).unsqueeze(-1)
    return out.to(q.dtype).flatten(1)
