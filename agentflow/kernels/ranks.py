"""Sums and gathers over the ranks of a model: the processes that compute it together (tensor parallelism).

``Ranks`` is the interface. ``DistributedRanks`` implements it with torch.distributed: gloo on CPUs, NCCL on
GPUs. ``native_ops.shared_ranks`` is faster if all ranks are on the CPUs of one machine.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Ranks(Protocol):
    """The group, as one rank sees it. All ranks must call the same functions in the same order. A function
    that waits for another rank raises ``ConnectionError`` if that rank has ended or does not answer. The
    group must not be used afterwards."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def add(self, values: Tensor) -> Tensor:
        """Replaces ``values`` with the sum over all ranks, which has the same bits on all ranks, and returns
        them. ``values``: bfloat16, float16 or float32, contiguous."""

    def gather(self, part: Tensor, widths: Sequence[int]) -> Tensor | None:
        """Returns on rank 0 the matrices ``part`` [S, widths[rank]] float32 of all ranks, concatenated by
        columns; on the other ranks None."""

    def native_sum(self) -> tuple[int, int]:
        """Returns the addresses of a function and its context with which ``NativeForward`` adds
        (``RankSum``). They are valid as long as this object exists."""

    def abort(self) -> None:
        """Makes functions that wait now or later raise ``ConnectionError``, if the implementation can. Any
        thread may call it."""

    def close(self) -> None:
        """Leaves the group."""


_NATIVE_SUM = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int)
LOOPBACK = "127.0.0.1"


class DistributedRanks:
    """``Ranks`` with a process group of torch.distributed, which is not the default group of the process.

    Args:
        store: the rendezvous of the ranks, such as ``torch.distributed.FileStore``.
        rank: the number of this rank.
        size: the number of ranks.
        device: the device of the tensors; gloo is used on a CPU, NCCL on a GPU.
        limit_s: how long a rank waits for another one.
        host: the address of this machine for the other ranks; for gloo.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        *,
        device: torch.device,
        limit_s: float,
        host: str = LOOPBACK,
    ) -> None:
        self.rank, self.size, self._device = rank, size, device
        limit = timedelta(seconds=limit_s)
        self._group: Any
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = limit
            self._group = dist.ProcessGroupNCCL(store, rank, size, options)
        else:
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
            options._timeout = limit
            self._group = dist.ProcessGroupGloo(store, rank, size, options)
        self._native = _NATIVE_SUM(self._add_in_pass)

    def add(self, values: Tensor) -> Tensor:
        self._wait(self._group.allreduce([values]))
        return values

    def gather(self, part: Tensor, widths: Sequence[int]) -> Tensor | None:
        if self.rank:
            self._wait(self._group.send([part.contiguous()], 0, 0))
            return None
        parts = [part]
        for other in range(1, self.size):
            parts.append(part.new_empty(len(part), widths[other]))
            self._wait(self._group.recv([parts[-1]], other, 0))
        return torch.cat(parts, dim=1)

    def native_sum(self) -> tuple[int, int]:
        return ctypes.cast(self._native, ctypes.c_void_p).value or 0, 0

    def abort(self) -> None:
        """Aborts NCCL's group. Does nothing with gloo: a rank that ends closes its connections, so that no
        rank waits for it."""
        if self._device.type == "cuda":
            self._group.abort()

    def close(self) -> None:
        self._group = None

    def _wait(self, work: Any) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise ConnectionError(f"another rank has ended or does not answer: {error}") from error

    def _add_in_pass(self, _context: int, values: int, count: int, is_bf16: int) -> int:
        """Adds for ``NativeForward``, which has addresses instead of tensors. Returns 0, or 1 for a
        failure."""
        dtype = torch.bfloat16 if is_bf16 else torch.float32
        if count == 0:
            return 0
        memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(values)
        try:
            self.add(torch.frombuffer(memory, dtype=dtype))
        except Exception:  # must not leave a function that C++ calls; the pass raises another exception
            return 1
        return 0
