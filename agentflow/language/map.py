"""A program on many inputs: a list of results to await, or an ordered stream of them.

The work of a map: reads inputs, runs the program on them side by side, keeps results for their reader.

It lives in a task of the session. Whoever reads the results holds a ``ProgramMap``, which this module
does not know: so that a map that nobody holds any more can be noticed, and ended.

The inputs of a map: read one by one from any iterable, and turned into the program's arguments.
"""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sized,
)
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, NoReturn, TypeAlias, TypedDict, TypeVar, cast

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from agentflow.errors import BadArgument, Cancelled, short_repr
from agentflow.language.graph import Graph
from agentflow.language.run import Run, check_program
from agentflow.language.submit import GraphRun
from agentflow.protocol.events import Usage
from agentflow.protocol.sampling import is_whole
from agentflow.runtime.task_group import CallInLoop, loop_caller, open_task_group

if TYPE_CHECKING:
    from rich.console import Console

    from agentflow.language.session import Session


ItemT = TypeVar("ItemT")

ManyOf: TypeAlias = Iterable[ItemT] | AsyncIterable[ItemT]
Inputs: TypeAlias = ManyOf[Any]


class MapOptions(TypedDict, total=False):
    """What ``map`` takes besides; see there."""

    concurrency: int
    progress: bool


END: Final = object()


class MapInputs:
    """Reads ``inputs`` once, from front to back. ``total``: how many there are, where that is known."""

    def __init__(self, inputs: Inputs) -> None:
        if isinstance(inputs, str | bytes | Mapping):
            raise BadArgument(
                f"map: the inputs are a {type(inputs).__name__}, which is one input: "
                "give a list (or another iterable) of inputs"
            )
        self.total = _length(inputs)
        self._source: AsyncIterator[Any] | Iterator[Any]
        if isinstance(inputs, AsyncIterable):
            self._source = aiter(inputs)
            return
        try:
            self._source = iter(inputs)
        except TypeError as error:
            raise BadArgument(
                f"map: inputs {short_repr(inputs)} cannot be iterated: give a list, a generator, "
                "or an async iterable of inputs"
            ) from error

    async def read(self) -> Any:
        """The next input, or ``END``."""
        if isinstance(self._source, AsyncIterator):
            try:
                return await anext(self._source)
            except StopAsyncIteration:
                return END
        return next(self._source, END)

    async def close(self) -> None:
        """No more will be read: a generator gets to clean up now, not when it is collected."""
        if inspect.isasyncgen(self._source):
            await self._source.aclose()
        elif inspect.isgenerator(self._source):
            self._source.close()


