"""A model's vocabulary as a trie of bytes, laid out once so that a machine can be walked over all of it.

Level ``d`` holds the distinct beginnings of ``d + 1`` bytes that tokens have, in alphabetical order, each
with its last byte and its place's parent in the level above: to read one more byte of all tokens at once
is one look-up for each of these, and not for each token.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from agentflow.engine.grammar.grammar import TokenWords, words_of

Indices: TypeAlias = NDArray[np.intp]
Bytes: TypeAlias = NDArray[np.uint8]

# Of the masks of tokens with a common beginning, so many are kept: 6 kB each for 50,000 tokens.
_MAX_PREFIX_MASKS = 512


@dataclass(frozen=True, slots=True, eq=False)
class TrieLevel:
    """``parents``: indices into the level above. ``last_bytes``: what each node adds to its parent.
    ``first``: number of the level's first node in the whole trie. ``children`` [nodes + 1]: node ``i``'s
    children are ``children[i]`` up to ``children[i + 1]`` of the level below."""

    parents: Indices
    last_bytes: Bytes
    first: int
    children: Indices


class Vocabulary:
    """``token_bytes[i]``: what token ``i`` stands for; empty for special tokens and for ids without a token,
    which no mask ever allows. ``vocab_size``: of the masks; at least as many as there are tokens."""

    def __init__(self, token_bytes: Sequence[bytes], vocab_size: int | None = None) -> None:
        self.token_bytes = list(token_bytes)
        self.vocab_size = max(len(self.token_bytes), vocab_size or 0)
        self.num_words = -(-self.vocab_size // 32)
        sorted_ids = [i for i, data in enumerate(self.token_bytes) if data]
        sorted_ids.sort(key=self.token_bytes.__getitem__)
        self._sorted_ids: Indices = np.array(sorted_ids, dtype=np.intp)
        self._sorted_bytes = [self.token_bytes[i] for i in sorted_ids]
        self.levels: list[TrieLevel] = []
        self.num_nodes = 0
        # For each bit of a mask the number of its node; the one behind the last is never allowed.
        self._node_of_bit: Indices = np.zeros(self.num_words * 32, dtype=np.intp)
        self._prefix_masks: dict[bytes, TokenWords] = {}
        self._lay_out()

    def words(self, allowed: NDArray[np.bool_]) -> TokenWords:
        """The mask of the tokens whose node is allowed. ``allowed`` [nodes + 1]; the last is False."""
        bits = allowed.take(self._node_of_bit)
        words: TokenWords = np.packbits(bits, bitorder="little").view(np.uint32)
        return words

    def only(self, token_ids: Sequence[int] | Indices) -> TokenWords:
        """The mask of exactly these tokens."""
        return words_of(token_ids, self.vocab_size)

    def beginning_with(self, prefix: bytes) -> TokenWords:
        """The mask of all tokens whose bytes begin with ``prefix``."""
        found = self._prefix_masks.get(prefix)
        if found is None:
            if len(self._prefix_masks) >= _MAX_PREFIX_MASKS:
                del self._prefix_masks[next(iter(self._prefix_masks))]
            found = self._prefix_masks[prefix] = self._beginning_with(prefix)
        return found

    def _beginning_with(self, prefix: bytes) -> TokenWords:
        first = bisect_left(self._sorted_bytes, prefix)
        stem = prefix.rstrip(
            b"\xff"
        )  # what begins with the prefix comes before what begins with the next one
        end = len(self._sorted_bytes)
        if stem:
            end = bisect_left(self._sorted_bytes, stem[:-1] + bytes([stem[-1] + 1]))
        return self.only(self._sorted_ids[first:end])

    def _lay_out(self) -> None:
        """Level by level: tokens stand in order, so a node begins where its byte or its parent changes."""
        lens = np.array([len(data) for data in self._sorted_bytes], dtype=np.intp)
        flat = np.frombuffer(b"".join(self._sorted_bytes), dtype=np.uint8)
        starts = np.cumsum(lens) - lens
        node_of: Indices = np.zeros(len(lens), dtype=np.intp)  # in the level before
        end_of: Indices = np.zeros(len(lens), dtype=np.intp)  # in the whole trie
        tokens = np.arange(len(lens))
        parts: list[tuple[Indices, Bytes, int]] = []
        depth = 0
        while len(tokens):
            last = flat[starts[tokens] + depth]
            parents = node_of[tokens]
            is_new: NDArray[np.bool_] = np.ones(len(tokens), dtype=bool)
            is_new[1:] = (last[1:] != last[:-1]) | (parents[1:] != parents[:-1])
            nodes = np.cumsum(is_new) - 1
            node_of[tokens] = nodes
            depth += 1
            is_end = lens[tokens] == depth
            end_of[tokens[is_end]] = self.num_nodes + nodes[is_end]
            parts.append((parents[is_new], last[is_new], self.num_nodes))
            self.num_nodes += int(nodes[-1]) + 1
            tokens = tokens[~is_end]
        nothing: Indices = np.zeros(0, dtype=np.intp)
        for depth, (parents, last, first) in enumerate(parts):
            children = parts[depth + 1][0] if depth + 1 < len(parts) else nothing
            bounds = np.searchsorted(children, np.arange(len(parents) + 1))
            self.levels.append(TrieLevel(parents, last, first, bounds))
        self._node_of_bit[:] = self.num_nodes
        self._node_of_bit[self._sorted_ids] = end_of
