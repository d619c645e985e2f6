"""The states of one session: their records, and the tree of forks.

``StateTree`` records the parent of each state. A failure in a task group propagates up: to the siblings
of the failed state and to their parent. A cancellation propagates down, to all forks of a state.
``GraphExecution`` tracks the states of one submitted graph. ``derived_error`` and the functions after it
make the errors of the states and variables that a failure ends."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Generator as Steps
from dataclasses import dataclass
from functools import partial
from typing import Generic

import anyio

from agentflow.errors import (
    AgentflowError,
    Cancelled,
    LimitExceeded,
    Overloaded,
    PromptTooLong,
    ProtocolError,
    RunFailed,
)
from agentflow.protocol import ops
from agentflow.protocol.events import ErrorInfo, Event, Reached, StateFailed
from agentflow.protocol.images import Image
from agentflow.protocol.op_table import GRAPH_TICKET
from agentflow.runtime.generator import ContextT, Generator, StateHint
from agentflow.runtime.interpreter.variables import EventCursor, VariableRecord, check_number
from agentflow.runtime.limits import (
    FORKED_CHAR_BYTES,
    OWN_CHAR_BYTES,
    STATE_BYTES,
    Budget,
    MemoryBudget,
    MemoryReservation,
    error_bytes,
    exceeded_with,
    text_bytes,
)


@dataclass(slots=True)
class PendingOp(Generic[ContextT]):
    """An op in its state's stream."""

    op: ops.Op | ops.Rejected
    reservation: MemoryReservation | None  # its own memory; None: nothing counts it
    number: int | None = None  # among the state's ops; None: it has none
    # the variables that its text refers to, in order; they outlive their states here
    sources: tuple[VariableRecord, ...] = ()
    children: tuple[StateRecord[ContextT], ...] = ()  # the states that it forks
    images: tuple[Image, ...] = ()  # that it refers to


