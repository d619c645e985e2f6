"""A rendered conversation, taken apart: which of its characters are contents and which are markup.

The template is a program, so its source does not say. It is asked instead: rendered once with the real
contents, and again with markers that nobody could have guessed in their place. What stands between the
markers is markup, and a walk along the real rendering finds the contents between it, as they are or
trimmed. Where that fails (the template drops a part of a content, or writes other markup for it), each
turn in question is rendered once more as a marker among the real others. What cannot be told apart is
never taken for markup, in which special tokens would count: it is content, or the call is refused.

Tools and tool calls come from outside too, but are shown inside the markup (see ``outside_text``).
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Literal

from agentflow.errors import NotSupported
from agentflow.server.chat_message import Message, ToolSpec
from agentflow.server.chat_template import ChatTemplate
from agentflow.server.chat_values import Mark, unmarked
from agentflow.server.outside_text import Place, Places, new_nonce, outside_places

_TURN_DIGITS = 9


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of a rendering. ``turn``: index of the message whose content it shows; None for markup."""

    kind: Literal["markup", "content"]
    text: str
    turn: int | None


@dataclass(frozen=True, slots=True)
class Shown:
    """Characters ``start`` to ``end`` of a rendering show the content of message number ``turn``."""

    turn: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Layout:
    """A rendering and where in it the contents are, in the order of the text.

    A turn may be shown as it is, altered, several times or not at all; the template decides.
    ``outside``: places in the markup that show what tools and tool calls say, as far as they were asked for.
    """

    messages: tuple[Message, ...]
    open_role: str | None
    text: str
    shown: tuple[Shown, ...]
    tools: tuple[ToolSpec, ...] = ()
    outside: tuple[Place, ...] = ()

    def pieces(self) -> list[Piece]:
        """The whole text, piece by piece: markup, content, markup, …, markup. Markup may be empty."""
        pieces: list[Piece] = []
        at = 0
        for part in self.shown:
            pieces.append(Piece("markup", self.text[at : part.start], None))
            pieces.append(Piece("content", self.text[part.start : part.end], part.turn))
            at = part.end
        return [*pieces, Piece("markup", self.text[at:], None)]


def lay_out(
    template: ChatTemplate,
    messages: Sequence[Message],
    open_role: str | None = None,
    *,
    tools: Sequence[ToolSpec] = (),
    now: datetime | None = None,
    previous: Layout | None = None,
    closed_places: Places | None = None,
) -> Layout:
    """Renders ``messages`` and says where each content is. ``open_role``: whose turn is then opened; the text
    ends where its content begins (for an assistant, with the template's own generation prompt).

    ``previous``: a layout of an earlier state of the same conversation; what its text has in common with
    the new one is read off it. ``closed_places``: where a text has tokens that no content may have; only
    with it does the layout say what came from ``outside``. Costs two renderings (three with tools), and one
    more for each new turn that was altered.
    Raises ``NotSupported`` where the template refuses these messages or hides the opened turn.
    """
    asked = _Asked(template, tuple(messages), open_role, now or datetime.now(), tuple(tools))
    if previous is not None and (previous.messages, previous.open_role, previous.tools) == (
        asked.messages,
        open_role,
        asked.tools,
    ):
        return previous
    text = asked.render(asked.messages)
    marks = asked.marks()
    shown = None if marks is None else _walk(text, asked.messages, marks)
    if shown is None:
        shown = _one_by_one(text, asked, marks, previous)
    shown = _whole_generations(text, asked.messages, shown)
    outside: tuple[Place, ...] = ()
    if closed_places is not None and asked.says_more_than_contents:
        outside = outside_places(lambda mark: asked.render(asked.messages, mark), text, closed_places)
    return Layout(asked.messages, open_role, text, tuple(shown), asked.tools, outside)


@dataclass(frozen=True, slots=True)
class _Marks:
    """The markup around contents that are markers: ``first``, then for each content in the order of the
    text its turn and the markup after it."""

    first: str
    after: tuple[tuple[int, str], ...]


@dataclass(frozen=True, slots=True)
class _Asked:
    template: ChatTemplate
    messages: tuple[Message, ...]
    open_role: str | None
    now: datetime
    tools: tuple[ToolSpec, ...]

    @property
    def says_more_than_contents(self) -> bool:
        return bool(self.tools) or any(
            message.tool_calls or message.tool_call_id is not None or message.name is not None
            for message in self.messages
        )

    def render(self, messages: tuple[Message, ...], mark: Mark = unmarked) -> str:
        if self.open_role is None or self.open_role == "assistant":
            opens = self.open_role is not None
            return self.template.render(
                messages, tools=self.tools, add_generation_prompt=opens, now=self.now, mark=mark
            )
        marker = new_nonce()
        opened = (*messages, Message(self.open_role, marker))
        text = self.template.render(opened, tools=self.tools, now=self.now, mark=mark)
        if marker not in text:
            raise NotSupported(
                f"the model's chat template does not show a {self.open_role} turn at this place"
            )
        return text[: text.rindex(marker)]

    def marks(self, turn: int | None = None) -> _Marks | None:
        """The markup around all contents, or around that of ``turn`` with the others as they are. None
        where the template does not take a marker for a content."""
        nonce = new_nonce()
        marked = tuple(
            replace(message, content=f"{nonce}{number:0{_TURN_DIGITS}}")
            # Beside tool calls, templates write no content otherwise than an empty one.
            if turn == number or (turn is None and (message.content or not message.tool_calls))
            else message
            for number, message in enumerate(self.messages)
        )
        try:
            # Split by a pattern with a group, a text becomes: markup, number, markup, …, number, markup.
            first, *rest = re.split(f"{nonce}([0-9]{{{_TURN_DIGITS}}})", self.render(marked))
        except NotSupported:
            return None
        return _Marks(first, tuple((int(n), after) for n, after in zip(rest[::2], rest[1::2], strict=True)))


