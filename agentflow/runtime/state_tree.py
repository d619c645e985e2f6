"""The states of one session as a tree: who was forked from whom, and how failure and cancellation travel.

Failure goes up: a branch of a task group takes its siblings and its parent along. Cancellation goes
down, to everything that was forked from a state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic

from agentflow.errors import AgentflowError, Cancelled, Overloaded, ProtocolError, RunFailed
from agentflow.protocol.ops import check_number
from agentflow.runtime.cells import StateCell
from agentflow.runtime.generator import ContextT
from agentflow.runtime.held_memory import STATE_BYTES, HeldMemory, Holding, error_bytes
from agentflow.runtime.limits import Budget
from agentflow.runtime.outbox import Outbox

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
        outbox: Outbox,
        memory: HeldMemory,
        *,
        free: Callable[[ContextT], None],
        kick: Callable[[StateCell[ContextT]], None],
    ) -> None:
        self._outbox = outbox
        self._memory = memory
        self._give_back = free
        self._kick = kick
        self._states: dict[int, StateCell[ContextT]] = {}
        self._budgets: tuple[Budget, ...] = ()
        self._num_limits = 0
        self._sealed: dict[StateCell[ContextT], int] = {}  # and the bytes of each, the oldest first
        self._num_sealed_bytes = 0

    def __iter__(self) -> Iterator[StateCell[ContextT]]:
        return iter(self._states.values())

    def get(self, state_id: int) -> StateCell[ContextT] | None:
        """The state, if there is one, closing or not."""
        return self._states.get(state_id)

    def open_state(self, state_id: int) -> StateCell[ContextT]:
        """The state, or ``ProtocolError``."""
        state = self._states.get(state_id)
        if state is None:
            raise ProtocolError(f"there is no state {state_id}")
        if state.is_closing:
            raise ProtocolError(f"state {state_id} has been closed")
        return state

    def add_root(self, state_id: int) -> StateCell[ContextT]:
        """A new root state."""
        self._check_new((state_id,))
        return self._add(state_id, None, Holding(self._memory, STATE_BYTES))

    def add_children(
        self, parent: StateCell[ContextT], children: tuple[int, ...]
    ) -> tuple[StateCell[ContextT], ...]:
        """States that a fork will begin; they take ops from now on."""
        if not children or len(set(children)) != len(children):
            raise ProtocolError("a fork needs one or more new states")
        self._check_new(children)
        holdings = [Holding(self._memory, STATE_BYTES) for _ in children]  # all of them, or none
        return tuple([self._add(child, parent, held) for child, held in zip(children, holdings, strict=True)])

    def add_failed(
        self, state_id: int, parent: StateCell[ContextT] | None, error: AgentflowError, memory: HeldMemory
    ) -> StateCell[ContextT]:
        """A state whose op was rejected: it has failed before it began, so that what is sent to it finds it.
        ``Overloaded`` where ``memory``, which counts these, has no room."""
        state = self._add(state_id, parent, Holding(memory, STATE_BYTES))
        self.stop(state, error)
        return state

    def waits_for_fork(self, state: StateCell[ContextT]) -> bool:
        """Whether the state is still there, and its fork may begin it."""
        return self._states.get(state.id) is state and not state.has_begun and state.error is None

    def restrict(self, root: StateCell[ContextT] | None, budget: Budget) -> None:
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

    def couple(self, parent: StateCell[ContextT], child_ids: tuple[int, ...]) -> None:
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

    def end(self, state: StateCell[ContextT], error: AgentflowError) -> None:
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

    def cancel(self, state: StateCell[ContextT], error: Cancelled) -> None:
        """Stops the state and everything that was forked from it."""
        doomed = [state]
        while doomed:  # a chain of forks may be deeper than Python's stack
            state = doomed.pop()
            doomed += state.children.values()
            self.stop(state, error)

    def stop(self, state: StateCell[ContextT], error: AgentflowError) -> None:
        """The state runs no more, and what waits there fails. Has no effect on one that has failed."""
        if state.error is not None:
            return
        state.error = error
        state.holding.count(error_bytes(error))
        _fail_expected(state, error)
        state.mark()
        if state.scope is not None:
            state.scope.cancel()
        self._kick(state)
        if not state.is_running:
            self.free(state)

    def seal(self, state: StateCell[ContextT]) -> None:
        """Gives the state's context back, and keeps what it holds for being read. May be repeated."""
        context, state.context = state.context, None
        if context is None or state.context_holding is None:
            return
        self._give_back(context)
        state.sealed = context
        self._sealed[state] = state.context_holding.num_bytes
        self._num_sealed_bytes += state.context_holding.num_bytes
        while self._num_sealed_bytes > MAX_SEALED_BYTES:
            self.free(next(iter(self._sealed)))

    def free(self, state: StateCell[ContextT]) -> None:
        """Gives the state's context back, and forgets what it held. May be repeated."""
        context, state.context = state.context, None
        state.context_holding = state.sealed = None
        self._num_sealed_bytes -= self._sealed.pop(state, 0)
        if context is not None:
            self._give_back(context)

    def forget(self, state: StateCell[ContextT]) -> None:
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
        self, state_id: int, parent: StateCell[ContextT] | None, holding: Holding
    ) -> StateCell[ContextT]:
        state = self._states[state_id] = StateCell[ContextT](state_id, parent, self._outbox, holding)
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


def _fail_expected(state: StateCell[ContextT], error: AgentflowError) -> None:
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
