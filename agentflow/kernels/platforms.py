"""The kernels of each platform, and the choice among them.

``Kernels`` has one implementation of each interface. All are tested against ``REFERENCE``. The environment
variable ``AGENTFLOW_KERNELS`` selects a platform.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from agentflow.kernels.attention.backend import AttentionBackend, AttentionRule
from agentflow.kernels.attention.reference_attention import ReferenceAttention
from agentflow.kernels.attention.torch_attention import TorchAttention
from agentflow.kernels.decoder_weights import DecoderWeights
from agentflow.kernels.inputs import (
    AttentionBatch,
    ChoiceRows,
    ForwardInput,
    IntArray,
    Likelihoods,
    LinearWeight,
)
from agentflow.kernels.linear.method import LinearMethod
from agentflow.kernels.linear.reference_linear import ReferenceLinear
from agentflow.kernels.linear.torch_linear import TorchLinear
from agentflow.kernels.native_library import PLATFORMS, NoNativeKernels
from agentflow.kernels.native_ops import team
from agentflow.kernels.native_ops.native_attention import NativeAttention
from agentflow.kernels.native_ops.native_forward import NativeForward
from agentflow.kernels.native_ops.native_linear import NativeLinear
from agentflow.kernels.native_ops.native_rows import NativeRows
from agentflow.kernels.native_ops.native_sampler import NativeSampler
from agentflow.kernels.rows.reference_rows import ReferenceRows
from agentflow.kernels.rows.row_ops import RowOps
from agentflow.kernels.rows.torch_rows import TorchRows
from agentflow.kernels.sampling.sampler import Sampler
from agentflow.kernels.sampling.torch_sampler import TorchSampler

logger = logging.getLogger(__name__)


class WholeForward(Protocol):
    """The forward pass of a whole model, in other threads. Once it has started, the function that waits for
    its end and returns the result must be called before any other kernel."""

    keeps_order: bool  # a row's sums have the same order regardless of the rest of the batch
    nbytes: int  # the size of weights in its layout, in addition to the decoder's weights

    def start_hidden(self, given: ForwardInput) -> Callable[[], Tensor]:
        """Starts the forward pass, which writes the KV of all rows. Returns the function that waits for the
        normed last hidden states of ``given.rows``, [S, hidden_size]."""

    def prepare_tokens(
        self,
        given: ForwardInput,
        make_choice: Callable[[], ChoiceRows],
        make_likelihoods: Callable[[], Likelihoods | None] = lambda: None,
    ) -> Callable[[], Callable[[], tuple[IntArray, Likelihoods | None]]]:
        """Prepares a forward pass that writes the KV of all rows, and chooses tokens as ``Sampler.choose``
        does. May be called while another one runs.

        Args:
            given: the rows. Their token ids and the slots of their KV are read when the pass starts.
            make_choice: returns how to choose; called while the forward pass runs, because it is needed only
                at the end.
            make_likelihoods: returns the arrays for log-probabilities, which become part of the result, or
                None; called like ``make_choice``.

        Returns:
            A function that starts the pass, once. It returns the function that waits for the tokens, [S], and
            their log-probabilities.
        """


@dataclass(frozen=True)
class Kernels:
    """The kernels of a platform. Tensors have the model's dtype unless a function specifies another."""

    name: str  # the value of ``AGENTFLOW_KERNELS``
    attention: AttentionBackend
    linear: LinearMethod
    rows: RowOps
    sampler: Sampler
    queues_work: bool = False  # no function waits for a GPU, so the next step can be launched meanwhile
    # Makes a ``WholeForward`` from the weights without the head, and the head with which ``multiply_exactly``
    # computes logits. None: the platform has none.
    whole_forward: Callable[[DecoderWeights, LinearWeight], WholeForward] | None = None


REFERENCE = Kernels("reference", ReferenceAttention(), ReferenceLinear(), ReferenceRows(), TorchSampler())
"""Written for clarity; slow."""
TORCH = Kernels("torch", TorchAttention(), TorchLinear(), TorchRows(), TorchSampler())
"""For any device."""
NATIVE = Kernels(
    "native",
    NativeAttention(),
    NativeLinear(),
    NativeRows(),
    NativeSampler(),
    whole_forward=NativeForward,
)
"""For x86 CPUs on which ``team.library`` finds or compiles them."""


def triton_kernels() -> Kernels:
    """Returns the kernels for GPUs. Raises ``ImportError`` if Triton is not installed."""
    from agentflow.kernels.triton_ops.attention.triton_attention import TritonAttention
    from agentflow.kernels.triton_ops.linear.triton_linear import TritonLinear
    from agentflow.kernels.triton_ops.triton_rows import TritonRows
    from agentflow.kernels.triton_ops.triton_sampler import TritonSampler

    parts = TritonAttention(), TritonLinear(), TritonRows(), TritonSampler()
    return Kernels("triton", *parts, queues_work=True)


def kernels_for(device: torch.device) -> Kernels:
    """Returns the kernels for a device: the platform in ``AGENTFLOW_KERNELS``, or if that is not set, the
    native kernels on a CPU and Triton's on a GPU if available, else torch's. Raises ``ValueError`` if the
    selected platform is unknown or unavailable."""
    name = os.environ.get("AGENTFLOW_KERNELS", "")
    if name not in ("", *PLATFORMS):
        raise ValueError(f"AGENTFLOW_KERNELS is {name!r}: it must be one of {', '.join(PLATFORMS)}")
    return _chosen(name, device)


