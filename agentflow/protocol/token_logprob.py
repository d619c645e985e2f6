"""The likeliest tokens at one place of a generated text: what ``gen(..., top_logprobs=k)`` tells."""

from __future__ import annotations

import msgspec


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """A token, its text (``\ufffd`` for the bytes of half a character), and its log-probability.

    >>> s += af.gen("word", max_tokens=4, top_logprobs=2)
    >>> word = await s["word"]
    >>> likeliest, second = s["word"].top_logprobs[0]
    >>> likeliest.logprob >= second.logprob
    True
    """

    token_id: int
    text: str
    logprob: float


TopLogprobs = tuple[tuple[TokenLogprob, ...] | None, ...]
"""For each generated token the likeliest at its place, likeliest first; None for a token that was encoded
anew at the end of the text."""
