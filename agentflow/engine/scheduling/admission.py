"""How many slots of the pool to keep for what running requests will still generate.

Reserving the limit of every request wastes most of the pool: most requests end before their limit, and they
do not end together. Reserving nothing admits requests that must be retracted a few steps later. The reserve
therefore learns from ended requests what fraction of their limit they use. This predicts when each running
request will end and free its slots, and so how many slots are needed at the worst moment (the idea of the
Past-Future scheduler, Gong et al., ASPLOS 2025). Each retraction adds caution, which wears off slowly, so
that a full pool settles instead of oscillating.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from agentflow.engine.request import Request

MIN_RESERVED = 8
"""Tokens reserved for each request, however many it has generated."""
FIRST_FRACTION = 0.5
LEARNING_RATE = 0.05
CAUTION_PER_RETRACTION = 0.25
CAUTION_KEPT_PER_STEP = 0.98


class OutputReserve:
    """``used_fraction``: of ``max_new_tokens`` that a generation uses on average. ``caution``: 0 reserves
    this fraction, 1 the whole limit."""

    def __init__(self) -> None:
        self.used_fraction = FIRST_FRACTION
        self.caution = 0.0
        self._reserved_fraction = FIRST_FRACTION

    def expected(self, request: Request) -> int:
        """Tokens that the request will probably still generate, by what its program says or by what others
        used of their limits."""
        limit, generated = request.max_new_tokens, request.num_generated
        likely = (request.expected_output or int(self._reserved_fraction * limit)) - generated
        return min(limit - generated, likely if likely > MIN_RESERVED else MIN_RESERVED)

    def need(self, request: Request) -> int:
        """Slots that a running request will still take, for tokens to compute and to generate."""
        return request.num_tokens - request.num_computed + request.num_nodes_left + self.expected(request)

    def need_at_peak(self, requests: Iterable[Request]) -> int:
        """Slots that the requests together need beyond those they have, at the worst moment. All advance in
        step, and each frees what only it uses after generating what is expected."""
        needs = [
            (
                self.expected(r),
                r.num_tokens + r.num_nodes - r.num_shared,
                r.num_computed + len(r.node_slots) - r.num_shared,
            )
            for r in requests
        ]
        if not needs:
            return 0
        left, own, taken = np.array(needs).T
        order = np.argsort(-left, kind="stable")
        left, own = left[order], own[order]
        # When a request ends, all before it in this order still run.
        in_use = np.cumsum(own) + left * np.arange(1, len(left) + 1)
        return max(0, int(in_use.max() - taken.sum()))

    def finished(self, request: Request) -> None:
        """Learns from a request that ended."""
        if request.max_new_tokens:
            used = request.num_generated / request.max_new_tokens
            self.used_fraction += LEARNING_RATE * (used - self.used_fraction)
            self._update()

    def retracted(self) -> None:
        """A request was retracted: too little was reserved."""
        self.caution = min(1.0, self.caution + CAUTION_PER_RETRACTION)
        self._update()

    def stepped(self) -> None:
        """Lets caution wear off, once per step."""
        self.caution *= CAUTION_KEPT_PER_STEP
        self._update()

    def _update(self) -> None:
        self._reserved_fraction = self.used_fraction + self.caution * (1 - self.used_fraction)
