"""From what the engine tells of one answer to the deltas that an API passes on.

Log-probabilities as they stream: each token is told with the text that it is part of.

A token may end with half a character, or be held back because a stop could begin in its text. It is told
once all of its text is. Under a constraint tokens can still be replaced by others for the same text, so
there they are told at the end.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Callable, Sequence

from agentflow.engine.process.ipc import Finished, Progress
from agentflow.engine.request import TopTokens
from agentflow.engine.text.tokenizer import Tokenizer
from agentflow.engine.text.tool_output import ToolOutput
from agentflow.protocol.chat import Arguments, CallBegun, Piece, TextPiece
from agentflow.protocol.events import Usage
from agentflow.protocol.sampling import SamplingParams
from agentflow.server.completion.request import (
    AnswerEnded,
    CompletionDelta,
    FinishReason,
    TextDelta,
    TokenLogprob,
    ToolArguments,
    ToolCallBegun,
)


class LogprobReader:
    """Those of one answer. ``is_constrained``: nothing is told before the end."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, *, is_constrained: bool) -> None:
        self._tokenizer = tokenizer
        self._num_top = params.top_logprobs
        self._is_constrained = is_constrained
        self._waiting: deque[tuple[int, TokenLogprob]] = deque()  # each with where its text ends
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_told = 0
        self._num_chars_read = 0  # of the tokens
        self._num_chars_given = 0  # of the text

    def push(self, progress: Progress) -> list[TokenLogprob]:
        """The tokens whose text is given with this step's."""
        if self._is_constrained:
            return []
        tops: Sequence[TopTokens | None] = progress.top_logprobs or [None] * len(progress.token_ids)
        for token_id, logprob, top in zip(progress.token_ids, progress.logprobs, tops, strict=True):
            token = self._told(token_id, logprob, top)
            self._num_chars_read += len(self._decoder.decode(token.raw))
            self._waiting.append((self._num_chars_read, token))
        self._num_chars_given += len(progress.text)
        told: list[TokenLogprob] = []
        while self._waiting and self._waiting[0][0] <= self._num_chars_given:
            told.append(self._waiting.popleft()[1])
        self._num_told += len(told)
        return told

    def finish(self, end: Finished) -> list[TokenLogprob]:
        """The tokens that are left."""
        start = self._num_told
        tops = end.top_logprobs or [None] * len(end.token_ids)
        return [
            self._told(token_id, logprob, top)
            for token_id, logprob, top in zip(
                end.token_ids[start:], end.logprobs[start:], tops[start:], strict=True
            )
        ]

    def _told(self, token_id: int, logprob: float | None, top: TopTokens | None) -> TokenLogprob:
        likeliest: Sequence[tuple[int, float]] = () if top is None else top
        shown = self._tokenizer.shown
        tops = tuple(
            [TokenLogprob(other, *shown(other), value) for other, value in likeliest[: self._num_top]]
        )
        return TokenLogprob(token_id, *shown(token_id), logprob, tops)


class AnswerReader:
    """Answer number ``index``; each delta is given to ``add``. ``told``: where log-probabilities are asked
    for. ``output``: where tools may be called, for then calls are to be told from prose."""

    def __init__(
        self,
        index: int,
        add: Callable[[CompletionDelta], None],
        *,
        told: LogprobReader | None = None,
        output: ToolOutput | None = None,
    ) -> None:
        self._index = index
        self._add = add
        self._told = told
        self._output = output
        self._num_chars = 0

    def hear(self, progress: Progress) -> None:
        """The answer goes on."""
        self._num_chars += len(progress.text)
        tokens = () if self._told is None else self._told.push(progress)
        if self._output is None:
            self._tell(progress.text, tokens)
        elif progress.text or tokens:
            self._tell_pieces(self._output.push(progress.text), tokens)

    def finish(self, end: Finished) -> None:
        """The answer has ended."""
        rest = end.text[self._num_chars :]
        tokens = () if self._told is None else self._told.finish(end)
        if self._output is None:
            self._tell(rest, tokens)
        else:
            self._tell_pieces(self._output.finish(rest), tokens)
        usage = Usage(end.prompt_tokens, end.cached_tokens, end.output_tokens)
        self._add(AnswerEnded(self._index, self._reason(end), usage, end.stopped_by))

    def _reason(self, end: Finished) -> FinishReason:
        if end.finish_reason == "length":
            return "length"
        return "tool_calls" if self._output is not None and self._output.num_calls else "stop"

    def _tell(self, text: str, tokens: Sequence[TokenLogprob]) -> None:
        if text or tokens:
            self._add(TextDelta(self._index, text, tuple(tokens)))

    def _tell_pieces(self, pieces: Sequence[Piece], tokens: Sequence[TokenLogprob]) -> None:
        assert self._output is not None
        if tokens:
            self._tell("", tokens)
        call = self._output.num_calls - sum(isinstance(piece, CallBegun) for piece in pieces) - 1
        for piece in pieces:
            match piece:
                case TextPiece():
                    self._tell(piece.text, ())
                case CallBegun():
                    call += 1
                    self._add(ToolCallBegun(self._index, call, piece.id, piece.name))
                case Arguments():
                    self._add(ToolArguments(self._index, call, piece.text))
