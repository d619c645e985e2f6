"""The device of a model: its threads, types and kernels, the identity of a model's values there, and its
failures."""

from __future__ import annotations

import hashlib
import logging
import re
from pathlib import Path
from typing import NoReturn

import torch

from agentflow.engine.machine.resources import driver_fault, gpu_number, usable_cpus
from agentflow.engine.models.config import DecoderConfig
from agentflow.engine.runner import AcceleratorFault, OutOfMemory
from agentflow.engine.store.model_identity import model_identity
from agentflow.errors import BadArgument
from agentflow.kernels.platforms import Kernels, kernels_for, kernels_with_attention

logger = logging.getLogger(__name__)

_DTYPES = {
    "auto": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
_MEMORY_WORDS = ("DefaultCPUAllocator", "_STATUS_ALLOC_FAILED", "out of memory")
_FAULT_WORDS = ("CUDA error", "CUBLAS_STATUS_", "CUDNN_STATUS_", "Triton Error [CUDA]")


def use_threads(num_threads: int | None) -> None:
    """Sets the CPU threads of torch; None: its default, but at most ``usable_cpus``."""
    num_threads = num_threads or min(torch.get_num_threads(), usable_cpus())
    if num_threads != torch.get_num_threads():
        torch.set_num_threads(num_threads)


def device_named(name: str | None) -> torch.device:
    """Returns a device by its name. A GPU becomes this thread's current device, on which kernels run."""
    if name is not None and not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise BadArgument(f"device must be cpu, cuda or cuda:NUMBER, not {name!r}", param="device")
    if name == "cpu":
        return torch.device("cpu")
    has_gpu = torch.cuda.is_available()
    fault = "" if has_gpu else driver_fault()
    if name is None and not has_gpu:
        if fault:
            logger.warning("the model runs on the CPU, because torch cannot use the NVIDIA driver: %s", fault)
        return torch.device("cpu")
    number = gpu_number(name)
    if not has_gpu or number >= torch.cuda.device_count():
        raise BadArgument(
            f"device is {name}, but torch finds no such CUDA device" + (fault and f": {fault}"),
            param="device",
        )
    device = torch.device("cuda", number)
    torch.cuda.set_device(device)
    return device


def dtype_on(device: torch.device, name: str) -> torch.dtype:
    """Returns the dtype of activations by its name. Raises ``BadArgument`` for an unknown name."""
    if name not in _DTYPES:
        raise BadArgument(f"dtype must be one of {', '.join(_DTYPES)}, not {name!r}", param="dtype")
    if name == "float16" and device.type == "cpu":
        logger.warning("float16 runs as float32 on a CPU, with twice the memory: bfloat16 is faster")
        return torch.float32
    return _DTYPES[name]


def kernels_on(device: torch.device) -> Kernels:
    """Returns the kernels for a device. Raises ``BadArgument`` if AGENTFLOW_KERNELS chooses kernels that are
    unavailable."""
    try:
        return kernels_for(device)
    except ValueError as error:
        raise BadArgument(str(error), param="AGENTFLOW_KERNELS") from error


def with_attention(
    kernels: Kernels, device: torch.device, config: DecoderConfig, dtype: torch.dtype
) -> Kernels:
    """Returns the kernels if they can compute the attention of a model, else torch's kernels. Raises
    ``BadArgument`` instead if AGENTFLOW_KERNELS chose the kernels."""
    if config.latent:
        return kernels
    heads = config.num_heads, config.num_kv_heads, config.head_dim
    try:
        return kernels_with_attention(kernels, device, heads, dtype)
    except ValueError as error:
        raise BadArgument(str(error), param="AGENTFLOW_KERNELS") from error


def check_fp8(kernels: Kernels, device: torch.device, *, quantize: str | None, kv_dtype: str) -> None:
    """Raises ``BadArgument`` if an option needs 8-bit floats and the device has none."""
    for param, value in (("quantize", quantize), ("kv_dtype", kv_dtype)):
        if value == "fp8" and not kernels.linear.has_fp8(device):
            raise BadArgument(
                f"{param} is fp8, and {device} has no 8-bit floats: they need an NVIDIA GPU of compute "
                "capability 8.9 or higher (Ada, Hopper and later) and the Triton kernels: leave it out"
                + (", or take int8" if param == "quantize" else ""),
                param=param,
            )


def weights_in(dtype: torch.dtype) -> str:
    """Describes the storage of dense weights for users."""
    return f"{str(dtype).removeprefix('torch.')} weights"


def identity_of_values(folder: Path, weights: str, dtype: torch.dtype) -> str:
    """Returns the identity of a model in a folder that runs in ``dtype``. ``weights``: the description of its
    weights."""
    return hashlib.sha256(repr((model_identity(folder), weights, str(dtype))).encode()).hexdigest()


def raise_device_failure(error: RuntimeError | MemoryError) -> NoReturn:
    """Raises the ``device_failure`` for an error of a forward pass, or the error itself if the device did not
    cause it."""
    failure = device_failure(error)
    if failure is None:
        raise error
    if isinstance(failure, OutOfMemory):
        torch.cuda.empty_cache()  # the free memory may be fragmented
    raise failure from error


def device_failure(error: RuntimeError | MemoryError) -> OutOfMemory | AcceleratorFault | None:
    """Returns the device failure that an error of a forward pass reports; None if the batch is at fault.

    torch has types for the memory and faults of GPUs; errors of its libraries and of the CPU's allocator are
    recognised by their messages only.
    """
    text = str(error)
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return OutOfMemory(text)
    if any(words in text for words in _MEMORY_WORDS):
        return OutOfMemory(text)
    if isinstance(error, torch.AcceleratorError) or any(words in text for words in _FAULT_WORDS):
        return AcceleratorFault(text)
    return None
