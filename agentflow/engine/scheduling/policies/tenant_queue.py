"""The waiting requests of one tenant in their order, with room for short prompts next to long ones.

Waiting requests are ordered thus: preempted requests; then the oldest request, if it has been overtaken as
far as ``arrival_queue`` allows; then requests of the highest priority, and lower ones only if all of these
are blocked. Among equal priorities the first deadline goes first, if any request has one; then the request
whose patience ended first, or that must start now for its first token to come in ``ttft_s``; then siblings in
the task group that was admitted last, or in an earlier one of which some still wait (if the group's consumer
counts by its throughput, they go behind all requests with the objective ``latency``); then the objective
``latency`` before ``throughput``, where a group whose consumer counts by its latency counts as ``latency``,
too: it takes its turn among them, as the consumer waits for the last of the group. Then come programs of a
lower level, short requests before long ones, and the longest match (``match_order``). A request is *short* if
it has at most SHORT_BATCHES * token_budget tokens to compute. Requests that compute ahead
(``Origin.is_ahead``) have no siblings, and the objective that goes last.

**Programs.** A program's *level* is 0 until LEVEL_BATCHES * token_budget tokens were computed for it, and
rises by one each time that its tokens grow LEVEL_FACTOR-fold. The program with the least attained service
goes first (Luo et al., "Autellix", 2025). The levels are coarse, so that programs of one size do not take
turns and evict each other's tokens. A request *continues* its program if an earlier request of the program
was admitted. While it is short, it keeps the program's position: of equal objectives and levels it goes
before siblings, and before the request with the longest match, if its program arrived before theirs did (a
request without a program arrives alone). So dependent requests run back to back under load (Lin et al.,
"Parrot", OSDI 2024). A long one has lost its tokens in the cache: programs that still have theirs go first.
The bound on overtaking holds for any order. It counts a request that continues a program from its own
arrival, and so the work that overtakes by a program's position.

A chunk goes to the first waiting request rather than to a running prompt if that request was preempted or
overtaken so far, or if it has a higher priority, or else an earlier deadline, or else the objective
``latency`` and the prompt does not, or else is short and the prompt is long. Of running prompts the first in
this order goes first. However, the prompt that was admitted first gets a chunk whenever it has less than a
third of the tokens that the tenant's other prompts got in this step, so that it always advances.

**Short next to long.** Let a short request r of a tenant arrive next to any number of running or waiting long
prompts of its tenant that have no higher priority, no deadline and the same objective. Let S be the tokens to
compute of r and of the short requests before it, and a chunk for each overdue or preempted request that
starts before it. Let P be the least number of prompt tokens that the tenant gets in a step, and P > 2c. Then,
while r is not blocked and may start by the rules of ``admission`` (it fits into memory and does not delay a
request that has waited longer for memory), its prompt is computed after at most::

    ceil(4 S / (3 (P - c)))   steps, however many and however long the long prompts are.

Proof. While r or requests before it have tokens left, a long prompt gets a chunk only as the first admitted
one, and only while it has less than a third of the others' tokens x in this step; with the chunk it has less
than x / 3 + c. So P < x + x / 3 + c in each step, or x > 3 (P - c) / 4, and all of x counts towards S. ∎

With n tenants that all use their weights, P is on average the tenant's part of the tokens, by the bound of
``fair_policy``.
"""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from agentflow.engine.cache.token_run import TOKEN_BYTES, TokenRun
from agentflow.engine.request import PATIENT_GROUPS, Origin, Request, Status
from agentflow.engine.scheduling.policies.arrival_queue import ArrivalQueue
from agentflow.engine.scheduling.policies.match_order import MatchOrder, Rank
from agentflow.engine.scheduling.policies.policy import Clock, Preempted
from agentflow.engine.scheduling.policies.waiting_tree import IsBlocked, SearchEnds

SHORT_BATCHES = 1
"""A request with at most this many full batches to compute is short."""
OLDEST_PART = 3
"""A tenant's first admitted prompt gets at least one token for this many of the tenant's other prompts."""
LEVEL_BATCHES = 32
LEVEL_FACTOR = 4
MAX_LEVEL = 4
MAX_PASSED_BY = 16
"""At most this many blocked requests that continue programs, or open groups, are passed in the search for one
that is not. The order by match follows then."""
MIN_GONE = 64
AFTER_TOKENS = b"\xff" * TOKEN_BYTES
"""Sorts after all tokens that may follow a run."""


