"""The outline of a state: its turns, its branches, and which text was cached, as plain data.

``states/outliner`` makes it; ``terminal`` and ``html`` draw it. Long texts and lists are cut in the middle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from agentflow.language.typed.tools import ToolCall
from agentflow.protocol.events import Usage

MAX_PARTS: Final = 60
"""The most turns of a state, or pieces of a turn, that are shown; the middle is left out."""
MAX_PIECE_CHARS: Final = 4_000

PieceKind = Literal["text", "generated", "inserted", "image"]
"""``generated``: a gen or select of this state. ``inserted``: another variable that was appended."""


@dataclass(slots=True)
class OutlinePiece:
    """A piece of a turn."""

    kind: PieceKind
    text: str
    name: str = ""  # of a variable
    is_running: bool = False
    error: str = ""  # why the variable failed
    finish_reason: str = ""
    usage: Usage | None = None  # of a complete variable
    cached_chars: int = 0
    picture: str = ""  # the data URL of a small image


@dataclass(slots=True)
class LeftOut:
    """``count`` turns, pieces or branches are not shown."""

    count: int


@dataclass(slots=True)
class TurnOutline:
    """A turn, or text outside turns."""

    role: str  # empty outside turns
    pieces: list[Any] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    continues: bool = False  # it begins before the state's fork


@dataclass(slots=True)
class ForkOutline:
    """A fork of the state at this point."""

    branches: list[StateOutline | LeftOut]


@dataclass(slots=True)
class StateOutline:
    """The content of a state, from the beginning of its root or from its fork. ``error``: why it failed."""

    path: tuple[int, ...]
    parts: list[OutlinePart]
    error: str = ""


OutlinePart = TurnOutline | ForkOutline | LeftOut


def shorten_items(items: Sequence[Any], most: int = MAX_PARTS) -> list[Any]:
    """The items, without those in the middle if there are more than ``most``."""
    if len(items) <= most:
        return list(items)
    num_first = most // 3
    last = len(items) - (most - num_first)
    count = sum(item.count if isinstance(item, LeftOut) else 1 for item in items[num_first:last])
    return [*items[:num_first], LeftOut(count), *items[last:]]


def elided(text: str, most: int) -> tuple[str, int, str]:
    """The beginning of a text, how many characters are left out in its middle, and its end, with ``most``
    characters together."""
    if len(text) <= most:
        return text, 0, ""
    num_last = max(0, most) // 3
    return text[: max(0, most - num_last)], len(text) - max(0, most), text[len(text) - num_last :]


def short(text: str, most: int = 300) -> str:
    """A text of at most about ``most`` characters on one line."""
    before, num_omitted, after = elided(" ".join(text.split()), most)
    return f"{before} … {after}" if num_omitted else before
