"""A session: one open backend, the states that run on it, and the tasks that serve them."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, TypeVarTuple, Unpack, overload

import anyio
from anyio.abc import TaskGroup

from agentflow.errors import AgentflowError, BadArgument, Cancelled, EngineFailed, ServerLost, StateClosed
from agentflow.language.graph import Graph
from agentflow.language.map import DEFAULT_CONCURRENCY, Inputs, ItemT, ManyOf, MapOptions, OnError, ProgramMap
from agentflow.language.markers import Markers
from agentflow.language.run import ProgramStream, RootState, Run, check_program
from agentflow.language.state import State
from agentflow.language.submit import GraphRun, submit
from agentflow.language.variable import Variable
from agentflow.protocol import ops
from agentflow.protocol.backend import Backend, Connection
from agentflow.protocol.events import (
    Capabilities,
    Delta,
    ErrorInfo,
    Event,
    Reached,
    StateFailed,
    Stats,
    StatsReply,
    Value,
    VarFailed,
)
from agentflow.protocol.op_table import check_sendable
from agentflow.runtime.limits import limit_op
from agentflow.runtime.task_group import open_task_group

P = ParamSpec("P")
ArgTs = TypeVarTuple("ArgTs")
ResultT = TypeVar("ResultT")


class Session:
    """Made by ``af.session``. Nothing it started outlives its block.

    >>> async with af.session() as flow:
    ...     print(flow.capabilities.model, flow.is_alive)
    ...     grade = await flow.run(judge, essay)
    scripted True
    """

    def __init__(
        self,
        backend: Backend,
        *,
        seed: int | None = None,
        deadline_s: float | None = None,
        output_tokens: int | None = None,
    ) -> None:
        self.seed = secrets.randbits(63) if seed is None else seed
        self.markers = Markers()
        self._backend = backend
        has_limit = deadline_s is not None or output_tokens is not None
        self._limit = limit_op(0, deadline_s, output_tokens) if has_limit else None
        self._connection: Connection | None = None
        self._tasks: TaskGroup | None = None
        self._stack = AsyncExitStack()
        self._failure: Exception | None = None
        self._ids = itertools.count(1)
        self._run_indices = itertools.count()
        self._states: dict[int, State] = {}
        self._variables: dict[int, Variable[Any]] = {}  # those not done yet
        self._answers: dict[int, tuple[anyio.Event, list[StatsReply]]] = {}

    async def __aenter__(self) -> Session:
        if self._tasks is not None:
            raise BadArgument("a session is entered once: make another with af.session(...)")
        async with AsyncExitStack() as stack:
            connecting = self._backend.connect(self._deliver, self._lose)
            self._connection = await stack.enter_async_context(connecting)
            self._tasks = await stack.enter_async_context(open_task_group())
            self._stack = stack.pop_all()
        if self._limit is not None:
            self.send([self._limit])
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._tasks is not None
        self._tasks.cancel_scope.cancel()
        if self._connection is not None:
            self._connection.end(error)
        self._connection = None
        self._end_all(ErrorInfo.of(Cancelled("the session has ended")))
        # An error of the block must leave as itself, not inside the task groups' exception groups;
        # a cancellation is the task groups' own business.
        is_cancelled = isinstance(error, anyio.get_cancelled_exc_class())
        await self._stack.__aexit__(*((kind, error, trace) if is_cancelled else (None, None, None)))

    async def run(
        self, program: Callable[Concatenate[State, P], Awaitable[ResultT]], *args: P.args, **kwargs: P.kwargs
    ) -> ResultT:
        """Runs a program on a state of its own and gives what it returns.

        Waits for everything the program started, and raises what failed there, unless an await in the
        program has raised that failure already. Cancelling the call cancels it all.

        >>> await flow.run(judge, essay)
        'A'
        """
        check_program(program, "run")
        return await Run(self).execute(program, args, kwargs)

    @overload
    def stream(
        self, program: Callable[Concatenate[State, P], Awaitable[Any]], *args: P.args, **kwargs: P.kwargs
    ) -> ProgramStream: ...
    @overload
    def stream(self, program: Graph, *args: str, **kwargs: str) -> ProgramStream: ...
    def stream(self, program: Any, *args: Any, **kwargs: Any) -> ProgramStream:
        """Runs a program and gives its events as they come: ``TextDelta`` of every branch,
        ``VariableDone``, and ``RunDone`` with the result at the end. Of a graph (``program.trace(...)``, with
        the texts of its arguments) each text comes when it is complete.

        >>> async for event in flow.stream(judge, essay):
        ...     if isinstance(event, af.TextDelta):
        ...         print(event.text, end="")
        """
        if isinstance(program, Graph):
            work = GraphRun(self, program, program.named(args, kwargs), is_streamed=True)
            return ProgramStream(self, work.run, work.result)
        check_program(program, "stream")
        run = Run(self)
        return ProgramStream(self, run, lambda: run.execute(program, args, kwargs))

    @overload
    def map(
        self, program: Graph, inputs: Inputs, *, on_error: OnError = ..., **options: Unpack[MapOptions]
    ) -> ProgramMap[Any]: ...
    @overload
    def map(
        self,
        program: Callable[[State, ItemT], Awaitable[ResultT]],
        inputs: ManyOf[ItemT],
        *,
        on_error: Literal["raise"] = ...,
        **options: Unpack[MapOptions],
    ) -> ProgramMap[ResultT]: ...
    @overload
    def map(
        self,
        program: Callable[[State, ItemT], Awaitable[ResultT]],
        inputs: ManyOf[ItemT],
        *,
        on_error: Literal["return"],
        **options: Unpack[MapOptions],
    ) -> ProgramMap[ResultT | Exception]: ...
    @overload
    def map(
        self,
        program: Callable[[State, *ArgTs], Awaitable[ResultT]],
        inputs: ManyOf[tuple[*ArgTs]],
        *,
        on_error: Literal["raise"] = ...,
        **options: Unpack[MapOptions],
    ) -> ProgramMap[ResultT]: ...
    @overload
    def map(
        self,
        program: Callable[[State, *ArgTs], Awaitable[ResultT]],
        inputs: ManyOf[tuple[*ArgTs]],
        *,
        on_error: Literal["return"],
        **options: Unpack[MapOptions],
    ) -> ProgramMap[ResultT | Exception]: ...
    @overload
    def map(
        self,
        program: Callable[Concatenate[State, ...], Awaitable[ResultT]],
        inputs: ManyOf[dict[str, Any]],
        *,
        on_error: Literal["raise"] = ...,
        **options: Unpack[MapOptions],
    ) -> ProgramMap[ResultT]: ...
    @overload
    def map(
        self,
        program: Callable[Concatenate[State, ...], Awaitable[ResultT]],
        inputs: ManyOf[dict[str, Any]],
        *,
        on_error: Literal["return"],
        **options: Unpack[MapOptions],
    ) -> ProgramMap[ResultT | Exception]: ...
    def map(
        self,
        program: Callable[Concatenate[State, ...], Awaitable[Any]] | Graph,
        inputs: Inputs,
        *,
        concurrency: int = DEFAULT_CONCURRENCY,
        progress: bool = False,
        on_error: OnError = "raise",
    ) -> ProgramMap[Any]:
        """Runs a program on each of many inputs, at most ``concurrency`` at once; results come in the
        order of the inputs. Await it for the list of them, or iterate it in bounded memory (see
        ``ProgramMap``: enter it where you may stop early).

        ``inputs``: any iterable or async iterable, also one without end. Each input is the program's
        one argument after the state; a tuple is its positional arguments, a dict its keyword arguments
        (which type checkers do not compare with the program's). To pass a tuple or a dict itself, wrap
        it: ``((item,) for item in items)``. A generator is closed when the map ends. ``program`` may be a
        graph (``program.trace(...)``); its arguments are texts.
        ``on_error``: with ``"raise"``, the first failure that happens cancels the rest and is raised,
        with a note that names the input; with ``"return"``, failures stand among the results, and
        only what ends the session or comes from ``inputs`` itself is raised. ``progress``: a bar on
        stderr, with the rate, the time left, failures, and the cached share of the prompt tokens.

        >>> grades = await flow.map(judge, essays, progress=True)
        >>> async for grade in flow.map(judge, essays):
        ...     print(grade)
        A
        A
        A
        """
        console = None
        if progress:
            from agentflow.language.progress import stderr_console

            console = stderr_console()
        return ProgramMap(self, program, inputs, concurrency=concurrency, on_error=on_error, console=console)

    async def submit(self, graph: Graph, inputs: Mapping[str, str] | None = None) -> Any:
        """Runs a compiled program (``program.trace(...)``) with the texts of its arguments: all of it goes
        to the backend in one op, and only its result comes back.

        >>> graph = judge.trace(dimensions=["clarity", "evidence"])
        >>> grade = await flow.submit(graph, {"essay": essay})
        """
        return await submit(self, graph, inputs or {})

    def state(
        self, *, cache_salt: str = "", objective: ops.Objective | None = None, program: str = ""
    ) -> RootState:
        """A state without a program. ``async with flow.state() as s`` ends it with the block, and what still
        runs then is cancelled; without ``async with`` it ends with the session. States share cached KV only
        under an equal ``cache_salt``. ``objective``: as in ``s.hint``. States that name the same ``program``
        are siblings to the scheduler, which finishes one program's before it begins another's: for what is
        one program, and has a state for each call.

        >>> async with flow.state() as s:
        ...     s += af.user("What do plants do?") + af.assistant(af.gen("answer"))
        ...     print(await s["answer"])
        Plants turn light into sugar.
        >>> s = flow.state()
        >>> s += af.user("What do plants do?") + af.assistant(af.gen("answer"))
        >>> print(await s["answer"])
        Plants turn light into sugar.
        """
        run = Run(self, cache_salt=cache_salt, objective=objective, program=program, root_type=RootState)
        assert isinstance(run.root, RootState)
        return run.root

    def limit(self, *, deadline_s: float | None = None, output_tokens: int | None = None) -> None:
        """From now on all states of this session may take so many seconds, and generate so many tokens
        together. What goes on after that fails with ``DeadlineExceeded`` or ``BudgetExceeded``.

        >>> flow.limit(output_tokens=100_000)
        """
        self.send([limit_op(0, deadline_s, output_tokens)])

    async def stats(self) -> Stats:
        """What the backend has counted since its start. Raises what ended the session, if that has ended, and
        ``EngineFailed`` while an engine restarts (the session goes on then).

        >>> before = await flow.stats()
        >>> grade = await flow.run(judge, essay)
        >>> (await flow.stats()).prompt_tokens > before.prompt_tokens
        True
        """
        self.check_alive()
        ticket = self.next_id()
        answer: tuple[anyio.Event, list[StatsReply]] = (anyio.Event(), [])
        self._answers[ticket] = answer
        self.send([ops.GetStats(ticket)])
        try:
            await answer[0].wait()
        finally:
            del self._answers[ticket]
        self.check_alive()
        reply = answer[1][0]
        if reply.stats is None:
            raise EngineFailed("no counters came") if reply.error is None else reply.error.to_exception()
        return reply.stats

    @property
    def capabilities(self) -> Capabilities:
        """What the backend can do, and its model's name."""
        self.check_alive()
        assert self._connection is not None
        return self._connection.capabilities

    @property
    def is_alive(self) -> bool:
        """Whether ops can still be submitted."""
        return self._connection is not None and self._failure is None

    def check_alive(self) -> None:
        """Raises what ended the session, if it has ended. For states."""
        if self._failure is not None:
            raise ErrorInfo.of(self._failure).to_exception()
        if self._connection is None:
            what = "is not open yet" if self._tasks is None else "has ended"
            raise StateClosed(f"the session {what}: do this inside its `async with` block")

    # What follows is for states, runs and streams.

    def next_id(self) -> int:
        """A number that no state, variable or ticket of this session has. For states."""
        return next(self._ids)

    def reserve_ids(self, count: int) -> int:
        """So many numbers in a row; the number before the first. For graphs."""
        first = next(self._ids)
        self._ids = itertools.count(first + count)
        return first - 1

    def next_run_index(self) -> int:
        """A number. For a run."""
        return next(self._run_indices)

    def send(self, recorded: list[ops.Op], *, quiet: bool = False) -> None:
        """Sends ops, all or none: ``BadArgument`` for one that makes no sense, ``NotSupported`` for one that
        the backend cannot do. ``quiet``: nothing happens when the session has ended. For states."""
        if quiet and not self.is_alive:
            return
        self.check_alive()
        assert self._connection is not None
        for op in recorded:
            check_sendable(op, self._connection.capabilities)
        self._connection.send(recorded)

    def start_soon(self, function: Callable[..., Coroutine[Any, Any, None]], *args: Any) -> None:
        """A task that ends with the session. For runs."""
        self.check_alive()
        assert self._tasks is not None
        self._tasks.start_soon(function, *args)

    def register(self, state: State) -> None:
        """Events of this state are for it. For runs."""
        self._states[state.id] = state

    def expect(self, variable: Variable[Any]) -> None:
        """Events of this variable are for it. For states."""
        self._variables[variable.id] = variable

    @property
    def is_tracing(self) -> bool:
        """Whether nothing runs here: awaits end at once. For traces."""
        return False

    def needs_values(self, what: str) -> None:
        """``what`` can be done where there are values: in a trace it raises ``DataDependent``. For states."""

    def awaited(self, variable: Variable[Any]) -> Any:
        """What stands for the value of ``variable`` where no value will come. For traces."""
        return None

    def state_of(self, state_id: int) -> State | None:
        """The state of that number, if it is open. For runs."""
        return self._states.get(state_id)

    def is_open(self, state: State) -> bool:
        """Whether the backend still knows the state. For states."""
        return state.id in self._states

    def forget(self, state: State) -> None:
        """The backend may drop the state and its variables. For states."""
        if self._states.pop(state.id, None) is not None:
            self.send([ops.Close(state.id)], quiet=True)

    def settle(self, variable: Variable[Any], error: ErrorInfo) -> None:
        """The variable will have no value. For states."""
        self._variables.pop(variable.id, None)
        variable.fail(error)
        variable.state.run.touch(variable)

    def _deliver(self, events: Iterable[Event]) -> None:
        for event in events:
            match event:
                case Delta():
                    variable = self._variables.get(event.var)
                    if variable is not None:
                        variable.extend(event.at, event.text)
                        variable.state.run.touch(variable)
                case Value() | VarFailed():
                    self._end_variable(event)
                case Reached():
                    if event.state in self._states:
                        self._states[event.state].reach(event.ticket)
                case StateFailed():
                    if event.state in self._states:
                        self._states[event.state].fail(event.error)
                case StatsReply():
                    if event.ticket in self._answers:
                        self._answers[event.ticket][1].append(event)
                        self._answers[event.ticket][0].set()

    def _end_variable(self, event: Value | VarFailed) -> None:
        variable = self._variables.pop(event.var, None)
        if variable is None:
            return
        if isinstance(event, Value):
            variable.complete(event)
            variable.state.end_variable(event.var)
            variable.state.run.usage += event.usage
        else:  # its state fails too, and says so itself
            variable.fail(event.error)
        variable.state.run.touch(variable)

    def _lose(self, error: Exception) -> None:
        """The backend is gone: everybody who waits for it hears why."""
        self._failure = (
            error if isinstance(error, AgentflowError) else ServerLost(f"the backend is gone: {error!r}")
        )
        self._end_all(ErrorInfo.of(self._failure))

    def _end_all(self, error: ErrorInfo) -> None:
        """Nothing will come any more: whoever waits hears why."""
        for variable in list(self._variables.values()):
            self.settle(variable, error)
        for state in list(self._states.values()):
            state.fail(error)
        for arrived, _ in self._answers.values():
            arrived.set()
