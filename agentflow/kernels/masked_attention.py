"""Paged attention for layers with a sliding window, capped scores or sinks, which the other kernels lack.

With a *window* of W, a row sees the last W tokens, itself included (Mistral, arXiv 2310.06825). *Capped*
scores are ``cap * tanh(score / cap)`` (Gemma 2, arXiv 2408.00118). A *sink* is a score without a value, one
for each head, that takes a part of the softmax (GPT-OSS). Runs on every device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from agentflow.kernels.attention_plan import Group, plan_tails
from agentflow.kernels.inputs import AttentionBatch
from agentflow.kernels.torch_ops import attend_dense, attend_group


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """The features of a layer's attention beyond causality."""

    scale: float  # of the scores
    window: int = 0  # the number of tokens that a row sees, itself included; 0: all
    cap: float = 0.0  # of the scores; 0: none


class MaskedPlans:
    """The plans of one forward pass, made once for each window."""

    def __init__(self, batch: AttentionBatch, device: torch.device) -> None:
        self._batch = batch
        self._device = device
        self._plans: dict[int, Sequence[Group]] = {}

    def of(self, window: int) -> Sequence[Group]:
        """The plan for this window, in tokens; 0: no limit."""
        if window not in self._plans:
            num_trees = 0 if self._batch.trees is None else len(self._batch.trees.req_rows)
            starts = np.zeros(len(self._batch.req_rows) + num_trees, dtype=np.int64)
            self._plans[window] = plan_tails(self._batch, starts, torch.float32, self._device, window=window)
        return self._plans[window]


def masked_attention(
    q: Tensor, kv_layer: Tensor, plan: Sequence[Group], rule: AttentionRule, sinks: Tensor | None = None
) -> Tensor:
    """As ``Kernels.attention``, under a rule.

    Args:
        q: the queries, [T, heads, head_dim].
        kv_layer: one layer of the KV pool, [slots, 2, kv_heads, head_dim].
        plan: the plan for the rule's window.
        rule: the scale, the window and the cap.
        sinks: the score of each head's sink, [heads].
    """

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
