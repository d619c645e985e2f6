"""Remembers which blocks of tokens were evicted, so that a miss can be explained.

A block ends at each multiple of ``HASHED_BLOCK_TOKENS`` of a sequence. It is known by a chained hash of all
tokens up to its end. The hashes are Python's, which are keyed in each process and several times faster than
cryptographic ones. Two blocks with the same hash would give one request a wrong reason.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable

from agentflow.engine.cache.nodes import Node
from agentflow.engine.cache.token_run import TOKEN_BYTES

HASHED_BLOCK_TOKENS = 256
"""Not the blocks of 64 tokens that ``blocks`` reports."""
MAX_BLOCKS = 32_768
"""The most blocks that are remembered; about 4 MB."""
_BLOCK_BYTES = TOKEN_BYTES * HASHED_BLOCK_TOKENS


def next_end(num_tokens: int) -> int:
    """Returns the end of the first block that ends after ``num_tokens`` tokens."""
    return (num_tokens // HASHED_BLOCK_TOKENS + 1) * HASHED_BLOCK_TOKENS


def block_hash(before: int, block: bytes) -> int:
    """Returns the hash of a block. ``before``: of the block before it; 0 for the first one."""
    return hash((before, block))


def block_hashes(before: int, run: bytes) -> list[int]:
    """Returns the hashes of the whole blocks at the front of a run that begins at the start of a block."""
    hashes = []
    for start in range(0, len(run) - _BLOCK_BYTES + 1, _BLOCK_BYTES):
        before = block_hash(before, run[start : start + _BLOCK_BYTES])
        hashes.append(before)
    return hashes


class EvictedBlocks:
    """The hashes of the last ``max_blocks`` evicted blocks."""

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._hashes: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._hashes)

    def has(self, cache_key: Hashable, block: int) -> bool:
        """Whether the block was evicted from this tree."""
        return hash((cache_key, block)) in self._hashes

    def add(self, cache_key: Hashable, blocks: Iterable[int]) -> None:
        """Remembers blocks of a tree."""
        for block in blocks:
            known = hash((cache_key, block))
            self._hashes[known] = None
            self._hashes.move_to_end(known)
        while len(self._hashes) > self._max_blocks:
            self._hashes.popitem(last=False)


def last_hash(node: Node) -> int:
    """Returns the hash of the last block that ends in the node or above. Stores it in the nodes on the
    way."""
    if node.last_hash is not None:
        return node.last_hash
    below: list[Node] = []
    while node.last_hash is None and node.parent is not None:
        below.append(node)
        node = node.parent
    found = node.last_hash or 0
    for one in reversed(below):
        hashes = hashes_in(one, found)
        found = one.last_hash = hashes[-1] if hashes else found
    return found


def hashes_in(node: Node, before: int) -> list[int]:
    """Returns the hashes of the blocks that end in the node. ``before``: of the last block above."""
    if next_end(node.start) > node.start + len(node.slots):
        return []
    run, missing, above = node.run, node.start % HASHED_BLOCK_TOKENS, node.parent
    while missing and above is not None:
        run = above.run[-missing * TOKEN_BYTES :] + run
        missing -= min(missing, len(above.slots))
        above = above.parent
    return block_hashes(before, run)
