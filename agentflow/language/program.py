"""Programs: async functions whose first argument is a state.

``program`` makes a program of a function; ``execute`` calls it on the root state of a run and waits for
everything it started. ``ProgramStream`` runs it in a task of the session and yields its events.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import suppress
from types import FunctionType, TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, Generic, NoReturn, ParamSpec, TypeVar

import anyio

from agentflow.errors import AgentflowError, BadArgument, Cancelled, short_repr
from agentflow.language.by_name import by_name
from agentflow.language.failures.mistakes import AsyncOnly, explain, needs_async_for
from agentflow.language.failures.user_code import UserCode
from agentflow.language.graphs.graph import Graph
from agentflow.language.graphs.trace import called, trace
from agentflow.language.link import Link
from agentflow.language.markers import MARKERS
from agentflow.language.states.event_stream import ProgramEvent, RunDone
from agentflow.language.states.reported import left_by, program_failure
from agentflow.language.states.run import Run
from agentflow.language.states.state import State
from agentflow.language.states.variable import complete_marked_text
from agentflow.runtime.task_group import loop_caller

P = ParamSpec("P")
ResultT = TypeVar("ResultT")
ProgramFunction = Callable[Concatenate[State, P], Awaitable[ResultT]]

logger = logging.getLogger(__name__)


def check_program(program: object, where: str) -> None:
    """``BadArgument`` if ``program`` is not callable."""
    if not callable(program):
        raise BadArgument(
            f"{where}: {short_repr(program)} cannot be called: give the program itself, and its arguments "
            "after it",
            param="program",
        )


def find_program_name(program: Callable[..., Any]) -> str:
    """The name of a program, for ``flow.runs`` and spans."""
    function = program.func if isinstance(program, functools.partial) else program
    return getattr(function, "__name__", type(function).__name__)


async def execute(
    run: Run,
    program: Callable[..., Awaitable[ResultT]],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> ResultT:
    """Calls the program on the run's root state, waits for everything it started, and ends the run."""
    try:
        with UserCode(f"program {find_program_name(program)!r}"):
            with run.record.current():
                result = await called(program, State(run.root), *args, **kwargs)
            await run.settle()
            result = await MARKERS.resolved(result, complete_marked_text)
    except BaseException as error:
        explain(error)
        run.root.cancel(f"its program ended {left_by(error)}", program_failure(error))
        run.record.fail(error)
        raise
    finally:
        run.close(keeps_files=False)
    return result


class Program(Generic[P, ResultT]):
    """An async function of a state. Calling it runs it on the given state, so programs can call each other.

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

    async def __call__(self, state: State, /, *args: P.args, **kwargs: P.kwargs) -> ResultT:
        if not isinstance(state, State):
            raise BadArgument(
                f"a program's first argument is a state, not {type(state).__name__}: "
                "run it with flow.run(program, ...), or hand it the state of the program that calls it",
                param="state",
            )
        return await called(self._function, state, *args, **kwargs)

    def __repr__(self) -> str:
        return f"<Program {find_program_name(self)}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return by_name(self, self._function) or (Program, (self._function,))

    def trace(self, /, *args: Any, **kwargs: Any) -> Graph:
        """The program as a graph, made by running it without a model: with these arguments after its state,
        and stand-ins for the texts, images (``af.Image``) and videos (``af.Video``) that are not given.
        ``flow.submit`` runs the graph.

        ``DataDependent`` has the line at which the program's control flow depends on a generated value.

        >>> graph = judge.trace(dimensions=["clarity", "evidence"])
        >>> print(graph.draw())
        """
        return trace(self._function, args, kwargs)

    @property
    def function(self) -> ProgramFunction[P, ResultT]:
        """The decorated function.

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
            f"program: {short_repr(function)} is not a function: decorate an async function of a state",
            param="function",
        )
    if isinstance(function, FunctionType):
        first, inside = function.__code__.co_varnames[:1], function.__qualname__.rpartition(".")[0]
        if first == ("self",) and inside and not inside.endswith("<locals>"):
            raise BadArgument(
                f"program: {function.__qualname__} is a method, whose first argument is no state: leave out "
                "@af.program, and run the method itself, as in flow.run(agent.ask, …)",
                param="function",
            )
    return Program(function)


