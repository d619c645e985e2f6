"""Separates contents from markup in a rendered conversation.

A template is a program, so its source does not show where contents are. It is rendered once with the real
contents and once with unguessable markers in their place. The text between markers is markup, and a walk
along the real rendering finds each content between it, unchanged or trimmed. If that fails (the template
drops a part of a content, or writes other markup for it), the turns in question are rendered again as
markers, the others with real contents: together if there is only one way to place them, else in halves, and
finally one by one. The amount of rendering is limited. Text that cannot be attributed is never treated as
markup, in which special tokens are recognised: it is content, or the call fails.

Tools and tool calls are untrusted like contents but appear inside the markup. The conversation is rendered
again with a nonce before and after each of their strings; the text between two nonces is an *untrusted span*,
and a special token that is even partly inside one is encoded as content.

A content with images or videos is several contents, one for each text between them. The template writes a
placeholder for each medium. It is found in the markup, outside untrusted spans, so no text of a user is
mistaken for one.
"""

from __future__ import annotations

import itertools
import json
import secrets
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Literal, TypeAlias

from msgspec.structs import replace

from agentflow.engine.text.chat_template import ChatTemplate, MarkText, unmarked
from agentflow.engine.text.common_prefix import common_prefix
from agentflow.errors import NotSupported
from agentflow.protocol.chat import Message, ToolSpec
from agentflow.protocol.images import Medium, MediumKind, medium_kind, placed_in

_NO_MEDIA: Mapping[MediumKind, str] = {}


@dataclass(frozen=True, slots=True)
class Shown:
    """Characters ``start`` to ``end`` of a rendering, which show the content of message number ``turn``.
    ``part``: which of its texts, if media divide it."""

    turn: int
    start: int
    end: int
    part: int = 0


@dataclass(frozen=True, slots=True)
class Marks:
    """The markup around markers."""

    first: str  # before the first content
    # For each content, in the order of the text: its turn, and the markup after it.
    after: tuple[tuple[int, str], ...]


def walk(text: str, messages: Sequence[Message], marks: Marks) -> list[Shown] | None:
    """Returns the places of the contents, if each appears unchanged or trimmed between the same markup; else
    None."""
    if not text.startswith(marks.first):
        return None
    at = len(marks.first)
    shown: list[Shown] = []
    for turn, after in marks.after:
        length = _written_at(text, at, messages[turn].content, after)
        if length is None:
            return None
        shown.append(Shown(turn, at, at + length))
        at += length + len(after)
    return shown if at == len(text) else None


def between(text: str, marks: Marks) -> list[tuple[int, int]] | None:
    """Returns the places of one content, if the text between the markup is the same at all of them; else
    None."""
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


def aligned(text: str, marks: Marks) -> list[Shown] | None:
    """Returns the places of contents that may be altered. None if there is no way to place them, or more than
    one, or if a content that is shown several times is not always written the same."""
    lefts = _ends(text, marks.first, [after for _, after in marks.after])
    if lefts is None:
        return None
    backwards = [marks.first, *(after for _, after in marks.after)][::-1]
    # Reversed instead of rfind, which takes quadratic time on some texts.
    reverse = _ends(text[::-1], backwards[0][::-1], [after[::-1] for after in backwards[1:]])
    if reverse is None or [(len(text) - end, len(text) - start) for start, end in reverse[::-1]] != lefts:
        return None
    written: dict[int, str] = {}
    places = [Shown(turn, start, end) for (turn, _), (start, end) in zip(marks.after, lefts, strict=True)]
    alike = all(written.setdefault(p.turn, text[p.start : p.end]) == text[p.start : p.end] for p in places)
    return places if alike else None


def _ends(text: str, first: str, after: Sequence[str]) -> list[tuple[int, int]] | None:
    """Returns the places between the markup, each piece of which is matched as far left as possible."""
    if not text.startswith(first):
        return None
    at = len(first)
    if not after:
        return [] if at == len(text) else None
    places: list[tuple[int, int]] = []
    for markup in after[:-1]:
        end = text.find(markup, at)
        if end < 0:
            return None
        places.append((at, end))
        at = end + len(markup)
    end = len(text) - len(after[-1])
    return [*places, (at, end)] if end >= at and text.endswith(after[-1]) else None


def suspects(text: str, messages: Sequence[Message], marks: Marks) -> set[int]:
    """Returns the turns that are probably altered: the walk fails there, and resumes at the next match of the
    markup after them."""
    found: set[int] = set()
    if not text.startswith(marks.first):
        return found
    at = len(marks.first)
    for number, (turn, after) in enumerate(marks.after):
        length = _written_at(text, at, messages[turn].content, after)
        if length is None:
            found.add(turn)
            end = text.find(after, at)
            if end < 0:
                return found | {turn for turn, _ in marks.after[number:]}
            length = end - at
        at += length + len(after)
    return found


