"""Runs of token ids as ``bytes``, four for each token: as keys of trees they compare, slice and hash
faster than arrays."""

from __future__ import annotations

import numpy as np

TokenRun = bytes
TOKEN_BYTES = 4


def token_run(tokens: np.ndarray[tuple[int], np.dtype[np.int32]]) -> TokenRun:
    """The run of an int32 array."""
    return tokens.tobytes()


def common_prefix_len(a: TokenRun, b: TokenRun) -> int:
    """Number of equal tokens at the front of both."""
    size = min(len(a), len(b))
    if a[:size] == b[:size]:
        return size // TOKEN_BYTES
    differs = np.frombuffer(a, np.int32, size // TOKEN_BYTES) != np.frombuffer(
        b, np.int32, size // TOKEN_BYTES
    )
    return int(differs.argmax())


def num_common_ids(old: list[int], new: list[int]) -> int:
    """The same for lists of ids, most often one of which goes on where the other ends."""
    if new[: len(old)] == old:
        return len(old)
    return next(
        (n for n, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new))
    )
