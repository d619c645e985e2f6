"""Capacity by objective: how long a step may take while requests need low latency, and which work fits into
it.

The time per output token (TPOT) of a request is the mean time of the steps that decode it. Each request of
the objective ``latency`` has a *bound* on it: the engine's target (``SchedulerConfig.tpot_target_ms``) or its
reader's (``Origin.tpot_s``), whichever is less. A step that decodes such requests, the *urgent* ones, is
planned by the learned cost of steps, to take a part of the lowest bound among them. Without urgent requests
or bounds, nothing of this applies.

- *Balance*: a request's balance is MEAN_PART of its bound for each token that it has generated with this
  bound, less the time that these tokens took. A step may take MEAN_PART of the bound plus the lowest balance
  of all urgent requests. So errors of the learned costs are corrected in the next steps, and time that every
  urgent request has saved goes to other work. The step stays between PLANNED_PART and MOST_PART of the bound,
  so that no stream pauses.
- *Decoding* takes at most DECODE_PART of the step beyond its constant cost: all urgent requests, then as
  many others as fit. The others take turns: requests that were left out of a step come first in the next one,
  and a step has at least one of them.
- *Prompts* take the rest of the step, in the order of the policy. A step with a prompt computes at least
  ``MIN_CHUNK`` tokens of one (``step_limits``).
- *Admission*: a request of the objective ``throughput`` starts next to urgent ones only if all running
  requests could then decode in one step. With a target, an urgent one starts only if all urgent ones could.

**Limits of a bound.** Decoding for the urgent requests alone may take longer than their bound allows. Then
the step takes MIN_STRETCH times as long as this decoding, so that prompts continue. A reader's bound does not
shorten steps below LEAST_STRETCH times the decoding of the urgent requests: a tenant cannot push out the work
of others with it. A request that would break the target even alone does not wait for it.

**No starvation.** A request that Pace holds back waits in the policy's order, and counts as one that does not
fit into memory: the policy's bound on overtaking within a tenant holds for it (``arrival_queue``). Across
tenants: let r be held back first when the engine has computed n tokens in total. Once it has computed n +
PASSED_BATCHES * token_budget, a step in which the policy picks r admits no other request after that. If r is
picked before the others in each later step, as the tenant with the lowest charge is, r starts at the latest
when the requests that ran at that moment have ended.

Proof. While r is held back, an urgent request runs. From that moment on no request starts before r, so the
set of running requests only shrinks. When no urgent one is left in it, Pace holds nothing back. ∎

**Mean time.** Let a request with bound b decode one token in each of n steps. Let each step take at most e
longer than planned, e <= (MEAN_PART - PLANNED_PART) * b, and let the limits above lengthen none. Then its n
tokens take at most MEAN_PART * n * b + e.

Proof. The balance is at least -e: if it is x >= 0, the next step is planned to take at most MEAN_PART * b +
x, which leaves 0. If -e <= x < 0, it is planned to take at most PLANNED_PART * b, which leaves x + e or more,
or MEAN_PART * b + x, which leaves 0. In each case the error takes at most e. ∎ If a step is planned while
another is in flight, whose time is not known yet, the sum may be larger by the time of one step.

Of k others that decode, each is in at least one of k steps in a row.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from agentflow.engine.request import Request
from agentflow.engine.scheduling.step_limits import StepCost

MEAN_PART = 0.97
"""The rest of a bound is for the work between steps."""
PLANNED_PART = 0.9
MOST_PART = 1.25
DECODE_PART = 0.75
MIN_STRETCH = 1.1
LEAST_STRETCH = 2.0
PASSED_BATCHES = 32
MAX_TRIED = 64
"""A step tries no more requests after this many that were held back."""


class Pace:
    """The bounds on a scheduler's steps.

    Args:
        cost: The learned durations of steps.
        target_s: The bound of all requests of the objective ``latency``; None: they have none.
        token_budget: The scheduled tokens of one forward pass.
    """

    def __init__(self, cost: StepCost, target_s: float | None, token_budget: int) -> None:
        self._cost = cost
        self._target_s = math.inf if target_s is None else target_s
        self._passed_tokens = PASSED_BATCHES * token_budget
        self._left_out: Sequence[Request] = ()  # of the last step, in the order of their turns
        self._time_s = 0.0  # of all steps
        # Where the balances of urgent requests that decode start, by id: the time and the generated tokens.
        self._since: dict[int, tuple[float, int]] = {}
        self._urgent_waiting: set[int] = set()  # the ids of waiting requests of the objective ``latency``
        # By id of waiting requests: how many tokens the engine had computed when it was first held back.
        self._held_back_from: dict[int, int] = {}
        # Of the step that is being planned:
        self._num_tried = 0
        self._held_back_tenants: set[str] = set()  # tenants of which a request was held back
        self._is_bound = False  # an urgent request runs
        self._uncounted: list[Request] | None = None  # the running requests, while none of them has a bound
        self._reader_s = math.inf  # the lowest of the readers' bounds
        self._urgent_s = self._all_s = 0.0  # decoding of the urgent requests that run, and of all

    def waits(self, request: Request) -> None:
        """The request waits, or has another objective while it waits."""
        if request.is_urgent:
            self._urgent_waiting.add(request.id)
        else:
            self._urgent_waiting.discard(request.id)

    def bound_changed(self, request: Request) -> None:
        """The request has another bound, which is for its further tokens: its balance starts again."""
        self._since.pop(request.id, None)

    def departed(self, request: Request) -> None:
        """The request no longer waits."""
        self._urgent_waiting.discard(request.id)
        self._held_back_from.pop(request.id, None)

    # Steps.

    def bound_s(self, ready: Iterable[Request]) -> float:
        """The longest step, in seconds, while these requests decode; infinity without a bound."""
        urgent = [request for request in ready if request.is_urgent]
        reader_s = self._lowest_reader_s(urgent)
        if not urgent or not self._cost.is_known:
            return math.inf
        self._follow(urgent)
        if self._target_s == reader_s == math.inf:
            return math.inf
        num_read = sum([request.num_computed for request in urgent])
        urgent_s = self._cost.decode_s(len(urgent), len(urgent), num_read)
        return self._bound_s(reader_s, urgent_s, self._lowest_balance_s(urgent))

    @staticmethod
    def _lowest_reader_s(requests: Iterable[Request]) -> float:
        """The lowest bound that readers of these requests ask for."""
        origins = [request.origin for request in requests]
        return min([one.tpot_s for one in origins if one.tpot_s is not None], default=math.inf)

    def ran(self, took_s: float) -> None:
        """A step has run, in ``took_s`` seconds."""
        self._time_s += took_s
        self._uncounted = None  # it would keep requests that have ended

    def _follow(self, urgent: Sequence[Request]) -> None:
        """Begins the balances of new urgent requests, and forgets the balances of others."""
        known = self._since
        if known.keys() != {request.id for request in urgent}:
            now = self._time_s
            self._since = {one.id: known.get(one.id, (now, one.num_generated)) for one in urgent}

    def _lowest_balance_s(self, urgent: Sequence[Request]) -> float:
        """The lowest balance of the urgent requests, in seconds."""
        now = self._time_s
        lowest_s = math.inf
        for request in urgent:
            since_s, first = self._since[request.id]
            bound_s = min(self._target_s, _reader_s(request))
            if bound_s < math.inf:
                allowed_s = MEAN_PART * bound_s * (request.num_generated - first)
                lowest_s = min(lowest_s, allowed_s - (now - since_s))
        return lowest_s

    def in_turn(
        self, ready: Sequence[Request], bound_s: float
    ) -> tuple[Sequence[Request], Sequence[Request]]:
        """Returns the requests that decode in a step of at most ``bound_s``, and the requests that are left
        out of it. Pass the latter to ``planned`` when the step is certain."""
        if bound_s == math.inf:
            return ready, ()
        chosen = [request for request in ready if request.is_urgent]
        num_read = sum([request.num_computed for request in chosen])
        left_s = self._decode_limit_s(bound_s) - self._cost.decode_s(len(chosen), len(chosen), num_read)
        others = {request: None for request in ready if not request.is_urgent}
        turns = [request for request in self._left_out if request in others]
        for request in turns:
            del others[request]
        turns += others
        num_chosen = 0
        for request in turns:
            left_s -= self._cost.row_s(request.num_computed)
            if left_s < 0 and num_chosen:
                break
            num_chosen += 1
        return chosen + turns[:num_chosen], turns[num_chosen:]

    def planned(self, left_out: Sequence[Request]) -> None:
        """A step was planned without these requests."""
        self._left_out = left_out

    # Admission.

    def start_step(self, running: Iterable[Request]) -> None:
        """A step is being planned, which may admit requests next to the ``running`` ones."""
        self._num_tried = 0
        self._held_back_tenants.clear()
        self._is_bound, self._reader_s = False, math.inf
        self._urgent_s = self._all_s = self._cost.decode_s(0, 0, 0)
        self._uncounted = [*running]
        if self._target_s < math.inf or self._lowest_reader_s(self._uncounted) < math.inf:
            self._count()

    def _count(self) -> None:
        """Counts the running requests, because one of them has a bound."""
        running, self._uncounted = self._uncounted, None
        for request in running or ():
            self.started(request)

    def started(self, request: Request) -> None:
        """The request runs."""
        if self._uncounted is not None:
            self._uncounted.append(request)
            if request.origin.tpot_s is not None:
                self._count()
            return
        if not request.will_decode:
            return
        row_s = self._cost.row_s(request.num_tokens)
        self._all_s += row_s
        if request.is_urgent:
            self._urgent_s += row_s
            self._reader_s = min(self._reader_s, _reader_s(request))
            self._is_bound = True

    def may_start(self, request: Request) -> bool:
        """Whether the request may start next to the running ones. Preempted requests always may."""
        if not (self._is_bound and self._cost.is_known):
            return True
        if request.num_preemptions or not request.will_decode:
            return True
        row_s = self._cost.row_s(request.num_tokens)
        if not request.is_urgent:
            bound_s = self._bound_s(self._reader_s, self._urgent_s)
            return self._all_s + row_s <= self._decode_limit_s(bound_s)
        limit_s = self._decode_limit_s(PLANNED_PART * self._target_s)
        return self._urgent_s + row_s <= limit_s or self._cost.decode_s(0, 0, 0) + row_s > limit_s

    def hold_back(self, request: Request, num_computed: int) -> bool:
        """The request may not start in this step. Returns whether others may.

        Args:
            request: The request.
            num_computed: How many tokens the engine has computed in total.
        """
        held_back_from = self._held_back_from.setdefault(request.id, num_computed)
        self._num_tried += 1
        self._held_back_tenants.add(request.tenant)
        is_due = num_computed - held_back_from >= self._passed_tokens
        return bool(self._urgent_waiting) and not (
            is_due or request.is_urgent or self._num_tried >= MAX_TRIED
        )

    def holds_back(self, request: Request) -> bool:
        """Whether the request need not be tried in this step, because another request of its tenant was held
        back."""
        return request.tenant in self._held_back_tenants and request.is_paced

    def _bound_s(self, reader_s: float, urgent_s: float, balance_s: float = -math.inf) -> float:
        """The longest step for urgent requests whose decoding alone takes ``urgent_s``, and whose lowest
        balance is ``balance_s``."""
        bound_s = min(self._target_s, max(reader_s, LEAST_STRETCH * urgent_s))
        if bound_s == math.inf:
            return math.inf
        planned_s = min(max(MEAN_PART * bound_s + balance_s, PLANNED_PART * bound_s), MOST_PART * bound_s)
        return max(planned_s, MIN_STRETCH * urgent_s)

    def _decode_limit_s(self, bound_s: float) -> float:
        """How long decoding may take in a step of at most ``bound_s``."""
        constant_s = self._cost.decode_s(0, 0, 0)
        return constant_s + DECODE_PART * (bound_s - constant_s)


def _reader_s(request: Request) -> float:
    return math.inf if request.origin.tpot_s is None else request.origin.tpot_s
