"""From what the engine tells of one answer to the deltas that an API passes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from agentflow.engine.process.ipc import Finished, Progress
from agentflow.engine.text.tool_output import ToolOutput
from agentflow.protocol.reply import Arguments, CallBegun, Piece, TextPiece
from agentflow.runtime.generator import Usage
from agentflow.server.completion.request import (
    AnswerEnded,
    CompletionDelta,
    FinishReason,
    TextDelta,
    ToldToken,
    ToolArguments,
    ToolCallBegun,
)
from agentflow.server.completion.told_tokens import ToldTokens


class AnswerReader:
    """Answer number ``index``; each delta is given to ``add``. ``told``: where log-probabilities are asked
    for. ``output``: where tools may be called, for then calls are to be told from prose."""

    def __init__(
        self,
        index: int,
        add: Callable[[CompletionDelta], None],
        *,
        told: ToldTokens | None = None,
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

    def _tell(self, text: str, tokens: Sequence[ToldToken]) -> None:
        if text or tokens:
            self._add(TextDelta(self._index, text, tuple(tokens)))

    def _tell_pieces(self, pieces: Sequence[Piece], tokens: Sequence[ToldToken]) -> None:
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
