"""The plot of a soak run: memory above, file descriptors and tasks below, over time, with the kills marked.
An SVG that is legible on light and dark pages."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

from benchmarks.soak.samples import Sample

WIDTH, PANEL_HEIGHT = 840, 240
LEFT, RIGHT, TOP, GAP, BOTTOM = 64, 150, 50, 46, 40
_STYLE = """
svg { background: #ffffff; color: #1f2328; font: 12px system-ui, sans-serif; }
.axis { stroke: #8c959f; } .grid { stroke: #d8dee4; } .kill { stroke: #cf222e; stroke-dasharray: 4 3; }
text { fill: currentColor; } .kill-label { fill: #cf222e; }
.a { stroke: #0969da; } .b { stroke: #bc4c00; } .c { stroke: #1a7f37; }
.line { fill: none; stroke-width: 1.6; }
@media (prefers-color-scheme: dark) {
  svg { background: #0d1117; color: #e6edf3; }
  .axis { stroke: #6e7681; } .grid { stroke: #30363d; }
  .kill { stroke: #ff7b72; } .kill-label { fill: #ff7b72; }
  .a { stroke: #58a6ff; } .b { stroke: #f0883e; } .c { stroke: #3fb950; }
}
"""
Line = tuple[str, Callable[[Sample], float | None]]
_PANELS: tuple[tuple[str, tuple[Line, ...]], ...] = (
    (
        "resident memory, MB",
        (
            ("server", lambda sample: sample.server_mb or None),
            ("engine", lambda sample: sample.engine_mb or None),
            ("compiler", lambda sample: sample.compiler_mb or None),
        ),
    ),
    (
        "count, of the server",
        (
            ("file descriptors", lambda sample: sample.fds),
            ("tasks", lambda sample: sample.tasks),
            ("threads", lambda sample: sample.threads),
        ),
    ),
)


def plot(samples: Sequence[Sample], kills_s: Sequence[float], title: str) -> str:
    """Returns the SVG. Needs at least one sample."""
    height = TOP + len(_PANELS) * (PANEL_HEIGHT + GAP) - GAP + BOTTOM
    last_s = max(samples[-1].at_s, 1.0)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" role="img"><style>{_STYLE}</style>',
        f'<text x="{LEFT}" y="20" font-weight="600">{escape(title)}</text>',
    ]
    for index, (label, lines) in enumerate(_PANELS):
        parts += _panel(samples, kills_s, last_s, TOP + index * (PANEL_HEIGHT + GAP), label, lines)
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{height - 8}" text-anchor="middle">seconds</text></svg>\n')
    return "\n".join(parts)


def ticks(most: float) -> list[float]:
    """Returns round numbers from 0 to just above ``most``, in four to eight steps.

    >>> ticks(700.0)
    [0.0, 100.0, 200.0, 300.0, 400.0, 500.0, 600.0, 700.0]
    """
    rough = max(most, 1e-9) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.7)
    return [number * step for number in range(math.ceil(most / step - 1e-9) + 1)]


def _panel(
    samples: Sequence[Sample],
    kills_s: Sequence[float],
    last_s: float,
    top: float,
    label: str,
    lines: Sequence[Line],
) -> list[str]:
    right, bottom = WIDTH - RIGHT, top + PANEL_HEIGHT - 18
    most = max((read(sample) or 0 for sample in samples for _, read in lines), default=1) or 1
    marks = ticks(most)

    def x(at_s: float) -> float:
        return round(LEFT + (right - LEFT) * at_s / last_s, 1)

    def y(value: float) -> float:
        return round(bottom - (bottom - top - 16) * value / marks[-1], 1)

    parts = [f'<text x="{LEFT}" y="{top - 8}">{escape(label)}</text>']
    for mark in marks:
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{y(mark)}" y2="{y(mark)}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y(mark) + 4}" text-anchor="end">{mark:g}</text>')
    for mark in ticks(last_s):
        if mark <= last_s:
            parts.append(f'<text x="{x(mark)}" y="{bottom + 15}" text-anchor="middle">{mark:g}</text>')
    for kill_s in kills_s:
        parts.append(f'<line class="kill" x1="{x(kill_s)}" x2="{x(kill_s)}" y1="{top + 10}" y2="{bottom}"/>')
        parts.append(f'<text class="kill-label" x="{x(kill_s) + 3}" y="{top + 8}">engine killed</text>')
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
    for row, ((name, read), color) in enumerate(zip(lines, "abc", strict=True)):
        parts += [
            f'<polyline class="line {color}" points="{piece}"/>' for piece in _pieces(samples, read, x, y)
        ]
        place = top + 24 + 18 * row
        parts.append(
            f'<line class="line {color}" x1="{right + 12}" x2="{right + 32}" y1="{place}" y2="{place}"/>'
        )
        parts.append(f'<text x="{right + 38}" y="{place + 4}">{escape(name)}</text>')
    return parts


def _pieces(
    samples: Sequence[Sample],
    read: Callable[[Sample], float | None],
    x: Callable[[float], float],
    y: Callable[[float], float],
) -> list[str]:
    """Returns the line's points, with a gap where a value is missing."""
    pieces: list[list[str]] = [[]]
    for sample in samples:
        value = read(sample)
        if value is None:
            pieces.append([])
        else:
            pieces[-1].append(f"{x(sample.at_s)},{y(value)}")
    return [" ".join(piece) for piece in pieces if piece]
