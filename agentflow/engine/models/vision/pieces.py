"""Divides work into pieces, so that an encoding can pause between them.

The pieces are even parts of some rows. The division depends only on the work, not on its pauses.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
Pieces = Generator[None, None, T]
"""Yields after each piece, and returns the result."""


def even_parts(num: int, count: int) -> Iterator[tuple[int, int]]:
    """Divides 0 to ``num`` into ``count`` parts of about equal length, which may be 0."""
    return pairwise([num * i // count for i in range(count + 1)])


def by_rows(function: Callable[[Tensor], Tensor], x: Tensor, count: int) -> Pieces[Tensor]:
    """Applies a function to the rows of x [rows, any] in ``count`` pieces."""
    made = []
    for first, end in even_parts(len(x), count):
        if first < end:
            made.append(function(x[first:end]))
        yield
    return made[0] if len(made) == 1 else torch.cat(made)
