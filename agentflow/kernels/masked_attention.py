"""Paged attention for layers with a sliding window, capped scores or sinks, which the other kernels lack.

With a *window* of W, a row sees the last W tokens, itself included (Mistral, arXiv 2310.06825). *Capped*
scores are ``cap * tanh(score / cap)`` (Gemma 2, arXiv 2408.00118). A *sink* is a score without a value, one
for each head, that takes a part of the softmax (GPT-OSS).

The rows of decoding requests are padded to one group; every other request, and every tree, is a separate
group with a mask. Keys that no row of a group sees are not gathered. Runs on every device, with all scores of
a group in memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from agentflow.kernels.inputs import AttentionBatch, IntArray, tree_block


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """The features of a layer's attention beyond causality."""

    scale: float  # of the scores
    window: int = 0  # the number of tokens that a row sees, itself included; 0: all
    cap: float = 0.0  # of the scores; 0: none


@dataclass(frozen=True, slots=True)
class _Group:
    """N requests with L rows each over K slots."""

    num_requests: int  # N
    rows: Tensor  # [N * L]
    slots: Tensor  # [N * K]
    hidden: Tensor  # [N, 1, L, K]: true for keys that a row does not see


@dataclass(frozen=True, slots=True)
class MaskedPlan:
    """The groups of a batch under one window."""

    groups: Sequence[_Group]


def plan_masked(batch: AttentionBatch, window: int, device: torch.device) -> MaskedPlan:
    """Decides which keys each row sees, once for all layers with this window. ``window``: in tokens; 0: no
    limit."""
    first_rows = np.cumsum(batch.query_lens) - batch.query_lens
    is_single = batch.query_lens == 1
    groups = []
    if is_single.any():
        groups.append(_decode_group(batch, np.flatnonzero(is_single), first_rows[is_single], window))
    groups += [
        _chunk_group(batch, int(r), int(first_rows[r]), window) for r in np.flatnonzero(batch.query_lens > 1)
    ]
    groups += _tree_groups(batch, int(batch.query_lens.sum()), window)
    return MaskedPlan([_on_device(*group, device) for group in groups])


class MaskedPlans:
    """The plans of one forward pass, made once for each window."""

    def __init__(self, batch: AttentionBatch, device: torch.device) -> None:
        self._batch = batch
        self._device = device
        self._plans: dict[int, MaskedPlan] = {}

    def of(self, window: int) -> MaskedPlan:
        """The plan for this window."""
        if window not in self._plans:
            self._plans[window] = plan_masked(self._batch, window, self._device)
        return self._plans[window]


_Parts = tuple[int, IntArray, IntArray, np.ndarray[tuple[int, ...], np.dtype[np.bool_]]]


def _on_device(
    num_requests: int,
    rows: IntArray,
    slots: IntArray,
    hidden: np.ndarray[tuple[int, ...], np.dtype[np.bool_]],
    device: torch.device,
) -> _Group:
    return _Group(
        num_requests,
        torch.from_numpy(rows).to(device),
        torch.from_numpy(slots).to(device),
        torch.from_numpy(hidden).to(device).unsqueeze(1),
    )


def _decode_group(batch: AttentionBatch, requests: IntArray, rows: IntArray, window: int) -> _Parts:
    ends = batch.kv_lens[requests]
    begins = np.maximum(ends - window, 0) if window else np.zeros_like(ends)
    # A shorter request repeats its last slot: a slot of another request may never have been written.
    columns = np.minimum(begins[:, None] + np.arange(int((ends - begins).max())), ends[:, None] - 1)
    hidden = np.arange(columns.shape[1]) >= (ends - begins)[:, None]
    slots = batch.req_to_token[batch.req_rows[requests, None], columns].astype(np.int64)
    return len(requests), rows.astype(np.int64), slots.reshape(-1), hidden[:, None]


def _chunk_group(batch: AttentionBatch, request: int, first_row: int, window: int) -> _Parts:
    length, end = int(batch.query_lens[request]), int(batch.kv_lens[request])
    begin = max(end - length - window + 1, 0) if window else 0
    slots = batch.req_to_token[batch.req_rows[request], begin:end].astype(np.int64)
    own, seen = np.arange(end - length, end)[:, None], np.arange(begin, end)
    hidden = seen > own
    if window:
        hidden |= seen <= own - window
    return 1, np.arange(first_row, first_row + length), slots, hidden[None]


def _tree_groups(batch: AttentionBatch, first_row: int, window: int) -> list[_Parts]:
    trees = batch.trees
    groups: list[_Parts] = []
    if trees is None:
        return groups
    first = 0
    for req_row, prefix_len, length in zip(
        trees.req_rows.tolist(), trees.prefix_lens.tolist(), trees.query_lens.tolist(), strict=True
    ):
        rows = slice(first, first + length)
        depths = trees.path_lens[rows]
        head = batch.req_to_token[req_row, :prefix_len]
        slots, visible = tree_block(head, trees.paths[rows], 0)
        if window:
            # A column is a position, in the prefix and in the paths after it.
            columns = np.minimum(np.arange(trees.paths.shape[1]), depths[:, None] - 1)
            position_of = np.zeros(int(slots.max()) + 1, dtype=np.int64)
            position_of[trees.paths[rows]] = prefix_len + columns
            position = np.arange(len(slots))
            position[prefix_len:] = position_of[slots[prefix_len:]]
            own = prefix_len + depths - 1
            visible &= position > own[:, None] - window
        groups.append(
            (
                1,
                np.arange(first_row + first, first_row + first + length),
                slots.astype(np.int64),
                ~visible[None],
            )
        )
        first += length
    return groups


def masked_attention(
    q: Tensor, kv_layer: Tensor, plan: MaskedPlan, rule: AttentionRule, sinks: Tensor | None = None
) -> Tensor:
    """As ``Kernels.attention``, under a rule.

    Args:
        q: the queries, [T, heads, head_dim].
        kv_layer: one layer of the KV pool, [slots, 2, kv_heads, head_dim].
        plan: the plan for the rule's window.
        rule: the scale, the window and the cap.
        sinks: the score of each head's sink, [heads].
    """
    _, num_heads, head_dim = q.shape
    num_kv_heads = kv_layer.shape[2]
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    for group in plan.groups:
        n = group.num_requests
        queries = q.index_select(0, group.rows).view(n, -1, num_kv_heads, num_heads // num_kv_heads, head_dim)
        queries = queries.permute(0, 2, 3, 1, 4).float()
        kv = kv_layer.index_select(0, group.slots).view(n, -1, 2, num_kv_heads, head_dim).float()
        keys, values = kv[:, :, 0].permute(0, 2, 3, 1), kv[:, :, 1].transpose(1, 2)
        scores = torch.matmul(queries, keys.unsqueeze(2)).mul_(rule.scale)
        if rule.cap:
            scores = scores.div_(rule.cap).tanh_().mul_(rule.cap)
        scores.masked_fill_(group.hidden.unsqueeze(1), -math.inf)
        if sinks is None:
            weights = scores.softmax(dim=-1)
        else:
            sink = sinks.float().view(1, num_kv_heads, -1, 1, 1).expand(*scores.shape[:-1], 1)
            weights = torch.cat((scores, sink), dim=-1).softmax(dim=-1)[..., :-1]
        # [n, kv_heads, group, rows, head_dim]
        attended = torch.matmul(weights, values.unsqueeze(2)).permute(0, 3, 1, 2, 4)
        out.index_copy_(0, group.rows, attended.reshape(-1, num_heads, head_dim).to(q.dtype))
    return out.flatten(1)
