"""The progress of a pull: bars in a terminal, one line for each phase elsewhere, or nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Literal

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

Phase = Literal["download", "verify", "store"]

_SAYS: Final[dict[Phase, str]] = {
    "download": "downloading",
    "verify": "checking the hashes",
    "store": "storing",
}


class PullListener:
    """Receives each step of a pull, in the pull's thread, and reports nothing. An exception ends the pull."""

    def note(self, text: str) -> None:
        """Information for the user, such as why the pull waits."""

    def begin(self, phase: Phase) -> None:
        """A phase begins; the previous phase has ended."""

    def advance(self, done: int, total: int) -> None:
        """The phase has processed ``done`` of ``total`` bytes."""


class Lines(PullListener):
    """Prints one line for each phase, for logs, pipes and CI."""

    def __init__(self, name: str, console: Console) -> None:
        self._name = name
        self._console = console

    def note(self, text: str) -> None:
        self._say(text)

    def begin(self, phase: Phase) -> None:
        self._say(_SAYS[phase])

    def _say(self, what: str) -> None:
        self._console.print(f"{self._name}: {what}", soft_wrap=True, highlight=False, markup=False)


class Bars(PullListener):
    """Draws one bar for each phase with rich; finished bars stay on the screen."""

    def __init__(self, name: str, progress: Progress) -> None:
        self._name = name
        self._progress = progress
        self._task: TaskID | None = None
        self._total = 1

    def note(self, text: str) -> None:
        self._progress.console.print(f"{self._name}: {text}", soft_wrap=True, highlight=False, markup=False)

    def begin(self, phase: Phase) -> None:
        self.finish()
        self._task = self._progress.add_task(_SAYS[phase], total=None)

    def advance(self, done: int, total: int) -> None:
        if self._task is not None:
            self._total = total
            self._progress.update(self._task, completed=min(done, total), total=total)

    def finish(self) -> None:
        """Fills the bar of the current phase, whose last report may have been incomplete."""
        if self._task is not None:
            self._progress.update(self._task, completed=self._total, total=self._total)


@contextmanager
def show_pull(console: Console, name: str) -> Iterator[PullListener]:
    """Yields a listener for the pull of ``name``: bars if the console can redraw them, else lines."""
    if not console.is_terminal or console.is_dumb_terminal:
        yield Lines(name, console)
        return
    columns = (
        TextColumn(f"[bold]{name}[/] {{task.description:<26}}"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    with Progress(*columns, console=console) as progress:
        bars = Bars(name, progress)
        yield bars
        bars.finish()
