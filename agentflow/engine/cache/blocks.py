"""Which blocks of tokens are cached, by digest, for readers in other processes: a router, or a store of KV.

A block is ``BLOCK_TOKENS`` tokens of a sequence, from a multiple of ``BLOCK_TOKENS`` on. Its digest is the
SHA-256 of the digest before it and its token ids; the first block follows the digest of the extra key. A
digest therefore identifies the whole prefix up to the block's end, as in vLLM ("Automatic Prefix Caching":
parent hash, block tokens, extra hashes). The tree itself works on single tokens: the ends of runs are not
reported.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable
from typing import NamedTuple

BLOCK_TOKENS = 64


class BlocksStored(NamedTuple):
    """Blocks that follow each other are cached now.

    - ``extra_key``: the tree that they are in.
    - ``parent``: the digest that the first of them follows.
    - ``digests``: one for each block.
    - ``run``: their tokens.
    """

    extra_key: Hashable
    parent: bytes
    digests: list[bytes]
    run: bytes


class BlocksRemoved(NamedTuple):
    """Blocks that are no longer cached as a whole. ``digests``: from the first to the last."""

    digests: list[bytes]


OnBlocks = Callable[[BlocksStored | BlocksRemoved], None]
"""Called as blocks enter and leave. It must not use the cache."""


def root_digest(*identities: object) -> bytes:
    """The digest that the first block follows. ``identities``: strings and numbers, among them the
    model's."""
    return hashlib.sha256(repr(identities).encode()).digest()


def chain(parent: bytes, run: bytes) -> list[bytes]:
    """The digests of the whole blocks in ``run``, the first of which follows ``parent``."""
    size = 4 * BLOCK_TOKENS
    digests: list[bytes] = []
    for start in range(0, len(run) - size + 1, size):
        parent = hashlib.sha256(parent + run[start : start + size]).digest()
        digests.append(parent)
    return digests
