"""Norms on the team's threads. Rotary embeddings use torch; ``NativeForward`` has separate ones."""

from __future__ import annotations

import torch
from torch import Tensor

from agentflow.kernels.native_ops.structures import pointer
from agentflow.kernels.native_ops.team import is_bf16, team
from agentflow.kernels.rows.torch_rows import TorchRows


class NativeRows(TorchRows):
    """``RowOps`` of the native kernels."""

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        return _norm(x, weight, bias, eps)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return _norm(x, weight, None, eps)


def _norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    out = torch.empty_like(rows, memory_format=torch.contiguous_format)
    team().af_norm(
        is_bf16(x),
        rows.data_ptr(),
        rows.shape[0],
        rows.stride(0),
        weight.data_ptr(),
        pointer(bias),
        rows.shape[1],
        eps,
        out.data_ptr(),
    )
    return out.view(x.shape)
