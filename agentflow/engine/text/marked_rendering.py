"""A rendering with markers in the place of contents, laid beside the real one: where are the contents?

Nothing here renders anything; ``chat_layout`` does, and chooses which contents become markers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agentflow.protocol.chat import Message


@dataclass(frozen=True, slots=True)
class Shown:
    """Characters ``start`` to ``end`` of a rendering show the content of message number ``turn``."""

    turn: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Marks:
    """The markup around contents that are markers: ``first``, then for each content in the order of the
    text its turn and the markup after it."""

    first: str
    after: tuple[tuple[int, str], ...]


def walk(text: str, messages: Sequence[Message], marks: Marks) -> list[Shown] | None:
    """The places of the contents where each stands as it is, or trimmed, between the same markup."""
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


def aligned(text: str, marks: Marks) -> list[Shown] | None:
    """The places of contents of which nothing is known. None where there is no place for them, or more than
    one, or where a content that is shown several times is not written alike each time."""
    lefts = _ends(text, marks.first, [after for _, after in marks.after])
    if lefts is None:
        return None
    backwards = [marks.first, *(after for _, after in marks.after)][::-1]
    # Reversed and not by rfind, which takes quadratic time for some texts.
    reverse = _ends(text[::-1], backwards[0][::-1], [after[::-1] for after in backwards[1:]])
    if reverse is None or [(len(text) - end, len(text) - start) for start, end in reverse[::-1]] != lefts:
        return None
    written: dict[int, str] = {}
    places = [Shown(turn, start, end) for (turn, _), (start, end) in zip(marks.after, lefts, strict=True)]
    alike = all(written.setdefault(p.turn, text[p.start : p.end]) == text[p.start : p.end] for p in places)
    return places if alike else None


def _ends(text: str, first: str, after: Sequence[str]) -> list[tuple[int, int]] | None:
    """What stands between the markup, each piece of which is taken as far to the left as it can be."""
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
    """The turns that are probably altered: those that a walk stumbles over, which goes on at the next place
    where the markup after them stands."""
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
    """How long ``content`` is that stands at ``at`` as it is, or trimmed, with ``after`` behind it."""
    for written in (content, content.strip(), content.lstrip(), content.rstrip()):
        if text.startswith(written, at) and text.startswith(after, at + len(written)):
            return len(written)
    return None


def common_prefix(a: str, b: str) -> int:
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


def common_suffix(a: str, b: str) -> int:
    return common_prefix(a[::-1], b[::-1])
