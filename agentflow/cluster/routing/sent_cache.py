"""An estimate of a server's cache, from the prompts that the server was sent.

A server of another make does not report its cache. It most likely keeps the prefixes of the latest prompts,
as many as fit: leaves leave first, the least recently used first (Zheng et al., "SGLang", 2024, section 3). A
``SentCache`` does the same with the blocks of the prompts, and reports insertions and evictions like a
replica (``feed``), so that the router reads both in one way.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

from agentflow.cluster.routing.feed import Feed, Update
from agentflow.cluster.routing.prefix_tree import ReplicaNumber
from agentflow.engine.cache.blocks import (
    BLOCK_TOKENS,
    BlocksRemoved,
    BlocksStored,
    chain_digests,
    root_digest,
)
from agentflow.engine.cache.token_run import TOKEN_BYTES, TokenRun

_BLOCK_BYTES = BLOCK_TOKENS * TOKEN_BYTES


class SentCache:
    """The guessed cache of one server.

    Args:
        replica: The server's number.
        model: The identity of the model in the digests of blocks, as of the router.
        max_tokens: The size of the cache.
        epoch: Higher than the epoch of an earlier cache of this server, which is gone.
    """

    def __init__(self, replica: ReplicaNumber, model: str, max_tokens: int, epoch: int = 0) -> None:
        self._feed = Feed(replica, epoch)
        self._model = model
        self._max_blocks = max(1, max_tokens // BLOCK_TOKENS)
        # The least recently used first. A block is older than the block before it, so the first is a leaf.
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        """The number of blocks."""
        return len(self._blocks)

    def sent(self, key: Hashable, run: TokenRun) -> Update | None:
        """The server has computed this prompt. Returns the changes of the cache, if there are any."""
        root = root_digest(self._model, key)
        digests = chain_digests(root, run[: self._max_blocks * _BLOCK_BYTES])
        blocks, num_known = self._blocks, 0
        while num_known < len(digests) and digests[num_known] in blocks:
            num_known += 1
        new = digests[num_known:]
        for digest in reversed(digests):
            blocks[digest] = None
            blocks.move_to_end(digest)
        removed: list[bytes] = []
        while len(blocks) > self._max_blocks:
            removed.append(blocks.popitem(last=False)[0])
        if removed:  # before the new ones, below which none of them is
            self._feed.on_blocks(BlocksRemoved(removed[::-1]))
        if new:
            parent = digests[num_known - 1] if num_known else root
            piece = run[num_known * _BLOCK_BYTES : len(digests) * _BLOCK_BYTES]
            self._feed.on_blocks(BlocksStored(key, parent, new, piece))
        return self._feed.flush()
