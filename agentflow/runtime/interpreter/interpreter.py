"""The interpreter: runs the op streams of one session with a generator.

The ops of each state run in order, in a task that exists only while ops are pending; states run
concurrently. ``state_tree`` describes the propagation of failures and cancellations.

An op fails its state if it is invalid, if there is no room for it, or if it fails while it runs; the other
states continue. Only an error that belongs to no state ends the session.

A ``ProgramGraph`` follows the ops. When the scheduling hint of a state changes, the state's generator
gets a hint, at most one for each state in a turn of the event loop.

``OpExecution`` runs the ops that use their state's context, ``Interpreter`` all others.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Generic, Literal

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup
from msgspec.structs import replace

from agentflow.errors import (
    AgentflowError,
    Cancelled,
    EngineFailed,
    Overloaded,
    PromptTooLong,
    ProtocolError,
    UnknownModel,
    drop_tracebacks,
    incident,
)
from agentflow.protocol import ops
from agentflow.protocol.bounds.sized import sized, sizing
from agentflow.protocol.events import Capabilities, ErrorInfo
from agentflow.protocol.images import Image, Medium, Video
from agentflow.protocol.op_table import OP_BYTES, OPS, expanded, op_kind, opened, references, rejected
from agentflow.runtime.generator import ContextT, Embedder, Generator, StateHint
from agentflow.runtime.interpreter.image_store import ImageStore
from agentflow.runtime.interpreter.observation import GraphAnswers, StatsAnswers, WatchAnswers
from agentflow.runtime.interpreter.op_execution import OpExecution, opened_context
from agentflow.runtime.interpreter.state_tree import (
    GraphExecution,
    PendingOp,
    StateRecord,
    StateTree,
    derived_error,
    with_place,
)
from agentflow.runtime.interpreter.variables import EventCursor, VariableRecord, check_number, may_be_number
from agentflow.runtime.interpreter.wired_text import MAX_OP_CHARS
from agentflow.runtime.limits import (
    Budget,
    MemoryBudget,
    MemoryReservation,
    deadline_exceeded,
    earliest_deadline,
    exceeded,
    variable_bytes,
)
from agentflow.runtime.loop_turns import LoopTurn, end_loop_turn
from agentflow.runtime.programs.graph import FOLLOWED, ProgramGraph
from agentflow.runtime.programs.live import TenantGraphs
from agentflow.runtime.programs.scheduling_hint import SchedulingHint
from agentflow.runtime.task_group import first_error

logger = logging.getLogger(__name__)

# Twice the number of ops that the frontend lets a program submit without awaiting.
MAX_PENDING_OPS = 20_000
SKIPS_PER_LOOK = 64
"""The ops of a failed state that are skipped between two checks of the clock."""
REMOVALS_PER_LOOK = 64
"""The states and variables that a close removes between two checks of the clock."""
# Rejected ops have a separate budget: their states and variables must fail even if memory is exhausted.
REJECTED_BYTES = 4_000_000
_NUMBERED = {str(kind.__struct_config__.tag) for kind, spec in OPS.items() if spec.is_numbered}


class Interpreter(Generic[ContextT]):
    """Runs the ops of a session, which have been checked; ``events`` has the results.

    Args:
        generator: Runs the generations of the default model.
        task_group: Owns all tasks: cancel it to end the session, then call ``close``.
        memory: Counts the memory of the session.
        hides_faults: For faults of the backend, clients get only an id, with which the log has the error.
        models: The generators of further models, by name.
        embedders: Further embedding models, by name.
        counted: The generators whose counters are summed; none: only the default model's.
        max_states: The maximum number of open states; None: ``state_tree.MAX_STATES``.
        program: The scheduler's program of states without their own. Unlike the name in ``Open``, it
            makes no task group. Empty: each tree of states is a program.
        graphs: The graphs of the tenant's open sessions; this session's graph is added until ``close``.
    """

    def __init__(
        self,
        generator: Generator[ContextT],
        task_group: TaskGroup,
        memory: MemoryBudget | None = None,
        *,
        hides_faults: bool = False,
        models: Mapping[str, Generator[ContextT]] = MappingProxyType({}),
        embedders: Mapping[str, Embedder] = MappingProxyType({}),
        counted: Sequence[Generator[ContextT]] = (),
        max_states: float | None = None,
        program: str = "",
        graphs: TenantGraphs | None = None,
    ) -> None:
        self._hides_faults = hides_faults
        self._embedders = {**dict.fromkeys(generator.capabilities.embedding_models, generator), **embedders}
        self.events = EventCursor()
        self._memory = MemoryBudget() if memory is None else memory
        self._counts_memory = not self._memory.is_unlimited
        self._memory_of_rejected = MemoryBudget(REJECTED_BYTES, "of rejected ops, this session may hold")
        self._generator = generator
        self._generators = {**models, generator.capabilities.model: generator}
        self._tasks = task_group
        self._states: StateTree[ContextT] = StateTree(
            self.events, self._memory, kick=self._kick, later=self._later, max_states=max_states
        )
        self._variables: dict[int, VariableRecord] = {}
        self._images = ImageStore(self._memory)
        self._graph = ProgramGraph(program=program, find_replica=self._find_replica)
        self._tenant_graphs = TenantGraphs() if graphs is None else graphs
        self._tenant_graphs.add(self._graph)
        # Generators without a scheduler have no use for scheduling hints.
        self._uses_scheduling = any(
            getattr(one, "uses_scheduling", True) for one in self._generators.values()
        )
        self._is_reporting = False  # in a later turn of the event loop
        self._ops = OpExecution(self._find, self._embedders, self._variables, self._memory, self._start_child)
        self._stats = StatsAnswers(counted or (generator,), task_group, self.events)
        self._graphs = GraphAnswers(self._graph, self._tenant_graphs, self.events, self._later)
        self._watch = WatchAnswers(
            generator, task_group, self.events, self._memory, self._graph, self._tenant_graphs
        )

    @property
    def models(self) -> dict[str, Capabilities]:
        """The capabilities of each model by name, the default first. All can use the embedding models."""
        default = self._generator.capabilities.model
        names = [default, *[name for name in self._generators if name != default]]
        return {name: self._find_capabilities(self._generators[name]) for name in names}

    def _find_capabilities(self, generator: Generator[ContextT]) -> Capabilities:
        own, names = generator.capabilities, tuple(self._embedders)
        return own if own.embedding_models == names else replace(own, embedding_models=names)

    def _find(self, model: str) -> Generator[ContextT]:
        """The generator of a model, or of the default one for "". ``UnknownModel``."""
        if not model:
            return self._generator
        if model not in self._generators:
            known = ", ".join(self._generators)
            raise UnknownModel(f"there is no model {model[:200]!r} here (there are: {known})", param="model")
        return self._generators[model]

    def submit(self, op: ops.Op | ops.Rejected) -> None:
        """Accepts an op, without waiting for it to run. A rejected op fails its state. Raises an error that
        must end the session: ``ProtocolError`` if that state does not exist, ``Overloaded`` if too many ops
        were rejected."""
        for _ in self.submitting(op):
            pass

    def submit_all(self, accepted: Sequence[ops.Op]) -> None:
        """``submit`` for each of these ops."""
        for op in accepted:
            self.submit(op)

    def submitting(self, op: ops.Op | ops.Rejected) -> Iterator[None]:
        """``submit`` in short steps. Other tasks may run between them, but the next op must wait for the last
        step."""
        if isinstance(op, ops.Rejected):
            self._reject(op)
            return
        try:
            yield from self._accept(op, None)
        except AgentflowError as error:
            self._reject(rejected(op, error))

    def _accept(self, op: ops.Op, graph: GraphExecution[ContextT] | None) -> Iterator[None]:
        """Starts or enqueues an op, of a submitted graph or (None) of the client, in steps. An error leaves
        everything unchanged, except for a graph in part."""
        match op:
            case ops.Open():
                generator = self._find(op.model)
                root = self._states.add_root(op.state)
                root.opened = op
                reservation = MemoryReservation(self._memory, 0) if self._counts_memory else None
                root.begin(generator, opened_context(generator, op), reservation)
                self._graph.submit(op)  # its hint is reported with the hint of its first op
            case ops.SubmitGraph():
                yield from self._start_graph(op)
            case ops.Upload():
                yield from self._images.upload(op)
            case ops.Release():
                self._images.release(op.source)
            case ops.GetStats():
                self._stats.ask(op.ticket)
            case ops.GetGraph():
                self._graphs.ask(op.ticket, of_tenant=op.of_tenant)
            case ops.Watch():
                self._watch.watch(op)
            case ops.Unwatch():
                self._watch.unwatch()
            case ops.Peek():
                self._watch.peek(op)
            case ops.Cancel():
                why = "" if op.failure is None else f", because its program failed: {op.failure}"
                cancelled = Cancelled(f"state {op.state} was cancelled{why}")
                self._states.cancel(self._states.open_state(op.state), cancelled)
            case ops.Provide():
                self._provide(op)
            case ops.Want():
                self._graph.want(op.var, op.how, op.objective, op.ttft_s, op.tpot_s)
                self._report_hints_later()
            case ops.Limit():
                budget = Budget(deadline_s=op.deadline_s, output_tokens=op.output_tokens)
                self._states.restrict(self._states.open_state(op.state) if op.state else None, budget)
            case ops.TaskGroup():
                self._states.couple(self._open_state(op.state, op, graph), op.children)
            case _:
                yield from self._enqueue(self._open_state(op.state, op, graph), op)

    def _open_state(
        self, number: int, op: ops.Op, graph: GraphExecution[ContextT] | None
    ) -> StateRecord[ContextT]:
        """The open state that the op belongs to. Raises ``ProtocolError`` if it is a state of a graph that
        the op is not part of."""
        state = self._states.open_state(number)
        if state.graph is not graph and OPS[type(op)].in_graph:
            raise ProtocolError(f"state {state.id} belongs to a graph: nothing can be appended to it")
        return state

    def num_active(self) -> int:
        """The number of states with a running op. It may wait for its generator, but not for a value of
        another state. While all running ops wait for their generators, no further op can begin."""
        running = [state.current for state in self._states if state.is_running]
        return sum([op is None or all(source.has_ended for source in op.sources) for op in running])

    def variable(self, var_id: int) -> VariableRecord:
        """The variable, for a reader other than the client of the session. ``ProtocolError`` if it does not
        exist."""
        if var_id not in self._variables:
            raise ProtocolError(f"there is no variable {var_id}")
        return self._variables[var_id]

    def rewind(self, variables: dict[int, int], states: dict[int, int]) -> None:
        """Moves the events back to the client's position: the received characters of each unfinished
        variable, and the last ticket of each state."""
        for var_id, num_chars in variables.items():
            if (variable := self._variables.get(var_id)) is not None:
                variable.rewind(num_chars)
        for state_id, ticket in states.items():
            if (state := self._states.get(state_id)) is not None:
                state.rewind(ticket)
        self._watch.rewind()

    async def aclose(self) -> None:
        """``close`` in turns of the event loop."""
        with anyio.CancelScope(shield=True):
            turn = LoopTurn()
            try:
                while self._states.remove_one():
                    await turn.pause()
            finally:
                self.close()

    def close(self) -> None:
        """Frees all contexts. The task group must have ended."""
        try:
            while self._states.remove_one():
                pass
        finally:
            self._watch.unwatch()
            self._tenant_graphs.remove(self._graph)
            self._variables.clear()
            self._images.close()
            self._memory.close()
            self._memory_of_rejected.close()

    def _enqueue(self, state: StateRecord[ContextT], op: ops.Op) -> Iterator[None]:
        reservation: MemoryReservation | None = None
        if isinstance(op, ops.Close):  # always accepted, because it makes room
            if self._counts_memory:
                reservation = MemoryReservation(self._memory, 0)
                reservation.count(OP_BYTES + sized(op))
        elif len(state.pending) >= MAX_PENDING_OPS:
            raise Overloaded(
                f"{MAX_PENDING_OPS} ops are waiting on state {state.id}: await some of them first"
            )
        elif self._counts_memory:
            reservation = MemoryReservation(self._memory, OP_BYTES + (yield from sizing(op)))
        try:
            has_parts = isinstance(op, ops.Text | ops.Set)
            sources = tuple([self._variables[var_id] for var_id in references(op)]) if has_parts else ()
        except KeyError as error:
            raise ProtocolError(f"there is no variable {error.args[0]}") from None
        images: tuple[Image, ...] = ()
        children: tuple[StateRecord[ContextT], ...] = ()
        match op:
            case _ if isinstance(op, ops.Declaring):
                check_number(op.var)
                if op.var in self._variables:
                    raise ProtocolError(f"variable {op.var} exists already")
                own = (
                    MemoryReservation(self._memory, variable_bytes(op.name)) if self._counts_memory else None
                )
                variable = VariableRecord(
                    op.var,
                    op.name,
                    self.events,
                    own,
                    self._later,
                    is_expected=isinstance(op, ops.Expect),
                    is_reply=isinstance(op, ops.Gen) and op.reply,
                )
                self._variables[op.var] = variable
                state.variables.append(variable)
                if variable.is_expected:
                    state.expected.append(variable)
            case ops.Fork():
                children = yield from self._states.adding_children(state, op.children)
            case ops.Image() | ops.Video() | ops.Converse():
                images = self._images.find_images(op)
                if images:
                    self._graph.attach(op.state, _list_media(op, images))
            case ops.Close():
                state.is_closing = True
            case ops.Await():
                state.await_ticket(op.ticket)
            case _:
                pass
        number = self._next_number(state) if OPS[type(op)].is_numbered else None
        state.pending.append(PendingOp(op, reservation, number, sources, children, images))
        is_followed = bool(sources) or type(op) in FOLLOWED
        if is_followed:
            self._graph.submit(op, time.monotonic())
        self._kick(state)
        if is_followed:
            self._report_hints_later()  # after the kick: a request that begins now brings its hint

    def _next_number(self, state: StateRecord[ContextT]) -> int:
        state.num_ops += 1
        return state.num_ops

    def _reject(self, op: ops.Rejected) -> None:
        """Fails the variables and states that a rejected op would have declared immediately, and the op's
        state once its earlier ops are done."""
        if op.kind == "provide":
            for number in op.names:
                self._provide(ops.Provide(number, error=ErrorInfo.of(op.error)))
            return
        state = self._states.get(op.state)
        if state is None and op.kind in ("open", "submit") and may_be_number(op.state):
            state = self._states.add_failed(op.state, None, op.error, self._memory_of_rejected)
        if state is None or state.is_closing:
            # There is no state to fail, so the session ends.
            ends = isinstance(op.error, Overloaded | ProtocolError)
            raise op.error if ends else ProtocolError(str(op.error))
        for child in op.children:
            if self._states.get(child) is None and may_be_number(child):
                error = derived_error("the fork did not happen", op.error, state)
                self._states.add_failed(child, state, error, self._memory_of_rejected)
        for number, name in op.names.items():
            if number not in self._variables and may_be_number(number):
                reservation = MemoryReservation(self._memory_of_rejected, variable_bytes(name))
                variable = VariableRecord(number, name, self.events, reservation, self._later)
                self._variables[number] = variable
                state.variables.append(variable)
                variable.fail(op.error)
        if state.error is not None:
            return
        number_here = self._next_number(state) if op.kind in _NUMBERED else None
        can_begin = state.has_begun or state.parent is not None
        if isinstance(op.error, Overloaded) or not can_begin:
            # Immediately, because waiting ops take room.
            self._states.end(state, with_place(op.error, state, number_here))
        else:
            state.pending.append(
                PendingOp(op, MemoryReservation(self._memory_of_rejected, OP_BYTES), number_here)
            )
            self._kick(state)

    def _report_hints_later(self) -> None:
        has_news = self._graph.has_changes if self._uses_scheduling else not self._graph.is_settled
        if has_news and not self._is_reporting:
            self._is_reporting = True
            self._tasks.start_soon(self._report_all_hints)

    async def _report_all_hints(self) -> None:
        """Reports changed hints in portions, one in each turn of the event loop."""
        try:
            while self._graph.has_changes:
                self._report_hints()
                if self._graph.has_changes:
                    await end_loop_turn()
        finally:
            self._is_reporting = False

    def _report_hints(self, begins: StateRecord[ContextT] | None = None) -> None:
        """Reports some changed hints. ``begins``: a state whose next request begins now."""
        for number, hint in self._graph.take_hints():
            if begins is not None and number == begins.id:
                self._send_hint(begins, hint, begins=True)
            elif (state := self._states.get(number)) is not None:
                self._send_hint(state, hint)

    def _send_hint(
        self, state: StateRecord[ContextT], hint: SchedulingHint | None, *, begins: bool = False
    ) -> None:
        if hint is not None and state.context is not None and state.generator is not None:
            with suppress(AgentflowError):  # advice: the ops of the state report a fault themselves
                state.generator.hint(state.context, StateHint(scheduling=hint, begins=begins))

    def _find_replica(self, number: int) -> int | None:
        state = self._states.get(number)
        if state is None or state.context is None:
            return None
        find: Callable[[ContextT], int | None] | None = getattr(state.generator, "find_replica", None)
        return None if find is None else find(state.context)

    def _kick(self, state: StateRecord[ContextT]) -> None:
        if state.error is not None and self._states.get(state.id) is state:
            self._graph.stop(state.id, has_failed=not isinstance(state.error, Cancelled))
            self._report_hints_later()
        if state.pending and not state.is_running and (state.has_begun or state.error is not None):
            state.is_running = True
            self._tasks.start_soon(self._run, state)

    def _later(self, call: Callable[[], object]) -> None:
        async def run() -> None:
            call()

        self._tasks.start_soon(run)

    async def _run(self, state: StateRecord[ContextT]) -> None:
        turn: LoopTurn | None = None
        skips: LoopTurn | None = None
        while state.pending:
            pending = state.current = state.pending.popleft()
            if state.error is None:
                deadline = earliest_deadline(state.budgets) if state.budgets else math.inf
                if _is_instant(pending):
                    await self._attempt(state, pending, deadline)
                else:
                    with anyio.CancelScope(deadline=deadline) as state.scope:
                        await self._attempt(state, pending, deadline)
                    if state.scope.cancelled_caught and state.error is None:
                        self._fail(state, pending, exceeded(state.budgets, state.num_unreported))
                    state.scope = None
            if state.error is not None:
                # Skipping an op takes microseconds, so the clock is not checked after each.
                skips = skips or LoopTurn(SKIPS_PER_LOOK)
                await self._skip(state, pending, state.error)
                await skips.pause()
            elif turn is None:
                turn = LoopTurn() if state.pending else None  # a stream of text ops never waits
            elif turn.is_over:
                await anyio.lowlevel.checkpoint()  # the next turn among other states
                turn = LoopTurn()
        state.is_running = False
        if state.error is not None:
            self._states.free(state)
        if state.graph is not None:
            state.graph.state_ended(state)

    async def _attempt(
        self, state: StateRecord[ContextT], pending: PendingOp[ContextT], deadline: float
    ) -> None:
        try:
            if pending.number is not None and deadline != math.inf and deadline <= anyio.current_time():
                raise deadline_exceeded()
            is_followed = type(pending.op) in FOLLOWED
            if is_followed:
                self._graph.begin(pending.op)
                if (
                    self._graph.has_changes and self._uses_scheduling
                ):  # a request begins with its present hint
                    is_request = isinstance(pending.op, ops.Gen | ops.Select | ops.Decide)
                    self._report_hints(begins=state if is_request else None)
            await self._execute(state, pending)
            if is_followed:
                variable = self._variables.get(getattr(pending.op, "var", 0))
                value = None if variable is None else variable.value
                self._graph.end(pending.op, time.monotonic(), None if value is None else value.usage)
                self._report_hints_later()
        except Exception as error:
            first = first_error(error)  # a generator may run several requests for one op
            if not isinstance(first, AgentflowError):
                first = self._fault(op_kind(pending.op), error)
            self._fail(state, pending, first)

    def _fault(self, name: str, error: Exception) -> EngineFailed:
        """The error of an op that failed because of a fault of the backend."""
        if self._hides_faults:
            return incident(logger, name, error)
        logger.exception("an op failed because of a fault of the backend")
        failure = EngineFailed(f"{name} failed: {error!r}")
        failure.__cause__ = error
        return failure

    async def _execute(self, state: StateRecord[ContextT], pending: PendingOp[ContextT]) -> None:
        match pending.op:
            case ops.Seal():
                self._states.seal(state)
            case ops.Await(ticket=ticket):
                (state.graph or state).reach(ticket)
            case ops.Close():
                await self._forget(state)
            case ops.Expect():
                pass  # the client sends the value in a Provide
            case ops.Done(var=var_id):
                self._variables[var_id].complete_text("", "done")
            case ops.Rejected(error=error):
                raise error
            case _:
                await self._ops.execute(state, pending)

    def _start_child(
        self,
        child: StateRecord[ContextT],
        generator: Generator[ContextT],
        context: ContextT,
        reservation: MemoryReservation | None,
        num_chars: int,
    ) -> None:
        if self._states.waits_for_fork(child):
            child.begin(generator, context, reservation, num_chars)
            if self._uses_scheduling:
                self._send_hint(child, self._graph.hint(child.id))
            self._kick(child)
        else:  # closed or cancelled before it began
            generator.free(context)

    async def _skip(
        self, state: StateRecord[ContextT], pending: PendingOp[ContextT], error: AgentflowError
    ) -> None:
        """Skips an op of a failed state: its variable and its children fail too."""
        num_tokens, state.num_unreported = state.num_unreported, 0
        match op := pending.op:
            case _ if isinstance(op, ops.Declaring):
                variable = self._variables.get(op.var)  # None: its state is closed already
                if variable is not None and not variable.has_ended:
                    reason = f"{op.name!r} was not {OPS[type(op)].outcome}"
                    variable.fail(derived_error(reason, error, state), num_tokens)
            case ops.Fork():
                turn = LoopTurn()
                for child in pending.children:
                    if self._states.waits_for_fork(child):
                        self._states.stop(child, derived_error("the fork did not happen", error, child))
                        await turn.pause()
            case ops.Seal():
                self._states.free(state)
            case ops.Close():
                await self._forget(state)
            case _:
                pass

    def _fail(
        self, state: StateRecord[ContextT], pending: PendingOp[ContextT], error: AgentflowError
    ) -> None:
        """Fails an op: its variable (with the error itself), its state, and its task group."""
        drop_tracebacks(error)
        error = with_place(error, state, pending.number)
        variable = self._variables.get(pending.op.var) if isinstance(pending.op, ops.Declaring) else None
        if variable is not None:
            variable.fail(error, state.num_unreported)
        state.num_unreported = 0
        self._states.end(state, error)

    def _provide(self, op: ops.Provide) -> None:
        variable = self._variables.get(op.var)
        if variable is not None and not variable.is_expected:
            raise ProtocolError(f"variable {op.var} is not one that the client provides")
        if variable is None or variable.has_ended:
            return  # its state has failed or was closed meanwhile
        error = None
        try:
            if op.error is not None:  # its usage was reported with the failure that is passed on
                variable.hold_error(op.error)
                error = replace(op.error, usage=None).to_exception()
            elif variable.num_chars + len(op.text) > MAX_OP_CHARS:
                raise PromptTooLong(f"{variable.name!r} has more than {MAX_OP_CHARS:,} characters")
            elif op.more:
                variable.provide(op.text)
                return
            else:
                variable.complete_text(variable.text + op.text, "provided")
        except AgentflowError as failure:
            error = failure
        self._graph.provide(op.var)
        self._report_hints_later()
        if error is not None:
            variable.fail(error)

    async def _forget(self, state: StateRecord[ContextT]) -> None:
        turn = LoopTurn(REMOVALS_PER_LOOK)
        graph, state.graph = state.graph, None
        for one in [state] if graph is None else graph.states:
            if one is not state:  # its ops may still run
                one.graph = None
                self._states.stop(one, Cancelled("its graph was closed"))
            if self._states.get(one.id) is one:
                self._graph.close(one.id)
                self._report_hints_later()
            self._states.forget(one)
            for variable in one.variables:
                variable.fail(Cancelled(f"{variable.name!r}: its state was closed"))
                if self._variables.get(variable.id) is variable:
                    del self._variables[variable.id]
                await turn.pause()
            await turn.pause()

    def _start_graph(self, op: ops.SubmitGraph) -> Iterator[None]:
        """Enqueues all ops of a graph before the first one runs, in steps. If one is rejected, none runs."""
        outputs = {op.session_number(number) for number in op.outputs}
        inputs = {op.session_number(number): text for number, text in op.inputs.items()}
        reports: Literal["all", "end"] = "all" if op.live else "end"
        graph: GraphExecution[ContextT] | None = None
        try:
            for part in expanded(op):
                yield from self._accept(part, graph)
                if isinstance(part, ops.Declaring):
                    self._variables[part.var].reports = reports if part.var in outputs else "nothing"
                    if part.var in inputs:
                        self._provide(ops.Provide(part.var, inputs[part.var]))
                elif isinstance(part, ops.Open):
                    graph = GraphExecution(self._states.open_state(part.state))
                    graph.root.is_running = True  # holds its ops back
                if graph is not None:
                    for state_id in opened(part):
                        graph.add(self._states.open_state(state_id))
                yield
        except AgentflowError as error:
            if graph is not None:
                graph.root.is_running = False
                for state in graph.states:
                    self._states.stop(state, error)
                    yield
            raise
        if graph is not None:
            if reports == "end":
                self._graph.gather(graph.root.id, [state.id for state in graph.states])
            graph.root.is_running = False
            self._kick(graph.root)


def _is_instant(pending: PendingOp[ContextT]) -> bool:
    """Whether the op never waits, so that nothing can be cancelled in it."""
    is_known = isinstance(pending.op, ops.Text) and not pending.sources
    return is_known or isinstance(pending.op, ops.Begin | ops.Await | ops.Seal | ops.Hint)


def _list_media(op: ops.Image | ops.Video | ops.Converse, files: Sequence[Image]) -> Sequence[Medium]:
    """Returns the images and videos of an op. ``files``: their files and URLs."""
    match op:
        case ops.Video():
            return [Video(files[0], op.num_frames)]
        case ops.Converse(conversation=conversation):
            return conversation.with_files(files).media
        case _:
            return files
