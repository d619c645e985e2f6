"""A state as text for a terminal, for ``print(s)`` and ``s.show()``."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Final, NamedTuple, TextIO

from agentflow.language.display.outline import (
    MAX_PIECE_CHARS,
    ForkOutline,
    LeftOut,
    OutlinePiece,
    StateOutline,
    TurnOutline,
    elided,
    short,
)

MAX_CHARS: Final = 20_000
"""The characters of all texts of a state and its branches."""
_STYLES: Final = {
    "role": "bold",
    "cached": "blue",
    "generated": "green",
    "note": "dim italic",
    "error": "red",
    "frame": "dim",
    "": "",
}


# Control characters become their pictures, because a terminal would interpret them. Some have no picture.
_VISIBLE: Final = {code: 0x2400 + code for code in range(32) if code not in (9, 10)} | {
    127: 0x2421,
    **dict.fromkeys(range(0x80, 0xA0), 0xFFFD),
}


class StyledText(NamedTuple):
    """A piece of a line. ``style``: a key of ``_STYLES``."""

    text: str
    style: str = ""


def as_text(outline: StateOutline) -> str:
    """The state without colours."""
    return "".join(segment.text for segment in _Writer().state(outline)).rstrip("\n")


def show(outline: StateOutline, file: TextIO | None = None) -> None:
    """Writes the state to ``file`` (default: stdout), in colours if it is a terminal."""
    file = sys.stdout if file is None else file
    if not file.isatty() or os.environ.get("NO_COLOR"):
        print(as_text(outline), file=file)
        return
    from rich.console import Console
    from rich.text import Text

    text = Text()
    for segment in _Writer().state(outline):
        text.append(segment.text, _STYLES[segment.style])
    text.rstrip()
    Console(file=file, highlight=False).print(text, soft_wrap=True)


class _Writer:
    def __init__(self) -> None:
        self._num_chars_left = MAX_CHARS

    def state(self, outline: StateOutline, margin: str = "") -> Iterator[StyledText]:
        """The lines of a state. ``margin``: the beginning of each line."""
        for part in outline.parts:
            match part:
                case TurnOutline():
                    yield from _with_margin(self._turn(part), margin)
                case ForkOutline():
                    for branch in part.branches:
                        if isinstance(branch, LeftOut):
                            more = _count(branch.count, "more branch", "es")
                            yield StyledText(f"{margin}├╴… {more} …\n", "frame")
                        else:
                            yield StyledText(f"{margin}├╴branch {branch.path[-1]}\n", "frame")
                            yield from self.state(branch, f"{margin}│ ")
                case LeftOut():
                    yield StyledText(f"{margin}… {_count(part.count, 'more part')} …\n", "note")
        if outline.error:
            yield from _with_margin(iter([StyledText(f"failed: {outline.error}", "error")]), margin)

    def _turn(self, turn: TurnOutline) -> Iterator[StyledText]:
        if turn.role:
            yield StyledText(f"[{turn.role}]\n", "role")
        for piece in turn.pieces:
            if isinstance(piece, LeftOut):
                yield StyledText(f"… {_count(piece.count, 'more piece')} …", "note")
            else:
                yield from self._piece(piece)
        for call in turn.calls:
            yield StyledText(f"\n→ {call.name}({short(call.text)})", "note")

    def _piece(self, piece: OutlinePiece) -> Iterator[StyledText]:
        before, omitted, after = elided(piece.text, min(MAX_PIECE_CHARS, self._num_chars_left))
        self._num_chars_left -= len(before) + len(after)
        if piece.kind == "generated":
            yield StyledText(before, "generated")
        else:
            yield StyledText(before[: piece.cached_chars], "cached")
            yield StyledText(before[piece.cached_chars :])
        if omitted:
            yield StyledText(f" … {omitted:,} characters … ", "note")
            yield StyledText(after, "generated" if piece.kind == "generated" else "")
        if piece.error:
            yield StyledText(f"‹{piece.name} failed: {piece.error}›", "error")
        elif piece.is_running:
            yield StyledText(f"‹{piece.name}…›", "note")


def _with_margin(segments: Iterator[StyledText], margin: str) -> Iterator[StyledText]:
    """The segments with the margin at the beginning of each line, and a line break at the end."""
    is_at_start = True
    for text, style in segments:
        for number, line in enumerate(text.split("\n")):
            if number:
                yield StyledText("\n")
                is_at_start = True
            line = line.translate(_VISIBLE)
            if line:
                if is_at_start and margin:
                    yield StyledText(margin, "frame")
                is_at_start = False
                yield StyledText(line, style)
    if not is_at_start:
        yield StyledText("\n")


def _count(count: int, what: str, plural: str = "s") -> str:
    return f"{count:,} {what}{plural if count > 1 else ''}"
