"""A program on many inputs: a list of results to await, or an ordered stream of them.

``flow.map`` returns a ``ProgramMap``. Its ``_MapWork`` runs in a task of the session: it reads the inputs,
runs the program on several concurrently, retries failures that may pass, and keeps the results in order.
``Tally`` counts for the progress display.
"""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Awaitable, Callable, Generator, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, NoReturn, TypeAlias, TypedDict, TypeVar, cast

import anyio
import anyio.lowlevel
import anyio.to_thread
from anyio.abc import TaskGroup

from agentflow.errors import BadArgument, Cancelled, DataDependent, add_note, short_repr, shown_error
from agentflow.language.batch.inputs import END, InputKey, Inputs, KeyOf, MapInputs, Parameters, TableRow
from agentflow.language.batch.retries import pause_s
from agentflow.language.failures.mistakes import AsyncOnly, needs_async_for, unfit_arguments
from agentflow.language.failures.user_code import UserCode
from agentflow.language.graphs.graph import Graph
from agentflow.language.graphs.trace import GraphRun
from agentflow.language.link import Link
from agentflow.language.program import check_program, execute, find_program_name
from agentflow.language.states.run import Run
from agentflow.language.typed.json_form import record_fields
from agentflow.protocol.backend import Backend
from agentflow.protocol.batches import BatchCounts, batched
from agentflow.protocol.events import Usage
from agentflow.protocol.sampling import is_whole
from agentflow.runtime.task_group import CallInLoop, loop_caller, open_task_group

if TYPE_CHECKING:
    from agentflow.language.batch.batches import MapNotes
    from agentflow.language.batch.results_file import ResultsFile


class MapOptions(TypedDict, total=False):
    """The other options of ``Session.map``."""

    concurrency: int | None
    progress: bool
    retries: int
    resume: str | os.PathLike[str] | None
    key: KeyOf | None
    batch: bool


ResultT = TypeVar("ResultT")
OnError = Literal["raise", "return"]

READ_AHEAD = 4
"""At most this many times ``concurrency`` inputs are read ahead of the first result that was not taken. One
slow run must not stall the others too soon, and a slow reader must not fill the memory."""


@dataclass
class Tally:
    """The progress of a map, or of another call."""

    total: int | None = None  # the number of inputs, if it is known
    num_done: int = 0
    num_failed: int = 0
    usage: Usage = field(default_factory=Usage)  # the sum over ended runs
    num_retries: int = 0  # attempts after the first ones
    num_resumed: int = 0  # ended inputs that an earlier map had completed
    name: str = "map"  # of the call
    batches: BatchCounts | None = None  # of a map in batches


ShowTally: TypeAlias = Callable[[Tally], AbstractContextManager[Callable[[], None]]]
"""Displays a tally while a block lasts. The function that the block gets is called after each change."""


