"""The interface of the kernels that make up a forward pass, and the choice of an implementation.

Each implementation is a module with the functions of ``Kernels``: ``reference_ops``, ``torch_ops``,
``native_ops`` and ``triton_ops``, all tested against the first. The environment variable
``AGENTFLOW_KERNELS`` forces one.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from agentflow.kernels import native_ops, reference_ops, torch_ops
from agentflow.kernels.attention.backend import AttentionBackend
from agentflow.kernels.decoder_weights import DecoderWeights
from agentflow.kernels.inputs import ChoiceRows, ForwardInput, IntArray, LinearWeight
from agentflow.kernels.linear.method import LinearMethod
from agentflow.kernels.native_library import NoNativeKernels
from agentflow.kernels.sampling.sampler import Sampler

logger = logging.getLogger(__name__)


class Forward(Protocol):
    """The forward pass of a whole model, in other threads. Both methods start it and return a function that
    waits for its end and returns the result. The function must be called before any other kernel."""

    keeps_order: bool  # a row's sums have the same order regardless of the rest of the batch
    nbytes: int  # of weights that it holds in its layout in addition to those of the decoder

    def start_hidden(self, given: ForwardInput) -> Callable[[], Tensor]:
        """Writes the KV of all rows. The result is the normed last hidden states of ``given.rows``, [S,
        hidden_size]."""

    def start_tokens(self, given: ForwardInput, choice: ChoiceRows) -> Callable[[], IntArray]:
        """The same, but the result is the tokens that ``Sampler.choose`` chooses from their logits, [S]."""


class Kernels(Protocol):
    """T is the number of rows of the batch, one per token to compute. Tensors have the model's dtype unless
    stated otherwise.

    Rounding: sums and means are computed in float32. In bfloat16, each result named here is rounded where
    transformers' eager modules round it, so that both accumulate the same error.
    """

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        """(x - mean(x)) / sqrt(variance(x) + eps) * ``weight`` + ``bias`` over the last dimension, rounded
        once (arXiv 1607.06450)."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / sqrt(mean(x²) + eps) over the last dimension, rounded, times ``weight``
        (Zhang and Sennrich 2019, arXiv 1910.07467). x may be a strided view."""

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(rms_norm(x + residual), x + residual). ``residual`` may be overwritten."""

    def rope_and_write(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, kv_layer: Tensor, write_slots: Tensor
    ) -> Tensor:
        """Rotates queries and keys (RoPE, arXiv 2104.09864, halves as in transformers), and writes
        keys and values to the pool.

        Args:
            qkv: [T, heads + 2 kv_heads, head_dim]; may be overwritten.
            cos: [T, 1, head_dim].
            sin: [T, 1, head_dim], its first half negated.
            kv_layer: [slots, 2, kv_heads, head_dim]: keys at 0, values at 1; also as 8-bit floats, where
                ``LinearMethod.has_fp8``.
            write_slots: [T] int64.

        Returns:
            the rotated queries [T, heads, head_dim].
        """

    @property
    def attention(self) -> AttentionBackend:
        """Plans and computes attention."""

    @property
    def linear(self) -> LinearMethod:
        """Packs weights, and multiplies with them."""

    @property
    def sampler(self) -> Sampler:
        """Chooses tokens from logits."""

    @property
    def QUEUES_WORK(self) -> bool:
        """Whether no function waits for a GPU: another step can be launched meanwhile."""

    def whole_forward(self, weights: DecoderWeights, head: LinearWeight) -> Forward | None:
        """Returns a forward pass of all layers in one call, or None if the implementation has none; then the
        functions above run one by one. ``head``: the weight with which ``multiply_exactly`` computes logits."""


NAMES = ("native", "triton", "torch", "reference")


def kernels_for(device: torch.device) -> Kernels:
    """Returns the implementation for a device: the one that ``AGENTFLOW_KERNELS`` selects; without it, the
    native one on a CPU and Triton's on a GPU if available, else torch's. Raises ``ValueError`` if the
    selected one is unknown or unavailable."""
    name = os.environ.get("AGENTFLOW_KERNELS", "")
    if name not in ("", *NAMES):
        raise ValueError(f"AGENTFLOW_KERNELS is {name!r}: it must be one of {', '.join(NAMES)}")
    if name == "reference":
        return reference_ops
    if name == "triton" or (not name and device.type == "cuda"):
        return _triton_kernels(device, is_required=name == "triton")
    if name == "torch" or (not name and device.type != "cpu"):
        return torch_ops
    if device.type != "cpu":
        raise ValueError(f"AGENTFLOW_KERNELS is 'native', which is for CPUs, and the device is {device}")
    return _native_kernels(is_required=name == "native")


def _triton_kernels(device: torch.device, is_required: bool) -> Kernels:
    try:
        from agentflow.kernels import triton_ops
    except ImportError as error:
        if is_required:
            raise ValueError(f"AGENTFLOW_KERNELS is 'triton', but it cannot be imported: {error}") from error
        logger.warning("using the slower torch kernels: triton cannot be imported: %s", error)
        return torch_ops
    if device.type == "cuda":
        try:
            triton_ops.check(device)
        except Exception as error:  # of Triton, its compiler, the C compiler or the driver
            if is_required:
                raise ValueError(f"AGENTFLOW_KERNELS is 'triton', but a kernel fails: {error}") from error
            logger.warning("using the slower torch kernels: a kernel of triton fails: %s", error)
            return torch_ops
    elif not triton_ops.IS_INTERPRETED:
        raise ValueError(
            f"AGENTFLOW_KERNELS is 'triton', which is for GPUs, and the device is {device} "
            "(TRITON_INTERPRET=1 runs it on a CPU, for tests)"
        )
    return triton_ops


def _native_kernels(is_required: bool) -> Kernels:
    try:
        native_ops.library()
    except NoNativeKernels as error:
        if is_required:
            raise ValueError(f"AGENTFLOW_KERNELS is 'native', but {error}") from error
        logger.warning("using the slower torch kernels: native kernels are not available: %s", error)
        return torch_ops
    return native_ops
