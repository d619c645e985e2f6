"""The time budget of a server's shutdown, shared by its phases.

A server first finishes running requests (drain), then closes its connections, then ends its engines one after
another. Each phase has a limit, and at most the rest of the budget. So the total time is bounded, however
many engines there are or hang.
"""

from __future__ import annotations

import time
from collections.abc import Callable

# The time for running requests. With AFTER_DRAIN_S, less than the 30 s that Kubernetes allows.
DRAIN_S = 15.0
# The time for closing connections (2 s) and ending engines, after the drain.
AFTER_DRAIN_S = 8.0


class ShutdownBudget:
    """A budget of ``drain_s`` plus ``AFTER_DRAIN_S``, which starts with the first ``take``."""

    def __init__(self, drain_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.drain_s = drain_s
        self._clock = clock
        self._ends_at_s: float | None = None

    def take(self, most_s: float) -> float:
        """Returns the seconds for a phase that starts now: ``most_s`` or the rest of the budget, whichever is
        less."""
        now_s = self._clock()
        if self._ends_at_s is None:
            self._ends_at_s = now_s + self.drain_s + AFTER_DRAIN_S
        return max(0.0, min(most_s, self._ends_at_s - now_s))
