"""How long outputs become, learned from requests that ended.

Lengths are kept by tenant, label and size of the limit (to a power of two), and more widely without the
label and without the tenant. The length of a request that has generated n tokens is one of the kept lengths
above n, from the narrowest kind that has enough of them. Each request takes a different quantile of these,
so that together the requests that run end as the kept ones did, early ones and late ones.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import OrderedDict, deque
from collections.abc import Hashable

from agentflow.engine.request import Request

RING = 64
"""Lengths kept of each kind of request: the latest ones."""
MIN_LENGTHS = 8
"""A kind with fewer lengths to choose from tells too little."""
MAX_KINDS = 4096
FIRST_FRACTION = 0.5
"""A request of which nothing is known uses this part of what is left of its limit."""
UNBOUNDED = 2**62
"""The length of an output that its limit cut."""
GOLDEN_RATIO = 0.6180339887498949
"""Multiples of this, modulo 1, are spread evenly, whichever of them are taken."""


class OutputLengths:
    """Output lengths of past requests."""

    def __init__(self) -> None:
        self._rings: OrderedDict[Hashable, _Ring] = OrderedDict()  # the least recently taught first

    def learn(self, request: Request) -> None:
        """The request ended by itself. At its limit it might have gone on, as others of its kind might."""
        is_cut = request.num_generated >= request.max_new_tokens
        for kind in _kinds(request):
            ring = self._rings.setdefault(kind, _Ring())
            ring.add(UNBOUNDED if is_cut else request.num_generated)
            self._rings.move_to_end(kind)
        while len(self._rings) > MAX_KINDS:
            self._rings.popitem(last=False)

    def expected(self, request: Request, caution: float) -> int:
        """The length that the request's output will probably have, more than it has. ``caution``: 0 to 1,
        where 1 takes the longest."""
        generated, limit = request.num_generated, request.max_new_tokens
        quantile = request.arrival * GOLDEN_RATIO % 1.0
        quantile += caution * (1 - quantile)
        for kind in _kinds(request):
            ring = self._rings.get(kind)
            if ring is not None:
                lengths = ring.lengths
                first = bisect_right(lengths, generated)
                if len(lengths) - first >= MIN_LENGTHS:
                    index = first + int(quantile * (len(lengths) - first))
                    return min(limit, lengths[min(index, len(lengths) - 1)])
        fraction = FIRST_FRACTION + caution * (1 - FIRST_FRACTION)
        return generated + int(fraction * (limit - generated))


class _Ring:
    """The latest lengths of one kind. ``lengths``: in ascending order."""

    def __init__(self) -> None:
        self.lengths: list[int] = []
        self._in_order: deque[int] = deque()

    def add(self, length: int) -> None:
        self._in_order.append(length)
        insort(self.lengths, length)
        if len(self._in_order) > RING:
            del self.lengths[bisect_right(self.lengths, self._in_order.popleft()) - 1]


def _kinds(request: Request) -> tuple[Hashable, Hashable, Hashable]:
    """Kinds of request that it belongs to, the narrowest first."""
    size = request.max_new_tokens.bit_length()
    return (request.tenant, request.origin.label, size), (request.tenant, size), size
