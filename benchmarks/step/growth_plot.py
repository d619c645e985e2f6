"""Plots cost curves next to each other on logarithmic axes, each with its fitted line. An SVG that is legible
on light and dark pages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 300, 220, 52, 14, 34, 44
COLUMNS = 3
_STYLE = """
svg { background: #ffffff; color: #1f2328; font: 11px system-ui, sans-serif; }
.axis { stroke: #8c959f; } .grid { stroke: #d8dee4; } .dot { fill: #0969da; } .fit { stroke: #bc4c00; }
text { fill: currentColor; }
@media (prefers-color-scheme: dark) {
  svg { background: #0d1117; color: #e6edf3; }
  .axis { stroke: #6e7681; } .grid { stroke: #30363d; } .dot { fill: #58a6ff; } .fit { stroke: #f0883e; }
}
"""


@dataclass(frozen=True)
class Curve:
    """A cost over a size."""

    name: str
    label: str  # describes ``xs``
    unit: str  # of ``ys``
    xs: Sequence[int]
    ys: Sequence[float]

    @property
    def exponent(self) -> float:
        """The exponent k of the curve c xᵏ that fits best (least squares of the logarithms)."""
        return self.fit[0]

    @property
    def fit(self) -> tuple[float, float]:
        """k and the logarithm of c."""
        slope, offset = np.polyfit(np.log(self.xs), np.log(self.ys), 1)
        return float(slope), float(offset)


def plot(curves: Sequence[Curve]) -> str:
    """Returns the SVG."""
    rows = math.ceil(len(curves) / COLUMNS)
    width, height = COLUMNS * WIDTH, rows * HEIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img"><style>{_STYLE}</style>'
    ]
    for index, curve in enumerate(curves):
        parts.append(f'<g transform="translate({index % COLUMNS * WIDTH} {index // COLUMNS * HEIGHT})">')
        parts += _panel(curve)
        parts.append("</g>")
    return "\n".join([*parts, "</svg>\n"])


def _panel(curve: Curve) -> list[str]:
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    marks_x, marks_y = _decades(curve.xs), _decades(curve.ys)

    def x(value: float) -> float:
        return round(LEFT + (right - LEFT) * _place(value, marks_x), 1)

    def y(value: float) -> float:
        return round(bottom - (bottom - TOP) * _place(value, marks_y), 1)

    title = f"{curve.unit}, growing with exponent {curve.exponent:.2f}"
    parts = [f'<text x="{LEFT}" y="{TOP - 14}" font-weight="600">{escape(title)}</text>']
    for mark in marks_y:
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{y(mark)}" y2="{y(mark)}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y(mark) + 4}" text-anchor="end">{mark:,g}</text>')
    for mark in marks_x:
        parts.append(f'<text x="{x(mark)}" y="{bottom + 15}" text-anchor="middle">{mark:,.0f}</text>')
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
    slope, offset = curve.fit
    ends = [(value, math.exp(offset + slope * math.log(value))) for value in (curve.xs[0], curve.xs[-1])]
    (x1, y1), (x2, y2) = ((x(a), y(b)) for a, b in ends)
    parts.append(f'<line class="fit" x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}"/>')
    for a, b in zip(curve.xs, curve.ys, strict=True):
        parts.append(f'<circle class="dot" cx="{x(a)}" cy="{y(b)}" r="3"/>')
    middle = (LEFT + right) / 2
    label = escape(curve.label)
    parts.append(f'<text x="{middle}" y="{bottom + 32}" text-anchor="middle">{label}</text>')
    return parts


def _decades(values: Sequence[float]) -> list[float]:
    """Returns powers of ten around all values.

    >>> _decades([3.0, 250.0])
    [1.0, 10.0, 100.0, 1000.0]
    """
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    return [10.0**power for power in range(low, max(high, low + 1) + 1)]


def _place(value: float, marks: Sequence[float]) -> float:
    """Returns the place between the first mark (0) and the last (1)."""
    return math.log(value / marks[0]) / math.log(marks[-1] / marks[0])