class StateRecord(Generic[ContextT]):
    """One state: its context, its waiting ops, and its error. ``reservation``: its memory;
    ``context_reservation``: the memory of its context; None: it has none, or nothing counts its memory.
    ``generator``: the generator of its model."""

    def __init__(
        self,
        state_id: int,
        parent: StateRecord[ContextT] | None,
        events: EventCursor,
        reservation: MemoryReservation,
    ) -> None:
        self.id = state_id
        self.parent = parent
        self.opened: ops.Open | None = (
            None if parent is None else parent.opened
        )  # the op that opened its root
        self.generator: Generator[ContextT] | None = None  # once it has begun
        self.context: ContextT | None = None
        self.sealed: ContextT | None = None  # its context after a seal, read only
        self.has_begun = False
        self.pending: deque[PendingOp[ContextT]] = deque()
        self.variables: list[VariableRecord] = []
        self.expected: list[VariableRecord] = []  # of these, the ones that the client provides
        self.children: dict[int, StateRecord[ContextT]] = {}
        self.siblings: list[StateRecord[ContextT]] = []
        # The state that fails with the task group of its siblings. It may be closed.
        self.fails: StateRecord[ContextT] | None = None
        self.is_running = False
        self.current: PendingOp[ContextT] | None = None  # the op that runs, or ran last
        self.is_closing = False
        self.is_cancelled = False  # and all its forks
        self.scope: anyio.CancelScope | None = None
        self.budgets: tuple[Budget, ...] = () if parent is None else parent.budgets
        self.own_budget: Budget | None = None  # the limit that was set on this state; its forks share it
        self.num_limits = 0
        self.num_unreported = 0  # the tokens of a generation that ended without a value
        self.reservation = reservation
        self.context_reservation: MemoryReservation | None = None
        self.num_chars = 0  # of its context, including its parents'
        self._num_inherited = 0  # of these, its parents'
        self.error: AgentflowError | None = None
        self.awaited = 0  # the last ticket
        self.reached = 0
        self._events = events
        self.graph: GraphExecution[ContextT] | None = None
        self.is_silent = False
        self._sent_ticket = 0
        self._has_sent_error = False
        self.num_ops = 0  # that have a number; the client uses it to find the program's line

    def restrict(self, budget: Budget) -> None:
        """Adds a budget."""
        self.budgets += (budget,)
        self.num_limits += 1
        self.hasten(budget.deadline)

    def hasten(self, deadline: float) -> None:
        """The op that runs has this deadline, or an earlier one."""
        if self.scope is not None:
            self.scope.deadline = min(self.scope.deadline, deadline)

    def abort(self) -> None:
        """Ends the op that runs, because its tokens exceed a limit."""
        if self.scope is not None:
            self.scope.cancel()

    def begin(
        self,
        generator: Generator[ContextT],
        context: ContextT,
        reservation: MemoryReservation | None,
        num_chars: int = 0,
    ) -> None:
        """Gives the state its context of ``num_chars`` characters, so that its ops can run."""
        self.generator = generator
        self.context, self.context_reservation = context, reservation
        self.num_chars = self._num_inherited = num_chars
        self.has_begun = True

    def reserve_text(self, text: str, num_chars: int = 0) -> None:
        """Reserves memory for text that is appended to the context, and for content that counts like
        ``num_chars`` characters. ``Overloaded``."""
        if self.context is None:  # it has been freed meanwhile
            return
        if self.context_reservation is not None:
            self.context_reservation.add(text_bytes(text, num_chars))
        self.num_chars += len(text) + num_chars

    @property
    def context_bytes(self) -> int:
        """About the memory of its context."""
        num_own = self.num_chars - self._num_inherited
        return FORKED_CHAR_BYTES * self._num_inherited + OWN_CHAR_BYTES * num_own

    def await_ticket(self, ticket: int) -> None:
        """Accepts the ticket of an ``Await``. ``ProtocolError`` if it is not larger than the last one: events
        have only the largest ticket that is reached."""
        check_number(ticket)
        if ticket <= self.awaited:
            raise ProtocolError(
                f"state {self.id} awaits ticket {self.awaited} already: {ticket} is not larger"
            )
        self.awaited = ticket

    def reach(self, ticket: int) -> None:
        """The ops before the ``Await`` with this ticket are done."""
        self.reached = ticket
        self._events.mark(self)

    def rewind(self, ticket: int) -> None:
        """The reader has received tickets up to this one, and no failure."""
        self._sent_ticket, self._has_sent_error = ticket, False
        self._events.mark(self)

    def mark(self) -> None:
        self._events.mark(self)

    def take_events(self) -> list[Event]:
        events: list[Event] = []
        if self.is_silent:
            return events
        if self.reached > self._sent_ticket:
            self._sent_ticket = self.reached
            events.append(Reached(self.id, self.reached))
        if self.error is not None and not self._has_sent_error:
            self._has_sent_error = True
            events.append(StateFailed(self.id, ErrorInfo.of(self.error)))
        return events


class GraphExecution(Generic[ContextT]):
    """The states of one submitted graph. The root reports when all have ended, or the first error."""

    def __init__(self, root: StateRecord[ContextT]) -> None:
        self.states: list[StateRecord[ContextT]] = []
        self.root = root
        self._left: set[StateRecord[ContextT]] = set()  # states with ops to run
        self._ticket = root.awaited = GRAPH_TICKET  # which the root reaches at the end

    def add(self, state: StateRecord[ContextT]) -> None:
        """Adds a state of the graph. Only the root sends events."""
        self.states.append(state)
        self._left.add(state)
        state.graph = self
        state.is_silent = state is not self.root

    def reach(self, ticket: int) -> None:
        """The ops of the root before the ``Await`` with this ticket are done. The graph may not be."""
        self._ticket = ticket
        if not self._left:
            self.root.reach(self._ticket)

    def state_ended(self, state: StateRecord[ContextT]) -> None:
        """A state of the graph has no more ops to run."""
        if state not in self._left:  # an ``Await`` of the root came later
            return
        self._left.remove(state)
        if self._left:
            return
        errors = [state.error for state in self.states if state.error is not None]
        failures = [error for error in errors if not isinstance(error, Cancelled)]
        if self.root.error is None and failures:
            self.root.error = failures[0]
            self.root.mark()
        elif self.root.error is None:
            self.root.reach(self._ticket)


