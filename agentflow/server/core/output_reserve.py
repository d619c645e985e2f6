"""How much of the pool to leave for what running requests will still generate.

Reserving all they may generate wastes the pool, for most end early; reserving nothing admits requests
that are thrown out a few steps later. So the share of their limit that requests use is learned from
those that ended; and each retraction adds caution that wears off slowly, so that a full pool settles
instead of swinging between too many requests and too few.
"""

from __future__ import annotations

from agentflow.server.core.request import Request

LEAST = 8
"""Tokens left for each request, however far it is."""
FIRST_SHARE = 0.5
LEARNING_RATE = 0.05
CAUTION_PER_RETRACTION = 0.25
CAUTION_KEPT_PER_STEP = 0.995


class OutputReserve:
    """``share``: of ``max_new_tokens``, what a generation uses on average. ``caution``: how far from
    that to the whole limit, 0 to 1."""

    def __init__(self) -> None:
        self.share = FIRST_SHARE
        self.caution = 0.0
        self._reserved_share = FIRST_SHARE

    def expected(self, request: Request) -> int:
        """Tokens that the request will probably generate from now on."""
        limit, generated = request.max_new_tokens, request.num_generated
        likely = int(self._reserved_share * limit) - generated
        return min(limit - generated, likely if likely > LEAST else LEAST)

    def finished(self, request: Request) -> None:
        """Learns from a generation that came to its own end."""
        if request.max_new_tokens:
            used = request.num_generated / request.max_new_tokens
            self.share += LEARNING_RATE * (used - self.share)
            self._update()

    def retracted(self) -> None:
        """Too little was left."""
        self.caution = min(1.0, self.caution + CAUTION_PER_RETRACTION)
        self._update()

    def stepped(self) -> None:
        """Caution wears off."""
        self.caution *= CAUTION_KEPT_PER_STEP
        self._update()

    def _update(self) -> None:
        self._reserved_share = self.share + self.caution * (1 - self.share)
