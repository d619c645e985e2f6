"""Token runs: sequences of token ids as ``bytes``, four per token. As keys of trees they compare, slice and
hash several times faster than arrays."""

from __future__ import annotations

import sys

import numpy as np
from numpy.typing import NDArray

TokenRun = bytes
TOKEN_BYTES = 4
TokenArray = NDArray[np.int32]

INNER_IDS = range(-(2**30), -(2**29))
"""Token ids after which no prefix ends: the keys and values before them depend on tokens that follow."""


def token_run(tokens: np.ndarray[tuple[int], np.dtype[np.int32]]) -> TokenRun:
    """An int32 array as a run."""
    return tokens.tobytes()


def common_prefix_len(a: TokenRun, b: TokenRun) -> int:
    """Length of the common prefix, in tokens."""
    size = min(len(a), len(b))
    if a[:size] == b[:size]:
        return size // TOKEN_BYTES
    differs = np.frombuffer(a, np.int32, size // TOKEN_BYTES) != np.frombuffer(
        b, np.int32, size // TOKEN_BYTES
    )
    return int(differs.argmax())


def prefix_end(run: TokenRun, count: int) -> int:
    """The longest length, at most ``count`` tokens, at which a prefix of the run may end."""
    last = run[(count - 1) * TOKEN_BYTES : count * TOKEN_BYTES]
    if int.from_bytes(last, sys.byteorder, signed=True) not in INNER_IDS:
        return count
    tokens = np.frombuffer(run, np.int32, count)
    ends = np.flatnonzero((tokens < INNER_IDS.start) | (tokens >= INNER_IDS.stop))
    return int(ends[-1]) + 1 if len(ends) else 0
