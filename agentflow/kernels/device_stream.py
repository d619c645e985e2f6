"""The queue of a device's work."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor

from agentflow.kernels.uploads import upload


class StreamMark(Protocol):
    """A place in the queue."""

    def synchronize(self) -> None:
        """Waits until the device has finished the work before the mark."""


class _Passed:
    """A mark on a CPU, which has already finished all work."""

    def synchronize(self) -> None:
        pass


class DeviceStream:
    """The current stream of a device. A GPU does the work later, in the order of the calls; a CPU does it
    immediately."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._is_gpu = device.type == "cuda"

    def run(self, work: Callable[[], object]) -> None:
        """Queues work. ``work`` launches kernels and copies."""
        work()

    def mark(self) -> StreamMark:
        """Returns a mark after all work so far."""
        if not self._is_gpu:
            return _Passed()
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event  # type: ignore[no-any-return]

    def upload(self, arrays: Mapping[str, NDArray[Any]]) -> dict[str, Tensor]:
        """Queues a single copy of the arrays to new memory of the device. Reads the arrays before it
        returns."""
        return dict(zip(arrays, upload([*arrays.values()], self.device), strict=True))

    def download(self, made: Tensor) -> Tensor:
        """Queues a copy of a tensor to host memory. A later mark shows when the copy is complete. Call this
        only in ``run``'s work."""
        host = torch.empty(made.shape, dtype=made.dtype, pin_memory=self._is_gpu)
        host.copy_(made, non_blocking=True)
        return host
