"""Attention written for clarity: one row and one head at a time."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from agentflow.kernels.attention.backend import AttentionBackend, AttentionRule
from agentflow.kernels.inputs import AttentionBatch, IntArray


class ReferenceAttention(AttentionBackend):
    """``AttentionBackend`` for tests: the definition of each function."""

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
        out = torch.empty_like(q)
        for row, (slots, last) in enumerate(_seen(plan)):
            first = max(0, last + 1 - rule.window) if rule.window else 0
            out[row] = _attend_row(q[row], kv_layer[torch.from_numpy(slots[first:])], rule, sinks)
        return out.flatten(1)

    def attend_segments(self, q: Tensor, kv: Tensor, starts: IntArray, first: int, scale: float) -> Tensor:
        out = torch.empty_like(q)
        for row in range(len(q)):
            segment = int(np.searchsorted(starts, first + row, side="right")) - 1
            seen = kv[starts[segment] : starts[segment + 1]]
            out[row] = _attend_row(q[row], seen, AttentionRule(scale), None)
        return out.flatten(1)


def _seen(batch: AttentionBatch) -> list[tuple[IntArray, int]]:
    """Returns for each row the slots to which it attends without a window, in the order of their positions,
    and its own position."""
    seen: list[tuple[IntArray, int]] = []
    both_ways = [False] * len(batch.req_rows) if batch.both_ways is None else batch.both_ways.tolist()
    for req_row, query_len, kv_len, sees_all in zip(
        batch.req_rows, batch.query_lens.tolist(), batch.kv_lens.tolist(), both_ways, strict=True
    ):
        slots = batch.req_to_token[req_row, :kv_len].astype(np.int64)
        for position in range(kv_len - query_len, kv_len):
            seen.append((slots if sees_all else slots[: position + 1], position))
    if (trees := batch.trees) is not None:
        row = 0
        for req_row, prefix_len, num_rows in zip(
            trees.req_rows, trees.prefix_lens.tolist(), trees.query_lens.tolist(), strict=True
        ):
            prefix = batch.req_to_token[req_row, :prefix_len]
            for _ in range(num_rows):
                path = trees.paths[row, : trees.path_lens[row]]
                slots = np.concatenate((prefix, path), dtype=np.int64)
                seen.append((slots, len(slots) - 1))
                row += 1
    return seen


def _attend_row(q: Tensor, kv: Tensor, rule: AttentionRule, sinks: Tensor | None) -> Tensor:
    """Attends from one row, q [heads, head_dim], to kv [seen, 2, kv_heads, head_dim]."""
    group = q.shape[0] // kv.shape[2]
    out = torch.empty_like(q)
    for head in range(q.shape[0]):
        keys, values = kv[:, 0, head // group].float(), kv[:, 1, head // group].float()
        scores = keys @ q[head].float() * rule.scale
        if rule.cap:
            scores = rule.cap * torch.tanh(scores / rule.cap)
        highest = scores.max()
        weights = torch.exp(scores - highest)
        total = weights.sum()
        if sinks is not None:
            total = total + torch.exp(sinks[head].float() - highest)
        out[head] = (weights @ values / total).to(q.dtype)
    return out
