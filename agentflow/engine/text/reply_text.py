"""From what the engine tells of an answer to the text of a reply (``reply``)."""

from __future__ import annotations

from agentflow.engine.text.tools import ToolUse
from agentflow.protocol.constraint import Constraint
from agentflow.protocol.reply import Piece, ReplyWriter, TextPiece


class ReplyText:
    """Of one answer. ``use``: the tools that it may call, if there are any. ``constraint``: what it is where
    it calls none; and, of this object, what all of it keeps."""

    def __init__(self, use: ToolUse | None, constraint: Constraint | None = None) -> None:
        self.constraint = constraint if use is None else use.constraint(constraint)
        self._output = use.output(constraint) if use is not None and use.callable_names else None
        self._writer = ReplyWriter()
        self._told: list[str] = []
        self._num_chars = 0

    def hear(self, text: str) -> str:
        """The answer goes on by ``text``, the reply by what comes back."""
        self._num_chars += len(text)
        return self._tell(self._pieces(text))

    def finish(self, text: str) -> str:
        """All of the reply, of the answer that was ``text``."""
        rest = text[self._num_chars :]
        self._tell(self._pieces(rest) if self._output is None else self._output.finish(rest))
        return "".join(self._told) + self._writer.finish()

    def _pieces(self, text: str) -> list[Piece]:
        if self._output is not None:
            return self._output.push(text)
        return [TextPiece(text)] if text else []

    def _tell(self, pieces: list[Piece]) -> str:
        written = self._writer.push(pieces)
        self._told.append(written)
        return written
