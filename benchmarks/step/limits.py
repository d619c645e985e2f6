"""The measured limits of this machine: bytes read from memory per second, and bfloat16 operations of matrix
products per second."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from benchmarks.step.work import Work

READ_BYTES = 1 << 30
SIZE = 2048


@dataclass(frozen=True)
class Limits:
    """The limits of a machine."""

    bytes_s: float  # bytes read per second
    flops: float  # operations per second

    def bytes_ms(self, work: Work) -> float:
        """Returns the milliseconds for reading the bytes."""
        return 1e3 * work.num_bytes / self.bytes_s

    def flops_ms(self, work: Work) -> float:
        """Returns the milliseconds for the operations."""
        return 1e3 * work.flops / self.flops

    def ms(self, work: Work) -> float:
        """Returns the milliseconds for both, one after the other."""
        return self.bytes_ms(work) + self.flops_ms(work)


def measure_limits(num_tries: int = 8) -> Limits:
    """Measures the limits with torch's threads: the best of several attempts."""
    left, right = (torch.randn(SIZE, SIZE).bfloat16() for _ in range(2))
    bytes_s = max(MemoryReads().bytes_s(num_tries))
    multiply_s = min(_timed_s(lambda: left @ right) for _ in range(2 * num_tries))
    return Limits(bytes_s, 2 * SIZE**3 / multiply_s)


class MemoryReads:
    """Reads from memory with torch's threads. The rate of some machines changes by half from one second to
    the next, so it is measured again before each figure."""

    def __init__(self) -> None:
        self._memory = torch.ones(READ_BYTES // 8, dtype=torch.float64)

    def bytes_s(self, num_tries: int) -> list[float]:
        """Returns the bytes read per second, for each of several attempts (30 ms each at 33 GB/s)."""
        return [READ_BYTES / _timed_s(self._memory.sum) for _ in range(num_tries)]


def measure_byte_flops(num_tries: int = 8) -> float:
    """Measures the operations per second of byte products: the best of several attempts."""
    left, right = (torch.randint(-127, 128, (SIZE, SIZE), dtype=torch.int8) for _ in range(2))
    return 2 * SIZE**3 / min(_timed_s(lambda: torch._int_mm(left, right)) for _ in range(num_tries))


def _timed_s(call: object) -> float:
    assert callable(call)
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
