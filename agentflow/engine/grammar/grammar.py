"""The interface between a compiled constraint and the engine.

``DfaGrammar`` implements it for regular languages, ``LlguidanceGrammar`` for all others. Both compute the
same masks and report the same forced bytes, so the engine treats them alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

TokenWords: TypeAlias = NDArray[np.uint32]
"""A token mask: bit ``i % 32`` of word ``i // 32`` is set if token ``i`` is allowed."""


class Matcher(Protocol):
    """The position of one generation's text in its grammar. Used from the engine's thread only."""

    def mask(self) -> TokenWords:
        """Returns the tokens whose bytes can continue the text. Never contains a special token or a token
        without bytes. The array is shared and must not be modified. Raises ``RequestRefused`` if computing it
        exceeds a limit."""

    def may_end(self) -> bool:
        """Whether the text is complete."""

    def must_end(self) -> bool:
        """Whether the text is complete and nothing may follow."""

    def accept(self, token_id: int) -> bool:
        """Appends a token. Returns True only if nothing is ``forced`` next and the text may not end; a
        matcher may return False without checking. Raises ``ValueError`` if the mask forbids it; the position
        is then unchanged."""

    def roll_back(self, num_tokens: int) -> None:
        """Removes the last ``num_tokens`` tokens."""

    def forced(self) -> bytes:
        """Returns the bytes with which every continuation begins. Empty if there is a choice, including the
        choice between continuing and ending."""


class Grammar(Protocol):
    """A compiled constraint for one vocabulary, shared by all requests that use it. ``nbytes``: the
    approximate memory in use."""

    @property
    def nbytes(self) -> int: ...

    def matcher(self) -> Matcher:
        """Returns a matcher at the start of a new text."""


def make_mask(token_ids: Sequence[int] | NDArray[np.intp], vocab_size: int) -> TokenWords:
    """Returns the mask that allows exactly these tokens."""
    bits: NDArray[np.uint8] = np.zeros(-(-vocab_size // 32) * 32, dtype=np.uint8)
    bits[np.asarray(token_ids, dtype=np.intp)] = 1
    words: TokenWords = np.packbits(bits, bitorder="little").view(np.uint32)
    return words


def is_allowed(words: TokenWords, token_id: int) -> bool:
    """Whether the mask contains the token."""
    return bool(words[token_id >> 5] >> np.uint32(token_id & 31) & np.uint32(1))
