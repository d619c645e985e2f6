"""The open states of programs: whose tokens the cache keeps, and when their next requests are expected."""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Callable, Hashable, Iterable
from typing import NamedTuple

from agentflow.engine.cache.nodes import Node, PrefixMatch
from agentflow.engine.cache.radix_cache import RadixCache
from agentflow.engine.request import Request

ProgramKey = tuple[str, int]
"""A program: its tenant and its number."""
NewLiveness = Callable[[RadixCache, int, Callable[[], float]], "Liveness"]

EXPIRES_AFTER_POOLS = 4
"""A state without requests while tokens for this many pools are computed counts as finished."""

EXPECTED_STEPS = 2
"""The next request of a state is expected for this many steps. Programs continue immediately; people do
not."""
MEAN_OF = 4
"""Means of times follow about this many of the latest ones."""
OVERDUE_AFTER = 4
"""A state that continues sooner than requests take is overdue after this many times their mean time."""
LATE_AFTER = 3
"""Other states are overdue after this many times the mean time between their requests."""
MAX_EXPIRED = 256
"""A step drops at most this many states without recent requests, and expects at most this many overdue ones
later."""
LEAST_WAIT_S = 0.1
"""An overdue state is expected no sooner than this."""


class _End(NamedTuple):
    """The end of a state's last request. Times are in seconds."""

    match: PrefixMatch
    num_computed: int
    step: int
    ended: float
    returns: float = 0.0  # when the state is expected to continue; 0: soon, or its next request has arrived
    due: float = math.inf  # when it is expected later than that
    is_ahead: bool = False  # no request of the state has ended yet: its tokens were computed ahead
    program: ProgramKey | None = None
    is_kept: bool = True  # its program is not paused


def program_key(request: Request) -> ProgramKey | None:
    """The program of a request, or None."""
    program = request.origin.program
    return (request.tenant, program) if program else None


class LiveProgram:
    """A program with open states. ``number``: in the order in which their first requests ended.
    ``priority``: of its latest request that did not compute ahead."""

    __slots__ = ("is_paused", "number", "priority", "states")

    def __init__(self, number: int, *, is_paused: bool) -> None:
        self.number = number
        self.states: dict[Hashable, None] = {}
        self.priority = 0
        self.is_paused = is_paused


