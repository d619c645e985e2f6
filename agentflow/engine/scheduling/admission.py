"""How many slots of the pool to keep for the tokens that running requests will still generate.

Reserving the limit of every request wastes most of the pool: most requests end before their limit, and they
do not end together. Reserving nothing admits requests that must be preempted a few steps later. The reserve
therefore learns from ended requests how long outputs become (``OutputLengths``). This predicts when each
running request will end and free its slots, and so how many slots are needed at the worst moment (the idea of
the Past-Future scheduler, Gong et al., ASPLOS 2025). Each preemption adds caution, which wears off slowly, so
that a full pool settles instead of oscillating.

**Reservation.** Let h be the first waiting request in the policy's order that does not fit. The same
prediction gives the time when h will start: after the smallest number of steps T after which enough running
requests have ended for h to fit next to the others until its own end. Requests behind h may *pass* it, that
is start before it, if T stays the same with them: they end before h starts, or fit next to it (backfilling as
in EASY; Lifka, "The ANL/IBM SP Scheduling System", 1995). Let n be the step in which h was first blocked,
with T steps to wait then. Requests pass h only in the steps before n + T, and no request passes one that was
preempted. Then:

1. If requests end when they are expected to, and the policy orders no later request before h, h starts in
   step n + T at the latest.
2. In any case h starts at the latest when all requests have ended that started before step n + T or that the
   policy orders before h.

Proof. 1: A request that passes h does not change its expected start, and the expected start is the actual
one. 2: From step n + T on, while h is blocked, only requests start that the policy orders before it. When
none runs, h fits. ∎

So passing costs h nothing if predictions are right. If they are wrong, passing ends in a step that is known
from the beginning.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Hashable, Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from agentflow.engine.request import Request

MIN_RESERVED = 8
"""Tokens reserved for each request, however many it has generated."""
CAUTION_PER_PREEMPTION = 0.25
CAUTION_KEPT_PER_STEP = 0.98
MAX_HELD_BACK = 8
"""A step tries no more requests after this many that do not fit."""

RING = 64
"""Lengths kept of each kind of request: the latest ones."""
MIN_LENGTHS = 8
"""Kinds with fewer lengths to choose from are not used."""
MAX_KINDS = 4096
FIRST_FRACTION = 0.5
"""A request without known lengths is expected to use this part of its remaining limit."""
UNBOUNDED = 2**62
"""Stands for the unknown length of an output that reached its limit."""
GOLDEN_RATIO = 0.6180339887498949
"""Consecutive multiples of this, modulo 1, are spread evenly."""
Steps = NDArray[np.int64]
Outlooks = NDArray[np.int64]
"""Requests as rows, with the fields of ``Outlook`` as columns."""


class Outlook(NamedTuple):
    """The expected course of a request."""

    left: int  # tokens that it still generates
    own: int  # slots that only it uses once its present tokens are computed
    taken: int  # slots of these that it has already
    steps: int  # until it ends


class OutputReserve:
    """``lengths``: of past outputs. ``caution``: 0 expects lengths like these, 1 the longest of them."""

    def __init__(self) -> None:
        self.lengths = OutputLengths()
        self.caution = 0.0

    def expected(self, request: Request) -> int:
        """Tokens that the request will probably still generate, by its program's hint or by the lengths of
        past outputs."""
        left = request.max_new_tokens - request.num_generated
        if left <= MIN_RESERVED:
            return left
        length = request.origin.output_tokens or self.lengths.expected(request, self.caution)
        return min(left, max(MIN_RESERVED, length - request.num_generated))

    def need(self, request: Request) -> int:
        """Slots that a running request will still take, for tokens to compute and to generate."""
        return request.num_tokens - request.num_computed + request.num_nodes_left + self.expected(request)

    def outlook(self, request: Request, token_budget: int) -> Outlook:
        """The request's outlook, if steps compute ``token_budget`` tokens of its prompt."""
        left = self.expected(request)
        num_chunks = math.ceil(request.num_to_compute / token_budget)
        return Outlook(
            left,
            request.num_tokens + request.num_nodes - request.num_shared,
            request.num_computed + len(request.node_slots) - request.num_shared,
            # The step that computes the last token of the prompt generates the first of the output.
            max(1, num_chunks + left - 1),
        )

    def finished(self, request: Request) -> None:
        """Learns from a request that ended by itself."""
        if request.max_new_tokens:
            self.lengths.learn(request)

    def preempted(self) -> None:
        """A request was preempted: too little was reserved."""
        self.caution = min(1.0, self.caution + CAUTION_PER_PREEMPTION)

    def stepped(self) -> None:
        """Lets caution wear off, once per step."""
        self.caution *= CAUTION_KEPT_PER_STEP


