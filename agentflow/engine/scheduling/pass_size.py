"""How many tokens one forward pass may have, learned from passes that ran out of memory."""

from __future__ import annotations

import math

RECOVERY_PASSES = 100
"""After this many passes without a failure, larger ones are tried again: memory may be free by then."""


class PassSize:
    """A pass that ran out of memory is divided until its parts fit. Later passes are as small, so that they
    do not fail first. A request that does not fit alone says nothing about the others."""

    def __init__(self) -> None:
        self.limit: float = math.inf
        self._is_dividing = False  # parts of a failed batch are left to run
        self._limit_before: float = math.inf  # that batch failed
        self._most_failed = 0  # tokens of a pass
        self._num_passes = 0  # since the last failure

    def divide(self, num_tokens: int) -> int:
        """A pass of ``num_tokens`` tokens ran out of memory. Returns the size of its parts."""
        if not self._is_dividing:
            self._is_dividing, self._limit_before = True, self.limit
        self._most_failed = max(self._most_failed, num_tokens)
        self._num_passes = 0
        part = (num_tokens + 1) // 2
        self.limit = part
        return part

    def does_not_fit(self) -> None:
        """A request did not fit alone, however small its part was."""
        if self._is_dividing:
            self.limit, self._is_dividing = self._limit_before, False

    def planned(self) -> None:
        """All parts of the last batch that failed have run."""
        self._is_dividing = False

    def fits(self) -> None:
        """A pass has run."""
        self._num_passes += 1
        if self._num_passes >= RECOVERY_PASSES and self.limit < math.inf:
            self._num_passes = 0
            self.limit *= 2
            if self.limit >= self._most_failed:
                self.limit = math.inf
