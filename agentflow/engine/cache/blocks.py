"""Which blocks of tokens are cached, by digest, for readers in other processes: a router, or a store of KV.

A block is ``BLOCK_TOKENS`` tokens of a sequence, from a multiple of ``BLOCK_TOKENS`` on. Its digest is the
SHA-256 of the digest before it and its token ids; the first block follows the digest of the cache key. A
digest therefore identifies the whole prefix up to the block's end, as in vLLM ("Automatic Prefix Caching":
parent hash, block tokens, extra hashes). The tree itself works on single tokens: tokens after the last whole
block of a run are not reported.

Reports are numbered from 1. After a gap, a reader asks for a snapshot: all blocks that are cached, under the
number of the last report; the next report continues from there. A report has at most ``max_blocks`` blocks,
or a single longer run of blocks, so that a reader handles each in a short time. The rest of a large snapshot
follows as reports.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import NamedTuple

from agentflow.engine.cache.nodes import Node
from agentflow.engine.cache.token_run import TOKEN_BYTES, TokenRun

BLOCK_TOKENS = 64


class BlocksStored(NamedTuple):
    """Blocks that follow each other are cached now.

    - ``cache_key``: the tree that they are in.
    - ``parent``: the digest that the first of them follows.
    - ``digests``: one for each block.
    - ``run``: their tokens.
    """

    cache_key: Hashable
    parent: bytes
    digests: list[bytes]
    run: bytes


class BlocksRemoved(NamedTuple):
    """Blocks that are no longer cached as a whole. ``digests``: from the first to the last."""

    digests: list[bytes]


OnBlocks = Callable[[BlocksStored | BlocksRemoved], None]
"""Called as blocks enter and leave. It must not use the cache."""


def root_digest(*identities: object) -> bytes:
    """The digest that the first block follows. ``identities``: strings and numbers, the model's identity
    among them."""
    return hashlib.sha256(repr(identities).encode()).digest()


def chain_digests(parent: bytes, run: TokenRun) -> list[bytes]:
    """The digests of the whole blocks in ``run``. The first of them follows ``parent``."""
    size = BLOCK_TOKENS * TOKEN_BYTES
    digests: list[bytes] = []
    for start in range(0, len(run) - size + 1, size):
        parent = hashlib.sha256(parent + run[start : start + size]).digest()
        digests.append(parent)
    return digests


def num_blocks(node: Node, length: int) -> int:
    """How many blocks end within the first ``length`` tokens of the node."""
    return (node.start + length) // BLOCK_TOKENS - node.start // BLOCK_TOKENS


class NodeBlocks:
    """The blocks of a cache's nodes. ``model``: the identity of the model, which their digests contain."""

    def __init__(self, model: str, on_blocks: OnBlocks) -> None:
        self._model = model
        self._on_blocks = on_blocks

    def stored(self, node: Node, cache_key: Hashable, run: TokenRun, existing: int) -> None:
        """Reports the blocks of ``run``, which ends at ``node``, that end after its first ``existing``
        tokens."""
        size = BLOCK_TOKENS * TOKEN_BYTES
        new = run[existing // BLOCK_TOKENS * size : len(run) // size * size]
        if not new:
            return
        above: Node | None = node
        while above is not None and not above.digests:
            above = above.parent
        parent = root_digest(self._model, cache_key) if above is None else above.digests[-1]
        digests = chain_digests(parent, new)
        node.digests = (*node.digests, *digests)
        self._on_blocks(BlocksStored(cache_key, parent, digests, new))

    def removed(self, node: Node, num_kept: int) -> None:
        """Reports the blocks that end after the first ``num_kept`` tokens of a leaf."""
        first = num_blocks(node, num_kept)
        if first < len(node.digests):
            self._on_blocks(BlocksRemoved([*node.digests[first:]]))
            node.digests = node.digests[:first]

    def all_stored(self, roots: Mapping[Hashable, Node]) -> Iterator[BlocksStored]:
        """Yields all blocks below the roots, parents first."""
        for cache_key, root in roots.items():
            pending = [(node, b"", root_digest(self._model, cache_key)) for node in root.children.values()]
            while pending:
                node, rest, parent = pending.pop()  # ``rest``: the tokens above it, after the last block
                rest += node.run
                if node.digests:
                    size = len(node.digests) * BLOCK_TOKENS * TOKEN_BYTES
                    yield BlocksStored(cache_key, parent, list(node.digests), rest[:size])
                    rest, parent = rest[size:], node.digests[-1]
                pending += [(child, rest, parent) for child in node.children.values()]


class BlocksReport(NamedTuple):
    """Blocks that entered and left, in order. ``is_snapshot``: they replace all earlier reports."""

    number: int
    changes: list[BlocksStored | BlocksRemoved]
    is_snapshot: bool


class BlockFeed:
    """Collects changes for reports. ``on_blocks`` is the argument for a ``RadixCache``. ``changes``: not yet
    in a report. ``max_blocks``: the most blocks of one report; None: any number."""

    def __init__(self, max_blocks: int | None = None) -> None:
        self._max_blocks = max_blocks
        self._number = 0
        self.changes: deque[BlocksStored | BlocksRemoved] = deque()

    def on_blocks(self, change: BlocksStored | BlocksRemoved) -> None:
        """Blocks enter or leave the cache."""
        self.changes.append(change)

    def flush(self) -> BlocksReport | None:
        """Returns the next report, or None if nothing has changed."""
        if not self.changes:
            return None
        self._number += 1
        return BlocksReport(self._number, self._take(), False)

    def snapshot(self, stored: Iterable[BlocksStored]) -> BlocksReport:
        """Returns the first report of all blocks that are cached now. ``flush`` returns the others."""
        self.changes = deque(stored)
        return BlocksReport(self._number, self._take(), True)

    def _take(self) -> list[BlocksStored | BlocksRemoved]:
        taken: list[BlocksStored | BlocksRemoved] = []
        num_blocks = 0
        while self.changes:
            num_blocks += len(self.changes[0].digests)
            if taken and self._max_blocks is not None and num_blocks > self._max_blocks:
                break
            taken.append(self.changes.popleft())
        return taken