class ProgramStream(AsyncOnly):
    """A running program as an async iterator over its events. The last event is ``RunDone``; if the program
    fails, the iteration raises its error. ``async with`` (or ``aclose``) cancels the program if the reader
    stops early, and waits for its end.

    Without the block, leaving the loop cancels the program, for example by ``break``, and so does dropping
    the stream. An error that was not raised is logged then. To read on in another loop, enter the block.

    >>> async with flow.stream(judge, essay) as events:
    ...     async for event in events:
    ...         if isinstance(event, af.VariableDone) and event.name == "judgment":
    ...             break  # one judgment is enough: the rest is cancelled
    """

    def __init__(self, link: Link, run: Run, result: Callable[[], Awaitable[Any]]) -> None:
        async def done() -> RunDone:
            return RunDone(await result())

        self._work = StreamWork(link, run.wake_streams, done)
        self._events = run.watch(self._work.ended.is_set)
        self._is_entered = False
        weakref.finalize(self, self._work.abandon).atexit = False

    def __aiter__(self) -> AsyncIterator[ProgramEvent]:
        return self if self._is_entered else _Reader(self, self._work)

    if not TYPE_CHECKING:

        def __iter__(self) -> NoReturn:
            raise needs_async_for(self)

        def __await__(self) -> NoReturn:
            raise BadArgument(
                "a ProgramStream needs `async for`: `await flow.run(program, …)` gives the result alone"
            )

    async def __anext__(self) -> ProgramEvent:
        work = self._work
        try:
            return await self._events.__anext__()
        except StopAsyncIteration:
            failure, work.failure = work.failure, None
            if failure is not None:
                raise failure from failure.__cause__
            result, work.result = work.result, None
            if result is None and work.was_left:
                raise Cancelled(
                    "a loop over this stream was left, which cancels its program: to read on, iterate inside "
                    "of async with flow.stream(...) as events"
                ) from None
            if result is None:
                raise
            return result  # type: ignore[no-any-return]
        finally:
            # A stored traceback keeps this frame, which would keep a dropped stream alive.
            del self

    async def aclose(self) -> None:
        """Cancels the program if it still runs, and waits for its end. May be repeated.

        >>> events = flow.stream(judge, essay)
        >>> first = await anext(events)
        >>> await events.aclose()
        """
        await self._work.stop()

    async def __aenter__(self) -> ProgramStream:
        self._is_entered = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


class _Reader:
    """The iterator of one loop over a stream. The loop drops it when it is left, also if the program keeps
    the stream; the last one cancels the work then."""

    def __init__(self, stream: ProgramStream, work: StreamWork) -> None:
        self._stream = stream
        work.num_readers += 1
        weakref.finalize(self, work.leave_reader).atexit = False

    def __aiter__(self) -> _Reader:
        return self

    def __anext__(self) -> Coroutine[Any, Any, ProgramEvent]:
        return self._stream.__anext__()


class StreamWork:
    """The work behind a stream of events, such as a ``ProgramStream``, in a task of the session. It holds no
    reference to the stream, so that the garbage collector can notice a dropped one. ``wake`` is called at its
    end. ``was_left``: its last reader left it before that."""

    def __init__(self, link: Link, wake: Callable[[], None], result: Callable[[], Awaitable[Any]]) -> None:
        self._link = link
        self.ended = anyio.Event()
        self.failure: Exception | None = None
        self.result: Any = None
        self.num_readers = 0
        self.was_left = False
        self._wake = wake
        self._scope = anyio.CancelScope()
        self._is_abandoned = False
        self._has_ended_session = False  # the failure is the end of the session
        self._call_in_loop = loop_caller()
        link.start_soon(self._live, result)

    async def stop(self) -> None:
        """Cancels the program and waits for its end. May be repeated."""
        if not self.ended.is_set():
            self._link.check_loop()
        self._scope.cancel()
        await self.ended.wait()

    def abandon(self) -> None:
        """Cancels the program of a dropped stream. The garbage collector may call this in any thread."""
        with suppress(RuntimeError):  # the loop has ended, and the program with it
            self._call_in_loop(self._leave)

    def leave_reader(self) -> None:
        """Cancels the program if no reader is left. The garbage collector may call this in any thread."""
        with suppress(RuntimeError):
            self._call_in_loop(self._leave_reader)

    def _leave_reader(self) -> None:
        self.num_readers -= 1
        if not self.num_readers and not self.ended.is_set():
            self.was_left = True
            self._scope.cancel()

    def _leave(self) -> None:
        self._is_abandoned = True
        self._scope.cancel()
        self._log_failure()

    def _log_failure(self) -> None:
        failure, self.failure = self.failure, None
        if failure is not None and not isinstance(failure, Cancelled) and not self._has_ended_session:
            logger.warning("a program failed whose stream was left", exc_info=failure)

    async def _live(self, result: Callable[[], Awaitable[Any]]) -> None:
        try:
            with self._scope:
                self.result = await result()
        except Exception as error:
            self.failure = error  # raised where the stream is read, not in the session's task group
            self._has_ended_session = isinstance(error, AgentflowError) and not self._link.is_alive
            if self._is_abandoned:
                self._log_failure()
        except anyio.get_cancelled_exc_class():
            self.failure = Cancelled("the session ended while the program ran")
            raise
        finally:
            self.ended.set()
            self._wake()
