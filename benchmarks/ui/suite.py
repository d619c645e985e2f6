"""The page's weight and speed in a headless Chromium, and what watching costs the server."""

from __future__ import annotations

import asyncio
import gzip
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser
from rich.console import Console

from benchmarks.browser import open_browser
from benchmarks.report import Report, Result, median_of
from benchmarks.ui.watch_cost import measure_watch_cost

STATIC = Path(__file__).parents[2] / "agentflow" / "server" / "ui" / "static"
FIRST_PAINT = """() => new Promise((resolve) => new PerformanceObserver((entries) => {
  const found = entries.getEntriesByName("first-contentful-paint")[0];
  if (found) resolve(found.startTime);
}).observe({type: "paint", buffered: true}))"""


@contextmanager
def streaming_server(steps_per_s: float) -> Iterator[str]:
    """A server in another process whose generations advance in step. Yields the address of its page."""
    command = [sys.executable, "-m", "benchmarks.ui.streaming_server", str(steps_per_s)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip().replace("ws://", "http://", 1) + "/ui/"
        process.communicate()


def measure_weight(report: Report) -> None:
    """Measures ``page_kb``: all files of the page, of all views, compressed one by one."""
    files = [file for file in STATIC.rglob("*") if file.is_file()]
    num_bytes = sum(len(gzip.compress(file.read_bytes(), 9)) for file in files)
    note = f"{len(files)} files, gzip"
    report.results.append(
        Result("ui.page_kb", round(num_bytes / 1000, 1), "kB", [num_bytes / 1000], note, "< 300")
    )


def measure_first_paint(report: Report, browser: Browser) -> None:
    """Measures ``first_paint_ms``: from the navigation to the first content, with an empty cache."""
    runs: list[float] = []
    with streaming_server(20) as url:
        for _ in range(9 if report.scale == "full" else 3):
            context = browser.new_context(viewport={"width": 1280, "height": 800})
            page = context.new_page()
            page.goto(url)
            runs.append(page.evaluate(FIRST_PAINT))
            context.close()
    report.results.append(
        median_of("ui.first_paint_ms", runs, "ms", note="empty cache, loopback", goal="< 1000")
    )


def run(report: Report, console: Console, only: str = "") -> None:
    """Runs the measurements whose figures' ids contain ``only``."""
    measure_weight(report)
    with open_browser() as browser:
        if only in "ui.first_paint_ms":
            console.print("first paint …")
            measure_first_paint(report, browser)
    if only in "ui.watch_cost":
        console.print("watch cost …")
        asyncio.run(measure_watch_cost(report))