def _chosen(name: str, device: torch.device) -> Kernels:
    if name == "reference":
        return REFERENCE
    if name == "triton" or (not name and device.type == "cuda"):
        return _triton_or_torch(device, is_required=name == "triton")
    if name == "torch" or (not name and device.type != "cpu"):
        return TORCH
    if device.type != "cpu":
        raise ValueError(f"AGENTFLOW_KERNELS is 'native', which is for CPUs, and the device is {device}")
    return _native_or_torch(is_required=name == "native")


def _triton_or_torch(device: torch.device, is_required: bool) -> Kernels:
    try:
        kernels = triton_kernels()
        from agentflow.kernels.triton_ops.interpreted import IS_INTERPRETED
    except ImportError as error:
        if is_required:
            raise ValueError(f"AGENTFLOW_KERNELS is 'triton', but it cannot be imported: {error}") from error
        logger.warning("using the slower torch kernels: triton cannot be imported: %s", error)
        return TORCH
    if device.type == "cuda":
        try:
            check(kernels, device)
        except Exception as error:  # of Triton, its compiler, the C compiler or the driver
            if is_required:
                raise ValueError(f"AGENTFLOW_KERNELS is 'triton', but a kernel fails: {error}") from error
            logger.warning("using the slower torch kernels: a Triton kernel fails: %s", error)
            return TORCH
    elif not IS_INTERPRETED.value:
        raise ValueError(
            f"AGENTFLOW_KERNELS is 'triton', which is for GPUs, and the device is {device} "
            "(TRITON_INTERPRET=1 runs it on a CPU, for tests)"
        )
    return kernels


def check(kernels: Kernels, device: torch.device) -> None:
    """Runs a norm and the kernels that choose tokens, so that no request waits until they are compiled.
    Raises the implementation's error if they cannot run here, and ``RuntimeError`` for a wrong result."""
    twos, ones = torch.full((1, 2), 2.0, device=device), torch.ones(2, device=device)
    is_right = torch.allclose(kernels.rows.rms_norm(twos, ones, 0.0), ones.unsqueeze(0))
    logits = torch.zeros(1, 64, device=device)
    logits[0, 7] = 50.0
    one = np.ones(1, dtype=np.float32)
    rows = ChoiceRows(np.array([-1]), one, np.array([2]), 0.9 * one, 0 * one, np.array([0.5]))
    if not is_right or kernels.sampler.choose(logits, kernels.sampler.stage(rows, device)).tolist() != [7]:
        raise RuntimeError("a kernel computes a wrong result")


def kernels_with_attention(
    kernels: Kernels, device: torch.device, heads: tuple[int, int, int], dtype: torch.dtype
) -> Kernels:
    """Returns the kernels if their attention, which is compiled for the sizes of a model, runs on a device;
    otherwise torch's kernels, with a warning. Raises ``ValueError`` instead of the warning if
    ``AGENTFLOW_KERNELS`` is set.

    Args:
        kernels: From ``kernels_for``.
        device: The device of the model.
        heads: The number of query heads and of KV heads in a layer, and their size.
        dtype: The type of queries and of the KV pool.
    """
    try:
        _check_attention(kernels.attention, device, heads, dtype)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of Triton, its compiler or the driver
        if os.environ.get("AGENTFLOW_KERNELS"):
            raise ValueError(
                f"AGENTFLOW_KERNELS is {kernels.name!r}, but its attention fails for heads of {heads[2]} "
                f"values: {error}"
            ) from error
        text = "using the slower torch kernels: attention of %s fails for heads of %d values: %s"
        logger.warning(text, kernels.name, heads[2], error)
        return TORCH
    return kernels


def _check_attention(
    attention: AttentionBackend, device: torch.device, heads: tuple[int, int, int], dtype: torch.dtype
) -> None:
    """Computes the attention of a decode row and of a chunk, which use tiles of different sizes. All values
    of a request are equal, so each of its rows must become this value."""
    num_heads, num_kv_heads, head_dim = heads
    lens, counts = np.array([3, 64]), np.array([1, 64])
    table = np.arange(2 * 64, dtype=np.int32).reshape(2, 64)
    pool = torch.ones(2 * 64, 2, num_kv_heads, head_dim, device=device, dtype=dtype)
    pool[64:, 1] = 2.0
    q = torch.ones(int(counts.sum()), num_heads, head_dim, device=device, dtype=dtype)
    plan = attention.plan(AttentionBatch(table, np.arange(2), counts, lens, None), dtype, device)
    found = attention.attend(q, pool, plan, AttentionRule(head_dim**-0.5)).float()
    if not bool(((found[:1] - 1.0).abs() < 0.02).all() and ((found[1:] - 2.0).abs() < 0.02).all()):
        raise RuntimeError("it computes a wrong result")


def _native_or_torch(is_required: bool) -> Kernels:
    try:
        team.library()
    except NoNativeKernels as error:
        if is_required:
            raise ValueError(f"AGENTFLOW_KERNELS is 'native', but {error}") from error
        logger.warning("using the slower torch kernels: native kernels are not available: %s", error)
        return TORCH
    return NATIVE
