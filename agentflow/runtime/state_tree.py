"""The states of one session as a tree: who was forked from whom, and how failure and cancellation travel.

Failure goes up: a branch of a task group takes its siblings and its parent along. Cancellation goes
down, to everything that was forked from a state.

What an interpreter knows of each variable and state, and how much of it the listener has heard.

What an interpreter has to say, as cursors: each variable and state knows how far the listener has
heard, and ``drain`` makes the events that bring it up to date.

Nothing is queued: text that came while nobody listened leaves as one delta. After a broken
connection, ``rewind`` moves the cursors back to what the listener says it has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, Protocol

import anyio
import msgspec

from agentflow.errors import AgentflowError, Cancelled, Overloaded, ProtocolError, RunFailed
from agentflow.protocol import ops
from agentflow.protocol.chat import read_reply
from agentflow.protocol.events import (
    Delta,
    ErrorInfo,
    Event,
    Reached,
    StateFailed,
    StatsReply,
    Value,
    VarFailed,
)
from agentflow.protocol.op_table import GRAPH_TICKET
from agentflow.protocol.ops import check_number
from agentflow.runtime.generator import ContextT
from agentflow.runtime.limits import (
    STATE_BYTES,
    Budget,
    MemoryBudget,
    Reservation,
    error_bytes,
    text_bytes,
    value_bytes,
)


class Record(Protocol):
    """A variable, a state or an answer, with its own position in the events that it has sent."""

    def take_events(self) -> list[Event]:
        """The events since the last call."""


class EventCursor:
    """The position of the one reader of a session's events: the set of records that have changed since it
    last called ``drain``."""

    def __init__(self) -> None:
        self._fresh: dict[Record, None] = {}  # a dict: an ordered set
        self._changed = anyio.Event()

    def mark(self, record: Record) -> None:
        """``record`` has new events."""
        # To the end: what a state has reached is reported after the variables that it has reached.
        self._fresh.pop(record, None)
        self._fresh[record] = None
        self.wake()

    def wake(self) -> None:
        """Ends the current ``wait``, even if there are no new events."""
        self._changed.set()

    async def wait(self) -> None:
        """Waits for new events."""
        await self._changed.wait()

    def drain(self) -> list[Event]:
        """All new events, in the order in which their records last changed."""
        fresh, self._fresh = self._fresh, {}
        self._changed = anyio.Event()
        events: list[Event] = []
        for record in fresh:
            events += record.take_events()
        return events


class VariableRecord:
    """One variable: its text so far, its end, and how far the listener has heard. ``is_expected``: its
    value comes from the client. ``is_reply``: its text is the notation of a reply. ``reservation``: its
    memory."""

    def __init__(
        self,
        var_id: int,
        name: str,
        events: EventCursor,
        reservation: Reservation,
        *,
        is_expected: bool = False,
        is_reply: bool = False,
    ) -> None:
        self.id = var_id
        self.name = name
        self.is_expected = is_expected
        self._is_reply = is_reply
        self.text = ""
        self.value: Value | None = None
        self.error: AgentflowError | None = None
        self.done = anyio.Event()
        self._events = events
        self._reservation = reservation
        self.is_output = False
        self._heard = 0
        self._heard_end = False

    @property
    def content(self) -> str:
        """What stands for it in other texts, once it is complete: of a reply its prose."""
        return read_reply(self.text).text if self._is_reply else self.text

    def extend(self, delta: str) -> None:
        """More text. Of a graph's output only the end is told."""
        self.text += delta
        if not self.is_output:
            self._events.mark(self)

    def complete(self, text: str, value: Value) -> None:
        """The end: ``text`` is all of it; ``value`` says the rest. ``Overloaded`` where that is too much."""
        self._reservation.add(value_bytes(text, value))
        self.text, self.value = text, value
        self.done.set()
        self._events.mark(self)

    def fail(self, error: AgentflowError) -> None:
        """No value will come. Has no effect after the end."""
        if not self.done.is_set():
            self._reservation.count(error_bytes(error, self.text))
            self.error = error
            self.done.set()
            self._events.mark(self)

    def rewind(self, num_chars: int) -> None:
        """The listener has heard ``num_chars`` characters and not the end."""
        self._heard, self._heard_end = max(0, min(num_chars, len(self.text))), False
        self._events.mark(self)

    def take_events(self) -> list[Event]:
        if self._heard_end:
            return []
        at, self._heard = self._heard, len(self.text)
        rest = self.text[at:]
        if self.error is not None:
            self._heard_end = True
            events: list[Event] = [Delta(self.id, at, rest)] if rest else []
            return [*events, VarFailed(self.id, ErrorInfo.of(self.error))]
        if self.value is not None:
            self._heard_end = True
            return [msgspec.structs.replace(self.value, var=self.id, at=at, text=rest)]
        return [Delta(self.id, at, rest)] if rest else []


