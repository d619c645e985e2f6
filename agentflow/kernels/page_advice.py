"""Advises the system about memory pages (``madvise``), and allocates memory on large pages."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path

import torch
from torch import Tensor

HUGE_PAGE_BYTES = 2 << 20  # on x86-64
BLOCK_BYTES = 64 << 20  # only pages that are written count as used memory
LINE_BYTES = 64  # a cache line


@contextmanager
def blocks_of_large_pages(nodes: Path = Path("/sys/devices/system/node")) -> Iterator[None]:
    """Within the context, ``empty_memory`` allocates pieces one after another in mapped blocks, so that
    pieces of any size are on large pages. A block is freed with its last piece, so the pieces should have
    about the same lifetime.

    Memory from torch is seldom on large pages: a piece contains few whole large pages or none, and often
    reuses freed memory, which keeps its small pages.

    Has no effect on a machine with several NUMA nodes, where threads place small pages (``zero_panels``).
    ``nodes``: where the system lists the nodes.
    """
    has_blocks = len(list(nodes.glob("node[0-9]*"))) <= 1
    token = _blocks.set(_Blocks() if has_blocks else None)
    try:
        yield
    finally:
        _blocks.reset(token)


def empty_memory(size: int, dtype: torch.dtype) -> Tensor:
    """Returns uninitialised CPU memory for ``size`` values, and requests large pages for it."""
    blocks = _blocks.get()
    if blocks is not None:
        with suppress(OSError):  # torch's error contains the size
            return blocks.empty(size * dtype.itemsize).view(dtype)
    memory = torch.empty(size, dtype=dtype)
    advise_huge_pages(memory)
    return memory


class _Blocks:
    """Memory from mapped blocks. Only the last block is divided further."""

    def __init__(self) -> None:
        self._rest: Tensor = torch.empty(0, dtype=torch.uint8)

    def empty(self, nbytes: int) -> Tensor:
        padded = -(-nbytes // LINE_BYTES) * LINE_BYTES
        if padded > BLOCK_BYTES:
            return _mapped(padded)[:nbytes]
        if padded > len(self._rest):
            self._rest = _mapped(BLOCK_BYTES)
        piece, self._rest = self._rest[:nbytes], self._rest[padded:]
        return piece


_blocks: ContextVar[_Blocks | None] = ContextVar("blocks", default=None)


def _mapped(nbytes: int) -> Tensor:
    """Maps memory that starts at a large page. Raises ``OSError`` if there is not enough memory."""
    mapped = mmap.mmap(-1, nbytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = torch.frombuffer(mapped, dtype=torch.uint8)  # holds the mapping
    memory = memory[-memory.data_ptr() % HUGE_PAGE_BYTES :][:nbytes]
    advise_huge_pages(memory)
    return memory


def advise_huge_pages(memory: Tensor) -> None:
    """Requests large pages for memory that has not been touched yet, for fewer page faults and fewer TLB
    misses on scattered reads. Has no effect if the system has no large pages, or if the memory is smaller
    than one."""
    if memory.device.type == "cpu" and memory.nbytes >= HUGE_PAGE_BYTES:
        _advise(memory.data_ptr(), memory.nbytes, "MADV_HUGEPAGE")


def release_file_pages(address: int, nbytes: int) -> None:
    """Releases the pages of memory that is mapped from a file and was only read. The next access reads the
    file again."""
    _advise(address, nbytes, "MADV_DONTNEED")


def _advise(address: int, nbytes: int, name: str) -> None:
    """Advises on the pages that are completely within the ``nbytes`` from ``address`` on."""
    advice = getattr(mmap, name, None)  # Linux only
    if advice is None:
        return
    begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if end > begin:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), advice)