class _MapWork(Generic[ResultT]):
    """``start`` begins the work; ``take`` returns the results in the order of the inputs. Holds no reference
    to the ``ProgramMap``, so that the garbage collector can notice a dropped one."""

    def __init__(
        self,
        link: Link,
        program: Callable[..., Awaitable[ResultT]] | Graph,
        inputs: MapInputs,
        *,
        concurrency: int,
        on_error: OnError,
        show: ShowTally | None,
        retries: int,
        resume: str | os.PathLike[str] | None,
        key: KeyOf | None,
        backend: Backend | None,
    ) -> None:
        self.tally = Tally(inputs.total)
        self.parameters = Parameters(program)
        self._retries = retries
        self._file: ResultsFile | None = None
        self._make_file: Callable[[], ResultsFile] | None = None
        if resume is not None:
            from agentflow.language.batch import results_file  # not every program keeps its results

            results_file.check_path(resume)
            form = results_file.result_form(program)
            self._make_file = partial(results_file.ResultsFile.open, resume, program, form)
            self._key_of = results_file.Keys(key)
        self._resume = resume
        self._notes: MapNotes | None = None
        self._batched: Backend | None = None
        if backend is not None:
            from agentflow.language.batch.batches import MapNotes  # not every program runs in batches

            self._notes = MapNotes(self._show_batches, repeats=retries > 0)
            if not link.is_replay:  # a replay has the answers of batches among all others
                self._batched = batched(backend, self._notes, link.capabilities.model)
        self._keys: list[InputKey] = []  # of the file, in the order of the inputs
        self._is_synced = True
        self._group: TaskGroup
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
        self._results: dict[int, tuple[Any, ResultT | Exception]] = {}  # with their inputs; not taken yet
        self._name = ""  # in the session, after its first run
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

    async def take(self) -> tuple[Any, ResultT | Exception]:
        """The next input and its result in order, then once the failure that ended the map.
        ``StopAsyncIteration`` after the last."""
        while self._num_taken not in self._results:
            if self._ended.is_set():
                self._raise_end()
            await self._result_came.wait()
        found = self._results.pop(self._num_taken)
        self._num_taken += 1
        self._wake_feed()
        return found

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
            with self._scope:
                await self._open_file()
                with self._display as self._refresh:
                    async with self._opened_link() as self._link, open_task_group() as self._group:
                        await self._feed()
                    self._is_whole = self._failure is None
        except Exception as error:
            self._fail(error)  # raised where the results are read, not in the session's task group
        except anyio.get_cancelled_exc_class():
            self._failure = self._failure or Cancelled("the session ended while the map ran")
            raise
        finally:
            await self._close_file()
            self._ended.set()
            self._result_came.set()

    async def _open_file(self) -> None:
        if self._make_file is None or self._resume is None:
            return
        from agentflow.language.batch import results_file

        path = os.fspath(self._resume)
        begins = self._notes is not None and not await anyio.Path(path + results_file.LOG_SUFFIX).exists()
        self._file = await anyio.to_thread.run_sync(self._make_file)
        if self._notes is not None:
            from agentflow.language.batch.batches import BatchFile

            name = results_file.program_name(self._program)
            open_file = partial(BatchFile, path, name, begins=begins)
            self._notes.file = await anyio.to_thread.run_sync(open_file)

    def _opened_link(self) -> AbstractAsyncContextManager[Link]:
        """The link on which the programs run."""
        return nullcontext(self._link) if self._batched is None else self._link.to_backend(self._batched)

    def _show_batches(self, counts: BatchCounts) -> None:
        self.tally.batches = counts
        self._refresh()

    async def _close_file(self) -> None:
        file, self._file = self._file, None
        if file is None:
            return
        has_all = False
        try:
            with anyio.CancelScope(shield=True):
                try:
                    await anyio.to_thread.run_sync(file.close, self._keys if self._is_whole else None)
                    has_all = self._is_whole and not self.tally.num_failed
                finally:
                    if self._notes is not None and self._notes.file is not None:
                        await anyio.to_thread.run_sync(partial(self._notes.file.close, is_whole=has_all))
        except OSError as error:
            self._is_whole = False
            self._failure = self._failure or error

    async def _sync_file(self) -> None:
        """Syncs until nothing is left. Results that come meanwhile share the next turn."""
        while not self._is_synced:
            self._is_synced = True
            if self._file is not None:
                await anyio.to_thread.run_sync(self._file.sync)

    async def _feed(self) -> None:
        """Starts a run for each input, as soon as there is room."""
        try:
            try:
                while (item := await self._next_input()) is not END:
                    # Numbered here, because event loops start tasks in different orders: with the same
                    # session seed, each input gets the same samples.
                    run_index = self._link.next_run_index()
                    self._name = self._name or f"map {run_index}"
                    index, self._num_read = self._num_read, self._num_read + 1
                    if not self._is_resumed(index, item):
                        self._num_running += 1
                        self._note_unsent(1)
                        self._group.start_soon(self._run, index, run_index, item)
            except BaseException as error:
                # The first error counts. After a cancellation, closing may end with any other one.
                with suppress(Exception if isinstance(error, Exception) else BaseException):
                    await self._inputs.close()
                raise
            await self._inputs.close()
        except Exception as error:
            self._fail(error)
        finally:
            self._note_reading(False)

    def _note_reading(self, is_reading: bool) -> None:
        if self._notes is not None:
            self._notes.is_reading = is_reading

    def _note_unsent(self, change: int) -> None:
        if self._notes is not None:
            self._notes.num_unsent += change

    async def _next_input(self) -> Any:
        # Lets programs run: not every iterator waits.
        await anyio.lowlevel.checkpoint()
        while self._num_running >= self._concurrency or self._num_read - self._num_taken >= self._max_ahead:
            self._room_came = anyio.Event()
            self._note_reading(False)
            await self._room_came.wait()
        self._note_reading(True)
        self._link.check_alive()
        try:
            return await self._inputs.read()
        except Exception as error:
            add_note(error, f"in map: raised by the inputs, after {self._num_read:,} of them")
            raise

    def _is_resumed(self, index: int, item: Any) -> bool:
        """Takes the result from the file, if it is there."""
        if self._file is None:
            return False
        with UserCode("the key of an input"):
            key = self._key_of(item)
        self._keys.append(key)
        if not self._file.has_result(key):
            return False
        self.tally.num_resumed += 1
        with UserCode("reading a result"):
            result = self._file.result(key)
        self._end_item(index, item, result)
        self._refresh()
        return True

    async def _run(self, index: int, run_index: int, item: Any) -> None:
        used = Usage()
        num_failed = 0
        try:
            while True:
                run: Run | None = None
                try:
                    # Each attempt is a separate run with new samples, except of requests that were answered
                    # in batches; the runs of other inputs keep their numbers.
                    try:
                        run, result = self._begin(index, run_index + num_failed * _RUNS_OF_AN_ATTEMPT, item)
                    finally:
                        if not num_failed:
                            self._note_unsent(-1)
                    ended = await result()
                    break
                except Exception as error:
                    num_failed += 1
                    if self._notes is not None:
                        await self._notes.fail(self._label(index), error)
                    pause = pause_s(error, num_failed)
                    if pause is None or num_failed > self._retries or not self._link.is_alive:
                        raise
                    self.tally.num_retries += 1
                finally:
                    used += run.record.usage if run is not None else Usage()
                await anyio.sleep(pause)  # noqa: TID251  # the back-off before the next attempt
                if self._notes is not None:
                    self._notes.repeat(self._label(index))
        except Exception as error:
            self._end_in_failure(index, item, error, used)
        else:
            self._keep(index, item, ended, used)
        finally:
            if self._notes is not None:
                self._notes.end(self._label(index))
            self.tally.usage += used
            self._num_running -= 1
            self._wake_feed()
            self._refresh()

    def _begin(self, index: int, run_index: int, item: Any) -> tuple[Run, Callable[[], Awaitable[ResultT]]]:
        """The run of one attempt, and the awaitable of its result."""
        args, kwargs = self.parameters.arguments(item)
        if self._notes is not None:
            from agentflow.language.batch.batches import batched_run

            label = self._label(index)
            work = batched_run(self._link, self._program, args, kwargs, index=run_index, label=label)
            return work.run, work.result
        if isinstance(self._program, Graph):
            work = GraphRun(
                self._link,
                self._program,
                args,
                kwargs,
                index=run_index,
                objective="throughput",
                group=self._name,
            )
            return work.run, work.result
        run = Run(
            self._link,
            index=run_index,
            objective="throughput",
            group=self._name,
            name=find_program_name(self._program),
        )
        return run, partial(execute, run, self._program, args, kwargs)

    def _label(self, index: int) -> InputKey:
        """Returns a label for the requests of an input, which no other input has."""
        return self._keys[index] if self._keys else index

    def _keep(self, index: int, item: Any, result: ResultT, used: Usage) -> None:
        try:
            if self._file is not None:
                with UserCode("keeping a result"):
                    result = self._file.add_result(self._keys[index], result, used)
                self._begin_sync()
        except Exception as error:  # a result that has no form in JSON, or a full disk
            self._fail(error)
        else:
            self._end_item(index, item, result)

    def _begin_sync(self) -> None:
        if self._is_synced:
            self._is_synced = False
            self._group.start_soon(self._sync_file)

    def _end_item(self, index: int, item: Any, result: ResultT | Exception) -> None:
        self.tally.num_done += 1
        self._results[index] = item, result
        if index == self._num_taken:
            self._result_came.set()
            self._result_came = anyio.Event()

    def _end_in_failure(self, index: int, item: Any, error: Exception, used: Usage) -> None:
        if self._failure is not None or self._scope.cancel_called:
            return  # a program may fail because it was cancelled: only the first error counts
        self.tally.num_failed += 1
        if not self._link.is_alive or (self._notes is not None and isinstance(error, DataDependent)):
            self._fail(error)  # not a failure of this input: all others would fail too
            return
        if self._file is not None:
            try:
                self._file.add_failure(self._keys[index], error, used)
            except OSError as lost:
                self._fail(lost)
                return
            self._begin_sync()
        if self._on_error == "return":
            self._end_item(index, item, error)
        else:
            add_note(error, f"in map: input {index} was {short_repr(item)}")
            if (advice := unfit_arguments(error, item)) is not None:
                add_note(error, advice)
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


