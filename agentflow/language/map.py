"""A program on many inputs: a list of results to await, or an ordered stream of them.

``ProgramMap`` is what ``flow.map`` returns. Its ``_MapWork`` runs in a task of the session: it reads the
inputs, runs the program on several at once, and keeps the results in order. ``_MapInputs`` reads any
iterable. ``Tally`` counts for the progress display.
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
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, Generic, Literal, NoReturn, TypeAlias, TypedDict, TypeVar, cast

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from agentflow.errors import BadArgument, Cancelled, short_repr
from agentflow.language.graph import Graph
from agentflow.language.link import Link
from agentflow.language.program import check_program, execute
from agentflow.language.run import Run
from agentflow.language.trace import GraphRun
from agentflow.protocol.events import Usage
from agentflow.protocol.sampling import is_whole
from agentflow.runtime.task_group import CallInLoop, loop_caller, open_task_group

ItemT = TypeVar("ItemT")

ManyOf: TypeAlias = Iterable[ItemT] | AsyncIterable[ItemT]
Inputs: TypeAlias = ManyOf[Any]


class MapOptions(TypedDict, total=False):
    """The other options of ``map``; see there."""

    concurrency: int
    progress: bool


_END: Final = object()


class _MapInputs:
    """Reads ``inputs`` once, in order. ``total``: their number, or None if it is unknown."""

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
        """The next input, or ``_END``."""
        if isinstance(self._source, AsyncIterator):
            try:
                return await anext(self._source)
            except StopAsyncIteration:
                return _END
        return next(self._source, _END)

    async def close(self) -> None:
        """Closes a generator now, instead of when it is garbage-collected."""
        if inspect.isasyncgen(self._source):
            await self._source.aclose()
        elif inspect.isgenerator(self._source):
            self._source.close()


def _arguments_of(item: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The program's arguments for one input: a tuple becomes its positional arguments, a dict its keyword
    arguments, anything else its one argument. Instances of subclasses, such as named tuples, are values."""
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
    except (TypeError, NotImplementedError):  # a collection that knows its length only after reading
        return None


ResultT = TypeVar("ResultT")
OnError = Literal["raise", "return"]

READ_AHEAD = 4
"""At most this many times ``concurrency`` inputs are read ahead of the first result that was not taken. One
slow run must not stall the others at once, and a slow reader must not fill the memory."""


@dataclass
class Tally:
    """The progress of a map. ``total``: the number of inputs, if known. ``usage``: the sum over ended
    runs."""

    total: int | None = None
    num_done: int = 0
    num_failed: int = 0
    usage: Usage = field(default_factory=Usage)


Show: TypeAlias = Callable[[Tally], AbstractContextManager[Callable[[], None]]]
"""Displays a tally while a block lasts. The function that the block gets is called after each change."""


