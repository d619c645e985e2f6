"""The drawing of forked branches that stream: images/branches.svg, from branches.json.

    python docs/drawings/branches.py            # draws the recorded run
    python docs/drawings/branches.py --record   # first records one of examples/essay_judge.py

branches.json has the run's texts as they arrived: [seconds, name of the text, piece].
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
RUN = HERE / "branches.json"
DRAWING = HERE.parent / "images" / "branches.svg"

WIDTH, GAP, LINE, PAD = 880, 10, 15, 10
CHARACTER = 6.63  # the width of one, at 11 px
LEAD_S = 0.6  # before the first text
INK, FAINT, ACCENT, GROUND, LEAF = "#1f2933", "#7b8794", "#00796b", "#ffffff", "#f3f6f6"

Piece = tuple[float, str, str]


class Box(NamedTuple):
    """A panel for one text. ``column`` of ``columns`` in its row."""

    name: str
    title: str
    row: int
    column: int = 0
    columns: int = 1

    @property
    def width(self) -> float:
        return (WIDTH - GAP * (self.columns - 1)) / self.columns

    @property
    def x(self) -> float:
        return self.column * (self.width + GAP)


DIMENSIONS = ("clarity", "evidence", "originality", "style")
BOXES = [
    Box("related", 's["related"]', 0),
    *[Box(name, f'branches[{i}]["judgment"]', 1, i, len(DIMENSIONS)) for i, name in enumerate(DIMENSIONS)],
    Box("summary", 's["summary"]', 2),
    Box("grade", 's["grade"]', 3),
]


async def record() -> None:
    """Runs the program and writes branches.json."""
    sys.path.insert(0, str(HERE.parents[1] / "examples"))
    import essay_judge

    import agentflow as af

    pieces: list[Piece] = []
    async with af.session() as flow:
        await flow.run(essay_judge.judge, "On light.")  # the first run compiles kernels
        start = time.perf_counter()
        async for event in flow.stream(essay_judge.judge, essay_judge.ESSAY):
            if isinstance(event, af.TextDelta):
                name = DIMENSIONS[event.path[0]] if event.path else event.name
                pieces.append((round(time.perf_counter() - start, 3), name, event.text))
    RUN.write_text("[\n" + ",\n".join(json.dumps(piece) for piece in pieces) + "\n]\n", encoding="utf-8")


def lines_of(pieces: list[Piece], name: str, columns: int) -> list[list[tuple[float, str]]]:
    """The words of one text with their times, in lines of at most ``columns`` characters."""
    words: list[tuple[float, str]] = []
    for at_s, piece_name, text in pieces:
        for number, word in enumerate(text.replace("\n", " ").split(" ") if piece_name == name else ()):
            if number == 0 and words:
                words[-1] = (words[-1][0], words[-1][1] + word)  # goes on with the last word
            else:
                words.append((at_s, word))
    lines: list[list[tuple[float, str]]] = [[]]
    for word in [word for word in words if word[1]]:
        if sum(len(text) + 1 for _, text in lines[-1]) + len(word[1]) > columns:
            lines.append([])
        lines[-1].append(word)
    return lines


def drawing(pieces: list[Piece]) -> Iterator[str]:
    """The lines of the SVG."""
    texts = {box: lines_of(pieces, box.name, int((box.width - 2 * PAD) / CHARACTER)) for box in BOXES}
    heights = [
        max(len(texts[box]) for box in BOXES if box.row == row) * LINE + 30 + PAD
        for row in range(BOXES[-1].row + 1)
    ]
    tops = [sum(heights[:row]) + 28 * row for row in range(len(heights))]
    height = tops[-1] + heights[-1] + 24
    ends = {box.name: max(at_s for at_s, name, _ in pieces if name == box.name) for box in BOXES}
    yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-12 -12 {WIDTH + 24} {height + 12}" role="img">'
    yield "<title>Four branches of one state stream side by side; their texts flow into a summary</title>"
    yield "<style>"
    yield "text { font: 11px ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace }"
    yield "@media (prefers-reduced-motion: no-preference) { .w { animation: show 0.01s linear both } }"
    yield "@keyframes show { from { opacity: 0 } to { opacity: 1 } }"
    yield "</style>"
    yield f'<rect x="-12" y="-12" width="{WIDTH + 24}" height="{height + 12}" rx="8" fill="{GROUND}"/>'
    for above, below in ((0, 1), (1, 2), (2, 3)):
        for box in BOXES:
            if box.row in (above, below) and box.columns >= max(
                b.columns for b in BOXES if b.row in (above, below)
            ):
                x = box.x + box.width / 2
                top, bottom = tops[above] + heights[above], tops[below]
                yield f'<path d="M{x:.0f} {top + 4} V{bottom - 6}" stroke="{ACCENT}" fill="none"/>'
                yield f'<path d="M{x - 4:.0f} {bottom - 9} l4 6 l4 -6" stroke="{ACCENT}" fill="none"/>'
    for box in BOXES:
        y, end_s = tops[box.row], ends[box.name]
        yield (
            f'<rect x="{box.x:.0f}" y="{y}" width="{box.width:.0f}" height="{heights[box.row]}" rx="6" '
            f'fill="{LEAF}" stroke="{ACCENT}" stroke-opacity="0.5"/>'
        )
        yield f'<text x="{box.x + PAD:.0f}" y="{y + 19}" fill="{ACCENT}">{escape(box.title)}</text>'
        yield (
            f'<text x="{box.x + box.width - PAD:.0f}" y="{y + 19}" fill="{FAINT}" text-anchor="end" '
            f'class="w" style="animation-delay:{end_s + LEAD_S:.2f}s">{end_s:.1f} s</text>'
        )
        for number, line in enumerate(texts[box]):
            words = "".join(
                f'<tspan class="w" style="animation-delay:{at_s + LEAD_S:.2f}s">{escape(word)} </tspan>'
                for at_s, word in line
            )
            yield (
                f'<text x="{box.x + PAD:.0f}" y="{y + 40 + number * LINE}" fill="{INK}" xml:space="preserve">'
                f"{words}</text>"
            )
    yield "</svg>"


if __name__ == "__main__":
    if "--record" in sys.argv:
        asyncio.run(record())
    DRAWING.write_text(
        "\n".join(drawing(json.loads(RUN.read_text(encoding="utf-8")))) + "\n", encoding="utf-8"
    )
