"""How many slots of the pool to keep for what running requests will still generate.

Reserving the limit of every request wastes most of the pool: most requests end before their limit, and they
do not end together. Reserving nothing admits requests that must be retracted a few steps later. The reserve
therefore learns from ended requests how long outputs become (``output_lengths``). This predicts when each
running request will end and free its slots, and so how many slots are needed at the worst moment (the idea of
the Past-Future scheduler, Gong et al., ASPLOS 2025). Each retraction adds caution, which wears off slowly, so
that a full pool settles instead of oscillating.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from agentflow.engine.request import Request
from agentflow.engine.scheduling.output_lengths import OutputLengths

MIN_RESERVED = 8
"""Tokens reserved for each request, however many it has generated."""
CAUTION_PER_RETRACTION = 0.25
CAUTION_KEPT_PER_STEP = 0.98


class OutputReserve:
    """``lengths``: of past outputs. ``caution``: 0 expects lengths like these, 1 the longest of them."""

    def __init__(self) -> None:
        self.lengths = OutputLengths()
        self.caution = 0.0

    def expected(self, request: Request) -> int:
        """Tokens that the request will probably still generate, by what its program says or by the lengths of
        past outputs."""
        left = request.max_new_tokens - request.num_generated
        if left <= MIN_RESERVED:
            return left
        length = request.expected_output or self.lengths.expected(request, self.caution)
        return min(left, max(MIN_RESERVED, length - request.num_generated))

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
        """Learns from a request that ended by itself."""
        if request.max_new_tokens:
            self.lengths.learn(request)

    def retracted(self) -> None:
        """A request was retracted: too little was reserved."""
        self.caution = min(1.0, self.caution + CAUTION_PER_RETRACTION)

    def stepped(self) -> None:
        """Lets caution wear off, once per step."""
        self.caution *= CAUTION_KEPT_PER_STEP