MAX_STATES = 10_000
"""The maximum number of open states of a session."""
# The limit of a state or of the session counts once for each state that it applies to: every op of the state
# checks it.
MAX_LIMITS = 100_000
MAX_STOPPED = 200
"""The states that a failure or a cancellation stops in one turn of the event loop."""
_STEP = 100
"""The states of a fork that are added in one step."""
MAX_SEALED_BYTES = 16 * 1024 * 1024
"""The memory of all sealed contexts of a session; beyond it the oldest are dropped."""


class StateTree(Generic[ContextT]):
    """The states of one session.

    Args:
        events: The session's events.
        memory: Counts the memory of the states.
        kick: Starts a state's waiting ops, which run or fail.
        later: Calls a function in another turn of the event loop.
    """

    def __init__(
        self,
        events: EventCursor,
        memory: MemoryBudget,
        *,
        kick: Callable[[StateRecord[ContextT]], None],
        later: Callable[[Callable[[], object]], None],
        max_states: float | None = None,
    ) -> None:
        self._events = events
        self._memory = memory
        self._max_states = MAX_STATES if max_states is None else max_states
        self._kick = kick
        self._later = later
        self._states: dict[int, StateRecord[ContextT]] = {}
        self._budget: Budget | None = None  # of all states
        self._num_limits = 0
        self._sealed: dict[StateRecord[ContextT], int] = {}  # and the bytes of each, the oldest first
        self._num_sealed_bytes = 0

    def __iter__(self) -> Iterator[StateRecord[ContextT]]:
        return iter(self._states.values())

    def get(self, state_id: int) -> StateRecord[ContextT] | None:
        """The state, or None. It may be closing."""
        return self._states.get(state_id)

    def open_state(self, state_id: int) -> StateRecord[ContextT]:
        """The state, or ``ProtocolError`` if it does not exist or is closing."""
        state = self._states.get(state_id)
        if state is None:
            raise ProtocolError(f"there is no state {state_id}")
        if state.is_closing:
            raise ProtocolError(f"state {state_id} has been closed")
        return state

    def add_root(self, state_id: int) -> StateRecord[ContextT]:
        """Adds a root state."""
        self._check_new((state_id,), self._budgets)
        return self._add(state_id, None, MemoryReservation(self._memory, STATE_BYTES))

    def adding_children(
        self, parent: StateRecord[ContextT], children: tuple[int, ...]
    ) -> Steps[None, None, tuple[StateRecord[ContextT], ...]]:
        """Adds states that a fork will start, in steps. They accept ops after the last one."""
        if not children or len(set(children)) != len(children):
            raise ProtocolError("a fork needs one or more new states")
        self._check_new(children, parent.budgets)
        reservations: list[MemoryReservation] = []  # all of them, or none
        for number in range(len(children)):
            reservations.append(MemoryReservation(self._memory, STATE_BYTES))
            if number % _STEP == 0:
                yield
        added: list[StateRecord[ContextT]] = []
        for child, reservation in zip(children, reservations, strict=True):
            added.append(self._add(child, parent, reservation))
            if len(added) % _STEP == 0:
                yield
        return tuple(added)

    def add_failed(
        self, state_id: int, parent: StateRecord[ContextT] | None, error: AgentflowError, memory: MemoryBudget
    ) -> StateRecord[ContextT]:
        """Adds a state that has failed already, because its op was rejected. It accepts ops, which fail.
        ``Overloaded`` if ``memory``, which counts these states, has no room."""
        state = self._add(state_id, parent, MemoryReservation(memory, STATE_BYTES))
        self.stop(state, error)
        return state

    def waits_for_fork(self, state: StateRecord[ContextT]) -> bool:
        """Whether the state still exists and has not begun."""
        return self._is_open(state) and not state.has_begun and state.error is None

    def restrict(self, root: StateRecord[ContextT] | None, budget: Budget) -> None:
        """Makes ``root`` and all its forks (None: all states, and future ones) share the budget."""
        own = self._budget if root is None else root.own_budget
        if own is not None:
            own.tighten(budget)
            if budget.deadline == math.inf:
                return
        if root is None:
            restricted = [*self._states.values()]
        else:
            restricted = [root]
            for state in restricted:
                restricted += state.children.values()
        if own is not None:
            for state in restricted:
                state.hasten(budget.deadline)
            return
        self._check_limits(len(restricted))
        if root is None:
            self._budget = budget
        else:
            root.own_budget = budget
        self._num_limits += len(restricted)
        for state in restricted:
            state.restrict(budget)

    def couple(self, parent: StateRecord[ContextT], child_ids: tuple[int, ...]) -> None:
        """Makes forked states a task group."""
        for child_id in child_ids[: len(parent.children) + 1]:
            if self.open_state(child_id).parent is not parent:
                raise ProtocolError(f"state {child_id} is not a fork of state {parent.id}")
        if len(child_ids) > len(parent.children) or len(set(child_ids)) != len(child_ids):
            raise ProtocolError("a task group names each of its states once")
        children = [parent.children[child_id] for child_id in child_ids]
        for child in children:
            child.siblings, child.fails = children, parent
        for child in children:
            if child.error is not None and not isinstance(child.error, Cancelled):
                error, child.error = child.error, None
                self.end(child, error)
                return

    def end(self, state: StateRecord[ContextT], error: AgentflowError) -> None:
        """Fails the state with ``error``, its task group with it, and so on up the tree: at most
        ``MAX_STOPPED`` states now, and the others in later turns of the event loop."""
        num_left = MAX_STOPPED
        while num_left > 0:
            if state.error is not None or not self._is_open(state):
                return
            self.stop(state, error)
            if state.fails is None or isinstance(error, Cancelled):
                return
            index = state.siblings.index(state)
            cause = root_cause(error)
            cancelled = Cancelled(f"branch {index} of its fork failed: {cause}")
            cancelled.__cause__ = cause
            num_left = self._cancel_all(state.siblings[::-1], cancelled, num_left - 1)
            state = state.fails
            error = derived_error(f"branch {index} of a fork failed", error, state, of_other=True)
        self._later(partial(self.end, state, error))

    def cancel(self, state: StateRecord[ContextT], error: Cancelled) -> None:
        """Stops the state and all its forks: at most ``MAX_STOPPED`` now, and the others in later turns of
        the event loop."""
        self._cancel_all([state], error, MAX_STOPPED)

    def _cancel_all(self, pending: list[StateRecord[ContextT]], error: Cancelled, num_left: int) -> int:
        """Stops states and their forks, the last one first: at most ``num_left`` now. Returns how many more
        the caller may stop now."""
        while pending and num_left > 0:
            state = pending.pop()
            if not state.is_cancelled and self._is_open(
                state
            ):  # with its forks: each level of a failure cancels the levels below it
                state.is_cancelled = True
                pending += state.children.values()
                self.stop(state, error)
                num_left -= 1
        if pending:
            self._later(partial(self._cancel_all, pending, error, MAX_STOPPED))
        return num_left

    def _is_open(self, state: StateRecord[ContextT]) -> bool:
        return self._states.get(state.id) is state

    def stop(self, state: StateRecord[ContextT], error: AgentflowError) -> None:
        """Stops the state, so that its waiting ops fail. Has no effect after a failure."""
        if state.error is not None:
            return
        state.error = error
        state.reservation.count(error_bytes(error))
        _fail_expected(state, error)
        state.mark()
        if state.scope is not None:
            state.scope.cancel()
        self._kick(state)
        if not state.is_running:
            self.free(state)

    def seal(self, state: StateRecord[ContextT]) -> None:
        """Frees the state's context, but keeps its content readable. May be repeated."""
        context, state.context = state.context, None
        if context is None:
            return
        assert state.generator is not None
        state.generator.free(context)
        state.sealed = context
        self._sealed[state] = state.context_bytes
        self._num_sealed_bytes += state.context_bytes
        while self._num_sealed_bytes > MAX_SEALED_BYTES:
            self.free(next(iter(self._sealed)))

    def free(self, state: StateRecord[ContextT]) -> None:
        """Frees the state's context and drops its content. May be repeated."""
        context, state.context = state.context, None
        state.context_reservation = state.sealed = None
        self._num_sealed_bytes -= self._sealed.pop(state, 0)
        if context is not None and state.generator is not None:
            if state.is_cancelled and state.parent is not None:
                state.generator.hint(context, StateHint(is_dropped=True))
            state.generator.free(context)

    def forget(self, state: StateRecord[ContextT]) -> None:
        """Removes the state. Its forks remain forks of its parent."""
        self.free(state)
        _fail_expected(state, Cancelled("its state was closed"))
        if self._is_open(state):  # its number may have been reused
            del self._states[state.id]
            self._num_limits -= state.num_limits
        if state.parent is not None and state.parent.children.get(state.id) is state:
            del state.parent.children[state.id]
        if state.parent is not None:
            for child in state.children.values():
                child.parent = state.parent
            state.parent.children |= state.children
        state.siblings, state.children, state.fails = (
            [],
            {},
            None,
        )  # no cycles: it is deleted with its last reference

    def remove_one(self) -> bool:
        """Removes a state, even if others refer to it. False if there is none."""
        if not self._states:
            return False
        _, state = self._states.popitem()
        self.free(state)
        state.parent, state.siblings, state.children, state.fails = (
            None,
            [],
            {},
            None,
        )  # it is deleted now, not with all others
        return True

    def _add(
        self, state_id: int, parent: StateRecord[ContextT] | None, reservation: MemoryReservation
    ) -> StateRecord[ContextT]:
        state: StateRecord[ContextT] = StateRecord(state_id, parent, self._events, reservation)
        self._states[state_id] = state
        if parent is None:
            state.budgets = self._budgets
        else:
            parent.children[state_id] = state
        state.num_limits = len(state.budgets)
        self._num_limits += state.num_limits
        return state

    @property
    def _budgets(self) -> tuple[Budget, ...]:
        """The budgets of a root."""
        return () if self._budget is None else (self._budget,)

    def _check_limits(self, num_more: int) -> None:
        if self._num_limits + num_more > MAX_LIMITS:
            raise Overloaded(
                f"the states of a session may have {MAX_LIMITS} limits together: close some states first"
            )

    def _check_new(self, state_ids: tuple[int, ...], budgets: tuple[Budget, ...]) -> None:
        for state_id in state_ids:
            check_number(state_id)
            if state_id in self._states:
                raise ProtocolError(f"state {state_id} exists already")
        if len(self._states) + len(state_ids) > self._max_states:
            raise Overloaded(f"a session may have {self._max_states} open states: close some first")
        self._check_limits(len(state_ids) * len(budgets))


