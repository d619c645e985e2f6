"""The interpreter: runs the op streams of one session against a generator.

Each state's ops run in order, in a task that exists only while ops wait there; states run side by
side. An op that waits for a variable holds nothing but its place in its own stream. How failure and
cancellation travel between states is in ``state_tree``.
"""

from __future__ import annotations

import logging
from typing import Generic

import anyio
import anyio.lowlevel
import msgspec
from anyio.abc import TaskGroup as AnyioTaskGroup

from agentflow import ops
from agentflow.cells import PendingOp, StateCell, StatsCell, VariableCell
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
from agentflow.ops import check_choices
from agentflow.outbox import Outbox
from agentflow.state_tree import StateTree, because, origin_of

logger = logging.getLogger(__name__)

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
        self._states: StateTree[ContextT] = StateTree(self.outbox, free=generator.free, kick=self._kick)
        self._variables: dict[int, VariableCell] = {}

    def submit(self, op: ops.Op) -> None:
        """Takes an op; never waits. ``ProtocolError`` for ids that make no sense: the op is not taken."""
        match op:
            case ops.Open():
                self._states.add_root(op.state).begin(self._generator.open(op.cache_salt))
            case ops.GetStats():
                self._tasks.start_soon(self._report, op.ticket)
            case ops.Cancel():
                cancelled = Cancelled(f"state {op.state} was cancelled")
                self._states.cancel(self._states.open_state(op.state), cancelled)
            case ops.TaskGroup():
                parent = self._states.open_state(op.state)
                self._states.couple(parent, [self._states.open_state(child) for child in op.children])
            case _:
                self._enqueue(self._states.open_state(op.state), op)

    def rewind(self, variables: dict[int, int], states: dict[int, int]) -> None:
        """The listener says what it has: characters of each unfinished variable, the last ticket of
        each state. Everything after that is said again."""
        for var_id, num_chars in variables.items():
            if (variable := self._variables.get(var_id)) is not None:
                variable.rewind(num_chars)
        for state_id, ticket in states.items():
            if (state := self._states.get(state_id)) is not None:
                state.rewind(ticket)

    def close(self) -> None:
        """Frees every context. The task group must have ended."""
        self._states.clear()
        self._variables.clear()

    def _enqueue(self, state: StateCell[ContextT], op: ops.Op) -> None:
        if len(state.pending) >= MAX_PENDING_OPS:
            raise Overloaded(f"{MAX_PENDING_OPS} ops wait on state {state.id}: await some of them first")
        sources: tuple[VariableCell, ...] = ()
        match op:
            case ops.Gen() | ops.Select():
                if op.var in self._variables:
                    raise ProtocolError(f"variable {op.var} exists already")
                variable = self._variables[op.var] = VariableCell(op.var, op.name, self.outbox)
                state.variables.append(variable)
            case ops.Fork():
                self._states.add_children(state, op.children)
            case ops.Text():
                sources = tuple(self._variable(part.var) for part in op.parts if isinstance(part, ops.Ref))
            case ops.Close():
                state.is_closing = True
            case _:
                pass
        state.pending.append(PendingOp(op, sources))
        self._kick(state)

    def _kick(self, state: StateCell[ContextT]) -> None:
        if state.pending and not state.is_running and (state.has_begun or state.error is not None):
            state.is_running = True
            self._tasks.start_soon(self._run, state)

    async def _run(self, state: StateCell[ContextT]) -> None:
        num_done = 0
        while state.pending:
            pending = state.pending.popleft()
            if state.error is None:
                with anyio.CancelScope() as state.scope:
                    await self._attempt(state, pending)
                state.scope = None
            if state.error is not None:
                self._skip(state, pending.op, state.error)
            num_done += 1
            if num_done % OPS_PER_TURN == 0:
                await anyio.lowlevel.checkpoint()
        state.is_running = False
        if state.error is not None:
            self._states.free(state)

    async def _attempt(self, state: StateCell[ContextT], pending: PendingOp) -> None:
        try:
            await self._execute(state, pending)
        except AgentflowError as error:
            self._fail(state, pending.op, error)
        except Exception as error:
            logger.exception("an op failed for a reason that is not the program's")
            failure = EngineFailed(f"{type(pending.op).__name__.lower()} failed: {error!r}")
            failure.__cause__ = error
            self._fail(state, pending.op, failure)

    async def _execute(self, state: StateCell[ContextT], pending: PendingOp) -> None:
        op = pending.op
        match op:
            case ops.Seal():
                self._states.free(state)
            case ops.Await():
                state.reach(op.ticket)
            case ops.Close():
                self._forget(state)
            case _ if state.context is None:
                raise StateClosed(f"state {state.id} was sealed: nothing can be appended to it")
            case ops.Text():
                await self._fill(state.context, op.parts, pending.sources)
            case _:
                await self._extend(state.context, op)

    async def _fill(
        self, context: ContextT, parts: tuple[str | ops.Ref, ...], sources: tuple[VariableCell, ...]
    ) -> None:
        """Appends text; waits for the variables in it when their turn comes."""
        left = iter(sources)
        for part in parts:
            text = part if isinstance(part, str) else await _value_of(next(left))
            self._generator.fill(context, text)

    async def _extend(self, context: ContextT, op: ops.Op) -> None:
        """Ops that need the state's context."""
        match op:
            case ops.Begin():
                self._generator.begin_role(context, op.role)
            case ops.End():
                self._generator.end_role(context)
            case ops.Gen():
                variable = self._variables[op.var]
                end = await self._generator.generate(context, op.params.check(), variable.extend)
                value = Value(op.var, 0, "", end.finish_reason, end.usage, end.logprobs)
                value = msgspec.structs.replace(value, top_logprobs=end.top_logprobs)
                variable.complete(end.text, value)
            case ops.Select():
                check_choices(op.name, op.choices)
                scored = await self._generator.score(context, op.choices, op.method)
                self._variables[op.var].complete(op.choices[scored.index], _selected(op, scored))
            case ops.Fork():
                contexts = await self._generator.fork(context, len(op.children))
                for child_id, child_context in zip(op.children, contexts, strict=True):
                    self._start_child(child_id, child_context)
            case _:
                raise ProtocolError(f"an op that cannot stand in a stream: {op!r}")

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
                    self._variables[op.var].fail(because(f"{op.name!r} was not generated", error))
            case ops.Fork():
                for child in filter(None, map(self._states.get, op.children)):
                    if not child.has_begun:
                        self._states.stop(child, because("the fork did not happen", error))
            case ops.Seal():
                self._states.free(state)
            case ops.Close():
                self._forget(state)
            case _:
                pass

    def _fail(self, state: StateCell[ContextT], op: ops.Op, error: AgentflowError) -> None:
        """An op failed: so does its variable (with the error itself), its state, its task group."""
        if isinstance(op, ops.Gen | ops.Select):
            self._variables[op.var].fail(error)
        self._states.end(state, error)

    def _variable(self, var_id: int) -> VariableCell:
        variable = self._variables.get(var_id)
        if variable is None:
            raise ProtocolError(f"there is no variable {var_id}")
        return variable

    def _forget(self, state: StateCell[ContextT]) -> None:
        self._states.forget(state)
        for variable in state.variables:
            self._variables.pop(variable.id, None)

    async def _report(self, ticket: int) -> None:
        self.outbox.mark(StatsCell(StatsReply(ticket, await self._generator.stats())))


async def _value_of(variable: VariableCell) -> str:
    await variable.done.wait()
    if variable.error is not None:
        cause = origin_of(variable.error)
        raise RunFailed(f"the text needs {variable.name!r}, which has no value") from cause
    return variable.text


def _selected(op: ops.Select, scored: Scored) -> Value:
    choices = dict(zip(op.choices, scored.logprobs, strict=True))
    return Value(op.var, 0, "", "choice", scored.usage or Usage(), None, choices)
