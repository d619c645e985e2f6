"""From what the engine tells of an answer to the text of a reply (``reply``)."""

from __future__ import annotations

from agentflow.constraint import Constraint
from agentflow.reply import Piece, ReplyWriter, TextPiece
from agentflow.server.tool_use import ToolUse, refuse_beside_tools


class ReplyText:
    """Of one answer. ``use``: the tools that it may call, if there are any. ``constraint``: what its prose
    must look like, where it may call none (``NotSupported`` otherwise); and, of this object, what keeps its
    calls valid."""

    def __init__(self, use: ToolUse | None, constraint: Constraint | None = None) -> None:
        may_call = use is not None and bool(use.callable_names)
        if may_call:
            refuse_beside_tools(constraint)
        self.constraint = constraint if use is None else constraint or use.constraint
        self._output = use.output() if use is not None and may_call else None
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
