"""The time budget of a server's shutdown, shared by its phases.

A server first finishes running requests (drain), then closes its connections, then ends its engines one after
the other. Each phase has a limit of its own, and none takes more than the earlier phases have left. The total
is bounded, however many engines there are and whatever hangs.
"""

from __future__ import annotations

import time
from collections.abc import Callable

# How long running requests may continue. With AFTER_DRAIN_S, less than the 30 s of Kubernetes' default.
DRAIN_S = 15.0
# For closing connections (2 s) and ending engines, after the drain.
AFTER_DRAIN_S = 8.0


class ShutdownBudget:
    """``drain_s`` plus ``AFTER_DRAIN_S``, from the first ``take`` on."""

    def __init__(self, drain_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.drain_s = drain_s
        self._clock = clock
        self._ends_at_s: float | None = None

    def take(self, most_s: float) -> float:
        """Seconds for a phase that begins now: ``most_s`` or what is left, whichever is less."""
        now_s = self._clock()
        if self._ends_at_s is None:
            self._ends_at_s = now_s + self.drain_s + AFTER_DRAIN_S
        return max(0.0, min(most_s, self._ends_at_s - now_s))
