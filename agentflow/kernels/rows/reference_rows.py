"""Norms and rotary embeddings written for clarity."""

from __future__ import annotations

import torch
from torch import Tensor

from agentflow.kernels.rows.row_ops import RowOps


class ReferenceRows(RowOps):
    """``RowOps`` for tests: the definition of each function."""

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        wide = x.float()
        from_mean = wide - wide.mean(dim=-1, keepdim=True)
        normed = from_mean / torch.sqrt(from_mean.square().mean(dim=-1, keepdim=True) + eps)
        return (normed * weight.float() + bias.float()).to(x.dtype)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        normed = wide / torch.sqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
        return weight * normed.to(x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = residual + x
        return self.rms_norm(total, weight, eps), total

    def rope_and_write(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, kv_layer: Tensor, write_slots: Tensor
    ) -> Tensor:
        _, _, num_kv_heads, head_dim = kv_layer.shape
        num_heads = qkv.shape[1] - 2 * num_kv_heads
        turned, values = qkv[:, :-num_kv_heads], qkv[:, -num_kv_heads:]
        rotated = turned * cos + turned.roll(head_dim // 2, -1) * sin
        for row, slot in enumerate(write_slots.tolist()):
            kv_layer[slot, 0] = rotated[row, num_heads:]
            kv_layer[slot, 1] = values[row]
        return rotated[:, :num_heads]
