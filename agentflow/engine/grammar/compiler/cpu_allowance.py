"""How much of a processor something may take: a burst at once, and a share in the long run."""

from __future__ import annotations

from collections.abc import Callable


class CpuAllowance:
    """``burst_s`` seconds are there at first, and at most; what is spent comes back at ``share`` of the time
    that passes by ``clock``."""

    def __init__(self, burst_s: float, share: float, clock: Callable[[], float]) -> None:
        self._burst_s = burst_s
        self._share = share
        self._clock = clock
        self._left_s = burst_s
        self._seen_at = clock()

    @property
    def left_s(self) -> float:
        """What may be spent now; below 0 where more was spent than there was."""
        now = self._clock()
        self._left_s = min(self._burst_s, self._left_s + (now - self._seen_at) * self._share)
        self._seen_at = now
        return self._left_s

    def spend(self, seconds: float) -> None:
        """So much was taken."""
        self._left_s = self.left_s - seconds

    def wait_s(self, seconds: float) -> float:
        """How long until so much may be spent."""
        return max(0.0, (min(seconds, self._burst_s) - self.left_s) / self._share)