def _fail_expected(state: StateRecord[ContextT], error: AgentflowError) -> None:
    """Fails the variables of the state that the client has not provided, so that no op waits for them."""
    for variable in state.expected:
        variable.fail(derived_error(f"{variable.name!r} was not provided", error, state))
    state.expected.clear()


def derived_error(
    message: str, cause: AgentflowError, state: StateRecord[ContextT], *, of_other: bool = False
) -> AgentflowError:
    """The error of an op or variable of ``state`` that fails because of ``cause``: ``Cancelled`` after a
    cancellation, the error of a limit that the state also exceeds, otherwise ``RunFailed``. After
    ``PromptTooLong`` in the same state, later prompts are also too long (not with ``of_other``)."""
    text, root = f"{message}: {cause}", root_cause(cause)
    kind: type[AgentflowError] = RunFailed
    if isinstance(cause, Cancelled):
        kind = Cancelled
    elif isinstance(cause, PromptTooLong) and not of_other:
        kind = PromptTooLong
    error = exceeded_with(root, text, state.budgets) or kind(text)
    error.__cause__ = root
    return error


def root_cause(error: AgentflowError) -> BaseException:
    """The root cause of ``error``. It is the direct cause of derived errors, because a chain through many
    variables would grow without bound."""
    derived = RunFailed | Cancelled | LimitExceeded | PromptTooLong
    if isinstance(error, derived) and error.__cause__ is not None:
        return error.__cause__
    return error


def with_place(error: AgentflowError, state: StateRecord[ContextT], number: int | None) -> AgentflowError:
    """The error with its place; a copy if it already has one, because an exception may fail several ops."""
    if number is not None:
        if error.place is not None:
            error = ErrorInfo.of(error).to_exception()
        error.place = state.id, number
    return error