@dataclass(slots=True, eq=False)
class TenantProgram:
    """One program of a tenant."""

    arrival: int  # of its first request
    num_tokens: int = 0  # that were computed for it
    has_begun: bool = False  # a request of it was admitted


class TenantQueue:
    """A tenant's waiting requests, and its charge.

    - ``num_admitted``: requests that run. ``num_waiting``: requests that wait.
    - ``oldest``: its first admitted prompt in this step, which got ``oldest_tokens``; its other prompts got
      ``other_tokens``.
    - ``may_admit``: whether a waiting request may be admitted; False once all are found to be blocked.
    - ``open_groups``: task groups of admitted requests, of which some may still wait, the last one last.
    - ``aside``: requests of paused programs, by id.
    - ``by_match``: the requests in line by rank, length and match, which is their order where none is
      preferred.
      ``count_match``: as its method.

    Args:
        name: The tenant's name.
        number: Increases from tenant to tenant.
        token_budget: The most tokens of a step.
        clock: Seconds.
        used: Its charged tokens, divided by its weight.
    """

    def __init__(self, name: str, number: int, token_budget: int, clock: Clock, used: float) -> None:
        self.name = name
        self.number = number
        self._clock = clock
        self._short_tokens = SHORT_BATCHES * token_budget
        self._level_tokens = LEVEL_BATCHES * token_budget
        self.weight = 1.0
        self.used = used
        self.num_admitted = 0
        self.num_waiting = 0
        self.oldest: Request | None = None
        self.oldest_tokens = self.other_tokens = 0
        self.may_admit = True
        self._chosen: Request | None = None  # the first that waits, if it was found in this step
        self._has_searched = False  # in this step
        self._found: _Found | None = None  # since the requests that wait, or their matches, changed
        self._first_prompt: Request | None = None  # goes before ``_passed``, which waits
        self._passed: Request | None = None
        self.open_groups: dict[Hashable, None] = {}
        self.preempted = Preempted()
        self.aside: dict[int, Request] = {}
        self._aside_of: dict[int, dict[int, Request]] = {}  # the same, by program and id
        self.arrivals = ArrivalQueue(token_budget)
        self.by_match = MatchOrder(self._short_tokens)
        self.count_match = self.by_match.count_match
        self._num_at: dict[int, int] = {}  # requests in line, by priority
        # By priority and task group; requests that wait for the encoding of an image are apart.
        self._groups: dict[tuple[int, Hashable, bool], Siblings] = {}
        self._continuing: list[_QueuePosition] = []  # requests that continue their programs, in order
        self._positions: dict[int, _QueuePosition] = {}  # of requests that have a program, by id
        self._of_program: dict[int, dict[int, Request]] = {}  # the same, by program and id
        self._deadlines = TimeHeaps(self.arrivals.waiting)
        self._patience_ends = TimeHeaps(self.arrivals.waiting)

    def add(self, request: Request, run: TokenRun, match: int, program: TenantProgram | None) -> None:
        """Adds a request. ``run``: its tokens that may come from the cache, of which ``match`` are cached."""
        self.arrivals.add(request, request.num_tokens + request.num_nodes - match)
        if request.deadline < math.inf:
            self._deadlines.add(request.deadline, request)
        if request.patience_end < math.inf:
            self._patience_ends.add(request.patience_end, request)
        self.put_in(request, run, match, program)

    def lose_patience(self, request: Request, patience_end: float) -> None:
        """The patience of a waiting request ends earlier than it did."""
        self._chosen = self._found = None
        request.patience_end = patience_end
        self._patience_ends.add(patience_end, request)

    def put_in(self, request: Request, run: TokenRun, match: int, program: TenantProgram | None) -> None:
        """Gives an arrived request its position in the order. Its times, which stay, are not part of it.
        The arguments are as for ``add``."""
        self._chosen = self._found = None
        rank = (*_objective_rank(request), 0 if program is None else self._level(program))
        self.by_match.add(request, run, match, rank)
        priority = request.origin.priority
        self._num_at[priority] = self._num_at.get(priority, 0) + 1
        if program is not None:
            position = self._positions[request.id] = _QueuePosition(
                rank, program.arrival, request.id, request
            )
            self._of_program.setdefault(request.origin.program, {})[request.id] = request
            if program.has_begun:
                insort(self._continuing, position)
        self._join_group(request)

    def remove(self, request: Request) -> None:
        """The request no longer waits. After a fault in a move, it may be in two places, or not in all parts
        of one."""
        self._chosen = self._found = None
        if self.preempted:
            self.preempted.discard(request)
        if request.id in self.aside:
            self._leave_aside(request)
        if request.id in self.arrivals.waiting:
            self._leave_line(request)

    def _leave_line(self, request: Request) -> None:
        self.take_out(request)
        self._forget_arrival(request)

    def _forget_arrival(self, request: Request) -> None:
        self.arrivals.remove(request)
        for times in (self._deadlines, self._patience_ends):
            if times.heaps:
                times.gone(request)

    def take_out(self, request: Request) -> None:
        """Reverses ``put_in``, or the part of it that was done before a fault. The caller removes the
        request, or puts it in again."""
        if self.by_match.remove(request):
            priority = request.origin.priority
            self._num_at[priority] -= 1
            if not self._num_at[priority]:
                del self._num_at[priority]
        position = self._positions.pop(request.id, None)
        if position is not None:
            siblings = self._of_program[request.origin.program]
            del siblings[request.id]
            if not siblings:
                del self._of_program[request.origin.program]
            index = bisect_left(self._continuing, position)
            if index < len(self._continuing) and self._continuing[index].request is request:
                del self._continuing[index]
        self._leave_group(request)

    def set_unencoded(self, request: Request, is_unencoded: bool) -> None:
        """A request in line waits for the encoding of an image, or no longer does."""
        self._chosen = self._found = None
        self._leave_group(request)
        self.by_match.set_unencoded(request, is_unencoded)
        self._join_group(request)

    def _join_group(self, request: Request) -> None:
        group = _find_group(request)
        if group is not None:
            key = request.origin.priority, group, request.is_unencoded
            self._groups.setdefault(key, Siblings()).add(request)

    def _leave_group(self, request: Request) -> None:
        key = request.origin.priority, _find_group(request), request.is_unencoded
        siblings = self._groups.get(key)
        if siblings is not None:
            siblings.remove(request)
            if not len(siblings):
                del self._groups[key]

    def open_group(self, request: Request) -> None:
        """A request is admitted: the others of its task group come next."""
        group = _find_group(request)
        if group is None:
            return
        self.open_groups.pop(group, None)
        self.open_groups[group] = None
        if len(self.open_groups) > MAX_PASSED_BY:
            del self.open_groups[next(iter(self.open_groups))]

    def __contains__(self, request: Request) -> bool:
        waits_in_line = request.id in self.arrivals.waiting or request.id in self.preempted
        return waits_in_line or request.id in self.aside

    @property
    def is_aside(self) -> bool:
        """Whether no request runs or waits except aside."""
        return not self.num_admitted and self.num_waiting == len(self.aside)

    @property
    def is_unencoded(self) -> bool:
        """Whether no request runs, and all that wait in line wait for the encoding of an image."""
        return not self.num_admitted and not self.preempted and self.by_match.are_unencoded

    def put_aside(self, program: int) -> None:
        """The requests of a program wait aside."""
        self._chosen = self._found = None
        preempted = [one for one in self.preempted.values() if one.origin.program == program]
        for request in [*preempted, *self._of_program.get(program, {}).values()]:
            self.wait_aside(request)  # first, so that a fault does not lose it
            if not self.preempted.discard(request):
                self._leave_line(request)

    def wait_aside(self, request: Request) -> None:
        """The request, which is not in line, waits aside."""
        self.aside[request.id] = request
        self._aside_of.setdefault(request.origin.program, {})[request.id] = request

    def move_aside(self, request: Request, origin: Origin) -> None:
        """A request that waits, aside or not, waits aside from now on, and its origin changes."""
        self._chosen = self._found = None
        is_in_line = request.id in self.arrivals.waiting
        if request.id in self.aside:
            self._leave_aside(request)
        elif is_in_line:
            self.take_out(request)
        request.origin = origin
        self.wait_aside(request)
        self.preempted.discard(request)
        if is_in_line:
            self._forget_arrival(request)

    def _leave_aside(self, request: Request) -> None:
        del self.aside[request.id]
        siblings = self._aside_of[request.origin.program]
        del siblings[request.id]
        if not siblings:
            del self._aside_of[request.origin.program]

    def requests_aside(self, program: int) -> Sequence[Request]:
        """The requests of a program that wait aside."""
        return [*self._aside_of.get(program, {}).values()]

    def bring_back(self, requests: Sequence[Request]) -> None:
        """Requests that wait aside go before requests that have not run."""
        self._chosen = self._found = None
        for request in requests:
            self.preempted.add(request)  # first, so that a fault does not lose it
            self._leave_aside(request)

    def match_changed(self) -> None:
        """``by_match`` has changed the match of a waiting request."""
        self._chosen = self._found = None

    def next(self, prompts: Sequence[Request], is_blocked: IsBlocked | None) -> Request | None:
        """The request that gets the next chunk, in the order of the module's docstring."""
        oldest = self.oldest = prompts[0] if prompts else None
        if oldest is not None and OLDEST_PART * self.oldest_tokens < self.other_tokens:
            return oldest
        chosen: Request | None = None
        if is_blocked is not None and self.num_waiting and self.may_admit:
            chosen = self._chosen
            if chosen is None or chosen.is_held_back:
                # Without a prompt, the first one is admitted, and need not be kept.
                try:
                    chosen, is_due = self._search(is_blocked, keeps=oldest is not None)
                except SearchEnds:
                    chosen, is_due = None, False
                if is_due:
                    return chosen
                self._chosen = chosen
                self.may_admit = chosen is not None  # within a step requests only become blocked
        if oldest is None:
            return chosen
        first = oldest if len(prompts) == 1 else min(prompts, key=self._urgency)
        if chosen is None or (first is self._first_prompt and chosen is self._passed):
            return first
        if self._urgency(chosen) < self._urgency(first):
            return chosen
        self._first_prompt, self._passed = first, chosen
        return first

    def origin_changed(self) -> None:
        """The origin of a request that runs changed."""
        self._first_prompt = None

    def _search(self, is_blocked: IsBlocked, *, keeps: bool) -> tuple[Request | None, bool]:
        """The first waiting request that is not blocked, if there is one, and whether it goes before all
        running prompts. With ``keeps``, the step's first search checks the requests of the last search again,
        and ends if none of them is blocked and nothing has changed."""
        found, is_first = self._found, not self._has_searched
        self._has_searched = True
        if not (is_first and keeps):
            self._first_prompt = None
            return self._search_all(is_blocked)
        if found is not None and not self.preempted:
            for request, match in found.asked:
                if is_blocked(request, match):
                    break
            else:
                return found.first, False
        asked: list[tuple[Request, int | None]] = []
        num_blocked = 0

        def ask(request: Request, match: int | None) -> bool:
            nonlocal num_blocked
            asked.append((request, match))
            blocked = is_blocked(request, match)
            num_blocked += blocked
            return blocked

        self._found = self._first_prompt = None
        first, is_due = self._search_all(ask)
        if first is not None and not is_due and not num_blocked and not self._prefers:
            self._found = _Found(first, asked)
        return first, is_due

    def _search_all(self, is_blocked: IsBlocked) -> tuple[Request | None, bool]:
        due = self._first_due(is_blocked)
        if due is not None:
            return due, True
        return self._first_waiting(is_blocked) if self.may_admit else None, False

    def charge(self, request: Request, num_tokens: int) -> None:
        """Charges for ``num_tokens`` tokens of the request."""
        self.used += num_tokens / self.weight
        if request is self.oldest:
            self.oldest_tokens += num_tokens
        else:
            self.other_tokens += num_tokens

    def start_step(self) -> None:
        """Forgets the tokens that prompts got in the last step."""
        self.oldest, self.oldest_tokens, self.other_tokens = None, 0, 0
        self.may_admit, self._chosen, self._has_searched = True, None, False
        if self._first_prompt is not None and self._first_prompt.num_generated:
            self._first_prompt = None  # the tokens that it has to compute count now
        self.by_match.start_step()

    def _first_due(self, is_blocked: IsBlocked) -> Request | None:
        """A preempted request, or the oldest if it must not be overtaken further."""
        preempted = self.preempted.first(is_blocked) if self.preempted else None
        if preempted is not None:
            return preempted
        overdue = self.arrivals.overdue()
        if overdue is None:
            return None
        if not is_blocked(overdue, self.count_match(overdue)):
            return overdue
        if overdue.is_held_back:
            self.may_admit = False  # no other may pass it
        return None

    def _first_waiting(self, is_blocked: IsBlocked) -> Request | None:
        """The first request that is not blocked, of the highest priority that has one: a preferred request,
        or the first by match."""
        if not self._prefers:
            return self.by_match.first(is_blocked)
        highest = max(self._num_at, default=0)
        preferred = self._first_preferred(highest, is_blocked)
        if preferred is not None:
            return preferred
        found = self.by_match.first(is_blocked)
        if found is None:
            return None
        if found.origin.priority != highest:
            preferred = self._first_preferred(found.origin.priority, is_blocked)
        return preferred or self._continuing_before(found, is_blocked) or found

    @property
    def _prefers(self) -> bool:
        """Whether a request may be preferred to the first by match."""
        has_times = self._deadlines.heaps or self._patience_ends.heaps
        return bool(has_times or self.open_groups or self._continuing)

    def _first_preferred(self, priority: int, is_blocked: IsBlocked) -> Request | None:
        """Of the requests with this priority: the first deadline, then the first whose patience has ended,
        then a sibling in an open task group, or a request of an earlier program than the sibling's. Siblings
        whose consumer counts by its throughput do not pass requests with a better objective."""
        for times in (self._deadlines, self._patience_ends):
            if not times.heaps:
                continue
            urgent = times.first(priority, math.inf if times is self._deadlines else self._clock())
            if urgent is not None and not is_blocked(urgent, self.count_match(urgent)):
                return urgent
        for group, is_unencoded in itertools.product(reversed(self.open_groups), (False, True)):
            siblings = self._groups.get((priority, group, is_unencoded))
            if siblings is None or (is_unencoded and self.by_match.holds_back_unencoded):
                continue
            if self.by_match.holds_back_paced and not (
                siblings.num_unpaced or self.by_match.has_complete_paced
            ):
                continue
            sibling = siblings.first(self.count_match, is_blocked)
            if sibling is not None:
                if sibling.origin.task_group >= PATIENT_GROUPS and self._has_better(sibling, is_blocked):
                    continue
                return self._continuing_before(sibling, is_blocked) or sibling
        return None

    def _has_better(self, request: Request, is_blocked: IsBlocked) -> bool:
        """Whether the first request by match has a better objective."""
        first = self.by_match.first(is_blocked)
        return first is not None and _objective_rank(first) < _objective_rank(request)

    def _continuing_before(self, other: Request, is_blocked: IsBlocked) -> Request | None:
        """The first request that continues a program, if its position is before the position of ``other``."""
        if not self._continuing:
            return None
        end = self._positions.get(other.id)
        if end is None:
            end = _QueuePosition((*_objective_rank(other), 0), other.arrival, other.id, other)
        for position in itertools.islice(self._continuing, MAX_PASSED_BY):
            if position[:3] >= end[:3]:
                return None
            match = self.count_match(position.request)
            if self.by_match.is_short(position.request, match) and not is_blocked(position.request, match):
                return position.request
        return None

    def _level(self, program: TenantProgram) -> int:
        """The program's level, from its attained service."""
        level, limit = 0, self._level_tokens
        while program.num_tokens >= limit and level < MAX_LEVEL:
            level += 1
            limit *= LEVEL_FACTOR
        return level

    def _urgency(self, request: Request) -> tuple[int, float, int, bool]:
        """Lower goes first."""
        to_compute = request.num_to_compute
        if request.status is Status.WAITING:
            to_compute -= self.count_match(request)
        elif not request.num_generated:  # a long prompt counts as long until it is computed
            to_compute += request.num_computed - request.num_shared
        origin = request.origin
        objective = 2 if origin.is_ahead else int(origin.objective != "latency")
        return -origin.priority, request.deadline, objective, to_compute > self._short_tokens