def _walk(text: str, messages: tuple[Message, ...], marks: _Marks) -> list[Shown] | None:
    """The places of the contents where each stands as it is, or trimmed, between the same markup."""
    if not text.startswith(marks.first):
        return None
    at = len(marks.first)
    shown: list[Shown] = []
    for turn, after in marks.after:
        content = messages[turn].content
        for written in (content, content.strip(), content.lstrip(), content.rstrip()):
            if text.startswith(written, at) and text.startswith(after, at + len(written)):
                break
        else:
            return None
        shown.append(Shown(turn, at, at + len(written)))
        at += len(written) + len(after)
    return shown if at == len(text) else None


def _one_by_one(text: str, asked: _Asked, marks: _Marks | None, previous: Layout | None) -> list[Shown]:
    """The places of the contents, each found by itself."""
    counts = None if marks is None else Counter(turn for turn, _ in marks.after)
    shown = _still_shown(text, asked.messages, previous)
    shown = [part for part in shown if counts is None or counts[part.turn] == 1]
    known = {part.turn for part in shown}
    unsure: list[tuple[int, int, int]] = []
    for turn in range(len(asked.messages)):
        if turn in known:
            continue
        around = asked.marks(turn)
        places = None if around is None else _between(text, around)
        is_blank = not asked.messages[turn].content.strip()
        if places is not None:
            # What is written for no content at all is the template's own.
            shown += [Shown(turn, a, b) for a, b in places if not (is_blank and text[a:b].strip())]
        elif around is not None and len(around.after) == 1 and not is_blank:
            start = _common_prefix(text, around.first)
            tail = min(_common_suffix(text, around.after[0][1]), len(text) - start)
            unsure.append((turn, start, len(text) - tail))
        elif not is_blank:
            raise _cannot_tell(asked.messages[turn])
    for turn, start, end in unsure:
        shown += _search(text, asked.messages[turn], Shown(turn, start, end), shown)
    shown.sort(key=lambda part: (part.start, part.end))
    for one, other in itertools.pairwise(shown):
        if one.end > other.start:
            raise _cannot_tell(asked.messages[other.turn])
    return shown


def _between(text: str, marks: _Marks) -> list[tuple[int, int]] | None:
    """The places of one content that is written alike wherever the markup around it leaves room."""
    if not marks.after:
        return [] if marks.first == text else None
    room = len(text) - len(marks.first) - sum(len(after) for _, after in marks.after)
    length, left_over = divmod(room, len(marks.after))
    if length < 0 or left_over:
        return None
    at = len(marks.first)
    places = [(at, at + length)]
    written = text[at : at + length]
    rebuilt = marks.first + "".join(written + after for _, after in marks.after)
    for _, after in marks.after[:-1]:
        at += length + len(after)
        places.append((at, at + length))
    return places if rebuilt == text else None


def _search(text: str, message: Message, region: Shown, shown: list[Shown]) -> list[Shown]:
    """The place of a content around which the template writes other markup than around a marker.

    ``region`` is where the rendering differs from that with a marker. The content may also reach out of
    it, to the places of the turns before and after, but always covers it.
    """
    low = max((part.end for part in shown if part.turn < region.turn and part.end <= region.end), default=0)
    high = min(
        (p.start for p in shown if p.turn > region.turn and p.start >= region.start), default=len(text)
    )
    start, end = max(region.start, low), min(region.end, high)
    if start >= end:
        return []
    for written in (message.content, message.content.strip()):
        at = text.find(written, max(low, end - len(written)), min(high, start + len(written)))
        if at >= 0:
            return [Shown(region.turn, at, at + len(written))]
    return [Shown(region.turn, start, end)]


def _still_shown(text: str, messages: tuple[Message, ...], previous: Layout | None) -> list[Shown]:
    """The places that ``previous`` found in the text that it has in common with ``text``."""
    if previous is None:
        return []
    same = 0
    for old, new in zip(previous.messages, messages, strict=False):
        if old != new:
            break
        same += 1
    end = _common_prefix(previous.text, text)
    return [part for part in previous.shown if part.turn < same and part.end <= end]


def _whole_generations(text: str, messages: tuple[Message, ...], shown: list[Shown]) -> list[Shown]:
    """Counts to a generated content what is its own though the template writes it as markup, such as the
    space that it puts before each answer: what a model generated stays as it was generated."""
    whole: list[Shown] = []
    for number, part in enumerate(shown):
        message = messages[part.turn]
        length = len(message.content)
        if message.generated and part.end - part.start < length:
            low = max(whole[-1].end if whole else 0, part.end - length)
            high = shown[number + 1].start if number + 1 < len(shown) else len(text)
            at = text.find(message.content, low, min(high, part.start + length))
            if at >= 0:
                part = Shown(part.turn, at, at + length)
        whole.append(part)
    return whole


def _cannot_tell(message: Message) -> NotSupported:
    return NotSupported(
        f"the model's chat template rewrites a {message.role} turn: its content cannot be told from markup"
    )


def _common_prefix(a: str, b: str) -> int:
    """How many characters at the front are the same."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while high - low > 1:  # a[:low] is common, a[:high] is not
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low


def _common_suffix(a: str, b: str) -> int:
    return _common_prefix(a[::-1], b[::-1])
