"""The limits of a device for which launches are divided."""

from __future__ import annotations

import functools

import torch
import triton


@functools.cache
def num_processors(device: torch.device) -> int:
    """Returns the number of multiprocessors of a GPU. The CPU, on which only the interpreter runs, counts as
    one."""
    if device.type != "cuda":
        return 1
    num: int = torch.cuda.get_device_properties(device).multi_processor_count
    return num


@functools.cache
def shared_bytes(device: torch.device) -> int:
    """Returns the bytes of shared memory that a program may have; 0 on the CPU."""
    if device.type != "cuda":
        return 0
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"])
