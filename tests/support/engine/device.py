"""The device of the tests' models, and a stand-in for a GPU's queue."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentflow.kernels.device_stream import DeviceStream, StreamMark

DEVICE = os.environ.get("AGENTFLOW_DEVICE", "cpu")
"""Where tests run models that can run on any device: cpu, or cuda in ``make gpu-test``."""


@dataclass
class _Place:
    """A mark in the queue, behind ``num_works``."""

    stream: QueuedStream
    num_works: int

    def synchronize(self) -> None:
        self.stream.advance_to(self.num_works)


class QueuedStream(DeviceStream):
    """A queue on the CPU that does its work as late as a GPU may: when a mark is waited for, or at random
    places before (``seed``). Until then, uploaded data is poison on the device, and downloaded data is
    missing."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(torch.device("cpu"))
        self._works: deque[Callable[[], object]] = deque()
        self._num_done = 0
        self._is_running = False
        self._rng = np.random.default_rng(seed)

    def run(self, work: Callable[[], object]) -> None:
        if self._is_running:  # a part of the work that runs
            work()
            return
        self._works.append(work)
        if self._rng.random() < 0.3:
            self.advance_to(self._num_done + int(self._rng.integers(len(self._works) + 1)))

    def mark(self) -> StreamMark:
        return _Place(self, self._num_done + len(self._works))

    @torch.inference_mode()
    def advance_to(self, num_works: int) -> None:
        """Does the works up to this number."""
        while self._num_done < num_works:
            self._is_running = True
            try:
                self._works.popleft()()
            finally:
                self._is_running = False
                self._num_done += 1

    def upload(self, arrays: Mapping[str, NDArray[Any]]) -> dict[str, Tensor]:
        sent = super().upload(arrays)
        arrived = {name: _poison(tensor) for name, tensor in sent.items()}
        for name, tensor in sent.items():
            self.run(lambda to=arrived[name], of=tensor: to.copy_(of))  # type: ignore[misc]
        return arrived


def _poison(like: Tensor) -> Tensor:
    """Memory of this form that nothing was written to."""
    if like.is_floating_point():
        return torch.full_like(like, torch.nan)
    return torch.full_like(like, 77 if like.dtype == torch.uint8 else 2**30)
