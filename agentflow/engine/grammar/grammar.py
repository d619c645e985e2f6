"""The seam between a constraint and the engine: what a compiled constraint can be asked while text grows.

Two implementations: ``DfaGrammar`` for what a regular expression can say, and ``LlguidanceGrammar`` for
the rest. Both give the same masks and both tell what is forced, so that whatever decodes under one
decodes under the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

TokenWords: TypeAlias = NDArray[np.uint32]
"""A token mask: bit ``i % 32`` of word ``i // 32`` says whether token ``i`` is allowed."""


class Matcher(Protocol):
    """Where the text of one generation stands. Used from the engine's thread only."""

    def mask(self) -> TokenWords:
        """The tokens that may come next: those whose bytes the text can go on with. Never a special token,
        nor one without bytes. Shared: not to be written to. ``RequestRefused`` where it takes too long."""

    def may_end(self) -> bool:
        """Whether the text is complete as it is."""

    def must_end(self) -> bool:
        """Whether it is complete, and nothing may follow."""

    def take(self, token_id: int) -> None:
        """The text goes on by a token. ``ValueError``, and nothing is changed, where the mask forbids it."""

    def take_back(self, num_tokens: int) -> None:
        """The last tokens that were taken are not there."""

    def forced(self) -> bytes:
        """The bytes that must come next, whatever follows them: empty where there is a choice, be it
        that between going on and the end."""


class Grammar(Protocol):
    """A compiled constraint for one vocabulary, shared by all requests that use it. ``nbytes``: memory that
    it holds now, roughly."""

    @property
    def nbytes(self) -> int: ...

    def matcher(self) -> Matcher:
        """A new text's."""


def words_of(token_ids: Sequence[int] | NDArray[np.intp], vocab_size: int) -> TokenWords:
    """The mask that allows exactly these tokens."""
    bits: NDArray[np.uint8] = np.zeros(-(-vocab_size // 32) * 32, dtype=np.uint8)
    bits[np.asarray(token_ids, dtype=np.intp)] = 1
    words: TokenWords = np.packbits(bits, bitorder="little").view(np.uint32)
    return words


def is_allowed(words: TokenWords, token_id: int) -> bool:
    """Whether the mask has the token."""
    return bool(words[token_id >> 5] >> np.uint32(token_id & 31) & np.uint32(1))
