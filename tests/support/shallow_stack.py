"""A small stack, on which a short chain shows that nothing recurses along it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

LONG_CHAIN = 400
"""More links than the stack has frames."""


@contextmanager
def shallow_stack(num_frames: int = 250) -> Iterator[None]:
    """Leaves room for ``num_frames`` more frames than there are."""
    num_open, frame = 0, sys._getframe().f_back
    while frame is not None:
        num_open, frame = num_open + 1, frame.f_back
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(num_open + num_frames)
    try:
        yield
    finally:
        sys.setrecursionlimit(before)