@dataclass(slots=True)
class PendingOp(Generic[ContextT]):
    """An op in line. ``number``: which of its state's ops it is (None for those that are not counted).
    ``sources``: the variables that its text refers to, in order: the op keeps them, whatever becomes of
    their states. ``children``: the states that it forks. ``reservation``: its own memory."""

    op: ops.Op | ops.Rejected
    reservation: Reservation
    number: int | None = None
    sources: tuple[VariableRecord, ...] = ()
    children: tuple[StateRecord[ContextT], ...] = ()


class StateRecord(Generic[ContextT]):
    """One state: its context, the ops that wait, and how it ended. ``reservation``: its memory; that of its
    context is ``context_reservation``."""

    def __init__(
        self,
        state_id: int,
        parent: StateRecord[ContextT] | None,
        events: EventCursor,
        reservation: Reservation,
    ) -> None:
        self.id = state_id
        self.parent = parent
        self.context: ContextT | None = None
        self.sealed: ContextT | None = None  # its context, to be read only
        self.has_begun = False
        self.pending: deque[PendingOp[ContextT]] = deque()
        self.variables: list[VariableRecord] = []
        self.expected: list[VariableRecord] = []  # of these, the client's own
        self.children: dict[int, StateRecord[ContextT]] = {}
        self.siblings: list[StateRecord[ContextT]] = []
        self.is_coupled = False
        self.is_running = False
        self.is_closing = False
        self.scope: anyio.CancelScope | None = None
        self.budgets: tuple[Budget, ...] = () if parent is None else parent.budgets
        self.num_limits = 0
        self.reservation = reservation
        self.context_reservation: Reservation | None = None
        self.num_chars = 0  # of its context, those of its parents included
        self.error: AgentflowError | None = None
        self.reached = 0
        self._events = events
        self.graph: GraphExecution[ContextT] | None = None
        self.is_silent = False
        self._heard_reached = 0
        self._heard_error = False
        self._num_ops = 0

    def next_number(self) -> int:
        """The number of an op that was submitted now; the client finds the program's line by it."""
        self._num_ops += 1
        return self._num_ops

    def restrict(self, budget: Budget) -> None:
        """One budget more, from now on."""
        self.budgets += (budget,)
        self.num_limits += 1
        if self.scope is not None:
            self.scope.deadline = min(self.scope.deadline, budget.deadline)

    def begin(self, context: ContextT, reservation: Reservation, num_chars: int = 0) -> None:
        """The state has a context, of so many characters: its ops can run."""
        self.context, self.context_reservation = context, reservation
        self.num_chars = num_chars
        self.has_begun = True

    def reserve_text(self, text: str, num_chars: int = 0) -> None:
        """Counts what is appended to the context: the text, and what else counts like so many characters.
        ``Overloaded``."""
        if self.context_reservation is not None:  # otherwise its context was given back meanwhile
            self.context_reservation.add(text_bytes(text, num_chars))
            self.num_chars += len(text) + num_chars

    def reach(self, ticket: int) -> None:
        """The op stream got as far as the ``Await`` with this ticket."""
        self.reached = ticket
        self._events.mark(self)

    def rewind(self, ticket: int) -> None:
        """The listener has heard of tickets up to this one, and of no failure."""
        self._heard_reached, self._heard_error = ticket, False
        self._events.mark(self)

    def mark(self) -> None:
        self._events.mark(self)

    def take_events(self) -> list[Event]:
        events: list[Event] = []
        if self.is_silent:
            return events
        if self.reached > self._heard_reached:
            self._heard_reached = self.reached
            events.append(Reached(self.id, self.reached))
        if self.error is not None and not self._heard_error:
            self._heard_error = True
            events.append(StateFailed(self.id, ErrorInfo.of(self.error)))
        return events


class GraphExecution(Generic[ContextT]):
    """The states of one submitted graph. The root reports their end, or their first error."""

    def __init__(self, root: StateRecord[ContextT]) -> None:
        self.states: list[StateRecord[ContextT]] = []
        self._root = root
        self._num_left = 0

    def add(self, state: StateRecord[ContextT]) -> None:
        """Adds a state of the graph; only the root sends events."""
        self.states.append(state)
        self._num_left += 1
        state.graph = self
        state.is_silent = state is not self._root

    def ended(self) -> None:
        """One of the states has no more ops to run."""
        self._num_left -= 1
        if self._num_left:
            return
        errors = [state.error for state in self.states if state.error is not None]
        failures = [error for error in errors if not isinstance(error, Cancelled)]
        if self._root.error is None and failures:
            self._root.error = failures[0]
            self._root.mark()
        elif self._root.error is None:
            self._root.reach(GRAPH_TICKET)


