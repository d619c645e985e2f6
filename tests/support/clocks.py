"""Clocks that only a test advances."""

from dataclasses import dataclass


@dataclass
class ClockNs:
    """A clock of the test in nanoseconds."""

    now_ns: int = 10**15

    def __call__(self) -> int:
        return self.now_ns


@dataclass
class ClockS:
    """A clock of the test in seconds."""

    now_s: float = 100.0

    def __call__(self) -> float:
        return self.now_s
