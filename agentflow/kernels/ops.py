"""The kernels that a model's forward pass is made of, and the choice of an implementation.

Every implementation is a module with the functions of ``Kernels``: the same names, the same
signatures, tested against ``reference_ops``. The environment variable ``AGENTFLOW_KERNELS`` forces one.
"""

from __future__ import annotations

import os
from typing import Protocol

import torch
from torch import Tensor

from agentflow.kernels import cpu_ops, reference_ops
from agentflow.kernels.attention_parts import AttentionPlan
from agentflow.kernels.linear_weight import LinearWeight


class Kernels(Protocol):
    """T is the number of rows of the batch. Tensors are in the model's dtype unless said otherwise.

    Rounding: sums and means are formed in float32. In bfloat16 each result named here is rounded
    where transformers' eager modules round it, so that both drift alike.
    """

    def pack_linear(self, weight: Tensor, bias: Tensor | None, *, exact_output: bool = False) -> LinearWeight:
        """Lay out ``weight`` [out, in] for ``linear``; the caller should then drop it.
        ``exact_output``: for ``exact_linear`` instead."""

    def linear(self, x: Tensor, weight: LinearWeight) -> Tensor:
        """[T, in] to [T, out]: x Wᵀ + b."""

    def exact_linear(self, x: Tensor, weight: LinearWeight) -> Tensor:
        """As ``linear``, but the result is float32 and not rounded to x's dtype where the
        device's products allow it (the logits: in bfloat16 near-equal ones would tie)."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / sqrt(mean(x²) + eps) over the last dimension, rounded, times ``weight``
        (Zhang and Sennrich 2019, arXiv 1910.07467). x may be a strided view."""

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(rms_norm(x + residual), x + residual). ``residual`` may be overwritten."""

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """[T, 2 I] to [T, I]: silu of the first half times the second (SwiGLU, arXiv 2002.05202)."""

    def rope_and_write(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, kv_layer: Tensor, write_slots: Tensor
    ) -> Tensor:
        """Rotate queries and keys (RoPE, arXiv 2104.09864, halves as in transformers), and write
        keys and values to the pool.

        ``qkv`` [T, heads + 2 kv_heads, head_dim], may be overwritten. ``cos``, ``sin`` [T, 1,
        head_dim]; the first half of ``sin`` is negated. ``kv_layer`` [slots, 2, kv_heads,
        head_dim]: keys at 0, values at 1. ``write_slots`` [T] int64. Gives the rotated queries
        [T, heads, head_dim]."""

    def attention(self, q: Tensor, kv_layer: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
        """Paged causal attention of decode rows and prefill chunks alike, over what is cached and
        what was just written. ``q`` [T, heads, head_dim] gives [T, heads * head_dim]. Slots that
        the plan's requests do not hold may contain anything, NaN included."""


def kernels_for(device: torch.device) -> Kernels:
    """The implementation for a device. ValueError for an unknown name in ``AGENTFLOW_KERNELS``."""
    name = os.environ.get("AGENTFLOW_KERNELS", "torch")
    if name == "reference":
        return reference_ops
    if name == "torch":
        return cpu_ops
    raise ValueError(f"AGENTFLOW_KERNELS is {name!r} on {device}: it must be 'reference' or 'torch'")
