"""Results: figures with their runs, as a table and as JSON for comparison over time."""

from __future__ import annotations

import json
import operator
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import machine

# A run counts as disturbed if other processes keep more cores busy than this.
MAX_OTHERS_CORES = 0.15


@dataclass(frozen=True)
class Result:
    """One figure."""

    id: str
    value: float
    unit: str
    runs: list[float]  # all measurements
    note: str = ""
    goal: str = ""  # a condition such as ``>= 1.5``

    @property
    def is_reached(self) -> bool | None:
        """Whether the goal is reached; None without a goal."""
        if not self.goal:
            return None
        comparison, _, bound = self.goal.partition(" ")
        compare = {">=": operator.ge, "<=": operator.le, "<": operator.lt}[comparison]
        return bool(compare(self.value, float(bound)))


def one_line(error: Exception) -> str:
    """Returns an error as one line of at most about 200 characters."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


@dataclass
class Report:
    """All results of one invocation."""

    scale: str
    results: list[Result] = field(default_factory=list)
    load: machine.OthersLoad = field(default_factory=machine.OthersLoad)
    extra: dict[str, Any] = field(default_factory=dict)
    is_exact: bool = False  # only figures that do not depend on the speed of the machine
    seconds: dict[str, float] = field(default_factory=dict)
    """The duration of each ``timed`` part."""
    file: Path | None = None
    """The file for ``write``; None: nothing is written."""
    commit: str = field(default_factory=lambda: machine.commit())
    """The measured commit, read before ``write`` changes a tracked file."""

    def add(
        self, id: str, value: float, unit: str, runs: Sequence[float] = (), note: str = "", goal: str = ""
    ) -> None:
        """Adds a figure."""
        self.results.append(Result(id, value, unit, [*runs], note, goal))

    def median(self, id: str, runs: Sequence[float], unit: str, *, note: str = "", goal: str = "") -> None:
        """Adds a figure whose value is the median of its runs."""
        value, each = round(statistics.median(runs), 4), [round(run, 4) for run in runs]
        self.add(id, value, unit, each, note, goal)

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Records the duration of the block. For exact figures, which may be measured on a busy machine, it
        records the time of this process."""
        clock = time.process_time if self.is_exact else time.monotonic
        start = clock()
        yield
        self.seconds[part] = round(clock() - start, 1)

    def to_json(self) -> dict[str, Any]:
        """Returns the content of the file."""
        others = round(self.load.cores(), 3)
        disturbed = others > MAX_OTHERS_CORES and not self.is_exact
        return {
            "machine": {**machine.describe(), "others_cores": others, "disturbed": disturbed},
            "commit": self.commit,
            "scale": self.scale,
            "results": [asdict(result) for result in self.results],
            **({"seconds": self.seconds} if self.seconds else {}),
            **self.extra,
        }

    def show(self, console: Console) -> None:
        """Prints the table, and the machine below it."""
        table = Table(
            title=f"agentflow benchmarks ({self.scale} scale)", title_justify="left", show_lines=True
        )
        table.add_column("figure", overflow="fold")
        table.add_column("value", justify="right", no_wrap=True)
        table.add_column("goal", no_wrap=True)
        for result in self.results:
            runs = ", ".join(f"{run:.4g}" for run in result.runs)
            figure = f"{result.id}\n[dim]{result.note or result.unit}; runs: {runs}[/]"
            color = {True: "green", False: "red", None: "default"}[result.is_reached]
            table.add_row(figure, f"[{color}]{result.value:.4g} {result.unit}[/]", result.goal)
        console.print(table)
        data = self.to_json()
        console.print(", ".join(f"{key}: {value}" for key, value in data["machine"].items()), style="dim")

    def write(self) -> None:
        """Writes the JSON, if there is a file for it: at the end, and after each part of a long run. If a run
        is killed, the file has the results of the previous part."""
        if self.file is not None:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            new = self.file.with_name(self.file.name + ".new")
            new.write_text(json.dumps(self.to_json(), indent=2) + "\n", encoding="utf-8")
            new.replace(self.file)

    def earlier(self) -> dict[str, Any]:
        """Returns the content of the file, if it has exact figures of this commit and scale, so that a
        stopped run can be continued. Empty otherwise."""
        if self.file is None or not self.is_exact or not self.file.exists():
            return {}
        found = json.loads(self.file.read_text(encoding="utf-8"))
        is_same = found["commit"] == self.commit and found["scale"] == self.scale
        return found if is_same and not self.commit.endswith("-dirty") else {}
