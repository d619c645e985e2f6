"""The page's weight and speed in a headless Chromium, and the cost of watching to the server."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, CDPSession, Page
from rich.console import Console

from benchmarks.browser import open_browser
from benchmarks.report import Report
from benchmarks.serving import serving
from benchmarks.ui.watch_cost import measure_watch_cost

STATIC = Path(__file__).parents[2] / "agentflow" / "server" / "ui" / "static"
FIRST_PAINT = """() => new Promise((resolve) => new PerformanceObserver((entries) => {
  const found = entries.getEntriesByName("first-contentful-paint")[0];
  if (found) resolve(found.startTime);
}).observe({type: "paint", buffered: true}))"""


@contextmanager
def streaming_server(steps_per_s: float) -> Iterator[str]:
    """Runs a server whose generations advance in step. Yields the address of its page."""
    with serving("benchmarks.server.scripted_server", f"{steps_per_s}") as (url, _):
        yield url.replace("ws://", "http://", 1) + "/ui/"


def measure_weight(report: Report) -> None:
    """Measures ``page_kb``: all files of the page, of all views, compressed one by one."""
    files = [file for file in STATIC.rglob("*") if file.is_file()]
    num_bytes = sum(len(gzip.compress(file.read_bytes(), 9)) for file in files)
    note = f"{len(files)} files, gzip"
    report.add("ui.page_kb", round(num_bytes / 1000, 1), "kB", [num_bytes / 1000], note, "< 300")


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
    report.median("ui.first_paint_ms", runs, "ms", note="empty cache, loopback", goal="< 1000")


# The columns that stream concurrently, and steps per second: a token for each column in each step.
NUM_COLUMNS, STEPS_PER_S = 200, 10
NUM_TOKENS = 400
FRAMES_IN = """(duration_ms) => new Promise((resolve) => {
  let frames = 0, began = null;
  const frame = (now) => {
    began ??= now;
    if (now - began >= duration_ms) resolve(frames / ((now - began) / 1000));
    else { frames++; requestAnimationFrame(frame); }
  };
  requestAnimationFrame(frame);
})"""
STREAMED = """() => [...document.querySelectorAll(".streamed")].reduce(
  (sum, one) => sum + one.textContent.split(" ").length, 0)"""


def stream(page: Page, url: str, num_columns: int) -> None:
    """Runs a fork into ``num_columns`` columns in the playground. Returns when all of them stream."""
    page.goto(url)
    page.locator('[data-status="open"]').wait_for()
    page.get_by_test_id("example").select_option("few_shot")
    page.get_by_label("Branches", exact=True).fill(str(num_columns))
    page.get_by_label("Max tokens").first.fill(str(NUM_TOKENS))
    page.get_by_test_id("run").click()
    page.locator(f'[data-testid="branch-{num_columns - 1}"] .streamed > :not(:empty)').wait_for()


def measure_frames(report: Report, browser: Browser) -> None:
    """Measures ``frames_s_200_columns`` by the page's animation frames, over five seconds."""
    runs: list[float] = []
    with streaming_server(STEPS_PER_S) as url:
        for _ in range(5 if report.scale == "full" else 1):
            page = browser.new_page(viewport={"width": 1280, "height": 800})
            stream(page, url, NUM_COLUMNS)
            before = page.evaluate(STREAMED)
            runs.append(page.evaluate(FRAMES_IN, 5000))
            assert page.evaluate(STREAMED) - before > NUM_COLUMNS * STEPS_PER_S, "the columns did not stream"
            page.close()
    note = f"{STEPS_PER_S} tokens/s in each column"
    report.median("ui.frames_s_200_columns", runs, "frames/s", note=note, goal=">= 30")


def measure_main_thread(report: Report, browser: Browser) -> None:
    """Measures ``main_thread_ms_per_100_tokens``: the time of all tasks of the page's main thread, scripts,
    style, layout and painting, with the same number of columns as for the frames. A slow stream costs more
    per token, because each of its frames shows fewer."""
    runs: list[float] = []
    with streaming_server(STEPS_PER_S) as url:
        for _ in range(5 if report.scale == "full" else 1):
            page = browser.new_page(viewport={"width": 1280, "height": 800})
            stream(page, url, NUM_COLUMNS)
            session = page.context.new_cdp_session(page)
            session.send("Performance.enable")
            before_s, tokens = _task_s(session), page.evaluate(STREAMED)
            page.wait_for_timeout(5000)
            after_s, more = _task_s(session), page.evaluate(STREAMED)
            runs.append((after_s - before_s) * 1000 / (more - tokens) * 100)
            page.close()
    note = f"{NUM_COLUMNS} columns, {STEPS_PER_S} tokens/s in each"
    report.median("ui.main_thread_ms_per_100_tokens", runs, "ms", note=note, goal="< 16")


def _task_s(session: CDPSession) -> float:
    metrics = session.send("Performance.getMetrics")["metrics"]
    return float(next(one["value"] for one in metrics if one["name"] == "TaskDuration"))


def run(report: Report, console: Console, only: str = "") -> None:
    """Runs the measurements whose figures' ids contain ``only``."""
    measure_weight(report)
    with open_browser() as browser:
        if only in "ui.first_paint_ms":
            console.print("first paint …")
            measure_first_paint(report, browser)
        if only in "ui.frames_s_200_columns":
            console.print("frames …")
            measure_frames(report, browser)
        if only in "ui.main_thread_ms_per_100_tokens":
            console.print("main thread …")
            measure_main_thread(report, browser)
    if only in "ui.watch_cost":
        console.print("watch cost …")
        asyncio.run(measure_watch_cost(report))
