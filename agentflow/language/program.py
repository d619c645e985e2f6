"""Programs: async functions whose first argument is a state."""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Awaitable, Callable
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar

import anyio

from agentflow.errors import BadArgument, Cancelled
from agentflow.language.graph import Graph
from agentflow.language.map_inputs import short
from agentflow.language.run import Run, called
from agentflow.language.state import State
from agentflow.language.stream import EventStream, ProgramEvent, RunDone
from agentflow.runtime.loop_caller import loop_caller

if TYPE_CHECKING:
    from agentflow.language.session import Session

logger = logging.getLogger(__name__)

P = ParamSpec("P")
ResultT = TypeVar("ResultT")
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
        raise BadArgument(f"program: {short(function)} is no function: decorate an async function of a state")
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
