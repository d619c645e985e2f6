"""The progress of a map or of embeddings: in a terminal one line on stderr with a bar, redrawn as it changes;
in a notebook a line below the cell; elsewhere (a log, a pipe) a plain line every half minute and one at the
end. Imports rich, so it is imported when first used."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from typing import Final

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from agentflow.language.batch.map import Tally

MAX_BAR: Final = 40
MIN_BAR: Final = 10
DRAWN_PER_S: Final = 4
S_BETWEEN_LINES: Final = 30.0
# The parts that a narrow line omits first: keys of ``MapProgress.parts``.
DISPENSABLE: Final = ("tokens", "resumed", "retries", "left", "cached", "rate", "failed")


class ProgressConsole(Console):
    """A console that becomes quiet if its pipe breaks. rich would end the process and lose the results."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


def shown_on_stderr(tally: Tally) -> AbstractContextManager[Callable[[], None]]:
    """Shows ``tally`` on stderr, as ``show_tally`` does."""
    return show_tally(ProgressConsole(stderr=True), tally)


@contextmanager
def show_tally(
    console: Console, tally: Tally, clock: Callable[[], float] = time.monotonic
) -> Iterator[Callable[[], None]]:
    """Shows ``tally`` on the console during the block, and its last state afterwards. Yields a function to
    call after each change."""
    progress = MapProgress(tally, clock)
    if console.is_jupyter:
        cell = _NotebookLine(progress, clock)
        try:
            yield cell.tick
        finally:
            progress.finish()
            cell.show()
        return
    if not console.is_terminal or console.is_dumb_terminal:
        lines = _Lines(console, progress, clock)
        try:
            yield lines.tick
        finally:
            progress.finish()
            lines.print()
        return
    live = Live(
        progress,
        console=console,
        refresh_per_second=DRAWN_PER_S,
        # The program's output goes above the bar, unless it is redirected to a file.
        redirect_stdout=sys.stdout.isatty(),
    )
    with live:
        try:
            yield lambda: None  # rich redraws by itself
        finally:
            progress.finish()


class MapProgress:
    """The line, in a form that rich can draw in any width."""

    def __init__(self, tally: Tally, clock: Callable[[], float]) -> None:
        self.name = tally.name
        self._tally = tally
        self._clock = clock
        self._began_s = clock()
        self._took_s: float | None = None

    def finish(self) -> None:
        """Stops the clock."""
        self._took_s = self._clock() - self._began_s

    def parts(self) -> dict[str, str]:
        """The parts of the line by name, in order."""
        tally = self._tally
        elapsed_s = self._clock() - self._began_s if self._took_s is None else self._took_s
        num_run = tally.num_done - tally.num_resumed
        per_s = num_run / elapsed_s if elapsed_s > 0 else 0.0
        done = f"{tally.num_done:,}"
        found = {"count": f"{done} done" if tally.total is None else f"{done}/{tally.total:,}"}
        if per_s:
            found["rate"] = f"{per_s:,.0f}/s" if per_s >= 100 else f"{per_s:.3g}/s"
        if (batches := tally.batches) is not None and batches.num_requests:
            counts = f"{batches.num_done:,}/{batches.num_requests:,}"
            found["batch"] = f"batch {batches.num_batches:,}: {counts}"
        usage = tally.usage
        if usage.prompt_tokens:
            found["cached"] = f"{usage.hit_rate:.0%} cached"
            prompt, output = _amount(usage.prompt_tokens), _amount(usage.output_tokens)
            found["tokens"] = f"{prompt} tokens in, {output} out"
        if usage.cost:
            found["cost"] = f"${usage.cost:.3g}"
        if tally.num_resumed:
            found["resumed"] = f"{tally.num_resumed:,} resumed"
        if tally.num_retries:
            found["retries"] = f"{tally.num_retries:,} retried"
        if tally.num_failed:
            found["failed"] = f"{tally.num_failed:,} failed"
        if self._took_s is not None:
            found["left"] = f"in {_duration(elapsed_s)}"
        elif tally.total is not None and per_s:
            found["left"] = f"{_duration(max(0, tally.total - tally.num_done) / per_s)} left"
        return found

    def line(self, width: int | None = None) -> str:
        """The line without a bar, in at most ``width`` cells. Leaves out the least important parts."""
        parts = self.parts()
        for name in DISPENSABLE:
            if width is None or cell_len("  ".join(parts.values())) <= width:
                break
            parts.pop(name, None)
        return "  ".join(parts.values())

    def text(self, width: int) -> str:
        """The line with a bar of ``width`` characters, if the number of inputs is known."""
        if not self._tally.total:
            return self.line()
        num_full = min(width, width * self._completed // self._tally.total)
        return f"{'█' * num_full}{'░' * (width - num_full)}  {self.line()}"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        line = Text(self.line(width), no_wrap=True, overflow="ellipsis")
        room = width - cell_len(line.plain) - 1
        if self._tally.total is None or room < MIN_BAR:
            yield line
            return
        row = Table.grid(padding=(0, 1, 0, 0))
        bar = ProgressBar(self._tally.total or 1, self._completed, width=min(room, MAX_BAR))
        row.add_row(bar, line)
        yield row

    @property
    def _completed(self) -> int:
        return self._tally.num_done if self._tally.total else 1  # an empty map is complete


class _NotebookLine:
    """One line below the cell, whose other output stays in place."""

    def __init__(self, progress: MapProgress, clock: Callable[[], float]) -> None:
        ipython = import_module("IPython.display")  # a notebook has it
        self._progress = progress
        self._clock = clock
        self._next_s = clock()
        self._cell = ipython.display({"text/plain": ""}, raw=True, display_id=True)

    def tick(self) -> None:
        if self._clock() >= self._next_s:
            self._next_s = self._clock() + 1 / DRAWN_PER_S
            self.show()

    def show(self) -> None:
        self._cell.update({"text/plain": self._progress.text(MAX_BAR)}, raw=True)


class _Lines:
    """Plain lines, ``S_BETWEEN_LINES`` apart."""

    def __init__(self, console: Console, progress: MapProgress, clock: Callable[[], float]) -> None:
        self._console = console
        self._progress = progress
        self._clock = clock
        self._next_s = clock() + S_BETWEEN_LINES

    def tick(self) -> None:
        if self._clock() >= self._next_s:
            self.print()

    def print(self) -> None:
        self._next_s = self._clock() + S_BETWEEN_LINES
        text = f"{self._progress.name}: {', '.join(self._progress.parts().values())}"
        self._console.print(text, soft_wrap=True, highlight=False, markup=False)


def _amount(number: int) -> str:
    """The number in at most five characters.

    >>> _amount(950), _amount(12_345), _amount(3_200_000)
    ('950', '12.3k', '3.2M')
    """
    if number < 1000:
        return str(number)
    for unit in "kMG":
        number_of_unit = number / 1000 ** ("kMG".index(unit) + 1)
        if number_of_unit < 999.5:
            return f"{number_of_unit:.3g}{unit}"
    return f"{number / 1e12:.3g}T"


def _duration(seconds: float) -> str:
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
