"""Products written for clarity, in float32 and row by row."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from agentflow.kernels.activations import Activation, activated
from agentflow.kernels.decoder_weights import Experts
from agentflow.kernels.inputs import LinearWeight, LowRank
from agentflow.kernels.linear.grouped import Mixture
from agentflow.kernels.linear.routing import routed
from agentflow.kernels.linear.torch_linear import TorchLinear


class ReferenceLinear(TorchLinear):
    """``LinearMethod`` for tests: the definition of each product."""

    def pack(
        self, weight: Tensor, bias: Tensor | None, *, exact_output: bool = False, gated: bool = False
    ) -> LinearWeight:
        return LinearWeight(weight.t(), None, bias, (weight.shape[0], weight.shape[1]), is_gated=gated)

    def multiply(
        self,
        x: Tensor,
        weight: LinearWeight,
        added: Tensor | None = None,
        *,
        activation: Activation | None = None,
    ) -> Tensor:
        product = self.multiply_exactly(x, weight).to(x.dtype)
        if added is not None:
            product = product + added
        if activation is None:
            return product
        if activation != "silu" or not weight.is_gated:
            return activated(product, activation, is_gated=weight.is_gated)
        gate, up = product.chunk(2, dim=-1)
        silu = (gate.float() / (1 + torch.exp(-gate.float()))).to(gate.dtype)
        return silu * up

    def multiply_exactly(self, x: Tensor, weight: LinearWeight) -> Tensor:
        assert weight.transposed is not None
        product = x.float() @ weight.transposed.float()
        return product if weight.bias is None else product + weight.bias.float()

    def low_rank(self, x: Tensor, num_out: int, changes: Sequence[tuple[LowRank, Tensor]]) -> Tensor:
        added = torch.zeros(len(x), num_out, dtype=x.dtype)
        for change, rows in changes:
            for row in rows.tolist():
                inner = self.multiply(x[row : row + 1], change.down)
                for part in change.parts:
                    num_outputs, rank = part.up.shape
                    end = part.first_output + num_outputs
                    added[row, part.first_output : end] = self.multiply(inner[:, :rank], part.up)[0]
                    inner = inner[:, rank:]
        return added

    def group_experts(self, experts: Experts, activation: Activation) -> Mixture:
        def mixture(
            x: Tensor, scores: Tensor, added: Tensor | None = None, slots: Tensor | None = None
        ) -> Tensor:
            weights, chosen = routed(scores, experts.routing)
            total = torch.zeros(x.shape) if added is None else added.to(torch.float32, copy=True)
            for row in range(len(x)):
                if slots is not None and slots[row] < 0:
                    continue
                for weight, number in zip(weights[row].tolist(), chosen[row].tolist(), strict=True):
                    expert = experts.experts[number]
                    inner = self.multiply(x[row : row + 1], expert.gate_up, activation=activation)
                    total[row] += weight * self.multiply(inner, expert.down)[0].float()
            return total.to(x.dtype)

        return mixture