def _written_at(text: str, at: int, content: str, after: str) -> int | None:
    """Returns the length of ``content`` at ``at``, unchanged or trimmed, if ``after`` follows it; else
    None."""
    for written in (content, content.strip(), content.lstrip(), content.rstrip()):
        if text.startswith(written, at) and text.startswith(after, at + len(written)):
            return len(written)
    return None


TextRange: TypeAlias = "tuple[int, int]"
"""Start and end of a stretch of text."""

FindSpans: TypeAlias = Callable[[str], "Sequence[TextRange]"]
"""Finds the spans of tokens that no content may have, such as ``Tokenizer.closed_spans``."""


def find_untrusted_spans(
    render: Callable[[MarkText], str], text: str, closed_spans: FindSpans
) -> tuple[TextRange, ...]:
    """Returns the untrusted spans of ``text``, in order. ``render`` applies a mark to each untrusted string;
    with ``unmarked`` it returns ``text``.

    Some templates inspect the strings (the type of a parameter, the length of an id) and write other text for
    marked ones; then only strings that contain a special token are marked. Raises ``NotSupported`` if the
    template does not show these unchanged.
    """
    for around in (_whole_text, closed_spans):
        nonce = new_nonce()
        try:
            marked = render(partial(_marked, nonce, around))
        except NotSupported:
            continue
        parts = marked.split(nonce)
        if len(parts) % 2 and "".join(parts) == text:
            return _inside(parts)
    raise NotSupported(
        "the model's chat template alters text of tools or tool calls that contains a special token of the "
        "model: remove that token",
        param="tools",
    )


def closed_untrusted_spans(
    text: str, start: int, end: int, untrusted: Sequence[TextRange], closed_spans: FindSpans
) -> list[TextRange]:
    """Returns the spans of closed tokens that are at least partly in an untrusted span, in order and
    disjoint.

    Args:
        text: the rendering.
        start: the first character to search.
        end: the end of the search, exclusive.
        untrusted: the untrusted spans.
        closed_spans: finds closed tokens.
    """
    firsts, ends = [span[0] for span in untrusted], [span[1] for span in untrusted]
    found: list[TextRange] = []
    unread = [(start, end)]
    while unread:
        low, high = unread.pop()
        if bisect_right(ends, low) >= bisect_left(firsts, high):
            continue  # it has no untrusted span
        at = low
        for a, b in closed_spans(text[low:high]):
            a, b = a + low, b + low
            if a < b and bisect_right(ends, a) < bisect_left(firsts, b):
                found.append((a, b))
                # The text around it may be tokenised differently without it.
                unread.append((at, a))
                at = b
        if at > low:
            unread.append((at, high))
    return sorted(found)


def new_nonce() -> str:
    """Returns an unguessable text: digits, which have no case, of constant length, because templates may
    check the length."""
    return str(10**38 + secrets.randbelow(10**38))


def _whole_text(string: str) -> list[TextRange]:
    """Returns the place of the string without white space at its ends, which templates trim."""
    return [(len(string) - len(string.lstrip()), len(string.rstrip()))]


def _marked(nonce: str, around: FindSpans, string: str) -> str:
    parts: list[str] = []
    at = 0
    for start, end in around(string):
        if start < end:
            parts += [string[at:start], nonce, string[start:end], nonce]
            at = end
    return "".join([*parts, string[at:]])


def _inside(parts: list[str]) -> tuple[TextRange, ...]:
    places: list[TextRange] = []
    at = 0
    for number, part in enumerate(parts):
        if number % 2 and part:
            places.append((at, at + len(part)))
        at += len(part)
    return tuple(places)


_TURN_DIGITS = 9
# The most characters that are rendered to find the altered contents of one layout: about a second of work.
MAX_RENDERED_CHARS = 32_000_000
# The cost of a turn, in characters.
CHARS_PER_TURN = 100
# The number of renderings that are always allowed, even of long texts.
MIN_RENDERINGS = 32


@dataclass(frozen=True, slots=True)
class LayoutPiece:
    """A part of a rendering."""

    kind: Literal["markup", "content"]
    text: str
    turn: int | None  # the index of the message whose content it shows; None for markup


