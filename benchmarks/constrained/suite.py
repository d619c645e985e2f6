"""Constrained decoding and select: masks, compilation, jump-forward, hostile constraints."""

from __future__ import annotations

import asyncio

from rich.console import Console

from benchmarks.constrained.decoding import measure_jump_forward, measure_reuse
from benchmarks.constrained.differences import measure_differences
from benchmarks.constrained.hostile import measure_hostile
from benchmarks.constrained.masks import measure_masks
from benchmarks.constrained.select import measure_select
from benchmarks.report import Report


def run(report: Report, console: Console, only: str = "") -> None:
    """Measures the parts whose name contains ``only``."""
    if only in "masks":
        measure_masks(report)
    parts = {
        "jump_forward": measure_jump_forward,
        "reuse": measure_reuse,
        "select": measure_select,
        "hostile": measure_hostile,
        "differences": measure_differences,
    }
    for name, measure in parts.items():
        if only in name:
            console.print(f"[dim]{name} …[/]")
            asyncio.run(measure(report))
