"""The kernels in torch operations, for every device."""

from __future__ import annotations

import torch
from torch import Tensor

from agentflow.kernels.attention.torch_attention import TorchAttention
from agentflow.kernels.decoder_weights import DecoderWeights
from agentflow.kernels.inputs import LinearWeight
from agentflow.kernels.linear.torch_linear import TorchLinear
from agentflow.kernels.sampling.torch_sampler import TorchSampler


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return torch.nn.functional.layer_norm(x, weight.shape, weight, bias, eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.nn.functional.rms_norm(x, x.shape[-1:], eps=eps).mul_(weight)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = residual.add_(x)
    return rms_norm(total, weight, eps), total


def rope_and_write(qkv: Tensor, cos: Tensor, sin: Tensor, kv_layer: Tensor, write_slots: Tensor) -> Tensor:
    _, _, num_kv_heads, head_dim = kv_layer.shape
    num_heads = qkv.shape[1] - 2 * num_kv_heads
    rotated = qkv[:, : num_heads + num_kv_heads]
    swapped = rotated.roll(head_dim // 2, -1).mul_(sin)
    torch.add(rotated * cos, swapped, out=rotated)
    kv_layer.index_copy_(0, write_slots, qkv[:, num_heads:].view(-1, 2, num_kv_heads, head_dim))
    return qkv[:, :num_heads]


QUEUES_WORK = False
sampler = TorchSampler()
linear = TorchLinear()
attention = TorchAttention()


def whole_forward(weights: DecoderWeights, head: LinearWeight) -> None:
    return None
