"""Memory in large pages, where the system has them: fewer faults when it is first touched, and fewer misses
when it is read in pieces."""

from __future__ import annotations

import ctypes
import mmap

from torch import Tensor


def advise_huge_pages(memory: Tensor) -> None:
    """Asks for large pages for a tensor on the CPU that nobody has touched yet; where that cannot be, nothing
    changes."""
    advice = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux alone
    if advice is None or memory.device.type != "cpu":
        return
    begin = -(-memory.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (memory.data_ptr() + memory.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if end > begin:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), advice)
