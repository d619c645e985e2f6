"""The kernels that a model's forward pass is made of, and the choice of an implementation.

Every implementation is a module with the functions of ``Kernels``: the same names, the same
signatures, tested against ``reference_ops``. The environment variable ``AGENTFLOW_KERNELS`` forces one.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from agentflow.kernels import native_ops, reference_ops
from agentflow.kernels import torch_ops as cpu_ops
from agentflow.kernels.inputs import (
    AttentionBatch,
    ChoiceRows,
    DecoderWeights,
    ForwardInput,
    IntArray,
    LinearWeight,
)
from agentflow.kernels.native_library import NoNativeKernels

logger = logging.getLogger(__name__)


class Forward(Protocol):
    """A whole model's forward pass, of which ``meanwhile`` is called once while another thread computes; it
    must not use kernels."""

    def hidden(self, given: ForwardInput, meanwhile: Callable[[], None]) -> Tensor:
        """Writes the KV of all rows. Of those that are wanted it gives the last hidden states, normed:
        [S, hidden_size]."""

    def tokens(self, given: ForwardInput, choice: ChoiceRows, meanwhile: Callable[[], None]) -> IntArray:
        """The same, but gives the tokens that ``Kernels.choose`` would choose of their logits: [S]."""


class Kernels(Protocol):
    """T is the number of rows of the batch. Tensors are in the model's dtype unless said otherwise.

    Rounding: sums and means are formed in float32. In bfloat16 each result named here is rounded
    where transformers' eager modules round it, so that both drift alike.
    """

    def pack_linear(
        self, weight: Tensor, bias: Tensor | None, *, exact_output: bool = False, gated: bool = False
    ) -> LinearWeight:
        """Lay out ``weight`` [out, in] for ``linear``; the caller should then drop it.
        ``exact_output``: for ``exact_linear`` instead. ``gated``: for ``gated_linear`` instead."""

    def linear(self, x: Tensor, weight: LinearWeight) -> Tensor:
        """[T, in] to [T, out]: x Wᵀ + b."""

    def exact_linear(self, x: Tensor, weight: LinearWeight) -> Tensor:
        """As ``linear``, but the result is float32, of at least 16 bits, and not rounded to x's dtype (the
        logits: in bfloat16 near-equal ones would tie)."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / sqrt(mean(x²) + eps) over the last dimension, rounded, times ``weight``
        (Zhang and Sennrich 2019, arXiv 1910.07467). x may be a strided view."""

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(rms_norm(x + residual), x + residual). ``residual`` may be overwritten."""

    def gated_linear(self, x: Tensor, weight: LinearWeight) -> Tensor:
        """[T, in] to [T, out / 2]: of x Wᵀ + b silu of the first half times the second (SwiGLU, arXiv
        2002.05202)."""

    def rope_and_write(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, kv_layer: Tensor, write_slots: Tensor
    ) -> Tensor:
        """Rotate queries and keys (RoPE, arXiv 2104.09864, halves as in transformers), and write
        keys and values to the pool.

        ``qkv`` [T, heads + 2 kv_heads, head_dim], may be overwritten. ``cos``, ``sin`` [T, 1,
        head_dim]; the first half of ``sin`` is negated. ``kv_layer`` [slots, 2, kv_heads,
        head_dim]: keys at 0, values at 1. ``write_slots`` [T] int64. Gives the rotated queries
        [T, heads, head_dim]."""

    def plan_attention(
        self, batch: AttentionBatch, dtype: torch.dtype, device: torch.device
    ) -> AttentionBatch:
        """How the attention of a batch is computed, decided once for all layers. ``dtype``: of queries."""

    def attention(self, q: Tensor, kv_layer: Tensor, plan: Any, scale: float) -> Tensor:
        """Paged causal attention of decode rows and prefill chunks alike, over what is cached and
        what was just written. ``q`` [T, heads, head_dim] gives [T, heads * head_dim]. ``plan``: of this
        implementation's ``plan_attention``. Slots that its requests do not hold may contain anything, NaN
        included."""

    def choose(self, logits: Tensor, rows: ChoiceRows) -> IntArray:
        """One token per row of ``logits`` [S, vocabulary] float32. Rows with a target keep it. Of the others,
        temperature 0 takes the likeliest token that the mask allows, the first of equals; the rest are drawn.

        In this order: divide by the temperature; keep the ``top_k`` likeliest; of these the fewest likeliest
        that together reach ``top_p``; of these the ones at least ``min_p`` times as likely as the likeliest.
        Tokens as likely as the last one kept are kept too. Then the inverse of the cumulative distribution,
        in order of token ids, at ``uniforms``."""

    def whole_forward(self, weights: DecoderWeights, head: LinearWeight) -> Forward | None:
        """All layers in one call, where this implementation has that; None: the functions above, one by
        one. ``head``: what ``exact_linear`` makes logits with."""


def kernels_for(device: torch.device) -> Kernels:
    """The implementation for a device: the one that ``AGENTFLOW_KERNELS`` names, or else on a CPU the native
    one where it can be had. ValueError for an unknown name, and where what is named cannot be had."""
    name = os.environ.get("AGENTFLOW_KERNELS", "")
    if name == "reference":
        return reference_ops
    if name == "torch" or (not name and device.type != "cpu"):
        return cpu_ops
    if name not in ("", "native"):
        raise ValueError(
            f"AGENTFLOW_KERNELS is {name!r} on {device}: it must be 'native', 'torch' or 'reference'"
        )
    if device.type != "cpu":
        raise ValueError(f"AGENTFLOW_KERNELS is 'native', which is for CPUs, and the device is {device}")
    return _native_kernels(is_wanted=name == "native")


def _native_kernels(is_wanted: bool) -> Kernels:
    try:
        native_ops.library()
    except NoNativeKernels as error:
        if is_wanted:
            raise ValueError(f"AGENTFLOW_KERNELS is 'native', but {error}") from error
        logger.warning("running on torch's kernels, which are slower: of the native ones, %s", error)
        return cpu_ops
    return native_ops
