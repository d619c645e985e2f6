"""Remembers which blocks of tokens were evicted, so that a miss can be explained.

A block ends at each multiple of ``BLOCK_TOKENS`` of a sequence. It is known by the digest of its tree and of
all tokens up to its end.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import TypeAlias

BLOCK_TOKENS = 256
MAX_BLOCKS = 32_768
"""The most blocks that are remembered; about 4 MB."""
TOKEN_BYTES = 4
_DIGEST_BYTES = 16

PrefixHash: TypeAlias = "hashlib.blake2b"
"""The hash of a tree and of a prefix in it, which can be continued."""


def tree_hash(extra_key: object) -> PrefixHash:
    """Returns the hash of an empty prefix in the tree of ``extra_key``."""
    return hashlib.blake2b(repr(extra_key).encode("utf-8", "backslashreplace"), digest_size=_DIGEST_BYTES)


def next_end(num_tokens: int) -> int:
    """Returns the end of the first block that ends after ``num_tokens`` tokens."""
    return (num_tokens // BLOCK_TOKENS + 1) * BLOCK_TOKENS


class EvictedBlocks:
    """The last ``max_blocks`` evicted blocks."""

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._digests: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._digests)

    def add(self, before: PrefixHash, start: int, run: bytes, num_kept: int) -> None:
        """Remembers the blocks that end in ``run`` after its first ``num_kept`` tokens.

        Args:
            before: the hash of the prefix before ``run``.
            start: the number of tokens before ``run``.
            run: the tokens of a leaf.
            num_kept: the number of its tokens that stay.
        """
        prefix, at = before.copy(), 0
        for end in range(next_end(start + num_kept), start + len(run) // TOKEN_BYTES + 1, BLOCK_TOKENS):
            prefix.update(run[at : (end - start) * TOKEN_BYTES])
            at = (end - start) * TOKEN_BYTES
            digest = prefix.digest()
            self._digests[digest] = None
            self._digests.move_to_end(digest)
        while len(self._digests) > self._max_blocks:
            self._digests.popitem(last=False)

    def has(self, before: PrefixHash, run: bytes) -> bool:
        """Whether the block at the end of ``run`` was evicted. ``before``: as in ``add``."""
        prefix = before.copy()
        prefix.update(run)
        return prefix.digest() in self._digests
