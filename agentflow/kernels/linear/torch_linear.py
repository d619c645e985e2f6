"""Products with dense weights in torch operations, on any device."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from agentflow.kernels.activations import Activation, activated
from agentflow.kernels.inputs import LinearWeight, LowRank
from agentflow.kernels.linear.method import LinearMethod
from agentflow.kernels.native_library import cpu_flags


@functools.cache
def _multiplies_bfloat16() -> bool:
    """Whether the CPU has bfloat16 products (x86: AVX-512 BF16 or AMX). Without them, torch's products of
    several rows in bfloat16 take up to 10 times as long as in float32."""
    return not cpu_flags().isdisjoint(("avx512_bf16", "amx_bf16", "bf16"))


class TorchLinear(LinearMethod):
    """``LinearMethod`` in torch operations."""

    def pack(
        self, weight: Tensor, bias: Tensor | None, *, exact_output: bool = False, gated: bool = False
    ) -> LinearWeight:
        shape = (weight.shape[0], weight.shape[1])
        if exact_output and weight.device.type == "cpu":  # a CPU's products have the dtype of their operands
            weight = weight.float()
        return LinearWeight(weight.t(), None, bias, shape, is_gated=gated)

    def pack_embedding(self, weight: Tensor, head: LinearWeight | None) -> LinearWeight:
        return LinearWeight(weight.t(), None, None, (weight.shape[0], weight.shape[1]))

    def embed(self, token_ids: Tensor, weight: LinearWeight, dtype: torch.dtype) -> Tensor:
        assert weight.transposed is not None
        return torch.nn.functional.embedding(token_ids, weight.transposed.t()).to(dtype)

    def multiply(
        self,
        x: Tensor,
        weight: LinearWeight,
        added: Tensor | None = None,
        *,
        activation: Activation | None = None,
    ) -> Tensor:
        assert weight.transposed is not None
        if x.device.type == "cpu" and len(x) > 8 and x.dtype == torch.bfloat16 and not _multiplies_bfloat16():
            product = self.multiply_exactly(x, weight).to(x.dtype)
        else:
            product = torch.nn.functional.linear(x, weight.transposed.t(), weight.bias)
        product = product if added is None else product.add_(added)
        return product if activation is None else activated(product, activation, is_gated=weight.is_gated)

    def multiply_exactly(self, x: Tensor, weight: LinearWeight) -> Tensor:
        assert weight.transposed is not None
        if x.is_cuda and x.dtype != torch.float32:
            product = torch.mm(x, weight.transposed, out_dtype=torch.float32)  # GPUs add in float32 anyway
        else:
            product = torch.mm(x.float(), weight.transposed.float())
        return product if weight.bias is None else product.add_(weight.bias)

    def low_rank(self, x: Tensor, num_out: int, changes: Sequence[tuple[LowRank, Tensor]]) -> Tensor:
        added = x.new_zeros(len(x), num_out)
        for change, rows in changes:
            inner = self.multiply(x.index_select(0, rows), change.down)
            ranks = [part.up.shape[1] for part in change.parts]
            for part, own in zip(change.parts, torch.split(inner, ranks, dim=1), strict=True):
                outputs = slice(part.first_output, part.first_output + part.up.shape[0])
                added[:, outputs].index_copy_(0, rows, self.multiply(own, part.up))
        return added
