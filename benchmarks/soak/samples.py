"""The samples that a soak run takes every few seconds, and their evaluation: slopes that are robust against
outliers, and whether something leaked."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

# The part of the run in which caches fill, allocators grow, and lazy imports run.
WARM_UP_SHARE = 0.2
# The same for an engine process that was just started: its cache takes memory as it fills.
ENGINE_WARM_UP_S = 90.0
# Shorter series are not judged.
MIN_JUDGED_S = 60.0
MAX_MB_PER_HOUR = 60.0
# For the connections to the compiling process and to a restarted engine, and for a scrape of this benchmark.
FD_SLACK = 4
TASK_SLACK = 3

Process = Literal["server", "engine", "compiler"]
# The allowed growth after the warm-up, in addition to a rate per hour. The native memory of an engine grows
# more and more slowly for some minutes (measured with 8 clients: 20 MB from 50 s to 200 s of its life, 9 MB
# in the next 240 s).
NOISE_MB: dict[Process, float] = {"server": 8.0, "compiler": 8.0, "engine": 40.0}


@dataclass(frozen=True, slots=True)
class Sample:
    """The state of the server at one time. The last five fields come from /metrics; None: it did not answer
    in time."""

    at_s: float  # since the start
    server_mb: float  # resident memory of this process and the next two; 0: there is no process
    engine_mb: float
    compiler_mb: float
    fds: int  # of the server
    threads: int  # of the server
    tasks: float | None = None
    sessions: float | None = None
    running: float | None = None  # requests
    waiting: float | None = None  # requests
    in_use: float | None = None  # slots


@dataclass(frozen=True, slots=True)
class Growth:
    """The growth of a process's memory."""

    mb: float
    mb_per_hour: float  # the slope
    allowed_mb: float
    took_s: float  # the time of the samples

    @property
    def is_bounded(self) -> bool:
        """Whether the growth is within the limit."""
        return self.mb <= self.allowed_mb


@dataclass(frozen=True, slots=True)
class Check:
    """One condition that must hold at the end."""

    name: str
    holds: bool
    found: str  # for people
    wanted: str  # for people


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Returns the Theil-Sen slope: the median of the slopes between all pairs. 0 without two different
    places.

    >>> slope([(0, 1.0), (1, 3.0), (2, 5.0), (3, 700.0)])
    2.0
    """
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in combinations(points, 2) if a[0] != b[0]]
    return statistics.median(slopes) if slopes else 0.0


def growth(samples: Sequence[Sample], process: Process, from_s: float) -> Growth:
    """Returns the growth of the process's memory from then on, without the times at which it did not
    exist."""
    points = [
        (sample.at_s, mb)
        for sample in samples
        if sample.at_s >= from_s and (mb := getattr(sample, f"{process}_mb")) > 0
    ]
    per_s = slope(points)
    took_s = points[-1][0] - points[0][0] if points else 0.0
    allowed_mb = NOISE_MB[process] + MAX_MB_PER_HOUR * took_s / 3600
    return Growth(per_s * took_s, per_s * 3600, allowed_mb, took_s)


def growth_checks(samples: Sequence[Sample], minutes: float, last_kill_s: float) -> list[Check]:
    """Checks the growth of the server after its warm-up, and of the last engine process after its warm-up."""
    warm_s = WARM_UP_SHARE * minutes * 60
    checks = []
    starts: tuple[tuple[Process, float], ...] = (
        ("server", warm_s),
        ("compiler", warm_s),
        ("engine", max(warm_s, last_kill_s + ENGINE_WARM_UP_S)),
    )
    for process, from_s in starts:
        grown = growth(samples, process, from_s)
        found = f"{grown.mb:+.1f} MB ({grown.mb_per_hour:+.0f} MB/hour)"
        wanted = f"at most {grown.allowed_mb:.1f} MB from {from_s:.0f} s on"
        if grown.took_s < MIN_JUDGED_S:
            wanted = f"not judged: less than {MIN_JUDGED_S:.0f} s from {from_s:.0f} s on"
        holds = grown.is_bounded or grown.took_s < MIN_JUDGED_S
        checks.append(Check(f"memory of the {process}", holds, found, wanted))
    return checks


def rest_checks(before: Sample, after: Sample) -> list[Check]:
    """Checks the resources that must be released after all clients have disconnected. ``before``: the sample
    before the first client."""
    checks = [
        Check(name, value == 0, "unknown" if value is None else f"{value:g}", "0")
        for name, value in (
            ("running requests", after.running),
            ("waiting requests", after.waiting),
            ("slots in use", after.in_use),
            ("sessions", after.sessions),
        )
    ]
    most = before.fds + FD_SLACK
    checks.append(Check("file descriptors", after.fds <= most, f"{after.fds}", f"at most {most}"))
    if before.tasks is not None:
        most_tasks = before.tasks + TASK_SLACK
        is_back = after.tasks is not None and after.tasks <= most_tasks
        checks.append(Check("tasks", is_back, f"{after.tasks}", f"at most {most_tasks:g}"))
    return checks
