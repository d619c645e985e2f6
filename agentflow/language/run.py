"""One run: a root state with all its forks, from the first op until everything it began has ended.

Events as a program's user sees them: text of every branch as it comes, values, the result.

Programs: async functions whose first argument is a state.
"""

from __future__ import annotations

import functools
import inspect
import logging
import weakref
from collections.abc import Awaitable, Callable
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Self, TypeVar

import anyio

from agentflow.errors import AgentflowError, BadArgument, Cancelled, short_repr
from agentflow.language.graph import Graph
from agentflow.language.state import State
from agentflow.language.stream import EventStream, ProgramEvent, RunDone, TextDelta, VariableDone
from agentflow.language.variable import Variable
from agentflow.protocol import ops
from agentflow.protocol.events import ErrorInfo, Usage
from agentflow.protocol.ops import derived_seed, run_of
from agentflow.runtime.task_group import loop_caller

if TYPE_CHECKING:
    from agentflow.language.session import Session
    from agentflow.language.variable import Variable


ResultT = TypeVar("ResultT")


def check_program(program: object, where: str) -> None:
    """``BadArgument`` where it cannot be called."""
    if not callable(program):
        raise BadArgument(
            f"{where}: {short_repr(program)} cannot be called: give the program itself, and what it is "
            "called with beside it"
        )


def called(program: Callable[..., Awaitable[ResultT]], *args: Any, **kwargs: Any) -> Awaitable[ResultT]:
    """The program's call, to be awaited. ``BadArgument`` where it cannot be: the function is not async."""
    running = program(*args, **kwargs)
    if not inspect.isawaitable(running):
        raise BadArgument(
            f"{short_repr(program)} returned {short_repr(running)}, which cannot be awaited: a program is an "
            "async function"
        )
    return running


