"""The parts of a state: its turns, and the text between them.

``PlainTools`` converts them for a template that does not support tools.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from msgspec import structs

from agentflow.engine.text.channel_output import read_channels
from agentflow.engine.text.tool_format import RESULT_BEGIN, RESULT_END
from agentflow.protocol.chat import Message
from agentflow.protocol.images import Medium, placed_in


@dataclass(frozen=True, slots=True)
class TextRun:
    """Text that is encoded as a whole, or generated text; or an image or a video, whose text is empty."""

    text: str
    ids: tuple[int, ...] | None = None  # of generated text
    medium: Medium | None = None  # without its bytes


@dataclass(frozen=True, slots=True)
class Part:
    """One turn, or text outside all turns."""

    role: str | None  # None: text outside turns
    runs: tuple[TextRun, ...] = ()
    is_open: bool = False
    given: Message | None = None  # has the fields of the turn's message other than its content
    called: Message | None = None  # the reply with tool calls that this turn is

    @property
    def text(self) -> str:
        return "".join([run.text for run in self.runs])

    @property
    def is_generated(self) -> bool:
        return any(run.ids is not None for run in self.runs)

    def message(self, *, writes_calls: bool = False, in_channels: bool = False) -> Message:
        """Returns the turn for the template. ``writes_calls``: a reply has its tool calls as calls, not as
        generated text. ``in_channels``: generated text is divided into reasoning, text and calls."""
        if in_channels and self.is_generated and self.role == "assistant":
            return read_channels(self.text, self.called)
        if writes_calls and self.called is not None:
            return self.called
        text, images = placed_in([run.medium or run.text for run in self.runs])
        if self.given is not None:
            return structs.replace(self.given, content=text, images=images)
        return Message(self.role or "", text, self.is_generated, images=images)

    def texts(self) -> list[list[TextRun]]:
        """Returns the runs of each text between media, as the template gets them."""
        texts: list[list[TextRun]] = [[]]
        for run in self.runs:
            if run.medium is not None:
                texts.append([])
            else:
                texts[-1].append(run)
        filled = [runs for runs in texts if any(run.text for run in runs)]
        return filled if len(texts) > 1 else texts


@dataclass(frozen=True, slots=True)
class PlainTools:
    """The tools for a template without tools; see ``TokenState.plain_tools``."""

    description: str
    has_system: bool

    def rewritten(self, parts: Sequence[Part]) -> list[Part]:
        """Returns the parts with the description, and with results as turns of the user. Consecutive results,
        and the user's text directly after them, share a turn."""
        joined: list[tuple[Part, list[TextRun] | None]] = []  # with the runs of parts that have results
        is_answering = False
        for part in parts:
            is_result, runs = part.role == "tool", part.runs
            if is_result:
                end = () if part.is_open else (TextRun(RESULT_END),)
                part, runs = Part("user", (), part.is_open), (TextRun(RESULT_BEGIN), *runs, *end)
            before = joined[-1][1] if is_answering and part.role == "user" else None
            if before is not None:
                before += (TextRun("\n"), *runs)
                joined[-1] = part, before
            else:
                joined.append((part, [*runs] if is_result else None))
            is_answering = is_result
        shown = [part if runs is None else replace(part, runs=_merged(runs)) for part, runs in joined]
        if self.description:
            self._describe(shown)
        return shown

    def _describe(self, shown: list[Part]) -> None:
        first = next((number for number, part in enumerate(shown) if part.role is not None), len(shown))
        part = shown[first] if first < len(shown) else None
        if part is not None and part.role == "system":
            said = f"\n\n{self.description}" if part.text else self.description
            shown[first] = replace(part, runs=_merged((*part.runs, TextRun(said))))
        elif self.has_system:
            shown.insert(first, Part("system", (TextRun(self.description),)))
        elif part is not None:
            shown[first] = replace(part, runs=_merged((TextRun(f"{self.description}\n\n"), *part.runs)))


def _merged(runs: Sequence[TextRun]) -> tuple[TextRun, ...]:
    """Returns the runs with adjacent text that is not encoded yet joined to one run."""
    merged: list[TextRun] = []
    for is_text, group in groupby(runs, lambda run: run.ids is None and run.medium is None):
        adjacent = [*group]
        merged += [TextRun("".join([run.text for run in adjacent]))] if is_text else adjacent
    return tuple(merged)
