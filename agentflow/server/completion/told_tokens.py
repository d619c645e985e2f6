"""Log-probabilities as they stream: each token is told with the text that it is part of.

A token may end with half a character, or be held back because a stop could begin in its text. It is told
once all of its text is. Under a constraint tokens can still be replaced by others for the same text, so
there they are told at the end.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence

from agentflow.engine.process.ipc import Finished, Progress
from agentflow.engine.request import TopTokens
from agentflow.engine.text.tokenizer import Tokenizer
from agentflow.protocol.sampling import SamplingParams
from agentflow.server.completion.request import ToldToken


class ToldTokens:
    """Those of one answer. ``is_constrained``: nothing is told before the end."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, *, is_constrained: bool) -> None:
        self._tokenizer = tokenizer
        self._num_top = params.top_logprobs
        self._is_constrained = is_constrained
        self._waiting: deque[tuple[int, ToldToken]] = deque()  # each with where its text ends
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_told = 0
        self._num_chars_read = 0  # of the tokens
        self._num_chars_given = 0  # of the text

    def push(self, progress: Progress) -> list[ToldToken]:
        """The tokens whose text is given with this step's."""
        if self._is_constrained:
            return []
        tops: Sequence[TopTokens | None] = progress.top_logprobs or [None] * len(progress.token_ids)
        for token_id, logprob, top in zip(progress.token_ids, progress.logprobs, tops, strict=True):
            token = self._told(token_id, logprob, top)
            self._num_chars_read += len(self._decoder.decode(token.raw))
            self._waiting.append((self._num_chars_read, token))
        self._num_chars_given += len(progress.text)
        told: list[ToldToken] = []
        while self._waiting and self._waiting[0][0] <= self._num_chars_given:
            told.append(self._waiting.popleft()[1])
        self._num_told += len(told)
        return told

    def finish(self, end: Finished) -> list[ToldToken]:
        """The tokens that are left."""
        start = self._num_told
        tops = end.top_logprobs or [None] * len(end.token_ids)
        return [
            self._told(token_id, logprob, top)
            for token_id, logprob, top in zip(
                end.token_ids[start:], end.logprobs[start:], tops[start:], strict=True
            )
        ]

    def _told(self, token_id: int, logprob: float | None, top: TopTokens | None) -> ToldToken:
        likeliest: Sequence[tuple[int, float]] = () if top is None else top
        shown = self._tokenizer.shown
        tops = tuple([ToldToken(other, *shown(other), value) for other, value in likeliest[: self._num_top]])
        return ToldToken(token_id, *shown(token_id), logprob, tops)
