"""The time that the end of a server may take, shared by its phases.

At its end a server finishes what runs (drain), closes its connections, and ends its engines one after the
other. Each phase has a limit of its own, and none takes more than what the phases before it have left: the
sum is bounded, however many engines there are and whatever hangs.
"""

from __future__ import annotations

import time
from collections.abc import Callable

# How long running requests may go on. With what follows, less than the 30 s that Kubernetes gives by default.
DRAIN_S = 15.0
# What closing connections (2 s) and ending engines may take together, after the drain.
AFTER_DRAIN_S = 8.0


class ShutdownBudget:
    """``drain_s`` and ``AFTER_DRAIN_S`` in all. The clock starts with the first ``take``."""

    def __init__(self, drain_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.drain_s = drain_s
        self._clock = clock
        self._ends_at_s: float | None = None

    def take(self, most_s: float) -> float:
        """How long a phase may take that begins now: ``most_s`` or what is left, whichever is less."""
        now_s = self._clock()
        if self._ends_at_s is None:
            self._ends_at_s = now_s + self.drain_s + AFTER_DRAIN_S
        return max(0.0, min(most_s, self._ends_at_s - now_s))