def arguments_of(item: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a program is called with for one input: a tuple is spread over the positional arguments, a
    dict over the keyword arguments, anything else is the one argument. Subclasses are values (a named
    tuple has a meaning of its own)."""
    if type(item) is tuple:
        return item, {}
    if type(item) is dict:
        return (), item
    return (item,), {}


def _length(inputs: Inputs) -> int | None:
    if not isinstance(inputs, Sized):
        return None
    try:
        return len(inputs)
    except (TypeError, NotImplementedError):  # a collection that does not know before it is read
        return None


ResultT = TypeVar("ResultT")
OnError = Literal["raise", "return"]

READ_AHEAD = 4
"""So many times ``concurrency`` inputs are read at most before the first result is taken: one slow run
at the front must not leave the others idle at once, and a slow reader must not fill the memory."""


@dataclass
class Tally:
    """How far a map has got. ``total``: of inputs, where known; ``usage``: of the runs that have ended."""

    total: int | None = None
    num_done: int = 0
    num_failed: int = 0
    usage: Usage = field(default_factory=Usage)


class MapWork(Generic[ResultT]):
    """``start`` begins the work; ``take`` gives the results in the order of the inputs."""

    def __init__(
        self,
        session: Session,
        program: Callable[..., Awaitable[ResultT]] | Graph,
        inputs: MapInputs,
        *,
        concurrency: int,
        on_error: OnError,
        console: Console | None,
    ) -> None:
        self.tally = Tally(inputs.total)
        self._session = session
        self._program = program
        self._inputs = inputs
        self._concurrency = concurrency
        self._on_error = on_error
        self._console = console
        self._max_ahead: float = READ_AHEAD * concurrency
        self._scope = anyio.CancelScope()
        self._call_in_loop: CallInLoop | None = None
        self._ended = anyio.Event()
        self._result_came = anyio.Event()
        self._room_came = anyio.Event()
        self._results: dict[int, ResultT | Exception] = {}  # those not taken yet
        self._num_read = 0
        self._num_running = 0
        self._num_taken = 0
        self._show: Callable[[], None] = lambda: None
        self._is_whole = False
        self._failure: Exception | None = None

    def start(self) -> None:
        """Starts the work, unless that has been done."""
        if self._call_in_loop is None and not self._scope.cancel_called:
            self._session.start_soon(self._live)
            self._call_in_loop = loop_caller()

    async def take(self) -> ResultT | Exception:
        """The next result in order. ``StopAsyncIteration`` after the last; the failure that ended the
        map after those that came before it, once."""
        while self._num_taken not in self._results:
            if self._ended.is_set():
                self._raise_end()
            await self._result_came.wait()
        result = self._results.pop(self._num_taken)
        self._num_taken += 1
        self._wake_feed()
        return result

    def take_all(self) -> None:
        """From now on somebody keeps all results: reading ahead saves nothing."""
        self._max_ahead = float("inf")
        self._wake_feed()

    async def stop(self) -> None:
        """Cancels what runs and waits for its end, as a task group does. May be repeated."""
        self._scope.cancel()
        self._results.clear()
        if self._call_in_loop is None:
            self._ended.set()  # it never began
        with anyio.CancelScope(shield=True):
            await self._ended.wait()

    def abandon(self) -> None:
        """Nobody will read any more. Called by the garbage collector: at any point, in any thread."""
        if self._call_in_loop is not None and not self._ended.is_set():
            with suppress(RuntimeError):  # the loop has ended, and the work with it
                self._call_in_loop(self._scope.cancel)

    async def _live(self) -> None:
        try:
            with self._scope, self._shown():
                async with open_task_group() as group:
                    await self._feed(group)
                self._is_whole = self._failure is None
        except Exception as error:
            self._fail(error)  # raised where somebody reads, not in the session's task group
        except anyio.get_cancelled_exc_class():
            self._failure = self._failure or Cancelled("the session ended while the map ran")
            raise
        finally:
            self._ended.set()
            self._result_came.set()

    async def _feed(self, group: TaskGroup) -> None:
        """Starts a run for each input, as soon as there is room."""
        try:
            try:
                while (item := await self._next_input()) is not END:
                    # Numbered here, for the order in which a loop starts its tasks is its own affair: each
                    # input draws the same whenever the session's seed is the same.
                    run_index = self._session.next_run_index()
                    group.start_soon(self._run, self._num_read, run_index, item)
                    self._num_read += 1
                    self._num_running += 1
            finally:
                await self._inputs.close()
        except Exception as error:
            self._fail(error)

    async def _next_input(self) -> Any:
        # Programs get their turn, whatever the inputs are: not every iterator ever waits.
        await anyio.lowlevel.checkpoint()
        while self._num_running >= self._concurrency or self._num_read - self._num_taken >= self._max_ahead:
            self._room_came = anyio.Event()
            await self._room_came.wait()
        self._session.check_alive()
        try:
            return await self._inputs.read()
        except Exception as error:
            error.add_note(f"in map: raised by the inputs, after {self._num_read:,} of them")
            raise

    async def _run(self, index: int, run_index: int, item: Any) -> None:
        run: Run | None = None
        try:
            args, kwargs = arguments_of(item)
            if isinstance(self._program, Graph):
                texts = self._program.named(args, kwargs)
                work = GraphRun(self._session, self._program, texts, index=run_index, objective="throughput")
                run = work.run
                self._end_item(index, await work.result())
            else:
                run = Run(self._session, index=run_index, objective="throughput")
                self._end_item(index, await run.execute(self._program, args, kwargs))
        except Exception as error:
            self._end_in_failure(index, item, error)
        finally:
            self.tally.usage += run.usage if run is not None else Usage()
            self._num_running -= 1
            self._wake_feed()
            self._show()

    def _end_item(self, index: int, result: ResultT | Exception) -> None:
        self.tally.num_done += 1
        self._results[index] = result
        if index == self._num_taken:
            self._result_came.set()
            self._result_came = anyio.Event()

    def _end_in_failure(self, index: int, item: Any, error: Exception) -> None:
        if self._failure is not None or self._scope.cancel_called:
            return  # a program that was cancelled may fail as well: what cancelled it is what matters
        self.tally.num_failed += 1
        if not self._session.is_alive:
            self._fail(error)  # and no failure of this input: all that are to come would meet it
        elif self._on_error == "return":
            self._end_item(index, error)
        else:
            error.add_note(f"in map: input {index} was {short_repr(item)}")
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """The first failure ends the map."""
        if self._failure is None and not self._scope.cancel_called:
            self._failure = error
            self._scope.cancel()

    def _raise_end(self) -> NoReturn:
        failure, self._failure = self._failure, None
        if failure is not None:
            self._is_whole = True  # it is told: there is no more to come
            self._results.clear()
            self._num_read = self._num_taken
            raise failure from failure.__cause__
        if not self._is_whole or self._num_taken < self._num_read:
            raise Cancelled("the map was left or cancelled before this result was there")
        raise StopAsyncIteration

    def _wake_feed(self) -> None:
        self._room_came.set()

    @contextmanager
    def _shown(self) -> Iterator[None]:
        if self._console is None:
            yield
            return
        from agentflow.language.progress import shown_on

        with shown_on(self._console, self.tally) as self._show:
            yield


DEFAULT_CONCURRENCY = 64


class ProgramMap(Generic[ResultT]):
    """What ``flow.map`` gives. Nothing runs before it is awaited, iterated or entered.

    ``await`` it for the list of all results (of those not taken yet, where some have been). ``async
    for`` gives them one by one, in the order of the inputs, in bounded memory: before the first result
    that was not taken yet, at most ``4 * concurrency`` inputs are read ahead.

    Whoever may stop before the end should enter it, so that leaving the block cancels what runs and
    waits for its end:

    >>> async with flow.map(judge, essays) as grades:
    ...     async for grade in grades:
    ...         if grade == "A":
    ...             break

    Without the block, what runs is cancelled when the map is dropped (at once, after ``break`` in
    ``async for grade in flow.map(judge, essays)``) and ends with the session at the latest. A wait for
    one result that is cancelled, by a time-out for example, cancels that wait only; an ``await`` of
    the whole list that is cancelled cancels everything.
    """

    def __init__(
        self,
        session: Session,
        program: Callable[..., Awaitable[Any]] | Graph,
        inputs: Inputs,
        *,
        concurrency: int = DEFAULT_CONCURRENCY,
        on_error: OnError = "raise",
        console: Console | None = None,
    ) -> None:
        if not isinstance(program, Graph):
            check_program(program, "map")
        if not is_whole(concurrency, 1, math.inf):
            raise BadArgument(f"map: concurrency={concurrency!r}: say how many may run at once, 1 or more")
        if on_error not in ("raise", "return"):
            raise BadArgument(
                f"map: on_error={on_error!r}: give 'raise' (the first failure ends the map) "
                "or 'return' (failures stand among the results)"
            )
        session.check_alive()
        self._work: MapWork[ResultT] = MapWork(
            session,
            program,
            MapInputs(inputs),
            concurrency=concurrency,
            on_error=on_error,
            console=console,
        )
        weakref.finalize(self, self._work.abandon).atexit = False

    def __await__(self) -> Generator[object, None, list[ResultT]]:
        return self._collect().__await__()

    async def _collect(self) -> list[ResultT]:
        self._work.take_all()
        try:
            return [result async for result in self]
        except BaseException:
            await self.aclose()
            raise

    def __aiter__(self) -> ProgramMap[ResultT]:
        return self

    async def __anext__(self) -> ResultT:
        work = self._work
        work.start()
        try:
            return cast(ResultT, await work.take())
        finally:
            # The traceback of an exception (a cancellation of the reader, say) keeps this frame, and would
            # keep a map that has been left from being dropped.
            del self

    async def aclose(self) -> None:
        """Cancels what still runs and waits for its end. May be repeated; iterating any further
        raises ``Cancelled``, unless all results had been taken.

        >>> grades = flow.map(judge, essays)
        >>> first = await anext(grades)
        >>> await grades.aclose()
        """
        await self._work.stop()

    async def __aenter__(self) -> ProgramMap[ResultT]:
        self._work.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()
