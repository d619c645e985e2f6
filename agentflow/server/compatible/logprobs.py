"""The log-probabilities of an answer's tokens, as OpenAI's chat API shows them."""

from __future__ import annotations

from functools import lru_cache

import msgspec

from agentflow.server.completion.request import AnswerToken


class TopLogprob(msgspec.Struct, kw_only=True):
    """A likely token at a position. ``bytes``: its text in UTF-8."""

    token: str
    bytes: list[int]
    logprob: float | None


class ChatTokenLogprob(msgspec.Struct, kw_only=True):
    """A token of the answer. ``logprob`` is null if the text was encoded again, which happens under a
    constraint."""

    token: str
    bytes: list[int]
    logprob: float | None
    top_logprobs: list[TopLogprob]


def token_logprob(token: AnswerToken) -> ChatTokenLogprob:
    """A token with the log-probabilities of itself and of the likeliest tokens."""
    return ChatTokenLogprob(
        token=token.text,
        bytes=_byte_values(token.raw),
        logprob=token.logprob,
        top_logprobs=[
            TopLogprob(token=top.text, bytes=_byte_values(top.raw), logprob=top.logprob) for top in token.top
        ],
    )


@lru_cache(maxsize=16_384)
def _byte_values(raw: bytes) -> list[int]:
    """The bytes as a list, which is shared and must not be changed."""
    return list(raw)
