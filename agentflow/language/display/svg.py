"""Drawings of graphs and runs as SVG, made from text. They need no other program.

Notebooks may show an SVG as an image, which does not know the theme. So boxes have a light background, and
lines and other text have a grey that is readable on light and dark pages. All text is escaped.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from typing import Final, Literal, NamedTuple

BoxKind = Literal["argument", "text", "gen"]
ArrowKind = Literal["stream", "fork", "data"]

MAX_BOXES: Final = 400
_CHAR_PX, _BOX_PX, _ROW_PX, _GAP_PX, _MARGIN_PX = 6.6, 28, 52, 28, 12
_NOT_XML: Final = re.compile("[\x00-\x1f\ud800-\udfff\ufffe\uffff]")
_GREY: Final = "#7d8590"
_FILLS: Final = {"argument": "#fff3d6", "text": "#eef1f4", "gen": "#d7f0dd"}
_STROKES: Final = {
    "stream": f'stroke="{_GREY}"',
    "fork": f'stroke="{_GREY}" stroke-width="2.2"',
    "data": 'stroke="#d29922" stroke-dasharray="4 3"',
}


class Box(NamedTuple):
    """An op of the state ``lane``, or an argument, whose lane is None."""

    key: str
    label: str
    kind: BoxKind
    lane: int | None


class ForkMark(NamedTuple):
    """Here the state ``lane`` forks."""

    lane: int
    children: tuple[int, ...]


class Arrow(NamedTuple):
    """From one box to another, by their keys."""

    source: str
    target: str
    kind: ArrowKind


def graph_svg(title: str, root: int, items: Sequence[Box | ForkMark], arrows: Sequence[Arrow]) -> str:
    """The drawing of a graph: time goes down, and branches are side by side. ``root``: its lane. ``items``:
    in the order of the ops, arguments first. Of more than ``MAX_BOXES`` boxes, the first are drawn."""
    drawn = items[:MAX_BOXES]
    boxes = {item.key: item for item in drawn if isinstance(item, Box)}
    layout = _Layout(drawn)
    arguments = [box for box in boxes.values() if box.lane is None]
    for index, box in enumerate(arguments):
        layout.centers[box.key] = (index + 0.5 - len(arguments) / 2, 0)
    num_rows = layout.place(root, 0.0, 1 if arguments else 0)
    num_columns = max(layout.widths.get(root, 1), len(arguments))
    box_px = 20 + _CHAR_PX * max([len(box.label) for box in boxes.values()], default=8)
    column_px = box_px + _GAP_PX
    width = num_columns * column_px + 2 * _MARGIN_PX
    height = num_rows * _ROW_PX - (_ROW_PX - _BOX_PX) + 2 * _MARGIN_PX
    places = {
        key: (width / 2 + column * column_px, _MARGIN_PX + row * _ROW_PX)
        for key, (column, row) in layout.centers.items()
    }
    parts = [
        _arrow(places[arrow.source], places[arrow.target], arrow.kind)
        for arrow in arrows
        if arrow.source in places and arrow.target in places
    ]
    parts += [_box(boxes[key], x, y, box_px) for key, (x, y) in places.items()]
    if len(items) > len(drawn):
        height += 20
        parts.append(_text(f"… {len(items) - len(drawn):,} more", _MARGIN_PX, height - 8))
    return _svg(title, width, height, parts)


class _Layout:
    """Gives each box a row and a column. ``centers``: by key, the column (0: the middle) and the row.
    ``widths``: of a lane with its branches, in columns."""

    def __init__(self, items: Sequence[Box | ForkMark]) -> None:
        self.centers: dict[str, tuple[float, int]] = {}
        self.widths: dict[int, int] = {}
        self._lanes: dict[int, list[Box | ForkMark]] = {}
        for item in items:
            if item.lane is not None:
                self._lanes.setdefault(item.lane, []).append(item)
        for item in reversed(items):  # inner forks first
            if isinstance(item, ForkMark):
                width = sum(self.widths.get(child, 1) for child in item.children)
                self.widths[item.lane] = max(self.widths.get(item.lane, 1), width)

    def place(self, lane: int, center: float, row: int) -> int:
        """Places the boxes of a lane and its branches from ``row`` on. Returns the row after them."""
        for item in self._lanes.get(lane, ()):
            if isinstance(item, Box):
                self.centers[item.key] = (center, row)
                row += 1
                continue
            left = center - sum(self.widths.get(child, 1) for child in item.children) / 2
            rows = [row]
            for child in item.children:
                width = self.widths.get(child, 1)
                rows.append(self.place(child, left + width / 2, row))
                left += width
            row = max(rows)
        return row


class Bar(NamedTuple):
    """A run: when it began and ended in seconds, and the label next to it."""

    name: str
    began_s: float
    ended_s: float
    label: str
    color: str


_NAME_PX, _TIME_PX, _LABEL_PX, _BAR_ROW_PX = 170, 420, 300, 22


def runs_svg(bars: Sequence[Bar]) -> str:
    """The drawing of runs on a common time line."""
    start_s = min([bar.began_s for bar in bars], default=0.0)
    total_s = max([bar.ended_s for bar in bars], default=0.0) - start_s or 1.0
    scale = _TIME_PX / total_s
    parts: list[str] = []
    for index, bar in enumerate(bars):
        y = _MARGIN_PX + index * _BAR_ROW_PX
        x = _MARGIN_PX + _NAME_PX + (bar.began_s - start_s) * scale
        length = max(2.0, (bar.ended_s - bar.began_s) * scale)
        name = bar.name if len(bar.name) <= 24 else f"{bar.name[:23]}…"
        parts += [
            _text(name, _MARGIN_PX + _NAME_PX - 8, y + 13, anchor="end"),
            f'<rect x="{x:.1f}" y="{y + 3}" width="{length:.1f}" height="13" rx="3" fill="{bar.color}"/>',
            _text(bar.label, _MARGIN_PX + _NAME_PX + _TIME_PX + 8, y + 13),
        ]
    width = 2 * _MARGIN_PX + _NAME_PX + _TIME_PX + _LABEL_PX
    return _svg("runs", width, 2 * _MARGIN_PX + max(1, len(bars)) * _BAR_ROW_PX, parts)


def _svg(title: str, width: float, height: float, parts: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" '
        'style="max-width:100%;height:auto" font-family="system-ui,sans-serif" font-size="12">'
        f"<title>{_clean(title)}</title>{''.join(parts)}</svg>"
    )


def _box(box: Box, x: float, y: float, width: float) -> str:
    radius = _BOX_PX / 2 if box.kind == "gen" else 4
    return (
        f'<rect x="{x - width / 2:.1f}" y="{y:.1f}" width="{width:.1f}" height="{_BOX_PX}" rx="{radius}" '
        f'fill="{_FILLS[box.kind]}" stroke="{_GREY}"/>'
        + _text(box.label, x, y + 18, anchor="middle", color="#1f2328")
    )


def _arrow(source: tuple[float, float], target: tuple[float, float], kind: ArrowKind) -> str:
    (x0, y0), (x1, y1) = (source[0], source[1] + _BOX_PX), target
    bend = max(18.0, abs(y1 - y0) / 2) if x0 != x1 or y1 < y0 else 0.0
    curve = f"M{x0:.1f} {y0:.1f}C{x0:.1f} {y0 + bend:.1f} {x1:.1f} {y1 - bend:.1f} {x1:.1f} {y1:.1f}"
    tip = f"M{x1 - 4:.1f} {y1 - 6:.1f}L{x1:.1f} {y1:.1f}L{x1 + 4:.1f} {y1 - 6:.1f}"
    return f'<path d="{curve}{tip}" fill="none" {_STROKES[kind]}/>'


def _text(text: str, x: float, y: float, *, anchor: str = "start", color: str = _GREY) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}">{_clean(text)}</text>'


def _clean(text: str) -> str:
    """The text, escaped, without characters that XML does not allow."""
    return escape(_NOT_XML.sub("\ufffd", text))
