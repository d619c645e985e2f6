"""How long the phases of the engine's steps take, counted in buckets: cheap for whoever counts, and enough
to tell quantiles from over any span of time."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import msgspec

PHASES = ("schedule", "run", "complete", "deliver")
SCHEDULE, RUN, COMPLETE, DELIVER = range(len(PHASES))
# Seconds: from a step's bookkeeping to a long prefill.
STEP_BOUNDS_S = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0)


class BucketCounts(msgspec.Struct, array_like=True):
    """A histogram. ``counts[i]``: values up to ``bounds[i]`` and above the bound before it; the last one:
    those beyond all bounds."""

    counts: list[int]
    total: float = 0.0

    @classmethod
    def empty(cls, bounds: Sequence[float]) -> BucketCounts:
        """Nothing counted yet."""
        return cls([0] * (len(bounds) + 1))

    def count(self, bounds: Sequence[float], value: float) -> None:
        """Counts one value."""
        self.counts[bisect_left(bounds, value)] += 1
        self.total += value

    def __add__(self, other: BucketCounts) -> BucketCounts:
        counts = [mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)]
        return BucketCounts(counts, self.total + other.total)


class StepTimes:
    """Those of one engine since its start: a histogram for each of ``PHASES``."""

    def __init__(self) -> None:
        self.phases = [BucketCounts.empty(STEP_BOUNDS_S) for _ in PHASES]

    def count(self, phase: int, took_s: float) -> None:
        """One phase of one step is over."""
        self.phases[phase].count(STEP_BOUNDS_S, took_s)
