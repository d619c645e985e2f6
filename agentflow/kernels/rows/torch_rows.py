"""Norms and rotary embeddings in torch operations, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from agentflow.kernels.rows.row_ops import RowOps


class TorchRows(RowOps):
    """``RowOps`` in torch operations."""

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        return torch.nn.functional.layer_norm(x, weight.shape, weight, bias, eps)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return torch.nn.functional.rms_norm(x, x.shape[-1:], eps=eps).mul_(weight)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = residual.add_(x)
        return self.rms_norm(total, weight, eps), total

    def rope_and_write(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, kv_layer: Tensor, write_slots: Tensor
    ) -> Tensor:
        _, _, num_kv_heads, head_dim = kv_layer.shape
        num_heads = qkv.shape[1] - 2 * num_kv_heads
        rotated = qkv[:, : num_heads + num_kv_heads]
        swapped = rotated.roll(head_dim // 2, -1).mul_(sin)
        torch.add(rotated * cos, swapped, out=rotated)
        kv_layer.index_copy_(0, write_slots, qkv[:, num_heads:].view(-1, 2, num_kv_heads, head_dim))
        return qkv[:, :num_heads]
