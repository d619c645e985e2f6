"""Sizes that occur, kept few: what a kernel is compiled for.

oneDNN compiles a matrix product for each number of rows that it meets. Flash attention on CPUs cuts queries,
where they are about 64 or more, into blocks of up to 256, and keys into blocks of 512, and has two products
compiled for each pair of sizes. That takes a millisecond, and most of it stays in memory for good: 0.7 MB for
a product with a weight, 0.1 to 0.4 MB for attention.
"""

from __future__ import annotations

TILE_ROWS = 16
"""A tile of AMX has so many rows."""
MOST_STEP = 64


def whole_tiles(size: int) -> int:
    """The next multiple of ``TILE_ROWS``: numbers of queries."""
    return -(-size // TILE_ROWS) * TILE_ROWS


def rounded_up(size: int) -> int:
    """The next of fewer sizes yet, less than 16 or a quarter larger: numbers of rows and keys.

    >>> [rounded_up(size) for size in (1, 17, 100, 130, 500)]
    [16, 32, 112, 160, 512]
    """
    step = min(MOST_STEP, max(TILE_ROWS, (1 << size.bit_length()) // 8))
    return -(-size // step) * step


def rounded_down(size: int) -> int:
    """The multiple of ``MOST_STEP`` that is not larger."""
    return size // MOST_STEP * MOST_STEP
