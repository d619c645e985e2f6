"""Advises the system about memory pages (``madvise``)."""

from __future__ import annotations

import ctypes
import mmap

from torch import Tensor

HUGE_PAGE_BYTES = 2 << 20  # of x86-64


def advise_huge_pages(memory: Tensor) -> None:
    """Requests large pages for memory that has not been touched yet: fewer page faults, and fewer TLB misses
    on scattered reads. No effect if the system has no large pages, or if the memory is smaller than one."""
    if memory.device.type == "cpu" and memory.nbytes >= HUGE_PAGE_BYTES:
        _advise(memory.data_ptr(), memory.nbytes, "MADV_HUGEPAGE")


def release_file_pages(address: int, nbytes: int) -> None:
    """Releases the pages of memory that is mapped from a file and was only read. The next access reads the
    file again."""
    _advise(address, nbytes, "MADV_DONTNEED")


def _advise(address: int, nbytes: int, name: str) -> None:
    """Advises on the pages that lie completely in the ``nbytes`` from ``address`` on."""
    advice = getattr(mmap, name, None)  # Linux only
    if advice is None:
        return
    begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if end > begin:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), advice)