class StatsRecord:
    """An answer to be said once."""

    def __init__(self, reply: StatsReply) -> None:
        self._reply = reply

    def take_events(self) -> list[Event]:
        return [self._reply]


MAX_STATES = 100_000
# Limits, each counted for each state that it concerns: their checks are part of every op there.
MAX_LIMITS = 100_000
MAX_SEALED_BYTES = 16 * 1024 * 1024
"""What sealed states keep for being read, all of a session together: beyond it the oldest are dropped."""


class StateTree(Generic[ContextT]):
    """``free`` gives a context back; ``kick`` makes a state's waiting ops run (or fail). What the states hold
    is counted in ``memory``."""

    def __init__(
        self,
        events: EventCursor,
        memory: MemoryBudget,
        *,
        free: Callable[[ContextT], None],
        kick: Callable[[StateRecord[ContextT]], None],
    ) -> None:
        self._events = events
        self._memory = memory
        self._give_back = free
        self._kick = kick
        self._states: dict[int, StateRecord[ContextT]] = {}
        self._budgets: tuple[Budget, ...] = ()
        self._num_limits = 0
        self._sealed: dict[StateRecord[ContextT], int] = {}  # and the bytes of each, the oldest first
        self._num_sealed_bytes = 0

    def __iter__(self) -> Iterator[StateRecord[ContextT]]:
        return iter(self._states.values())

    def get(self, state_id: int) -> StateRecord[ContextT] | None:
        """The state, if there is one, closing or not."""
        return self._states.get(state_id)

    def open_state(self, state_id: int) -> StateRecord[ContextT]:
        """The state, or ``ProtocolError``."""
        state = self._states.get(state_id)
        if state is None:
            raise ProtocolError(f"there is no state {state_id}")
        if state.is_closing:
            raise ProtocolError(f"state {state_id} has been closed")
        return state

    def add_root(self, state_id: int) -> StateRecord[ContextT]:
        """A new root state."""
        self._check_new((state_id,))
        return self._add(state_id, None, Reservation(self._memory, STATE_BYTES))

    def add_children(
        self, parent: StateRecord[ContextT], children: tuple[int, ...]
    ) -> tuple[StateRecord[ContextT], ...]:
        """States that a fork will begin; they take ops from now on."""
        if not children or len(set(children)) != len(children):
            raise ProtocolError("a fork needs one or more new states")
        self._check_new(children)
        reservations = [Reservation(self._memory, STATE_BYTES) for _ in children]  # all of them, or none
        return tuple(
            [self._add(child, parent, held) for child, held in zip(children, reservations, strict=True)]
        )

    def add_failed(
        self, state_id: int, parent: StateRecord[ContextT] | None, error: AgentflowError, memory: MemoryBudget
    ) -> StateRecord[ContextT]:
        """A state whose op was rejected: it has failed before it began, so that what is sent to it finds it.
        ``Overloaded`` where ``memory``, which counts these, has no room."""
        state = self._add(state_id, parent, Reservation(memory, STATE_BYTES))
        self.stop(state, error)
        return state

    def waits_for_fork(self, state: StateRecord[ContextT]) -> bool:
        """Whether the state is still there, and its fork may begin it."""
        return self._states.get(state.id) is state and not state.has_begun and state.error is None

    def restrict(self, root: StateRecord[ContextT] | None, budget: Budget) -> None:
        """``root`` and all that comes of it (None: every state, and those to come) share the budget."""
        if root is None:
            restricted = [*self._states.values()]
        else:
            restricted = [root]
            for state in restricted:
                restricted += state.children.values()
        num_limits = self._num_limits + len(restricted) + (root is None)
        if num_limits > MAX_LIMITS:
            raise Overloaded(
                f"the states of a session may have {MAX_LIMITS} limits together: close some first"
            )
        if root is None:
            self._budgets += (budget,)
        self._num_limits = num_limits
        for state in restricted:
            state.restrict(budget)

    def couple(self, parent: StateRecord[ContextT], child_ids: tuple[int, ...]) -> None:
        """Makes forked states a task group."""
        for child_id in child_ids[: len(parent.children) + 1]:
            if self.open_state(child_id).parent is not parent:
                raise ProtocolError(f"state {child_id} is not a fork of state {parent.id}")
        if len(child_ids) > len(parent.children) or len(set(child_ids)) != len(child_ids):
            raise ProtocolError("a task group has each of its states once")
        children = [parent.children[child_id] for child_id in child_ids]
        for child in children:
            child.siblings, child.is_coupled = children, True
        for child in children:
            if child.error is not None and not isinstance(child.error, Cancelled):
                error, child.error = child.error, None
                self.end(child, error)
                return

    def end(self, state: StateRecord[ContextT], error: AgentflowError) -> None:
        """The state fails with ``error``; its task group goes with it, and so on up the tree."""
        while state.error is None:
            self.stop(state, error)
            if not state.is_coupled or isinstance(error, Cancelled):
                return
            assert state.parent is not None
            index = state.siblings.index(state)
            cancelled = Cancelled(f"branch {index} of its fork failed")
            cancelled.__cause__ = origin_of(error)
            for sibling in state.siblings:
                self.cancel(sibling, cancelled)
            state, error = state.parent, because(f"branch {index} of a fork failed", error)

    def cancel(self, state: StateRecord[ContextT], error: Cancelled) -> None:
        """Stops the state and everything that was forked from it."""
        doomed = [state]
        while doomed:  # a chain of forks may be deeper than Python's stack
            state = doomed.pop()
            doomed += state.children.values()
            self.stop(state, error)

    def stop(self, state: StateRecord[ContextT], error: AgentflowError) -> None:
        """The state runs no more, and what waits there fails. Has no effect on one that has failed."""
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
        """Gives the state's context back, and keeps what it holds for being read. May be repeated."""
        context, state.context = state.context, None
        if context is None or state.context_reservation is None:
            return
        self._give_back(context)
        state.sealed = context
        self._sealed[state] = state.context_reservation.num_bytes
        self._num_sealed_bytes += state.context_reservation.num_bytes
        while self._num_sealed_bytes > MAX_SEALED_BYTES:
            self.free(next(iter(self._sealed)))

    def free(self, state: StateRecord[ContextT]) -> None:
        """Gives the state's context back, and forgets what it held. May be repeated."""
        context, state.context = state.context, None
        state.context_reservation = state.sealed = None
        self._num_sealed_bytes -= self._sealed.pop(state, 0)
        if context is not None:
            self._give_back(context)

    def forget(self, state: StateRecord[ContextT]) -> None:
        """The state is not needed any more."""
        self.free(state)
        _fail_expected(state, Cancelled("its state was closed"))
        if self._states.get(state.id) is state:  # its number may be another one's already
            del self._states[state.id]
            self._num_limits -= state.num_limits
        if state.parent is not None and state.parent.children.get(state.id) is state:
            del state.parent.children[state.id]
        state.siblings, state.children = [], {}  # no cycles: it goes with the last one that has it

    def clear(self) -> None:
        """Forgets all states."""
        for state in self._states.values():
            self.free(state)
        self._states.clear()

    def _add(
        self, state_id: int, parent: StateRecord[ContextT] | None, reservation: Reservation
    ) -> StateRecord[ContextT]:
        state = self._states[state_id] = StateRecord[ContextT](state_id, parent, self._events, reservation)
        if parent is None:
            state.budgets = self._budgets
        else:
            parent.children[state_id] = state
        return state

    def _check_new(self, state_ids: tuple[int, ...]) -> None:
        for state_id in state_ids:
            check_number(state_id)
            if state_id in self._states:
                raise ProtocolError(f"state {state_id} exists already")
        if len(self._states) + len(state_ids) > MAX_STATES:
            raise Overloaded(f"a session may have {MAX_STATES} states open: close some first")


def _fail_expected(state: StateRecord[ContextT], error: AgentflowError) -> None:
    """What the client has not provided by now counts no more: nobody must wait for it."""
    for variable in state.expected:
        variable.fail(because(f"{variable.name!r} was not provided", error))
    state.expected.clear()


def because(message: str, cause: AgentflowError) -> AgentflowError:
    """What follows from a failure: a cancellation stays one, anything else is a ``RunFailed``."""
    text = f"{message}: {cause}"
    error: AgentflowError = Cancelled(text) if isinstance(cause, Cancelled) else RunFailed(text)
    error.__cause__ = origin_of(cause)
    return error


def origin_of(error: AgentflowError) -> BaseException:
    """The failure that ``error`` follows from. Causes name it directly: through a long row of wired
    variables, a chain of all the failures in between would grow without end."""
    is_derived = isinstance(error, RunFailed | Cancelled) and error.__cause__ is not None
    return (error.__cause__ or error) if is_derived else error
