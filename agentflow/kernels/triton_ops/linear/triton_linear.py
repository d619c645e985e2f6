"""Products on a GPU: one row with a dense weight, or any rows with quantised weights. torch computes other
products."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from agentflow.kernels.activations import Activation, activated
from agentflow.kernels.decoder_weights import Experts
from agentflow.kernels.inputs import BlockMatrix, LinearWeight
from agentflow.kernels.linear.grouped import GroupedAdapters, Mixture
from agentflow.kernels.linear.torch_linear import TorchLinear
from agentflow.kernels.triton_ops.linear import fp8, low_rank, mixture
from agentflow.kernels.triton_ops.linear.one_row import is_one_row, multiply_row
from agentflow.kernels.triton_ops.linear.quantised import BLOCK_TYPES, dequantised_rows, multiply, pack_blocks
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
        if weight.is_gated and activation == "silu" and is_one_row(x, weight):
            return multiply_row(x, weight, x.dtype, added, is_gated=True)
        return _activated(self._product(x, weight, added), weight, activation)

    def _product(self, x: Tensor, weight: LinearWeight, added: Tensor | None) -> Tensor:
        if is_one_row(x, weight):
            return multiply_row(x, weight, x.dtype, added)
        if weight.transposed is None:
            return multiply(x, weight, x.dtype, added)
        return super().multiply(x, weight, added)

    def multiply_exactly(self, x: Tensor, weight: LinearWeight) -> Tensor:
        if weight.transposed is None:
            return multiply(x, weight, torch.float32)
        if is_one_row(x, weight):
            return multiply_row(x, weight, torch.float32)
        return super().multiply_exactly(x, weight)

    def adapter_table(
        self, num_layers: int, dtype: torch.dtype, device: torch.device
    ) -> low_rank.AdapterTable:
        return low_rank.AdapterTable(num_layers, dtype, device)

    def multiply_adapted(
        self,
        x: Tensor,
        weight: LinearWeight,
        adapters: GroupedAdapters,
        layer: int,
        product_name: str,
        *,
        activation: Activation | None = None,
    ) -> Tensor:
        assert isinstance(adapters, low_rank.GroupedAdapters)
        product = self._product(x, weight, None)
        adapters.add(product, x, layer, product_name)
        return _activated(product, weight, activation)

    def group_experts(self, experts: Experts, activation: Activation) -> Mixture | None:
        return mixture.group_experts(experts, activation)


def _activated(product: Tensor, weight: LinearWeight, activation: Activation | None) -> Tensor:
    if activation is None:
        return product
    if weight.is_gated and activation == "silu":
        return silu_and_multiply(product)
    return activated(product, activation, is_gated=weight.is_gated)
