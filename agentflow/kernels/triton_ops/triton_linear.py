"""Products on a GPU: of one row with a dense weight, of any rows with quantised ones; other products are
torch's."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from agentflow.kernels.activations import Activation, activated
from agentflow.kernels.inputs import BlockMatrix, LinearWeight
from agentflow.kernels.linear.torch_linear import TorchLinear
from agentflow.kernels.triton_ops import fp8
from agentflow.kernels.triton_ops.one_row import is_one_row, multiply_row
from agentflow.kernels.triton_ops.quantised import BLOCK_TYPES, dequantised_rows, multiply, pack_blocks
from agentflow.kernels.triton_ops.triton_rows import silu_and_multiply


class TritonLinear(TorchLinear):
    """``LinearMethod`` of the Triton kernels."""

    block_types = BLOCK_TYPES

    def has_fp8(self, device: torch.device) -> bool:
        return fp8.has_fp8(device)

    def pack_blocks(
        self,
        parts: Sequence[BlockMatrix],
        bias: Tensor | None,
        *,
        gated: bool = False,
        device: torch.device | None = None,
    ) -> LinearWeight | None:
        return pack_blocks(parts, bias, gated=gated, device=device or torch.device("cpu"))

    def embed(self, token_ids: Tensor, weight: LinearWeight, dtype: torch.dtype) -> Tensor:
        if weight.transposed is not None:
            return super().embed(token_ids, weight, dtype)
        [part] = weight.quantised
        return dequantised_rows(part, weight.shape[1], token_ids, dtype)

    def multiply(
        self,
        x: Tensor,
        weight: LinearWeight,
        added: Tensor | None = None,
        *,
        activation: Activation | None = None,
    ) -> Tensor:
        has_silu_gate = weight.is_gated and activation == "silu"
        if is_one_row(x, weight):
            product = multiply_row(x, weight, x.dtype, added, is_gated=has_silu_gate)
            if has_silu_gate:
                return product
        elif weight.transposed is None:
            product = multiply(x, weight, x.dtype, added)
        else:
            product = super().multiply(x, weight, added)
        if has_silu_gate:
            return silu_and_multiply(product)
        return product if activation is None else activated(product, activation, is_gated=weight.is_gated)

    def multiply_exactly(self, x: Tensor, weight: LinearWeight) -> Tensor:
        if weight.transposed is None:
            return multiply(x, weight, torch.float32)
        if is_one_row(x, weight):
            return multiply_row(x, weight, torch.float32)
        return super().multiply_exactly(x, weight)
