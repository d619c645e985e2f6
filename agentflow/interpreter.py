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
from anyio.abc import TaskGroup as AnyioTaskGroup

from agentflow import ops
from agentflow.budget import Budget, check_limit, check_time, deadline_of, time_is_over
from agentflow.cells import PendingOp, StateCell, VariableCell
from agentflow.errors import (
    AgentflowError,
    BadArgument,
    Cancelled,
    EngineFailed,
    Overloaded,
    ProtocolError,
)
from agentflow.events import MAX_CAUSES, ErrorInfo, Value
from agentflow.generator import ContextT, Generator, StateHint, Usage
from agentflow.graph_execution import GraphExecution, expanded
from agentflow.held_memory import HeldMemory, Holding, op_bytes, variable_bytes
from agentflow.op_execution import OpExecution
from agentflow.outbox import Outbox
from agentflow.state_tree import StateTree, because
from agentflow.stats_answers import StatsAnswers
from agentflow.transform import check_number

logger = logging.getLogger(__name__)

# Twice what the frontend lets a program submit without awaiting.
MAX_PENDING_OPS = 20_000
# A stream of pure text ops never waits by itself: let others run after so many.
OPS_PER_TURN = 64
_MADE = {ops.Gen: "generated", ops.Select: "generated", ops.Read: "read", ops.Expect: "provided"}