class _MapWork(Generic[ResultT]):
    """``start`` begins the work; ``take`` returns the results in the order of the inputs. Holds no reference
    to the ``ProgramMap``, so that the garbage collector can notice a dropped one."""

    def __init__(
        self,
        link: Link,
        program: Callable[..., Awaitable[ResultT]] | Graph,
        inputs: _MapInputs,
        *,
        concurrency: int,
        on_error: OnError,
        show: Show | None,
    ) -> None:
        self.tally = Tally(inputs.total)
        self._link = link
        self._program = program
        self._inputs = inputs
        self._concurrency = concurrency
        self._on_error = on_error
        self._display: AbstractContextManager[Callable[[], None]] = (
            show(self.tally) if show is not None else nullcontext(_do_nothing)
        )
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
        self._refresh: Callable[[], None] = _do_nothing
        self._is_whole = False
        self._failure: Exception | None = None

    def start(self) -> None:
        """Starts the work. May be repeated."""
        if self._call_in_loop is None and not self._scope.cancel_called:
            self._link.start_soon(self._live)
            self._call_in_loop = loop_caller()

    async def take(self) -> ResultT | Exception:
        """The next result in order, then once the failure that ended the map. ``StopAsyncIteration`` after
        the last."""
        while self._num_taken not in self._results:
            if self._ended.is_set():
                self._raise_end()
            await self._result_came.wait()
        result = self._results.pop(self._num_taken)
        self._num_taken += 1
        self._wake_feed()
        return result

    def take_all(self) -> None:
        """Reads ahead without a limit, because the caller keeps all results."""
        self._max_ahead = float("inf")
        self._wake_feed()

    async def stop(self) -> None:
        """Cancels the runs and waits for their end, as a task group does. May be repeated."""
        self._scope.cancel()
        self._results.clear()
        if self._call_in_loop is None:
            self._ended.set()  # it never began
        with anyio.CancelScope(shield=True):
            await self._ended.wait()

    def abandon(self) -> None:
        """Cancels the work of a dropped map. The garbage collector may call this in any thread."""
        if self._call_in_loop is not None and not self._ended.is_set():
            with suppress(RuntimeError):  # the loop has ended, and the work with it
                self._call_in_loop(self._scope.cancel)

    async def _live(self) -> None:
        try:
            with self._scope, self._display as self._refresh:
                async with open_task_group() as group:
                    await self._feed(group)
                self._is_whole = self._failure is None
        except Exception as error:
            self._fail(error)  # raised where the results are read, not in the session's task group
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
                while (item := await self._next_input()) is not _END:
                    # Numbered here, because event loops start tasks in different orders: with the same seed
                    # of the session, each input samples the same.
                    run_index = self._link.next_run_index()
                    group.start_soon(self._run, self._num_read, run_index, item)
                    self._num_read += 1
                    self._num_running += 1
            finally:
                await self._inputs.close()
        except Exception as error:
            self._fail(error)

    async def _next_input(self) -> Any:
        # Lets programs run: not every iterator waits.
        await anyio.lowlevel.checkpoint()
        while self._num_running >= self._concurrency or self._num_read - self._num_taken >= self._max_ahead:
            self._room_came = anyio.Event()
            await self._room_came.wait()
        self._link.check_alive()
        try:
            return await self._inputs.read()
        except Exception as error:
            error.add_note(f"in map: raised by the inputs, after {self._num_read:,} of them")
            raise

    async def _run(self, index: int, run_index: int, item: Any) -> None:
        run: Run | None = None
        try:
            args, kwargs = _arguments_of(item)
            if isinstance(self._program, Graph):
                work = GraphRun(
                    self._link, self._program, args, kwargs, index=run_index, objective="throughput"
                )
                run = work.run
                self._end_item(index, await work.result())
            else:
                run = Run(self._link, index=run_index, objective="throughput")
                self._end_item(index, await execute(run, self._program, args, kwargs))
        except Exception as error:
            self._end_in_failure(index, item, error)
        finally:
            self.tally.usage += run.usage if run is not None else Usage()
            self._num_running -= 1
            self._wake_feed()
            self._refresh()

    def _end_item(self, index: int, result: ResultT | Exception) -> None:
        self.tally.num_done += 1
        self._results[index] = result
        if index == self._num_taken:
            self._result_came.set()
            self._result_came = anyio.Event()

    def _end_in_failure(self, index: int, item: Any, error: Exception) -> None:
        if self._failure is not None or self._scope.cancel_called:
            return  # a program may fail because it was cancelled: only the first error counts
        self.tally.num_failed += 1
        if not self._link.is_alive:
            self._fail(error)  # not a failure of this input: all others would fail too
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
            self._is_whole = True  # raised once: the next call ends the iteration
            self._results.clear()
            self._num_read = self._num_taken
            raise failure from failure.__cause__
        if not self._is_whole or self._num_taken < self._num_read:
            raise Cancelled("the map was left or cancelled before this result was there")
        raise StopAsyncIteration

    def _wake_feed(self) -> None:
        self._room_came.set()


def _do_nothing() -> None:
    pass


DEFAULT_CONCURRENCY = 64


class ProgramMap(Generic[ResultT]):
    """What ``flow.map`` returns. Nothing runs before it is awaited, iterated or entered.

    ``await`` returns the list of all results that were not taken before. ``async for`` yields them one by
    one, in the order of the inputs and in bounded memory: at most ``4 * concurrency`` inputs are read ahead
    of the first result that was not taken.

    If you may stop before the end, enter it: leaving the block cancels the runs and waits for their end.

    >>> async with flow.map(judge, essays) as grades:
    ...     async for grade in grades:
    ...         if grade == "A":
    ...             break

    Without the block, dropping the map cancels the runs, for example by ``break`` in ``async for grade in
    flow.map(judge, essays)``; they end with the session at the latest. Cancelling the wait for one result, by
    a timeout for example, cancels only that wait. Cancelling the ``await`` of the whole list cancels
    everything.
    """

    def __init__(
        self,
        link: Link,
        program: Callable[..., Awaitable[Any]] | Graph,
        inputs: Inputs,
        *,
        concurrency: int = DEFAULT_CONCURRENCY,
        on_error: OnError = "raise",
        show: Show | None = None,
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
        link.check_alive()
        self._work: _MapWork[ResultT] = _MapWork(
            link, program, _MapInputs(inputs), concurrency=concurrency, on_error=on_error, show=show
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
            # The traceback of an exception, such as a cancellation of the reader, keeps this frame, which
            # would keep a dropped map alive.
            del self

    async def aclose(self) -> None:
        """Cancels the runs and waits for their end. May be repeated. Further iteration raises ``Cancelled``
        unless all results had been taken.

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
