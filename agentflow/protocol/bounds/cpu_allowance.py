"""A limit on processor time: a burst, and then a share of the elapsed time."""

from __future__ import annotations

from collections.abc import Callable


class CpuAllowance:
    """A token bucket of processor time: at most ``burst_s`` seconds, refilled with the part ``share`` of the
    time that passes on ``clock``."""

    def __init__(self, burst_s: float, share: float, clock: Callable[[], float]) -> None:
        self._burst_s = burst_s
        self._share = share
        self._clock = clock
        self._left_s = burst_s
        self._seen_at = clock()

    @property
    def left_s(self) -> float:
        """The seconds available now; negative if overspent."""
        now = self._clock()
        self._left_s = min(self._burst_s, self._left_s + (now - self._seen_at) * self._share)
        self._seen_at = now
        return self._left_s

    def spend(self, seconds: float) -> None:
        """Takes seconds from the allowance."""
        self._left_s = self.left_s - seconds

    def wait_s(self, seconds: float) -> float:
        """The time until ``seconds`` are available."""
        return max(0.0, (min(seconds, self._burst_s) - self.left_s) / self._share)