class Reservation(NamedTuple):
    """The reservation of a blocked request, as in the module's docstring."""

    head: Outlook  # of the blocked request
    start: int  # in how many steps it is expected to start
    cached: int  # slots of its cached prefix that nothing else protects


class Admission:
    """Decides which waiting requests may start in step number ``step``, next to the ``running`` ones.

    ``available``, in all methods: slots that are free or can be evicted, without the request's own prefix.
    ``is_open``: whether further requests may be tried.
    """

    def __init__(
        self, reserve: OutputReserve, running: Iterable[Request], token_budget: int, step: int
    ) -> None:
        self.is_open = True
        self._reserve = reserve
        self._running = [*running]
        self._token_budget = token_budget
        self._step = step
        # Slots that the running requests take at most, and will probably take (None: not computed yet).
        self._most = sum([_most(request) for request in self._running])
        self._promised: int | None = None
        self._outlooks: Outlooks | None = None  # of the running requests
        self._reservation: Reservation | None = None
        self._num_held_back = 0

    def fits(self, request: Request, available: int) -> bool:
        """Whether the request fits now, and does not delay the blocked one."""
        if request.num_to_compute > available:
            return False
        if not self._running:
            return True
        # Cheap bounds that often suffice: all requests run to their limit, or to their expected end,
        # together.
        if self._reservation is None:
            if _most(request) + self._most <= available:
                return True
            if self._promised is None:
                self._promised = sum(map(self._reserve.need, self._running))
            if self._reserve.need(request) + self._promised <= available:
                return True
        together = np.vstack((self._running_outlooks(), self._outlook(request)))
        if need_at_peak(together) > available:
            return False
        if self._reservation is None:
            return True
        head, start, cached = self._reservation
        return bool(_fits_from(np.array([start]), head, together, available - cached)[0])

    def admitted(self, request: Request) -> None:
        """The request starts in this step."""
        self._running.append(request)
        self._most += _most(request)
        if self._promised is not None:
            self._promised += self._reserve.need(request)
        if self._outlooks is not None:
            self._outlooks = np.vstack((self._outlooks, self._outlook(request)))

    def hold_back(self, request: Request, available: int, cached: int) -> None:
        """The request does not fit. The first such request gets the reservation. ``cached``: as in
        ``Reservation``."""
        self._num_held_back += 1
        if self._reservation is None and self._running:
            outlooks, head = self._running_outlooks(), self._outlook(request)
            starts = np.unique(outlooks[:, 3])
            # It fits at the last of these, when no request runs.
            start = int(starts[_fits_from(starts, head, outlooks, available)][0])
            self._reservation = Reservation(head, start, cached)
            if request.passed_until is None:
                request.passed_until = self._step + start
        is_over = request.passed_until is not None and request.passed_until <= self._step
        self.is_open = self._reservation is not None and not is_over and self._num_held_back < MAX_HELD_BACK

    def _running_outlooks(self) -> Outlooks:
        if self._outlooks is None:
            self._outlooks = np.array([self._outlook(request) for request in self._running], dtype=np.int64)
        return self._outlooks

    def _outlook(self, request: Request) -> Outlook:
        return self._reserve.outlook(request, self._token_budget)


def _most(request: Request) -> int:
    """Slots that a running request still takes if its output reaches its limit."""
    most = request.num_prompt + request.max_new_tokens - request.num_computed
    return most if request.tree is None else most + request.num_nodes_left


def need_at_peak(outlooks: Outlooks) -> int:
    """Slots that requests together need beyond the slots they have, at the worst moment. All advance in step,
    and each frees its own slots once it has generated the expected tokens."""
    left, own, taken, _ = outlooks[np.argsort(-outlooks[:, 0], kind="stable")].T
    return max(0, int(_in_use(left, own).max() - taken.sum()))


