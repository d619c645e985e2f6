"""Paged attention by groups for layers with a sliding window, capped scores or sinks, on any device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from agentflow.kernels.attention.backend import AttentionRule
from agentflow.kernels.attention.group_attention import attend_dense, attend_group
from agentflow.kernels.attention.groups import ChunkGroup


def masked_attention(
    q: Tensor, kv_layer: Tensor, plan: Sequence[ChunkGroup], rule: AttentionRule, sinks: Tensor | None = None
) -> Tensor:
    """Like ``AttentionBackend.attend``, with the plan for the rule's window (``MaskedPlans``)."""

    def attend(
        queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        return attend_dense(queries.float(), keys.float(), values.float(), mask, scale, rule.cap)

    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    for group in plan:
        part, lse = attend_group(q, kv_layer, group, rule.scale, attend)
        if sinks is not None:
            part = part * torch.sigmoid(lse - sinks.float()).unsqueeze(-1)
        out.index_copy_(0, group.rows, part.to(q.dtype))
    return out.flatten(1)
