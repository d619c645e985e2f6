"""The values of a run before their answers have arrived: a call that was sent, its answer as a reference, and
a prompt with references.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

from langchain_core.prompt_values import PromptValue
from langchain_core.runnables import Runnable

from agentflow.integrations import Answer, Appendable, WiredProgram
from langchain_agentflow.chains.parts import WiredModel, text_properties
from langchain_agentflow.structured_output import JsonValue


@dataclass(eq=False)
class Pending:
    """The answer of a call, or a value that parsers read from it in this process."""

    call: SentCall
    is_text: bool
    parsers: tuple[Runnable[Any, Any], ...] = ()
    results: list[Any] = field(default_factory=list)  # the value, once it was needed

    @property
    def is_reference(self) -> bool:
        """Whether a prompt can contain it: its text is the text of the variable."""
        return self.is_text and not self.parsers


@dataclass(eq=False)
class SentCall:
    """A call that was sent."""

    model: WiredModel
    program: WiredProgram
    variable: Any
    answers: list[Answer] = field(default_factory=list)


class AnswerText(NamedTuple):
    """A text that a prompt can contain by reference."""

    call: SentCall
    item: Appendable


def answer_texts(value: Any) -> dict[str, AnswerText]:
    """The variables of a template that are texts of answers."""
    if isinstance(value, dict):
        return {
            name: AnswerText(one.call, one.call.variable)
            for name, one in value.items()
            if isinstance(one, Pending) and one.is_reference
        }
    if (
        not isinstance(value, Pending)
        or len(value.parsers) != 2
        or not isinstance(value.parsers[1], JsonValue)
    ):
        return {}
    return {
        name: AnswerText(value.call, value.call.variable.json(name))
        for name in text_properties(value.call.model)
    }


@dataclass(eq=False)
class Filled:
    """A prompt with placeholders for references."""

    template: Runnable[Any, Any]
    value: Any
    prompt: PromptValue
    texts: dict[str, AnswerText]  # by placeholder

    def parts(self, text: str) -> list[Appendable]:
        """The text with references in place of their placeholders."""
        pieces = re.split(f"({'|'.join(self.texts)})", text)
        return [self.texts[piece].item if piece in self.texts else piece for piece in pieces if piece]


class NotWired(Exception):
    """A template changes the text of a value, or the turns are not wired."""


class Placeholder(str):
    """Represents a reference in a template. Any use other than inserting its text raises."""

    def __format__(self, spec: str) -> str:
        return self._changed() if spec else str.__str__(self)

    def _changed(self, *_: Any) -> NoReturn:
        raise NotWired

    __repr__ = __getitem__ = _changed
