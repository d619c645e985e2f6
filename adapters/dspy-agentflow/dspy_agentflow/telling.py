"""When a streamed answer is told: what may still be said anew, because ``max_tokens`` cuts it off within a
value, waits until that is whole."""

from __future__ import annotations

from collections.abc import Iterator

from agentflow.integrations.client import Ended, Said
from agentflow.protocol.chat import TextPiece
from dspy_agentflow.answer_format import AnswerFormat, Rest


class Telling:
    """Of one answer in this format; without one, all is told as it comes."""

    def __init__(self, answer_format: AnswerFormat | None) -> None:
        self._is_held = answer_format is not None
        self._format = answer_format
        self._text = ""
        self._num_told = 0

    def tell(self, event: Said | Ended) -> Iterator[Said | Ended]:
        """What of it is told now."""
        if not self._is_held or (isinstance(event, Said) and not isinstance(event.piece, TextPiece)):
            yield event
            return
        if isinstance(event, Said) and isinstance(event.piece, TextPiece):
            self._text += event.piece.text
        num_certain = len(self._text)
        if self._format is not None and isinstance(event, Said):
            num_certain = self._format.num_certain(self._text)
        if num_certain > self._num_told:
            yield Said(event.index, TextPiece(self._text[self._num_told : num_certain]))
            self._num_told = num_certain
        if isinstance(event, Ended):
            yield event

    def go_on(self, rest: Rest) -> None:
        """It was cut off, and goes on behind what is kept. What was told beyond that comes again."""
        self._text, self._format = rest.kept, None
