"""The interpreter: runs the op streams of one session against a generator.

Each state's ops run in order, in a task that exists only while ops wait there; states run side by
side. An op that waits for a variable holds nothing but its place in its own stream. Failure goes
up (a branch of a task group takes its siblings and its parent along), cancellation goes down.
"""

from __future__ import annotations

import logging
from typing import Generic

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup as AnyioTaskGroup

from agentflow import ops
from agentflow.cells import StateCell, StatsCell, VariableCell
from agentflow.errors import (
    AgentflowError,
    Cancelled,
    EngineFailed,
    Overloaded,
    ProtocolError,
    RunFailed,
    StateClosed,
)
from agentflow.events import StatsReply, Value
from agentflow.generator import ContextT, Generator, Scored, Usage
from agentflow.outbox import Outbox

logger = logging.getLogger(__name__)

MAX_STATES = 100_000
# Twice what the frontend lets a program submit without awaiting.
MAX_PENDING_OPS = 20_000
# A stream of pure text ops never waits by itself: let others run after so many.
OPS_PER_TURN = 64


class Interpreter(Generic[ContextT]):
    """Runs ops on ``generator``; what comes of them is in ``outbox``. ``task_group`` owns all tasks:
    cancel it to end the session, then call ``close``."""

    def __init__(self, generator: Generator[ContextT], task_group: AnyioTaskGroup) -> None:
        self.outbox = Outbox()
        self._generator = generator
        self._tasks = task_group
        self._states: dict[int, StateCell[ContextT]] = {}
        self._variables: dict[int, VariableCell] = {}

    def submit(self, op: ops.Op) -> None:
        """Takes an op; never waits. ``ProtocolError`` for ids that make no sense: the op is not taken."""
        match op:
            case ops.Open():
                self._new_state(op.state, None).begin(self._generator.open(op.cache_salt))
            case ops.GetStats():
                self._tasks.start_soon(self._report, op.ticket)
            case ops.Cancel():
                self._cancel(self._state(op.state), Cancelled(f"state {op.state} was cancelled"))
            case ops.TaskGroup():
                self._couple(self._state(op.state), [self._state(child) for child in op.children])
            case _:
                self._enqueue(self._state(op.state), op)

    def rewind(self, variables: dict[int, int], states: dict[int, int]) -> None:
        """The listener says what it has: characters of each unfinished variable, the last ticket of
        each state. Everything after that is said again."""
        for var_id, num_chars in variables.items():
            if var_id in self._variables:
                self._variables[var_id].rewind(num_chars)
        for state_id, ticket in states.items():
            if state_id in self._states:
                self._states[state_id].rewind(ticket)

    def close(self) -> None:
        """Frees every context. The task group must have ended."""
        for state in self._states.values():
            self._free(state)
        self._states.clear()
        self._variables.clear()

    def _enqueue(self, state: StateCell[ContextT], op: ops.Op) -> None:
        match op:
            case ops.Gen() | ops.Select():
                if op.var in self._variables:
                    raise ProtocolError(f"variable {op.var} exists already")
                variable = VariableCell(op.var, op.name, self.outbox)
                self._variables[op.var] = variable
                state.variables.append(variable)
            case ops.Fork():
                if not op.children or len(set(op.children)) != len(op.children):
                    raise ProtocolError("a fork needs one or more new states")
                taken = [child for child in op.children if child in self._states]
                if taken:
                    raise ProtocolError(f"state {taken[0]} exists already")
                self._check_room(len(op.children))
                state.children += [self._new_state(child, state) for child in op.children]
            case ops.Text():
                for part in op.parts:
                    if isinstance(part, ops.Ref) and part.var not in self._variables:
                        raise ProtocolError(f"there is no variable {part.var}")
            case _:
                pass
        if len(state.pending) >= MAX_PENDING_OPS:
            raise Overloaded(f"{MAX_PENDING_OPS} ops wait on state {state.id}: await some of them first")
        state.pending.append(op)
        self._kick(state)

    def _kick(self, state: StateCell[ContextT]) -> None:
        if state.pending and not state.is_running and (state.has_begun or state.error is not None):
            state.is_running = True
            self._tasks.start_soon(self._run, state)

    async def _run(self, state: StateCell[ContextT]) -> None:
        num_done = 0
        while state.pending:
            op = state.pending.popleft()
            if state.error is None:
                with anyio.CancelScope() as state.scope:
                    await self._attempt(state, op)
                state.scope = None
            if state.error is not None:
                self._skip(state, op, state.error)
            num_done += 1
            if num_done % OPS_PER_TURN == 0:
                await anyio.lowlevel.checkpoint()
        state.is_running = False

    async def _attempt(self, state: StateCell[ContextT], op: ops.Op) -> None:
        try:
            await self._execute(state, op)
        except AgentflowError as error:
            self._fail(state, op, error)
        except Exception as error:
            logger.exception("an op failed for a reason that is not the program's")
            failure = EngineFailed(f"{type(op).__name__.lower()} failed: {error!r}")
            failure.__cause__ = error
            self._fail(state, op, failure)

    async def _execute(self, state: StateCell[ContextT], op: ops.Op) -> None:
        match op:
            case ops.Seal():
                self._free(state)
            case ops.Await():
                state.reach(op.ticket)
            case ops.Close():
                self._forget(state)
            case _ if state.context is None:
                raise StateClosed(f"state {state.id} was sealed: nothing can be appended to it")
            case _:
                await self._extend(state, state.context, op)

    async def _extend(self, state: StateCell[ContextT], context: ContextT, op: ops.Op) -> None:
        """Ops that need the state's context."""
        match op:
            case ops.Text():
                for part in op.parts:
                    text = part if isinstance(part, str) else await self._resolve(part.var)
                    self._generator.fill(context, text)
            case ops.Begin():
                self._generator.begin_role(context, op.role)
            case ops.End():
                self._generator.end_role(context)
            case ops.Gen():
                variable = self._variables[op.var]
                end = await self._generator.generate(context, op.params, variable.extend)
                value = Value(op.var, 0, "", end.finish_reason, end.usage, end.logprobs)
                variable.complete(end.text, value)
            case ops.Select():
                scored = await self._generator.score(context, op.choices, op.method)
                self._variables[op.var].complete(op.choices[scored.index], _selected(op, scored))
            case ops.Fork():
                contexts = await self._generator.fork(context, len(op.children))
                for child_id, child_context in zip(op.children, contexts, strict=True):
                    self._start_child(child_id, child_context)
            case _:
                raise ProtocolError(f"an op that cannot stand in a stream: {op!r}")

    async def _resolve(self, var_id: int) -> str:
        variable = self._variables.get(var_id)
        if variable is None:
            raise RunFailed(f"the text needs variable {var_id}, whose state was closed")
        await variable.done.wait()
        if variable.error is not None:
            raise RunFailed(f"the text needs {variable.name!r}, which has no value") from variable.error
        return variable.text

    def _start_child(self, child_id: int, context: ContextT) -> None:
        child = self._states.get(child_id)
        if child is None or child.error is not None:  # closed or cancelled before it began
            self._generator.free(context)
            return
        child.begin(context)
        self._kick(child)

    def _skip(self, state: StateCell[ContextT], op: ops.Op, error: AgentflowError) -> None:
        """What an op leaves behind when its state has failed: its variable and its children fail too."""
        match op:
            case ops.Gen() | ops.Select():
                if not self._variables[op.var].done.is_set():
                    self._variables[op.var].fail(_because(f"{op.name!r} was not generated", error))
            case ops.Fork():
                for child_id in op.children:
                    if child_id in self._states and not self._states[child_id].has_begun:
                        self._end(self._states[child_id], _because("the fork did not happen", error))
            case ops.Seal():
                self._free(state)
            case ops.Close():
                self._forget(state)
            case _:
                pass

    def _fail(self, state: StateCell[ContextT], op: ops.Op, error: AgentflowError) -> None:
        """An op failed: so does its variable (with the error itself), its state, its task group."""
        if isinstance(op, ops.Gen | ops.Select):
            self._variables[op.var].fail(error)
        self._end(state, error)

    def _end(self, state: StateCell[ContextT], error: AgentflowError) -> None:
        """The state fails with ``error``; its task group goes with it."""
        if state.error is not None:
            return
        state.error = error
        state.mark()
        if state.scope is not None:
            state.scope.cancel()
        self._kick(state)
        if state.is_coupled and not isinstance(error, Cancelled):
            index = state.siblings.index(state)
            cancelled = Cancelled(f"branch {index} of its fork failed")
            cancelled.__cause__ = error
            for sibling in state.siblings:
                self._cancel(sibling, cancelled)
            assert state.parent is not None
            self._end(state.parent, _because(f"branch {index} of a fork failed", error))

    def _cancel(self, state: StateCell[ContextT], error: Cancelled) -> None:
        for child in state.children:
            self._cancel(child, error)
        self._end(state, error)

    def _couple(self, parent: StateCell[ContextT], children: list[StateCell[ContextT]]) -> None:
        for child in children:
            if child.parent is not parent:
                raise ProtocolError(f"state {child.id} is not a fork of state {parent.id}")
        failed = next((child for child in children if child.error is not None), None)
        for child in children:
            child.siblings, child.is_coupled = children, True
        if failed is not None and failed.error is not None and not isinstance(failed.error, Cancelled):
            error, failed.error = failed.error, None
            self._end(failed, error)

    def _new_state(self, state_id: int, parent: StateCell[ContextT] | None) -> StateCell[ContextT]:
        if state_id in self._states:
            raise ProtocolError(f"state {state_id} exists already")
        self._check_room(1)
        state = self._states[state_id] = StateCell[ContextT](state_id, parent, self.outbox)
        return state

    def _check_room(self, num_states: int) -> None:
        if len(self._states) + num_states > MAX_STATES:
            raise Overloaded(f"a session may have {MAX_STATES} states open: close some first")

    def _state(self, state_id: int) -> StateCell[ContextT]:
        state = self._states.get(state_id)
        if state is None:
            raise ProtocolError(f"there is no state {state_id}")
        return state

    def _free(self, state: StateCell[ContextT]) -> None:
        context, state.context = state.context, None
        if context is not None:
            self._generator.free(context)

    def _forget(self, state: StateCell[ContextT]) -> None:
        self._free(state)
        self._states.pop(state.id, None)
        for variable in state.variables:
            self._variables.pop(variable.id, None)
        if state.parent is not None and state in state.parent.children:
            state.parent.children.remove(state)

    async def _report(self, ticket: int) -> None:
        self.outbox.mark(StatsCell(StatsReply(ticket, await self._generator.stats())))


def _because(message: str, cause: AgentflowError) -> AgentflowError:
    """What follows from a failure: a cancellation stays one, anything else is a ``RunFailed``."""
    error: AgentflowError = (
        Cancelled(f"{message}: {cause}") if isinstance(cause, Cancelled) else RunFailed(f"{message}: {cause}")
    )
    error.__cause__ = cause
    return error


def _selected(op: ops.Select, scored: Scored) -> Value:
    choices = dict(zip(op.choices, scored.logprobs, strict=True))
    return Value(op.var, 0, "", "choice", scored.usage or Usage(), None, choices)