class Liveness:
    """The open states of one model, each with the end of its last request in the cache.

    A state that is open will probably continue from its last tokens. Liveness ranks evictions and delays
    admissions, but never locks. The rank expires once much else was computed. The delay lasts two steps.
    While the batch has room, it applies only to requests that would evict many of these tokens.

    If only kept tokens are left, the state that continues last loses its tokens first. A token takes the same
    room for any state, so it is worth more the sooner its state continues (for known times, the rule of
    Belady, 1966; by steps to execution, KVFlow, 2025). This time comes from the program (``expect``), or from
    the earlier times between the state's requests. States that continue sooner than a request takes, from its
    arrival to its end, are equal, and the least recently used is evicted first: they will wait in the queue
    anyway. An overdue state is expected after as long again as it has already waited.

    Tokens that a state has superseded are evicted before all others of the tenant: the end of a branch that
    was cancelled, and a turn that the chat template wrote in another way in the next prompt of its state. The
    states of a paused program (``program_pauses``) are not kept, like closed ones.
    """

    def __init__(
        self, cache: RadixCache, num_slots: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._cache = cache
        self._clock = clock
        # The times between the requests of each open state: how many, and their mean.
        self._gaps: dict[Hashable, tuple[int, float]] = {}
        self._arrivals: dict[Hashable, float] = {}  # by state: when its unfinished request arrived
        self._request_s = 0.0  # the mean time from a request's arrival to its end
        self._due: list[tuple[float, int, Hashable]] = []  # a heap of expected times, with old entries
        self._ties = itertools.count()
        self._lifetime = EXPIRES_AFTER_POOLS * num_slots
        self._max_states = num_slots
        self._ends: dict[Hashable, _End] = {}  # least recently refreshed first
        self._num_programs = 0
        self._paused: set[ProgramKey] = set()
        self.programs: dict[str, dict[ProgramKey, LiveProgram]] = {}
        """The programs with open states, by tenant."""

    def __len__(self) -> int:
        return len(self._ends)

    def refresh(
        self,
        state: Hashable,
        end: PrefixMatch,
        *,
        num_computed: int,
        step: int,
        is_ahead: bool = False,
        program: ProgramKey | None = None,
        priority: int = 0,
    ) -> None:
        """A request of the state ended.

        Args:
            state: The state.
            end: The request's prompt and output in the cache.
            num_computed: The tokens that the engine has computed so far.
            step: The number of steps so far.
            is_ahead: The request computed ahead. The state is expected when it was before, and the priority
                is not the program's.
            program: The state's program; None: none.
            priority: The request's priority.
        """
        known = self._ends.get(state)
        self._drop(state)
        if known is not None and known.program != program:
            self._leave(state, known.program)
        if is_ahead and known is not None:
            moved = known._replace(match=end, num_computed=num_computed, step=step, program=program)
            self._put(state, moved)
            return
        now = self._clock()
        arrived = None if is_ahead else self._arrivals.pop(state, None)
        if arrived is not None:
            self._request_s += (now - arrived - self._request_s) / MEAN_OF
        new = _End(end, num_computed, step, now, is_ahead=is_ahead, program=program)
        self._put(state, self._expected(new, self._gap_s(state)), None if is_ahead else priority)
        if known is not None and arrived is not None and known.ended <= arrived:  # not at the same time
            self._cache.supersede(known.match)
        if len(self._ends) > self._max_states:
            self.close(next(iter(self._ends)))

    def arrived(self, state: Hashable) -> None:
        """A request of the state arrived that does not compute ahead: its tokens are needed soon, and the
        time since the last request is known."""
        now = self._clock()
        end = self._ends.get(state)
        if end is not None and state not in self._arrivals:  # not a second one at the same time
            if not end.is_ahead:
                count, mean_s = self._gaps.get(state, (0, 0.0))
                count = min(count + 1, MEAN_OF)
                self._gaps[state] = count, mean_s + (now - end.ended - mean_s) / count
            self._arrivals[state] = now
            self._move(state, end._replace(returns=0.0, due=math.inf))

    def preempted(self, state: Hashable) -> None:
        """The request of the state that ended last was preempted and waits again."""
        end = self._ends.get(state)
        if end is not None and state not in self._arrivals:
            self._arrivals[state] = self._clock()
            self._move(state, end._replace(returns=0.0, due=math.inf))

    def departed(self, state: Hashable) -> None:
        """The request of the state left the queue and did not run."""
        end = self._ends.get(state)
        if self._arrivals.pop(state, None) is not None and end is not None:
            self._move(state, self._expected(end, self._gap_s(state)))

    def expect(self, state: Hashable, steps: int | None, returns_s: float | None) -> None:
        """Sets when the program expects the state to continue. The arguments are as in ``SchedulingHint``.
        Unknown states are ignored."""
        end = self._ends.get(state)
        if end is None or state in self._arrivals:
            return
        if steps is None:
            wait_s = self._gap_s(state) if returns_s is None else returns_s
        else:
            wait_s = steps * self._request_s
        self._move(state, self._expected(end, wait_s))

    def gap(self, state: Hashable) -> float | None:
        """The mean time from a request of the state to its next one, or None before there are two."""
        known = self._gaps.get(state)
        return None if known is None else known[1]

    def _gap_s(self, state: Hashable, unknown_s: float = 0.0) -> float:
        return self._gaps.get(state, (0, unknown_s))[1]

    def num_tokens(self, state: Hashable) -> int:
        """How many tokens the state had when its last request ended."""
        end = self._ends.get(state)
        return 0 if end is None else end.match.num_tokens

    def num_tokens_together(self, states: Iterable[Hashable]) -> int:
        """How many tokens the states had when their last requests ended. Tokens that several of them share
        count once, while they are cached."""
        seen: set[Node] = set()
        total = 0
        for end in [self._ends[state] for state in states if state in self._ends]:
            node = end.match.node.present
            total += max(0, end.match.num_tokens - node.start - len(node.slots))  # were evicted
            while node.parent is not None and node not in seen:
                seen.add(node)
                total += len(node.slots)
                node = node.parent
        return total

    def late_at(self, state: Hashable, gap_s: float) -> float:
        """The time from which the state is late; infinite while it has a request, minus infinity for unknown
        states. ``gap_s``: for states whose mean time between requests is not known."""
        end = self._ends.get(state)
        if end is None:
            return -math.inf
        if state in self._arrivals:
            return math.inf
        return end.ended + LATE_AFTER * max(self._gap_s(state, gap_s), LEAST_WAIT_S)

    def pause(self, program: ProgramKey) -> None:
        """Stops keeping the tokens of a program."""
        self._paused.add(program)
        self._set_paused(program, is_paused=True)

    def resume(self, program: ProgramKey) -> None:
        """Keeps the remaining tokens of the program again."""
        self._paused.discard(program)
        self._set_paused(program, is_paused=False)

    def _set_paused(self, key: ProgramKey, *, is_paused: bool) -> None:
        program = self.programs.get(key[0], {}).get(key)
        if program is not None:
            program.is_paused = is_paused
            for state in program.states:
                end = self._ends[state]
                is_here = state in self._arrivals
                self._move(state, end if is_here else self._expected(end, self._gap_s(state)))

    def close(self, state: Hashable, *, is_dropped: bool = False) -> None:
        """The state was closed. Unknown states are ignored. ``is_dropped``: it is a branch that was
        cancelled, and nothing continues from its last tokens."""
        self._gaps.pop(state, None)
        self._arrivals.pop(state, None)
        known = self._drop(state)
        if known is not None:
            self._leave(state, known.program)
            if is_dropped:
                self._cache.supersede(known.match)

    def _put(self, state: Hashable, end: _End, priority: int | None = None) -> None:
        program = None if end.program is None else self._join(state, end.program)
        if program is not None and priority is not None:
            program.priority = priority
        end = end._replace(is_kept=program is None or not program.is_paused)
        if end.is_kept:
            self._cache.keep(end.match, end.returns)
        self._set(state, end)

    def _set(self, state: Hashable, end: _End) -> None:
        self._ends[state] = end
        if end.due < math.inf:
            heapq.heappush(self._due, (end.due, next(self._ties), state))
            if len(self._due) > 64 + 4 * len(self._ends):
                self._due = [entry for entry in self._due if self._is_due(*entry)]
                heapq.heapify(self._due)

    def _move(self, state: Hashable, end: _End) -> None:
        """The state is expected at another time. It keeps its rank among the states that expire."""
        known = self._ends[state]
        if end.is_kept and known.returns == end.returns and end.program not in self._paused:
            self._set(state, end)  # the cache keeps it as before
            return
        if end.is_kept:
            self._cache.unkeep(end.match)
        self._put(state, end)

    def _join(self, state: Hashable, key: ProgramKey) -> LiveProgram:
        programs = self.programs.setdefault(key[0], {})
        program = programs.get(key)
        if program is None:
            self._num_programs += 1
            program = programs[key] = LiveProgram(self._num_programs, is_paused=key in self._paused)
        program.states[state] = None
        return program

    def _expected(self, end: _End, wait_s: float) -> _End:
        """The end of a state that is expected to continue in ``wait_s``."""
        now = self._clock()
        if wait_s > self._request_s:
            return end._replace(returns=now + wait_s, due=now + LATE_AFTER * wait_s)
        return end._replace(returns=0.0, due=now + OVERDUE_AFTER * max(self._request_s, LEAST_WAIT_S))

    def _leave(self, state: Hashable, key: ProgramKey | None) -> None:
        if key is None:
            return
        programs = self.programs[key[0]]
        del programs[key].states[state]
        if not programs[key].states:
            del programs[key]
        if not programs:
            del self.programs[key[0]]

    def _drop(self, state: Hashable) -> _End | None:
        known = self._ends.pop(state, None)
        if known is not None and known.is_kept:
            self._cache.unkeep(known.match)
        return known

    def _is_due(self, due: float, _: int, state: Hashable) -> bool:
        end = self._ends.get(state)
        return end is not None and end.due == due

    def _postpone(self) -> None:
        """Expects the overdue states later."""
        now = self._clock()
        for _ in range(MAX_EXPIRED):
            if not self._due or self._due[0][0] > now:
                return
            entry = heapq.heappop(self._due)
            if self._is_due(*entry):
                end = self._ends[entry[2]]
                returns = now + max(now - end.ended, LEAST_WAIT_S)
                self._move(entry[2], end._replace(returns=returns, due=returns))

    def expire(self, num_computed: int) -> None:
        """Drops states without recent requests, and expects the overdue ones later. If there are many,
        later steps go on."""
        self._postpone()
        oldest = itertools.islice(self._ends.items(), MAX_EXPIRED)
        least = num_computed - self._lifetime
        for state, _ in [*itertools.takewhile(lambda one: one[1].num_computed < least, oldest)]:
            self.close(state)

    def num_expected(self, step: int) -> int:
        """Unlocked cached tokens that open states are expected to need within a few steps."""
        seen: set[Node] = set()
        total = 0
        for end in reversed(self._ends.values()):
            if step - end.step >= EXPECTED_STEPS:
                break
            node = end.match.node.present
            while node.parent is not None and not node.locks and node not in seen:
                seen.add(node)
                total += len(node.slots)
                node = node.parent
        return total