class Run:
    """The states of one call of a program, or of one ``flow.state()``. ``index``: from
    ``next_run_index``, where its order matters. ``objective``: a hint for all its states. ``program``: what
    it is a part of, where it is no whole one. ``usage``: of its variables that are complete."""

    def __init__(
        self,
        session: Session,
        *,
        cache_salt: str = "",
        index: int | None = None,
        root_id: int | None = None,
        objective: ops.Objective | None = None,
        program: str = "",
        root_type: type[State] = State,
    ) -> None:
        self.session = session
        self.index = session.next_run_index() if index is None else index
        self.usage = Usage()
        self.places: dict[int, str] = {}
        """Of a trace: where its gens stand."""
        self._states: list[State] = []
        self._variables: dict[int, Variable[Any]] = {}
        self._failed: list[Variable[Any]] = []
        self._told: set[ErrorInfo] = set()
        # Weak: a reader that is gone needs no news.
        self._streams: weakref.WeakSet[EventStream] = weakref.WeakSet()
        if root_id is None:  # otherwise it is opened by a graph
            root_id = session.next_id()
            session.send([ops.Open(root_id, cache_salt, objective, program)])
        self.root = self.adopt(root_type(self, root_id, ()))

    async def execute(
        self, program: Callable[..., Awaitable[ResultT]], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> ResultT:
        """Calls the program on the root state, waits for everything it left running, and ends."""
        try:
            result = await called(program, self.root, *args, **kwargs)
            await self._settle()
        except BaseException:
            self.root.cancel()
            raise
        finally:
            self.close()
        return result

    async def _settle(self) -> None:
        """Nothing outlives the run: waits for what nobody awaited, and raises what failed there,
        unless the program has been told of that failure already."""
        for state in self._states:
            state.ask()
        for state in self._states:
            await state.settled()
        # Those that functions of the program provide: no state waits for them.
        provided = [*self._failed, *self._variables.values()]
        for variable in provided:
            await variable.settled()
        errors = [state.error for state in self._states] + [variable.error for variable in provided]
        for error in errors:
            if error is not None and error.code != Cancelled.code and error.origin not in self._told:
                raise self._located(error)

    @property
    def seed_prefix(self) -> str:
        """What the seeds of this run have in common."""
        return run_of(self.session.seed, self.index)

    def seed_at(self, var_id: int, place: str) -> int | None:
        """The seed of a gen that names none; in a trace None, and the place is kept."""
        if self.session.is_tracing:
            self.places[var_id] = place
            return None
        return derived_seed(self.seed_prefix, place)

    @property
    def states(self) -> list[State]:
        """Its states so far, the root first."""
        return list(self._states)

    def told(self, error: ErrorInfo) -> AgentflowError:
        """The exception of a failure that is now raised in the program: how to go on is up to it."""
        self._told.add(error.origin)
        return self._located(error)

    def _located(self, error: ErrorInfo) -> AgentflowError:
        """The exception, with a note that names the program's line whose op failed."""
        exception = error.to_exception()
        place = error.place
        state = self.session.state_of(place[0]) if place is not None else None
        line = state.line_of(place[1]) if state is not None and place is not None else None
        if line is not None:
            exception.add_note(f"what failed was appended at {line}")
        return exception

    def adopt(self, state: State) -> State:
        """A state of this run. For the run and ``State.fork``."""
        self._states.append(state)
        self.session.register(state)
        return state

    def touch(self, variable: Variable[Any]) -> None:
        """A variable is new, or has news: whoever watches hears of it."""
        if variable.is_done:
            if self._variables.pop(variable.id, None) is not None and variable.error is not None:
                self._failed.append(variable)
        else:
            self._variables.setdefault(variable.id, variable)
        if not variable.is_shown:
            return
        for stream in self._streams:
            stream.touch(variable)

    def watch(self, is_over: Callable[[], bool], *, as_sent: bool = False) -> EventStream:
        """The events of all variables of this run until ``is_over``; replays what there is."""
        stream = EventStream(is_over, as_sent=as_sent)
        for state in self._states:
            for variable in state.variables:
                stream.touch(variable)
        self._streams.add(stream)
        return stream

    def watch_state(self, state: State) -> EventStream:
        """The events of one state's variables, until all that it has now are done."""
        stream = _StateStream(state)
        for variable in state.variables:
            stream.touch(variable)
        self._streams.add(stream)
        return stream

    def wake_streams(self) -> None:
        """Something ended: streams look whether they are over."""
        for stream in self._streams:
            stream.wake()

    def close(self) -> None:
        """All its states end."""
        for state in reversed(self._states):
            state.close()
        self.wake_streams()

    @property
    def is_unfinished(self) -> bool:
        """Whether some of its variables are not done."""
        return bool(self._variables)


class RootState(State):
    """What ``flow.state()`` gives: a state without a program, which leaving its ``async with`` ends."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None or self._run.is_unfinished:
            self.cancel()
        self._run.close()


class _StateStream(EventStream):
    """Raises at its end what failed of the state's variables."""

    def __init__(self, state: State) -> None:
        super().__init__(lambda: all(variable.is_done for variable in state.variables))
        self._state = state
        self._has_ended = False

    def touch(self, variable: Variable[Any]) -> None:
        if variable.state is self._state:
            super().touch(variable)

    async def __anext__(self) -> TextDelta | VariableDone:
        try:
            return await super().__anext__()
        except StopAsyncIteration:
            if not self._has_ended:
                self._has_ended = True
                for variable in self._state.variables:
                    variable.raise_failure()
            raise


logger = logging.getLogger(__name__)

P = ParamSpec("P")
ProgramFunction = Callable[Concatenate[State, P], Awaitable[ResultT]]


class Program(Generic[P, ResultT]):
    """An async function on a state. Calling it runs it on the state given: programs compose.

    >>> @af.program
    ... async def judge_twice(s: af.State, essay: str) -> list[str]:
    ...     return [await judge(s.copy(), essay), await judge(s.copy(), essay)]
    >>> await flow.run(judge_twice, essay)
    ['A', 'A']
    """

    __name__: str

    def __init__(self, function: ProgramFunction[P, ResultT]) -> None:
        self._function = function
        functools.update_wrapper(self, function)

    async def __call__(self, state: State, *args: P.args, **kwargs: P.kwargs) -> ResultT:
        if not isinstance(state, State):
            raise BadArgument(
                f"a program's first argument is a state, not {type(state).__name__}: "
                "run it with flow.run(program, ...), or hand it the state of the program that calls it"
            )
        return await called(self._function, state, *args, **kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> Graph:
        """The program as a graph, made by running it without a model: with these arguments after its
        state, and stand-ins for the text arguments that are not given. ``flow.submit`` runs it.

        ``DataDependent`` names the line where the program's course follows from a value.

        >>> graph = judge.trace(dimensions=["clarity", "evidence"])
        >>> print(graph.draw())
        """
        from agentflow.language.trace import trace

        return trace(self._function, args, kwargs)

    @property
    def function(self) -> ProgramFunction[P, ResultT]:
        """The function that was decorated.

        >>> judge.function.__name__
        'judge'
        """
        return self._function


def program(function: ProgramFunction[P, ResultT]) -> Program[P, ResultT]:
    """Makes an async function a program.

    >>> @af.program
    ... async def greet(s: af.State, name: str) -> str:
    ...     s += af.user(f"Greet {name}.")
    ...     s += af.assistant(af.gen("greeting", max_tokens=16))
    ...     return await s["greeting"]
    """
    if not callable(function):
        raise BadArgument(
            f"program: {short_repr(function)} is no function: decorate an async function of a state"
        )
    return Program(function)


class ProgramStream:
    """A running program as an async iterator over its events; the last is ``RunDone``. A failure of
    the program is raised by the iteration. ``async with`` (or ``aclose``) cancels what is left when
    the reader stops early, and waits for its end.

    Without the block, the program is cancelled when the stream is dropped (at once, after ``break`` in
    ``async for event in flow.stream(judge, essay)``); an unread failure is logged then.

    >>> async with flow.stream(judge, essay) as events:
    ...     async for event in events:
    ...         if isinstance(event, af.VariableDone) and event.name == "judgment":
    ...             break  # one judgment is enough: what still runs is cancelled
    """

    def __init__(self, session: Session, run: Run, result: Callable[[], Awaitable[Any]]) -> None:
        self._work = _StreamWork(session, run, result)
        self._events: EventStream = self._work.run.watch(self._work.ended.is_set)
        weakref.finalize(self, self._work.abandon).atexit = False

    def __aiter__(self) -> ProgramStream:
        return self

    async def __anext__(self) -> ProgramEvent:
        work = self._work
        try:
            return await self._events.__anext__()
        except StopAsyncIteration:
            failure, work.failure = work.failure, None
            if failure is not None:
                raise failure from failure.__cause__
            result, work.result = work.result, None
            if result is None:
                raise
            return result
        finally:
            # A traceback that is kept keeps this frame, and would keep a stream that was left.
            del self

    async def aclose(self) -> None:
        """Cancels the program if it still runs, and waits for its end. May be repeated.

        >>> events = flow.stream(judge, essay)
        >>> first = await anext(events)
        >>> await events.aclose()
        """
        await self._work.stop()

    async def __aenter__(self) -> ProgramStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


class _StreamWork:
    """The run behind a ``ProgramStream``, in a task of the session. It does not know the stream, so that a
    stream that was dropped can be noticed."""

    def __init__(self, session: Session, run: Run, result: Callable[[], Awaitable[Any]]) -> None:
        self.run = run
        self.ended = anyio.Event()
        self.failure: Exception | None = None
        self.result: RunDone | None = None
        self._scope = anyio.CancelScope()
        self._is_abandoned = False
        self._call_in_loop = loop_caller()
        session.start_soon(self._live, result)

    async def stop(self) -> None:
        """Cancels what runs and waits for its end. May be repeated."""
        self._scope.cancel()
        await self.ended.wait()

    def abandon(self) -> None:
        """The stream was dropped. Called by the garbage collector: at any point, in any thread."""
        with suppress(RuntimeError):  # the loop has ended, and the work with it
            self._call_in_loop(self._leave)

    def _leave(self) -> None:
        self._is_abandoned = True
        self._scope.cancel()
        self._log_failure()

    def _log_failure(self) -> None:
        failure, self.failure = self.failure, None
        if failure is not None and not isinstance(failure, Cancelled):
            logger.warning("a program failed whose stream was left", exc_info=failure)

    async def _live(self, result: Callable[[], Awaitable[Any]]) -> None:
        try:
            with self._scope:
                self.result = RunDone(await result())
        except Exception as error:
            self.failure = error  # raised where the stream is read, not in the session's task group
            if self._is_abandoned:
                self._log_failure()
        except anyio.get_cancelled_exc_class():
            self.failure = Cancelled("the session ended while the program ran")
            raise
        finally:
            self.ended.set()
            self.run.wake_streams()