def _objective_rank(request: Request) -> tuple[int, int]:
    """The priority and the objective of a waiting request. Lower goes first."""
    origin = request.origin
    if origin.is_ahead:
        return -origin.priority, 2
    return -origin.priority, int(origin.objective != "latency" and not origin.gates_latency)


class _Found(NamedTuple):
    """The first request that waits, and the requests that were checked to find it, with their matches. None
    of them was blocked or preferred."""

    first: Request
    asked: Sequence[tuple[Request, int | None]]


class _QueuePosition(NamedTuple):
    """The position of a waiting request that belongs to a program. Lower goes first."""

    rank: Rank  # with the program's level
    arrival: int  # of the program
    id: int  # of the request
    request: Request


def _find_group(request: Request) -> Hashable:
    """The task group, of which only requests with equal cache keys are siblings here: they share KV, and
    wait for the same running prompts."""
    group = request.origin.task_group
    return (group, request.cache_key) if group and not request.origin.is_ahead else None


class Siblings:
    """Waiting requests of one task group. Sorted by their tokens, siblings that need the same tokens next are
    neighbours, and one of them decides for all."""

    def __init__(self) -> None:
        self._by_arrival: OrderedDict[int, Request] = OrderedDict()
        self._by_tokens: list[Request] = []
        self.num_unpaced = 0  # the ones that ``pace`` never holds back together

    def __len__(self) -> int:
        return len(self._by_arrival)

    def add(self, request: Request) -> None:
        """A sibling arrived."""
        insort(self._by_tokens, request, key=_tokens_and_id)
        self._by_arrival[request.id] = request
        self.num_unpaced += not request.is_paced

    def remove(self, request: Request) -> None:
        """The request, if it is one of them, no longer waits."""
        if self._by_arrival.pop(request.id, None) is None:
            return
        self.num_unpaced -= not request.is_paced
        del self._by_tokens[bisect_left(self._by_tokens, _tokens_and_id(request), key=_tokens_and_id)]

    def first(self, match_of: Callable[[Request], int], is_blocked: IsBlocked) -> Request | None:
        """The oldest, or if that is blocked, the first in the order of their tokens that is not."""
        oldest = next(iter(self._by_arrival.values()))
        if not is_blocked(oldest, match_of(oldest)):
            return oldest
        index = 0
        while index < len(self._by_tokens):
            request = self._by_tokens[index]
            if request.is_held_back:
                index += 1
                continue
            match = match_of(request)
            if not is_blocked(request, match):
                return request
            if request.is_held_back:  # by itself
                index += 1
                continue
            after_equals = request.run(match + 1) + AFTER_TOKENS
            index = bisect_left(self._by_tokens, after_equals, index + 1, key=Request.reusable_run)
        return None


