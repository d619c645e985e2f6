"""How much of the pool to leave for what running requests will still generate.

Reserving all that each may generate wastes the pool twice over: most end before their limit, and they
do not end together. Reserving nothing admits requests that are thrown out a few steps later. So the
share of their limit that requests use is learned from those that ended; from it follows when each
running one will end and give its slots back, and how many slots are needed at the worst moment
(the idea of the Past-Future scheduler, Gong et al., ASPLOS 2025). Each retraction adds caution that
wears off slowly, so that a full pool settles instead of swinging.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from agentflow.engine.request import Request

LEAST = 8
"""Tokens left for each request, however far it is."""
FIRST_SHARE = 0.5
LEARNING_RATE = 0.05
CAUTION_PER_RETRACTION = 0.25
CAUTION_KEPT_PER_STEP = 0.98


class OutputReserve:
    """``share``: of ``max_new_tokens``, what a generation uses on average. ``caution``: how far from
    that to the whole limit, 0 to 1."""

    def __init__(self) -> None:
        self.share = FIRST_SHARE
        self.caution = 0.0
        self._reserved_share = FIRST_SHARE

    def expected(self, request: Request) -> int:
        """Tokens that the request will probably generate from now on: what its program says, or what
        others used of their limits."""
        limit, generated = request.max_new_tokens, request.num_generated
        likely = (request.expected_output or int(self._reserved_share * limit)) - generated
        return min(limit - generated, likely if likely > LEAST else LEAST)

    def need(self, request: Request) -> int:
        """Slots that a running request will still take: what it has to compute, and what it generates."""
        return request.num_tokens - request.num_computed + request.num_nodes_left + self.expected(request)

    def need_at_peak(self, requests: Iterable[Request]) -> int:
        """Slots that the requests together take beyond those they have, at the worst moment: all go on
        in step, and each gives back what it alone uses when it has generated what is expected."""
        rows = [
            (
                self.expected(r),
                r.num_tokens + r.num_nodes - r.num_shared,
                r.num_computed + len(r.node_slots) - r.num_shared,
            )
            for r in requests
        ]
        if not rows:
            return 0
        left, own, taken = np.array(rows).T
        order = np.argsort(-left, kind="stable")
        left, own = left[order], own[order]
        # When those with the least left end, all before them in this order run still.
        in_use = np.cumsum(own) + left * np.arange(1, len(left) + 1)
        return max(0, int(in_use.max() - taken.sum()))

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
