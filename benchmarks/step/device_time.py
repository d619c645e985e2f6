"""Times of work on a device."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Call = Callable[[], object]


def timed_ms(call: Call, device: torch.device, runs: int) -> list[float]:
    """Returns the time of each run until the device is done, after two warm-up runs."""
    [took] = alternated_ms([call], device, runs)
    return took


def alternated_ms(calls: Sequence[Call], device: torch.device, runs: int) -> list[list[float]]:
    """Returns the times of each call, like ``timed_ms``: the calls run in turn."""
    took: list[list[float]] = [[] for _ in calls]
    for run in range(runs + 2):
        for number, call in enumerate(calls):
            began = time.perf_counter()
            call()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if run >= 2:
                took[number].append(1e3 * (time.perf_counter() - began))
    return took


@dataclass(frozen=True, slots=True)
class Repeated:
    """A call, repeated: on a GPU in one graph, so that only kernels count."""

    call: Call  # the graph reads its tensors
    repeats: int
    graph: torch.cuda.CUDAGraph | None

    @classmethod
    def of(cls, call: Call, device: torch.device, repeats: int) -> Repeated:
        """Captures the graph. The call has run once before."""
        call()
        if device.type != "cuda":
            return cls(call, repeats, None)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(repeats):
                call()
        return cls(call, repeats, graph)

    def __call__(self) -> None:
        if self.graph is not None:
            self.graph.replay()
            return
        for _ in range(self.repeats):
            self.call()


def kernels_ms(calls: Sequence[Call], device: torch.device, runs: int, repeats: int) -> list[list[float]]:
    """Returns the mean times of ``repeats`` calls in each run, for each call. They run in turn."""
    repeated = [Repeated.of(call, device, repeats) for call in calls]
    return [[ms / repeats for ms in took] for took in alternated_ms(repeated, device, runs)]
