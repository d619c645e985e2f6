"""Attention within segments of rows, in torch operations, for encoders, which cache no KV."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from agentflow.kernels.attention.group_attention import mask_of_few
from agentflow.kernels.inputs import IntArray


def attend_segments(q: Tensor, kv: Tensor, starts: IntArray, first: int, scale: float) -> Tensor:
    """Like ``AttentionBackend.attend_segments``."""
    end = first + len(q)
    low = int(np.searchsorted(starts, first, side="right")) - 1
    high = int(np.searchsorted(starts, end, side="left"))
    begins, ends = starts[low:high], starts[low + 1 : high + 1]
    lengths = ends - begins
    if begins[0] == first and ends[-1] == end and (lengths == lengths[0]).all():
        return _equal_segments(q, kv[first:end], len(lengths), scale)
    parts = [
        _equal_segments(q[max(a - first, 0) : min(b, end) - first], kv[a:b], 1, scale)
        for a, b in zip(begins.tolist(), ends.tolist(), strict=True)
    ]
    return torch.cat(parts)


def _equal_segments(q: Tensor, kv: Tensor, num: int, scale: float) -> Tensor:
    _, num_heads, head_dim = q.shape
    keys, values = kv.view(num, -1, 2, num_heads, head_dim).permute(2, 0, 3, 1, 4)
    queries = q.reshape(num, -1, num_heads, head_dim).transpose(1, 2)
    mask = mask_of_few(queries, keys.shape[2])
    out = torch.nn.functional.scaled_dot_product_attention(queries, keys, values, mask, scale=scale)
    return out.transpose(1, 2).reshape(len(q), -1)