class Interpreter(Generic[ContextT]):
    """Runs ops on ``generator``; what comes of them is in ``outbox``. ``task_group`` owns all tasks:
    cancel it to end the session, then call ``close``. ``memory``: where all that it holds is counted."""

    def __init__(
        self,
        generator: Generator[ContextT],
        task_group: AnyioTaskGroup,
        memory: HeldMemory | None = None,
    ) -> None:
        self.outbox = Outbox()
        self._memory = HeldMemory() if memory is None else memory
        self._generator = generator
        self._tasks = task_group
        self._states: StateTree[ContextT] = StateTree(
            self.outbox, self._memory, free=generator.free, kick=self._kick
        )
        self._variables: dict[int, VariableCell] = {}
        self._ops = OpExecution(generator, self._variables, self._memory, self._start_child)
        self._stats = StatsAnswers(generator, task_group, self.outbox)

    def submit(self, op: ops.Op) -> None:
        """Takes an op; never waits. ``ProtocolError`` for what makes no sense: the op is not taken."""
        match op:
            case ops.Open():
                if max(len(op.cache_salt), len(op.program)) > ops.MAX_SALT_CHARS:
                    raise ProtocolError(
                        f"a cache_salt, and a program, have {ops.MAX_SALT_CHARS} characters at most"
                    )
                root = self._states.add_root(op.state)
                context = self._generator.open(op.cache_salt, program=op.program)
                root.begin(context, Holding(self._memory, 0))
                if op.objective is not None:
                    self._generator.hint(context, StateHint(op.objective))
            case ops.Submit():
                self._start_graph(op)
            case ops.GetStats():
                self._stats.ask(op.ticket)
            case ops.Cancel():
                cancelled = Cancelled(f"state {op.state} was cancelled")
                self._states.cancel(self._states.open_state(op.state), cancelled)
            case ops.Provide():
                self._provide(op)
            case ops.Limit():
                self._limit(op)
            case ops.TaskGroup():
                self._states.couple(self._states.open_state(op.state), op.children)
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
        try:
            self._states.clear()
        finally:
            self._variables.clear()
            self._memory.close()

    def _enqueue(self, state: StateCell[ContextT], op: ops.Op, outbox: Outbox | None = None) -> None:
        if len(state.pending) >= MAX_PENDING_OPS:
            raise Overloaded(f"{MAX_PENDING_OPS} ops wait on state {state.id}: await some of them first")
        sources: tuple[VariableCell, ...] = ()
        children: tuple[StateCell[ContextT], ...] = ()
        if isinstance(op, ops.Text | ops.Set):
            sources = tuple(self._source(part) for part in op.parts if isinstance(part, ops.Ref))
        match op:
            case _ if isinstance(op, ops.Declaring):
                ops.check_number(op.var)
                if op.var in self._variables:
                    raise ProtocolError(f"variable {op.var} exists already")
                variable = VariableCell(
                    op.var,
                    op.name,
                    outbox or self.outbox,
                    Holding(self._memory, variable_bytes(op.name)),
                    is_expected=isinstance(op, ops.Expect),
                    is_reply=isinstance(op, ops.Gen) and op.reply,
                )
                self._variables[op.var] = variable
                state.variables.append(variable)
                if variable.is_expected:
                    state.expected.append(variable)
            case ops.Fork():
                children = self._states.add_children(state, op.children)
            case ops.Close():
                state.is_closing = True
            case ops.Await():
                ops.check_number(op.ticket)
            case _:
                pass
        held = Holding(self._memory, op_bytes(op))
        state.pending.append(PendingOp(op, held, state.number_of(op), sources, children))
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
                with anyio.CancelScope(deadline=deadline_of(state.budgets)) as state.scope:
                    await self._attempt(state, pending)
                if state.scope.cancelled_caught and state.error is None:
                    self._fail(state, pending, time_is_over())
                state.scope = None
            if state.error is not None:
                self._skip(state, pending, state.error)
            num_done += 1
            if num_done % OPS_PER_TURN == 0:
                await anyio.lowlevel.checkpoint()
        state.is_running = False
        if state.error is not None:
            self._states.free(state)
        if state.graph is not None:
            state.graph.ended()

    async def _attempt(self, state: StateCell[ContextT], pending: PendingOp[ContextT]) -> None:
        try:
            if pending.number is not None:
                check_time(state.budgets)
            await self._execute(state, pending)
        except AgentflowError as error:
            self._fail(state, pending, error)
        except Exception as error:
            logger.exception("an op failed for a reason that is not the program's")
            failure = EngineFailed(f"{type(pending.op).__name__.lower()} failed: {error!r}")
            failure.__cause__ = error
            self._fail(state, pending, failure)

    async def _execute(self, state: StateCell[ContextT], pending: PendingOp[ContextT]) -> None:
        match pending.op:
            case ops.Seal():
                self._states.seal(state)
            case ops.Await(ticket=ticket):
                state.reach(ticket)
            case ops.Close():
                self._forget(state)
            case ops.Expect():
                pass  # the client provides it when it likes
            case _:
                await self._ops.execute(state, pending)

    def _start_child(
        self, child: StateCell[ContextT], context: ContextT, holding: Holding, num_chars: int
    ) -> None:
        if self._states.waits_for_fork(child):
            child.begin(context, holding, num_chars)
            self._kick(child)
        else:  # closed or cancelled before it began
            self._generator.free(context)

    def _skip(self, state: StateCell[ContextT], pending: PendingOp[ContextT], error: AgentflowError) -> None:
        """What an op leaves behind when its state has failed: its variable and its children fail too."""
        op = pending.op
        match op:
            case _ if isinstance(op, ops.Declaring):
                variable = self._variables.get(op.var)  # None: its state is closed already
                if variable is not None and not variable.done.is_set():
                    variable.fail(because(f"{op.name!r} was not {_MADE.get(type(op), 'set')}", error))
            case ops.Fork():
                for child in pending.children:
                    if self._states.waits_for_fork(child):
                        self._states.stop(child, because("the fork did not happen", error))
            case ops.Seal():
                self._states.free(state)
            case ops.Close():
                self._forget(state)
            case _:
                pass

    def _fail(self, state: StateCell[ContextT], pending: PendingOp[ContextT], error: AgentflowError) -> None:
        """An op failed: so does its variable (with the error itself), its state, its task group."""
        _forget_frames(error)
        if pending.number is not None:
            if error.place is not None:  # one exception may fail many ops, each in a place of its own
                error = ErrorInfo.of(error).to_exception()
            error.place = state.id, pending.number
        variable = self._variables.get(pending.op.var) if isinstance(pending.op, ops.Declaring) else None
        if variable is not None:
            variable.fail(error)
        self._states.end(state, error)

    def _variable(self, var_id: int) -> VariableCell:
        variable = self._variables.get(var_id)
        if variable is None:
            raise ProtocolError(f"there is no variable {var_id}")
        return variable

    def _source(self, ref: ops.Ref) -> VariableCell:
        variable = self._variable(ref.var)
        try:
            check_number(ref.transforms)
        except BadArgument as error:
            raise ProtocolError(str(error)) from error
        return variable

    def _provide(self, op: ops.Provide) -> None:
        variable = self._variables.get(op.var)
        if variable is not None and not variable.is_expected:
            raise ProtocolError(f"variable {op.var} is none that the client provides")
        if variable is None or variable.done.is_set():
            return  # its state has failed or ended meanwhile
        if op.error is not None:
            variable.fail(op.error.to_exception())
        else:
            variable.complete(op.text, Value(op.var, 0, "", "provided", Usage()))

    def _limit(self, op: ops.Limit) -> None:
        try:
            check_limit(op)
        except BadArgument as error:
            raise ProtocolError(str(error)) from error
        budget = Budget(deadline_s=op.deadline_s, output_tokens=op.output_tokens)
        self._states.restrict(self._states.open_state(op.state) if op.state else None, budget)

    def _forget(self, state: StateCell[ContextT]) -> None:
        graph, state.graph = state.graph, None
        for one in [state] if graph is None else graph.states:
            if one is not state:  # its ops may still run, and find nothing more of what they need
                one.graph = None
                self._states.stop(one, Cancelled("its graph was closed"))
            self._states.forget(one)
            for variable in one.variables:
                variable.fail(Cancelled(f"{variable.name!r}: its state was closed"))
                if self._variables.get(variable.id) is variable:
                    del self._variables[variable.id]

    def _start_graph(self, op: ops.Submit) -> None:
        """All its ops are in line before the first of them runs."""
        outputs = {op.session_number(number) for number in op.outputs}
        inputs = {op.session_number(number): text for number, text in op.inputs.items()}
        unheard = Outbox()
        graph: GraphExecution[ContextT] | None = None
        for part in expanded(op):
            if isinstance(part, ops.Declaring):
                self._enqueue(
                    self._states.open_state(part.state), part, None if part.var in outputs else unheard
                )
                self._variables[part.var].is_output = True
                if part.var in inputs:
                    self._provide(ops.Provide(part.var, inputs[part.var]))
            else:
                self.submit(part)
            if isinstance(part, ops.Open):
                root = self._states.open_state(part.state)
                graph = GraphExecution(root)
                graph.add(root)
            elif isinstance(part, ops.Fork) and graph is not None:
                for child in part.children:
                    graph.add(self._states.open_state(child))


def _forget_frames(error: BaseException) -> None:
    """With its traceback, an error that is kept keeps all that the functions had that it came through."""
    link: BaseException | None = error
    for _ in range(MAX_CAUSES):
        if link is None:
            return
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
