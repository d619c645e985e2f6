"""``ranks.Ranks`` through the shared memory of one machine: a native function adds the values of all ranks.

The memory is an unnamed file. The processes of the other ranks inherit its file descriptor, and it is freed
with the last process.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from agentflow.kernels.native_ops.structures import array_address
from agentflow.kernels.native_ops.team import library

SLOT_BYTES = 1 << 22
"""The memory for the values of one rank; more values are exchanged in turns."""
MAX_RANKS = 64


def make_room(memory: int, size: int) -> None:
    """Grows an empty unnamed file to the size that ``size`` ranks need. Its pages occupy memory once they are
    used. Raises ``NoNativeKernels``, and ``OSError`` if there is not enough memory."""
    os.ftruncate(memory, library().af_ranks_memory(size, SLOT_BYTES))


class SharedRanks:
    """The ranks that share memory, as one rank sees them.

    Args:
        memory: the file descriptor, after ``make_room``; it may be closed after this call.
        rank: the number of this rank.
        size: the number of ranks.
        limit_s: how long a rank waits for another one.
    """

    def __init__(self, memory: int, rank: int, size: int, *, limit_s: float) -> None:
        self.rank, self.size = rank, size
        self._library = library()
        self._memory = mmap.mmap(memory, self._library.af_ranks_memory(size, SLOT_BYTES))
        place = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._ranks = self._library.af_join_ranks(place, rank, size, SLOT_BYTES, limit_s)
        if not self._ranks:
            raise MemoryError("there is not enough memory for a group of ranks")

    def add(self, values: Tensor) -> Tensor:
        assert values.is_contiguous()
        assert values.dtype in (torch.bfloat16, torch.float32)
        is_bf16 = values.dtype == torch.bfloat16
        self._library.af_add_over_ranks(self._ranks, values.data_ptr(), values.numel(), is_bf16)
        return values

    def gather(self, part: Tensor, widths: Sequence[int]) -> Tensor | None:
        part = part.contiguous()
        out = None if self.rank else torch.empty(len(part), sum(widths), dtype=torch.float32)
        counts = np.array(widths, dtype=np.int64)
        self._library.af_gather_ranks(
            self._ranks,
            part.data_ptr(),
            len(part),
            array_address(counts),
            None if out is None else out.data_ptr(),
        )
        return out

    def native_sum(self) -> tuple[int, int]:
        function = ctypes.cast(self._library.af_add_in_pass, ctypes.c_void_p).value
        assert function is not None
        return function, self._ranks

    def abort(self) -> None:
        if self._ranks:
            self._library.af_abort_ranks(self._ranks)

    def close(self) -> None:
        """Leaves the group. The memory stays mapped until this object is freed."""
        ranks, self._ranks = self._ranks, None
        self._library.af_leave_ranks(ranks)
