"""The log-probabilities of an answer's tokens, and of the prompt's, as deltas."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence

from agentflow.engine.messages import Finished, Progress
from agentflow.engine.request import TopTokens
from agentflow.engine.text.tokenizer import Tokenizer
from agentflow.protocol.sampling import SamplingParams
from agentflow.server.completion.request import AnswerToken, CompletionRequest, PromptDelta


class LogprobReader:
    """Emits each token of an answer together with the text that it is part of.

    A token may end within a character, or be withheld because a stop string could begin in its text. It is
    emitted when all of its text is emitted. With ``has_jumps``, some tokens are not sampled, and others may
    be replaced by tokens with the same text, so all are emitted at the end.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, *, has_jumps: bool) -> None:
        self._tokenizer = tokenizer
        self._num_top = params.top_logprobs
        self._has_jumps = has_jumps
        self._waiting: deque[tuple[int, AnswerToken]] = deque()  # with the end of each token's text
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_emitted = 0
        self._num_token_chars = 0
        self._num_text_chars = 0

    def push(self, progress: Progress) -> list[AnswerToken]:
        """The tokens whose text is complete with this progress."""
        if self._has_jumps:
            return []
        tops: Sequence[TopTokens | None] = progress.top_logprobs or [None] * len(progress.token_ids)
        for token_id, logprob, top in zip(progress.token_ids, progress.logprobs, tops, strict=True):
            token = self._token(token_id, logprob, top)
            self._num_token_chars += len(self._decoder.decode(token.raw))
            self._waiting.append((self._num_token_chars, token))
        self._num_text_chars += len(progress.text)
        emitted: list[AnswerToken] = []
        while self._waiting and self._waiting[0][0] <= self._num_text_chars:
            emitted.append(self._waiting.popleft()[1])
        self._num_emitted += len(emitted)
        return emitted

    def num_left(self, end: Finished) -> int:
        """The log-probabilities of the remaining tokens."""
        return (len(end.token_ids) - self._num_emitted) * (1 + self._num_top)

    def finish(self, end: Finished) -> list[AnswerToken]:
        """The remaining tokens."""
        start = self._num_emitted
        tops = end.top_logprobs or [None] * len(end.token_ids)
        rest = zip(end.token_ids[start:], end.logprobs[start:], tops[start:], strict=True)
        return [self._token(token_id, logprob, top) for token_id, logprob, top in rest]

    def _token(self, token_id: int, logprob: float | None, top: TopTokens | None) -> AnswerToken:
        return _token_logprob(self._tokenizer, token_id, logprob, () if top is None else top[: self._num_top])


def _token_logprob(
    tokenizer: Tokenizer,
    token_id: int,
    logprob: float | None,
    top: Sequence[tuple[int, float]] = (),
    rank: int | None = None,
) -> AnswerToken:
    shown = tokenizer.token_text
    tops = tuple([AnswerToken(other, *shown(other), value) for other, value in top])
    return AnswerToken(token_id, *shown(token_id), logprob, tops, rank)


def prompt_delta(
    tokenizer: Tokenizer, request: CompletionRequest, token_ids: list[int], scored: Finished | None
) -> PromptDelta:
    """The prompt as a delta. ``scored``: its log-probabilities, if they were requested."""
    prompt, num_added = request.prompt, 0
    if isinstance(prompt, str):
        text, prefix = prompt, tokenizer.prefix_ids
        begin = tokenizer.decode(prefix, skip_special=False)
        if prefix and tuple(token_ids[: len(prefix)]) == prefix and not prompt.startswith(begin):
            num_added = len(prefix)
    else:
        text = tokenizer.decode(token_ids, skip_special=False)
    tokens: list[AnswerToken] = []
    if request.prompt_logprobs is not None:
        tokens.append(_token_logprob(tokenizer, token_ids[0], None))
    if scored is not None:
        tops: Sequence[TopTokens | None] = scored.top_logprobs or [None] * len(scored.logprobs)
        rows = zip(token_ids[1:], scored.logprobs, tops, scored.ranks, strict=True)
        for token_id, logprob, top, rank in rows:
            tokens.append(_token_logprob(tokenizer, token_id, logprob, top or (), rank))
    return PromptDelta(0, text, tuple(token_ids), tuple(tokens), num_added)