@dataclass(frozen=True, slots=True)
class Layout:
    """A rendering and the places of the contents in it. The template may show a turn unchanged, altered,
    several times or not at all."""

    messages: tuple[Message, ...]
    open_role: str | None  # the role of the opened turn after the messages
    text: str
    shown: tuple[Shown, ...]  # in the order of the text
    tools: tuple[ToolSpec, ...] = ()
    untrusted_spans: tuple[TextRange, ...] = ()  # strings of tools and tool calls in the markup, if requested
    # The places of the placeholders of images and videos, in the order of the text.
    media: tuple[tuple[TextRange, Medium], ...] = ()

    @property
    def placeholders(self) -> dict[MediumKind, str]:
        """The template's text for its media."""
        return {medium_kind(medium): self.text[low:high] for (low, high), medium in self.media}

    def contents(self) -> list[Shown]:
        """Returns the places of the texts and of the placeholders of media, in the order of the text."""
        turns = [turn for turn, message in enumerate(self.messages) for _ in message.images]
        placed = [Shown(turn, *place) for turn, (place, _) in zip(turns, self.media, strict=True)]
        return sorted([*self.shown, *placed], key=lambda part: (part.start, part.end))

    def pieces(self) -> list[LayoutPiece]:
        """Returns the whole text in pieces: markup, content, markup, …, markup. Markup may be empty."""
        pieces: list[LayoutPiece] = []
        at = 0
        for part in self.shown:
            pieces.append(LayoutPiece("markup", self.text[at : part.start], None))
            pieces.append(LayoutPiece("content", self.text[part.start : part.end], part.turn))
            at = part.end
        return [*pieces, LayoutPiece("markup", self.text[at:], None)]


def lay_out(
    template: ChatTemplate,
    messages: Sequence[Message],
    open_role: str | None = None,
    *,
    tools: Sequence[ToolSpec] = (),
    now: datetime | None = None,
    previous: Layout | None = None,
    closed_spans: FindSpans | None = None,
    placeholders: Mapping[MediumKind, str] = _NO_MEDIA,
) -> Layout:
    """Renders ``messages`` and finds each content. Costs two renderings (three with tools), and two or more
    extra if the template alters new turns.

    Args:
        template: the chat template.
        messages: the turns.
        open_role: the role whose turn is opened after them. The text ends where the content of this turn
            begins (for an assistant, with the template's generation prompt).
        tools: the tools that the template describes.
        now: the time for the template; None: the current time.
        previous: a layout of an earlier state of the same conversation; places in the common prefix are
            reused.
        closed_spans: finds tokens that no content may have; without it, ``untrusted_spans`` stays empty.
        placeholders: the template's text for an image, and for a video.

    Raises:
        NotSupported: the template rejects these messages, hides the opened turn or alters too many turns.
    """
    units = _units(messages)
    asked = _Asked(template, tuple(messages), open_role, now or datetime.now(), tuple(tools), *units)
    if previous is not None and (previous.messages, previous.open_role, previous.tools) == (
        asked.messages,
        open_role,
        asked.tools,
    ):
        return previous
    text = asked.render(asked.units)
    marks = asked.marks()
    shown = None if marks is None else walk(text, asked.units, marks)
    if shown is None:
        shown = _one_by_one(text, asked, marks, previous)
    found = [(part, asked.owners[part.turn]) for part in _whole_generations(text, asked.units, shown)]
    shown = [Shown(turn, part.start, part.end, number) for part, (turn, number) in found]
    untrusted: tuple[TextRange, ...] = ()
    if closed_spans is not None and asked.says_more_than_contents:
        untrusted = find_untrusted_spans(lambda mark: asked.render(asked.units, mark), text, closed_spans)
    media = [placed.medium for message in asked.messages for placed in message.images]
    by_place = _places_of_media(media, placeholders, text, shown, untrusted)
    return Layout(asked.messages, open_role, text, tuple(shown), asked.tools, untrusted, by_place)


def _places_of_media(
    media: Sequence[Medium],
    placeholders: Mapping[MediumKind, str],
    text: str,
    shown: Sequence[Shown],
    untrusted: Sequence[TextRange],
) -> tuple[tuple[TextRange, Medium], ...]:
    """Returns the media with their places, in the order of the text. Media with the same placeholder are in
    the order of the conversation; a template may write all images before all videos."""
    by_placeholder: dict[str, list[Medium]] = {}
    for medium in media:
        by_placeholder.setdefault(placeholders.get(medium_kind(medium), ""), []).append(medium)
    found: list[tuple[TextRange, Medium]] = []
    for placeholder, same in by_placeholder.items():
        places = _placeholders(text, shown, untrusted, placeholder)
        if len(places) != len(same):
            kinds = " and ".join(sorted({f"{medium_kind(medium)}s" for medium in same}))
            raise NotSupported(
                f"the model's chat template shows {len(places)} of {len(same)} {kinds} of this conversation"
            )
        found += zip(places, same, strict=True)
    return tuple(sorted(found, key=lambda one: one[0]))


