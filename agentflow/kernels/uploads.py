"""Copies arrays to a device in one transfer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGNMENT = 16
"""Each tensor starts at a multiple of this number of bytes, for which Triton compiles wide loads."""


def upload(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Copies arrays to ``device`` in one transfer. Returns them as tensors.

    On a GPU, the transfer reads pinned memory and is queued on the current stream: this function does not
    wait for it. The caller may change the arrays immediately. torch keeps the pinned memory until the
    transfer has ended.
    """
    starts, size = [], 0
    for array in arrays:
        starts.append(size)
        size += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
    staged = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    host = staged.numpy()
    for start, array in zip(starts, arrays, strict=True):
        host[start : start + array.nbytes].view(array.dtype)[:] = array.ravel()
    moved = staged.to(device, non_blocking=True)
    return [
        moved[start : start + array.nbytes].view(torch.from_numpy(array[:0]).dtype).view(array.shape)
        for start, array in zip(starts, arrays, strict=True)
    ]