DEFAULT_CONCURRENCY: Final = 64
"""The maximum number of inputs that run concurrently by default; fewer if the backend's batches are
smaller."""
DEFAULT_BATCH_CONCURRENCY: Final = 10_000
"""The maximum number of inputs that wait for batches at the same time by default."""
_RUNS_OF_AN_ATTEMPT: Final = 2**40
"""Larger than any run index."""


class ProgramMap(AsyncOnly, Generic[ResultT]):
    """The return value of ``flow.map``. Nothing runs before it is awaited, iterated or entered.

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

    The arguments are as in ``flow.map``.
    """

    def __init__(
        self,
        link: Link,
        program: Callable[..., Awaitable[Any]] | Graph,
        inputs: Inputs,
        *,
        concurrency: int | None = None,
        on_error: OnError = "raise",
        show: ShowTally | None = None,
        retries: int = 0,
        resume: str | os.PathLike[str] | None = None,
        key: KeyOf | None = None,
        batch: bool = False,
        backend: Backend | None = None,
    ) -> None:
        if not isinstance(program, Graph):
            check_program(program, "map")
        if concurrency is not None and not is_whole(concurrency, 1, math.inf):
            raise BadArgument(
                f"map: concurrency={concurrency!r}: give a whole number, 1 or more", param="concurrency"
            )
        if on_error not in ("raise", "return"):
            raise BadArgument(
                f"map: on_error={on_error!r}: give 'raise' (the first failure ends the map) "
                "or 'return' (failures stand among the results)",
                param="on_error",
            )
        if not is_whole(retries, 0, math.inf):
            raise BadArgument(
                f"map: retries={retries!r}: say how often a failed input runs again, 0 or more",
                param="retries",
            )
        if resume is not None and not isinstance(resume, str | os.PathLike):
            raise BadArgument(f"map: resume={resume!r}: give the path of a file", param="resume")
        if key is not None and (resume is None or not (isinstance(key, str) or callable(key))):
            raise BadArgument(
                f"map: key={key!r}: give a field or a function that identifies an input, and resume=",
                param="key",
            )
        link.check_alive()
        link.check_runs()
        if batch and concurrency is None:
            concurrency = DEFAULT_BATCH_CONCURRENCY
        if concurrency is None:
            concurrency = min(DEFAULT_CONCURRENCY, link.capabilities.batch_size or DEFAULT_CONCURRENCY)
        self._work: _MapWork[Any] = _MapWork(
            link,
            program,
            MapInputs(inputs),
            concurrency=concurrency,
            on_error=on_error,
            show=show,
            retries=retries,
            resume=resume,
            key=key,
            backend=backend if batch else None,
        )
        self._pick: Callable[[Any, Any], Any] = _result_only
        self._owner = _Owner()
        weakref.finalize(self._owner, self._work.abandon).atexit = False

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

    if not TYPE_CHECKING:

        def __iter__(self) -> NoReturn:
            raise needs_async_for(self)

    async def __anext__(self) -> ResultT:
        work = self._work
        work.start()
        try:
            return cast(ResultT, self._pick(*await work.take()))
        finally:
            # The traceback of an exception, such as a cancellation of the reader, keeps this frame, which
            # would keep a dropped map alive.
            del self

    @property
    def num_done(self) -> int:
        """The number of inputs that have ended, including inputs whose results were not read yet.

        >>> results = flow.map(judge, essays)
        >>> await results
        ['A', 'A', 'A']
        >>> results.num_done
        3
        """
        return self._work.tally.num_done

    def pairs(self) -> ProgramMap[tuple[Any, ResultT]]:
        """Returns this map with its inputs: it yields pairs of an input and its result.

        >>> async for text, grade in flow.map(judge, essays).pairs():
        ...     print(text, grade)
        On leaves. A
        On light. A
        On sugar. A
        """
        view: ProgramMap[tuple[Any, ResultT]] = ProgramMap.__new__(ProgramMap)
        view._work, view._owner, view._pick = self._work, self._owner, _pair
        return view

    async def to_dicts(self) -> list[dict[str, Any]]:
        """The inputs and results as rows of a table, for ``pandas.DataFrame(rows)`` or
        ``polars.DataFrame(rows)``.

        The columns of an input are the columns of its table or dict, or else the program's parameters. A
        result that is a record (a dict, a dataclass, a struct, a model) has a column for each field, any
        other one the column ``result``; ``result_x`` where the input has a column ``x``. The values of a
        record are in the types of JSON, others unchanged. Failures, with ``on_error="return"``, are in the
        column ``error``.

        >>> rows = await flow.map(judge, essays).to_dicts()
        >>> rows[0]
        {'essay': 'On leaves.', 'result': 'A'}
        """
        rows = []
        for item, result in await self.pairs():
            row = self._work.parameters.columns(item)
            rows.append(row | {_free_name(name, row): value for name, value in _fields(result).items()})
        columns = dict.fromkeys(name for row in rows for name in row)
        return [{name: row.get(name) for name in columns} for row in rows]

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


class _Owner:
    """The owner that a map and its ``pairs`` share: when both are dropped, the work ends."""


def _result_only(item: Any, result: Any) -> Any:
    return result


def _pair(item: Any, result: Any) -> tuple[Any, Any]:
    return dict(item) if isinstance(item, TableRow) else item, result


def _fields(result: Any) -> dict[str, Any]:
    if isinstance(result, Exception):
        return {"error": f"{type(result).__name__}: {shown_error(result, str)}"}
    found = record_fields(result)
    return {"result": result} if found is None else found


def _free_name(name: str, row: Mapping[str, Any]) -> str:
    while name in row:
        name = f"result_{name}"
    return name