def _fits_from(starts: Steps, head: Outlook, outlooks: Outlooks, available: int) -> NDArray[np.bool_]:
    """For each of ``starts``, in steps: whether ``head`` fits into memory from then until its end, next to
    the others that still run then. The use of memory is highest when one of them ends, before it frees its
    slots.
    """
    _, own, taken, ends = outlooks[np.argsort(-outlooks[:, 3], kind="stable")].T
    capacity = available + int(taken.sum())
    head_ends = starts + head.steps
    is_next_to = (ends > starts[:, None]) & (ends <= head_ends[:, None])
    fits = (_in_use(ends, own) + head.own + ends - starts[:, None] <= capacity) | ~is_next_to
    num_next_to = np.searchsorted(-ends, -head_ends, side="right")
    own_next_to = np.append(0, own.cumsum())[num_next_to] + head_ends * num_next_to
    fits_at_end = own_next_to + head.own + head.steps <= capacity
    found: NDArray[np.bool_] = (fits.all(axis=1) & fits_at_end) | (ends[0] <= starts)
    return found


def _in_use(ends: Steps, own: Steps) -> Steps:
    """Slots in use when each request ends, where all before it still run: ``ends`` descend."""
    in_use: Steps = own.cumsum() + ends * np.arange(1, len(ends) + 1)
    return in_use


class OutputLengths:
    """Output lengths of past requests.

    Lengths are kept by tenant, label and size of the limit (to a power of two), and more widely without the
    label and without the tenant. The length of a request that has generated n tokens is one of the kept
    lengths above n, from the narrowest kind that has enough of them. Each request takes a different quantile
    of these, so that together the requests that run end as the kept ones did, early ones and late ones.
    """

    def __init__(self) -> None:
        self._rings: OrderedDict[Hashable, _Ring] = OrderedDict()  # the least recently taught first

    def learn(self, request: Request) -> None:
        """Learns from a request that ended by itself. An output that reached its limit counts as
        ``UNBOUNDED``, because it might have continued."""
        is_cut = request.num_generated >= request.max_new_tokens
        for kind in _kinds(request):
            ring = self._rings.get(kind)
            if ring is None:
                ring = self._rings[kind] = _Ring()
            ring.add(UNBOUNDED if is_cut else request.num_generated)
            self._rings.move_to_end(kind)
        while len(self._rings) > MAX_KINDS:
            self._rings.popitem(last=False)

    def expected(self, request: Request, caution: float) -> int:
        """The probable length of the request's output, greater than its current length. ``caution``: 0 to 1,
        where 1 takes the longest."""
        generated, limit = request.num_generated, request.max_new_tokens
        quantile = request.arrival * GOLDEN_RATIO % 1.0
        quantile += caution * (1 - quantile)
        for kind in _kinds(request):
            ring = self._rings.get(kind)
            if ring is not None:
                lengths = ring.lengths()
                first = bisect_right(lengths, generated)
                if len(lengths) - first >= MIN_LENGTHS:
                    index = first + int(quantile * (len(lengths) - first))
                    return min(limit, lengths[min(index, len(lengths) - 1)])
        fraction = FIRST_FRACTION + caution * (1 - FIRST_FRACTION)
        return generated + int(fraction * (limit - generated))


class _Ring:
    """The latest lengths of one kind. They are read seldom and added to often."""

    __slots__ = ("_latest", "_sorted")

    def __init__(self) -> None:
        self._latest: list[int] = []
        self._sorted: list[int] | None = None

    def add(self, length: int) -> None:
        self._latest.append(length)
        if len(self._latest) > RING:
            del self._latest[0]
        self._sorted = None

    def lengths(self) -> list[int]:
        """In ascending order."""
        if self._sorted is None:
            self._sorted = sorted(self._latest)
        return self._sorted


def _kinds(request: Request) -> tuple[Hashable, Hashable, Hashable]:
    """Kinds of request that it belongs to, the narrowest first."""
    size = request.max_new_tokens.bit_length()
    return (request.tenant, request.origin.label, size), (request.tenant, size), size