def _placeholders(
    text: str, shown: Sequence[Shown], untrusted: Sequence[TextRange], placeholder: str
) -> list[TextRange]:
    """Returns the places of the placeholders that the template wrote, in order."""
    found: list[TextRange] = []
    firsts, ends = [span[0] for span in untrusted], [span[1] for span in untrusted]
    edges = [0, *[edge for part in shown for edge in (part.start, part.end)], len(text)]
    for low, high in zip(edges[::2], edges[1::2], strict=True):
        at = text.find(placeholder, low, high) if placeholder else -1
        while at >= 0:
            end = at + len(placeholder)
            if bisect_right(ends, at) >= bisect_left(firsts, end):
                found.append((at, end))
            at = text.find(placeholder, end, high)
    return found


def _units(messages: Sequence[Message]) -> tuple[list[Message], list[tuple[int, int]]]:
    """Returns each text of the contents as a message, and the number of its message and of the text in
    it."""
    units: list[Message] = []
    owners: list[tuple[int, int]] = []
    for turn, message in enumerate(messages):
        texts = [message.content]
        if message.images:
            texts = [part for part in message.parts if isinstance(part, str)]
        for part, text in enumerate(texts):
            units.append(replace(message, content=text, images=()) if message.images else message)
            owners.append((turn, part))
    return units, owners


@dataclass(frozen=True, slots=True)
class _Asked:
    template: ChatTemplate
    messages: tuple[Message, ...]
    open_role: str | None
    now: datetime
    tools: tuple[ToolSpec, ...]
    units: Sequence[Message]  # as in ``_units``, with ``owners``
    owners: Sequence[tuple[int, int]]

    @property
    def says_more_than_contents(self) -> bool:
        return bool(self.tools) or any(
            message.tool_calls
            or message.reasoning is not None
            or message.tool_call_id is not None
            or message.name is not None
            for message in self.messages
        )

    def render(self, units: Sequence[Message], mark: MarkText = unmarked) -> str:
        messages = self._with_texts(units)
        if self.open_role is None or self.open_role == "assistant":
            opens = self.open_role is not None
            return self.template.render(
                messages, tools=self.tools, add_generation_prompt=opens, now=self.now, mark=mark
            )
        marker = new_nonce()
        opened = (*messages, Message(self.open_role, marker))
        text = self.template.render(opened, tools=self.tools, now=self.now, mark=mark)
        if marker not in text:
            raise NotSupported(f"the model's chat template does not show a {self.open_role} turn here")
        return text[: text.rindex(marker)]

    def _with_texts(self, units: Sequence[Message]) -> tuple[Message, ...]:
        """Returns the messages with the texts of ``units``."""
        texts = iter(units)
        messages: list[Message] = []
        for message in self.messages:
            if not message.images:
                messages.append(next(texts))
                continue
            parts = [next(texts).content if isinstance(part, str) else part for part in message.parts]
            content, images = placed_in(parts)
            messages.append(replace(message, content=content, images=images))
        return tuple(messages)

    def marks(self, turns: Set[int] | None = None) -> Marks | None:
        """Returns the markup around all units, or around the units ``turns``, while the others are
        unchanged. None if the template rejects markers as contents."""
        nonce = new_nonce()
        marked = tuple(
            replace(message, content=f"{nonce}{number:0{_TURN_DIGITS}}")
            # Next to tool calls, templates treat an absent content like an empty one.
            if (message.content or not message.tool_calls if turns is None else number in turns)
            else message
            for number, message in enumerate(self.units)
        )
        try:
            first, *rest = self.render(marked).split(nonce)
        except NotSupported:
            return None
        texts, numbers = [first], list[int]()
        for part in rest:
            number = part[:_TURN_DIGITS]
            if len(number) == _TURN_DIGITS and number.isascii() and number.isdecimal():
                numbers.append(int(number))
                texts.append(part[_TURN_DIGITS:])
            else:  # the template truncates contents
                texts[-1] += nonce + part
        return Marks(texts[0], tuple(zip(numbers, texts[1:], strict=True)))


