"""What the system may do with the pages of a tensor in host memory."""

from __future__ import annotations

import ctypes
import mmap

from torch import Tensor


def advise_huge_pages(memory: Tensor) -> None:
    """Asks for large pages for memory that has not been touched yet: fewer faults when it is, and fewer
    misses when it is read in pieces. Where there are none, nothing changes."""
    _advise(memory, "MADV_HUGEPAGE")


def release_file_pages(mapped: Tensor) -> None:
    """Takes the pages of a tensor that a file is mapped to, and that is not written to, out of this process's
    memory. Reading it again reads the file again."""
    _advise(mapped, "MADV_DONTNEED")


def _advise(memory: Tensor, name: str) -> None:
    """For the whole pages that only ``memory`` uses."""
    advice = getattr(mmap, name, None)  # Linux alone
    if advice is None or memory.device.type != "cpu":
        return
    begin = -(-memory.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (memory.data_ptr() + memory.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if end > begin:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), advice)