def _tokens_and_id(request: Request) -> tuple[TokenRun, int]:
    return request.reusable_run(), request.id


class TimeHeaps:
    """Waiting requests by a time, the earliest first. ``heaps``: one for each priority, with old entries.
    ``waiting``: the ids of the requests that still wait."""

    def __init__(self, waiting: Collection[int]) -> None:
        self.heaps: dict[int, list[tuple[float, int, Request]]] = {}
        self._num_gone: dict[int, int] = {}  # requests since old entries were dropped
        self._waiting = waiting

    def add(self, at: float, request: Request) -> None:
        """Adds a request."""
        heap = self.heaps.setdefault(request.origin.priority, [])
        heapq.heappush(heap, (at, request.id, request))

    def gone(self, request: Request) -> None:
        """The request, with a time or without, no longer waits. Drops old entries once they may be the
        most, or if no request waits."""
        if not self._waiting:
            self.heaps.clear()
            self._num_gone.clear()
            return
        priority = request.origin.priority
        heap = self.heaps.get(priority)
        if heap is None:
            return
        num_gone = self._num_gone.get(priority, 0) + 1
        if num_gone > MIN_GONE and 2 * num_gone > len(heap):
            self.heaps[priority] = [entry for entry in heap if entry[1] in self._waiting]
            heapq.heapify(self.heaps[priority])
            num_gone = 0
        self._num_gone[priority] = num_gone

    def first(self, priority: int, by: float) -> Request | None:
        """The earliest request, if its time is not after ``by``."""
        heap = self.heaps.get(priority)
        while heap and heap[0][1] not in self._waiting:
            heapq.heappop(heap)
        return heap[0][2] if heap and heap[0][0] <= by else None