def _one_by_one(text: str, asked: _Asked, marks: Marks | None, previous: Layout | None) -> list[Shown]:
    """Returns the places of the contents. Finds many together if that is unambiguous, else one by one."""
    counts = None if marks is None else Counter(turn for turn, _ in marks.after)
    shown = _still_shown(text, asked, previous)
    shown = [part for part in shown if counts is None or counts[part.turn] == 1]
    known = {part.turn for part in shown}
    unsure: list[Shown] = []
    altered = set() if marks is None else suspects(text, asked.units, marks)
    new = [turn for turn in range(len(asked.units)) if turn not in known]
    groups = [[turn for turn in new if turn in altered], [turn for turn in new if turn not in altered]]
    budget = _Budget(len(text) + CHARS_PER_TURN * len(asked.units))
    while groups:
        group = groups.pop()
        if not group:
            continue
        budget.spend()
        around = asked.marks(set(group))
        found: list[Shown] | None
        if len(group) == 1:
            found = _alone(text, asked.units[group[0]], group[0], around, unsure)
        else:
            found = None if around is None else _together(text, asked.units, around)
        if found is None:
            middle = len(group) // 2
            groups += [group[middle:], group[:middle]]
        else:
            shown += found
    for region in sorted(unsure, key=lambda part: part.turn):
        shown += _search(text, asked.units[region.turn], region, shown)
    shown.sort(key=lambda part: (part.start, part.end))
    for one, other in itertools.pairwise(shown):
        if one.end > other.start:
            raise _cannot_tell(asked.units[other.turn])
    return shown


class _Budget:
    """Limits the renderings for one layout, whose cost is quadratic in the size of the request."""

    def __init__(self, cost: int) -> None:
        self._cost = cost
        self._num_renderings = 0

    def spend(self) -> None:
        self._num_renderings += 1
        if self._num_renderings > max(MIN_RENDERINGS, MAX_RENDERED_CHARS // self._cost):
            raise NotSupported(
                "the model's chat template rewrites too many turns of this conversation to find them in "
                "time: send fewer turns, or leave out parts that the template drops (such as reasoning)"
            )


def _alone(text: str, message: Message, turn: int, around: Marks | None, unsure: list[Shown]) -> list[Shown]:
    """Returns the places of one content. If they are not known yet, appends its region to ``unsure``."""
    places = None if around is None else between(text, around)
    is_blank = not message.content.strip()
    if places is not None:
        # Text written for an empty content belongs to the template.
        return [Shown(turn, a, b) for a, b in places if not (is_blank and text[a:b].strip())]
    if around is not None and len(around.after) == 1 and not is_blank:
        start = common_prefix(text, around.first)
        tail = min(common_prefix(text[::-1], around.after[0][1][::-1]), len(text) - start)
        unsure.append(Shown(turn, start, len(text) - tail))
    elif not is_blank:
        raise _cannot_tell(message)
    return []


def _together(text: str, messages: Sequence[Message], around: Marks) -> list[Shown] | None:
    """Returns the places of several contents, if unambiguous: each is unchanged or trimmed, or there is only
    one way to place them and each shows a part of its content. Else None."""
    shown = walk(text, messages, around)
    if shown is not None:
        return shown
    places = aligned(text, around)
    if places is None:
        return None
    shown = []
    for part in places:
        content, written = messages[part.turn].content, text[part.start : part.end]
        # Otherwise a content might imitate the markup that the template writes around another.
        if written not in content and written not in json.dumps(content, ensure_ascii=False):
            return None
        if content.strip() or not written.strip():  # otherwise as in ``_alone``
            shown.append(part)
    return shown


def _search(text: str, message: Message, region: Shown, shown: list[Shown]) -> list[Shown]:
    """Returns the place of a content around which the template writes other markup than around a marker.

    ``region`` is the part of the rendering that differs from the rendering with a marker. The content covers
    it and may extend to the places of the turns before and after.
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


def _still_shown(text: str, asked: _Asked, previous: Layout | None) -> list[Shown]:
    """Returns the places in ``previous`` that are in the common prefix with ``text``."""
    if previous is None:
        return []
    same = common_prefix(previous.messages, asked.messages)
    end = common_prefix(previous.text, text)
    numbers = {owner: number for number, owner in enumerate(asked.owners)}
    return [
        Shown(numbers[part.turn, part.part], part.start, part.end)
        for part in previous.shown
        if part.turn < same and part.end <= end
    ]


def _whole_generations(text: str, messages: Sequence[Message], shown: list[Shown]) -> list[Shown]:
    """Extends a generated content by text that the template writes as markup, such as the space before each
    answer, so that generated text keeps its ids."""
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
        f"the model's chat template rewrites a {message.role} turn: its content is not distinct from markup"
    )
