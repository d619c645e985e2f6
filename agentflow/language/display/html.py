"""A state as HTML for a notebook: its turns, with branches side by side, cached and generated text tinted.

The HTML is self-contained and of bounded size. Colours are translucent, so that they fit light and dark
themes. All text is escaped."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Final

from agentflow.language.display.outline import (
    MAX_PIECE_CHARS,
    ForkOutline,
    LeftOut,
    OutlinePart,
    OutlinePiece,
    StateOutline,
    TurnOutline,
    elided,
    short,
)
from agentflow.protocol.events import Usage

MAX_CHARS: Final = 60_000
"""The characters of all texts of a state and its branches."""
MAX_PICTURE_CHARS: Final = 300_000
"""The characters of all pictures."""
_STYLE: Final = """<style>
.agentflow{font:13px/1.5 system-ui,sans-serif;max-width:72em}
.agentflow .af-turn{display:flex;gap:.8em;padding:.25em 0}
.agentflow .af-role{flex:0 0 5.5em;text-align:right;font-size:11px;line-height:1.8;opacity:.6}
.agentflow .af-text{flex:1;min-width:0;white-space:pre-wrap;overflow-wrap:anywhere}
.agentflow .af-cached{background:rgba(56,139,253,.18);border-radius:2px}
.agentflow .af-generated{background:rgba(46,160,67,.22);border-radius:2px}
.agentflow .af-inserted{border-bottom:1px dotted}
.agentflow .af-note{opacity:.6;font-style:italic}
.agentflow .af-error{color:#d1242f;font-style:italic}
.agentflow .af-cursor{display:inline-block;width:.5em;height:1em;vertical-align:-.15em;
  background:rgba(46,160,67,.8)}
.agentflow .af-fork{display:flex;flex-wrap:wrap;gap:.6em;margin:.3em 0 .3em 1.5em}
.agentflow .af-branch{flex:1 1 16em;min-width:0;border:1px solid rgba(128,128,128,.35);border-radius:6px;
  padding:.2em .7em}
.agentflow .af-branch .af-turn{display:block}
.agentflow .af-branch .af-role,.agentflow .af-head{display:block;text-align:left;font-size:11px;opacity:.6}
.agentflow .af-picture{max-height:8em;max-width:100%;vertical-align:text-bottom;border-radius:3px}
.agentflow .af-foot{font-size:11px;opacity:.75;margin-top:.4em}
.agentflow .af-foot span{padding:0 .4em}
</style>"""


def as_html(outline: StateOutline) -> str:
    """The state as one ``div``, with its style."""
    writer = _Writer()
    body = "".join(writer.state(outline))
    return f'{_STYLE}<div class="agentflow">{body}{writer.foot()}</div>'


class _Writer:
    def __init__(self) -> None:
        self._num_chars_left = MAX_CHARS
        self._picture_chars_left = MAX_PICTURE_CHARS
        self._num_gens = 0
        self._usage = Usage()

    def state(self, outline: StateOutline) -> Iterator[str]:
        """The parts of a state."""
        for part in outline.parts:
            yield from self._part(part)
        if outline.error:
            yield f'<div class="af-error">failed: {escape(short(outline.error))}</div>'

    def foot(self) -> str:
        """The legend, and the tokens of all gens that are shown."""
        if not self._num_gens:
            return ""
        usage = self._usage
        return (
            '<div class="af-foot"><span class="af-cached">cached</span> '
            '<span class="af-generated">generated</span> '
            f"{usage.prompt_tokens:,} prompt tokens ({usage.hit_rate:.0%} cached), "
            f"{usage.output_tokens:,} generated</div>"
        )

    def _part(self, part: OutlinePart) -> Iterator[str]:
        match part:
            case TurnOutline():
                content = "".join(self._turn(part))
                role = f'<span class="af-role">{escape(part.role)}</span>'
                yield f'<div class="af-turn">{role}<div class="af-text">{content}</div></div>'
            case ForkOutline():
                yield '<div class="af-fork">'
                for branch in part.branches:
                    if isinstance(branch, LeftOut):
                        yield f'<div class="af-note">… {branch.count:,} more …</div>'
                    else:
                        yield f'<div class="af-branch"><span class="af-head">branch {branch.path[-1]}</span>'
                        yield from self.state(branch)
                        yield "</div>"
                yield "</div>"
            case LeftOut():
                yield f'<div class="af-note">… {part.count:,} more …</div>'

    def _turn(self, turn: TurnOutline) -> Iterator[str]:
        for piece in turn.pieces:
            if isinstance(piece, LeftOut):
                yield f'<span class="af-note"> … {piece.count:,} more … </span>'
            else:
                yield from self._piece(piece)
        for call in turn.calls:
            yield f'<div class="af-note">→ {escape(call.name)}({escape(short(call.text))})</div>'

    def _piece(self, piece: OutlinePiece) -> Iterator[str]:
        if piece.picture and len(piece.picture) <= self._picture_chars_left:
            self._picture_chars_left -= len(piece.picture)
            yield f'<img class="af-picture" alt="{escape(piece.text)}" src="{escape(piece.picture)}" />'
            return
        before, num_omitted, after = elided(piece.text, min(MAX_PIECE_CHARS, self._num_chars_left))
        self._num_chars_left -= len(before) + len(after)
        omitted = f'<span class="af-note"> … {num_omitted:,} characters … </span>' if num_omitted else ""
        if piece.kind == "generated":
            if piece.usage is not None:
                self._num_gens += 1
                self._usage += piece.usage
            yield _span("af-generated", before, _about(piece)) + omitted + _span("af-generated", after)
        else:
            kind = "af-inserted" if piece.kind == "inserted" else ""
            num = piece.cached_chars
            yield _span(f"af-cached {kind}".strip(), before[:num], piece.name)
            yield _span(kind, before[num:], piece.name) + omitted + _span(kind, after)
        if piece.error:
            yield f'<span class="af-error">{escape(piece.name)} failed: {escape(short(piece.error))}</span>'
        elif piece.is_running:
            yield f'<span class="af-cursor" title="{escape(piece.name)}"></span>'


def _about(piece: OutlinePiece) -> str:
    """The tooltip of a gen."""
    if piece.usage is None:
        return piece.name
    usage = piece.usage
    return (
        f"{piece.name}: {usage.output_tokens:,} tokens after {usage.prompt_tokens:,} "
        f"({usage.cached_tokens:,} cached), {piece.finish_reason}"
    )


def _span(kind: str, text: str, title: str = "") -> str:
    if not text:
        return ""
    if not kind:
        return escape(text)
    shown = f' title="{escape(title)}"' if title else ""
    return f'<span class="{kind}"{shown}>{escape(text)}</span>'
