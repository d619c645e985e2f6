"""The loaded library of native kernels, and its team of threads."""

from __future__ import annotations

import ctypes
import functools
import logging
import os

import torch
from torch import Tensor

from agentflow.kernels.native_library import load_best
from agentflow.kernels.native_ops.structures import declare

logger = logging.getLogger(__name__)


@functools.cache
def _library_allowed(cpu: str) -> ctypes.CDLL:
    return declare(load_best())


def library() -> ctypes.CDLL:
    """Returns the compiled kernels for the best level that ``AGENTFLOW_CPU`` allows. Raises
    ``NoNativeKernels`` if there are none."""
    return _library_allowed(os.environ.get("AGENTFLOW_CPU", ""))


def team() -> ctypes.CDLL:
    """Returns the library, with as many threads as torch has."""
    loaded = library()
    set_num_threads(loaded)
    return loaded


def set_num_threads(loaded: ctypes.CDLL) -> None:
    """Sets the team's number of threads to torch's."""
    if num_missing := loaded.af_set_num_threads(torch.get_num_threads()):
        _warn_of_missing_threads(num_missing)


@functools.cache
def _warn_of_missing_threads(num_missing: int) -> None:
    """Warns once for each number, because every forward pass tries again."""
    logger.warning("cannot start %d of the kernels' threads: forward passes are slower", num_missing)


def is_bf16(x: Tensor) -> bool:
    """Whether a tensor is in bfloat16; other tensors of the native kernels are in float32."""
    return x.dtype == torch.bfloat16


# The measured parts of a forward pass, in the order of part_times.h. ``head``: single products, such as the
# logits. ``ranks``: the sums over the ranks of a model, including the waits.
PARTS = (
    *("plan", "embed", "norm", "qkv", "rope", "attention"),
    *("output", "gate_up", "down", "head", "choice", "ranks"),
)


def part_seconds() -> dict[str, float]:
    """Returns the seconds spent in each of ``PARTS`` since the last call, in all forward passes of the
    process."""
    seconds = (ctypes.c_double * len(PARTS))()
    library().af_part_seconds(seconds)
    return dict(zip(PARTS, seconds, strict=True))
