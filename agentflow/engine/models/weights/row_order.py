"""The order of the rows of queries, keys and values, for families whose files order them differently from
the forward pass.

The forward pass reads all queries, then all keys, then all values. It rotates row ``i`` of a head together
with row ``i + n / 2``, if ``n`` rows rotate. Attention scores do not depend on the order of the rows within a
head, as long as queries and keys have the same order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from agentflow.engine.models.config import DecoderConfig
from agentflow.engine.models.families.family import WeightNames


def qkv_order(config: DecoderConfig, names: WeightNames) -> Tensor | None:
    """Returns the place in the files of each row of the forward pass, counted over all tensors of
    ``names.qkv``. Rows stay within their tensor. None if the order is the same."""
    num_heads, num_kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
    if not (names.is_fused_by_head or names.has_pairs):
        return None
    rows = torch.arange((num_heads + 2 * num_kv_heads) * head_dim).view(-1, head_dim)
    if names.is_fused_by_head:
        groups = rows.view(num_kv_heads, -1, head_dim)
        rows = torch.cat((groups[:, :-2].flatten(0, 1), groups[:, -2], groups[:, -1]))
    if names.has_pairs:
        turned = rows[: num_heads + num_kv_heads].index_select(1, pair_order(config))
        rows = torch.cat((turned, rows[num_heads + num_kv_heads :]))
    return rows.flatten()


def pair_order(config: DecoderConfig) -> Tensor:
    """Returns the place in the files of each row of a head, for files in which adjacent rows rotate
    together."""
    num_rotated = config.rope.num_rotated(config.head_dim)
    rows = torch.arange(config.head_dim)
    return torch.cat((rows[:num_rotated:2], rows[1:num_rotated:2], rows[num_rotated:]))
