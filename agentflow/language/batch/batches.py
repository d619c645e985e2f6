"""A map whose generations run in batches of a vendor: its programs as graphs, and the record of its batches.

Each input's program is traced, which guarantees that it waits for nothing but the model. The graphs of all
inputs run on a separate link, whose backend sends the generations of a stage together.

With ``resume``, a file has a line for each change of a batch, so that an interrupted map finds its batches
again: before a batch is sent, when the vendor has answered, when its results were received, and when one of
these made an input fail. The file is removed when all inputs have results.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from inspect import signature
from typing import Any, Final

import anyio
import anyio.to_thread
import msgspec

from agentflow.errors import BadArgument, Cancelled, InvalidValue, RunFailed
from agentflow.language.batch.inputs import InputKey
from agentflow.language.graphs.graph import Graph
from agentflow.language.graphs.trace import GraphRun, trace
from agentflow.language.link import Link
from agentflow.language.program import Program, find_program_name
from agentflow.protocol import ops
from agentflow.protocol.batches import BatchCounts, BatchRecord, InputAnswers
from agentflow.runtime.locked_file import append, open_locked

FORMAT: Final = 1
FILE_SUFFIX: Final = ".batches"


def batched_run(
    link: Link,
    program: Callable[..., Awaitable[Any]] | Graph,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    index: int,
    label: InputKey,
) -> GraphRun:
    """The run of one input, as a graph.

    Args:
        link: The link to the backend that collects generations.
        program: The program, or its graph.
        args: The arguments by position.
        kwargs: The arguments by name.
        index: The number of the run.
        label: Equal for all requests of the input, and for no others.

    Raises:
        DataDependent: The program's course depends on a generated value.
    """
    graph, texts = program, (args, kwargs)
    if not isinstance(graph, Graph):
        graph, texts = _traced(graph, args, kwargs), ((), {})
    first, *rest = graph.ops
    assert isinstance(first, ops.Open)
    graph = replace(graph, ops=(msgspec.structs.replace(first, label=_state_label(label)), *rest))
    # All values are reported, because each has a part of the costs.
    return GraphRun(link, graph, *texts, index=index, is_streamed=True)


def _state_label(label: InputKey) -> str:
    """The label of the input's states."""
    return hashlib.blake2b(repr(label).encode(), digest_size=16).hexdigest()


def _traced(program: Callable[..., Awaitable[Any]], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Graph:
    function: Any = program.function if isinstance(program, Program) else program
    name = find_program_name(function)
    if not hasattr(function, "__name__"):
        function = partial(function)
        function.__name__ = name
    # Defaults are given as well: a trace has stand-ins for arguments that are missing.
    bound = signature(function).bind(None, *args, **kwargs)
    bound.apply_defaults()
    return trace(function, bound.args[1:], bound.kwargs)


class MapNotes:
    """The map's side of ``BatchNotes``.

    Args:
        show: Shows the progress.
        repeats: Whether a failed input runs again.
    """

    def __init__(self, show: Callable[[BatchCounts], None], *, repeats: bool) -> None:
        self._show = show
        self.repeats = repeats
        self._answers: InputAnswers | None = None  # a replay has none
        self.file: BatchFile | None = None
        """Keeps the records. Without one, they end with the map."""
        self._writing = anyio.Lock()
        self.is_reading = True
        """Whether the map reads inputs now."""
        self.num_unsent = 0
        """The inputs that were read and whose graphs are not sent yet."""

    @property
    def is_kept(self) -> bool:
        """Whether records outlive the map."""
        return self.file is not None

    @property
    def is_fed(self) -> bool:
        """Whether the map begins no more inputs before one of the running ones ends."""
        return not self.is_reading and not self.num_unsent

    def records(self) -> Sequence[BatchRecord]:
        """The batches of earlier maps."""
        return [] if self.file is None else self.file.records()

    async def keep(self, record: BatchRecord) -> None:
        """Writes the record to the disk."""
        if self.file is not None:
            async with self._writing:  # in order
                await anyio.to_thread.run_sync(self.file.add, record)

    def show(self, counts: BatchCounts) -> None:
        """Shows the progress."""
        self._show(counts)

    def connect(self, answers: InputAnswers) -> None:
        """Takes the backend's side."""
        self._answers = answers

    async def fail(self, label: InputKey, error: Exception) -> None:
        """An attempt at the input has failed."""
        texts = _invalid_texts(error)
        if texts and self._answers is not None:
            await self._answers.reject(_state_label(label), texts)

    def repeat(self, label: InputKey) -> None:
        """The next attempt at the input begins."""
        if self._answers is not None:
            self._answers.repeat(_state_label(label))

    def end(self, label: InputKey) -> None:
        """The input has ended."""
        if self._answers is not None:
            self._answers.end(_state_label(label))


def _invalid_texts(error: BaseException | None) -> set[str]:
    """The generated texts that made an attempt fail, because they are no values of their types."""
    if isinstance(error, BaseExceptionGroup):
        return {text for inner in error.exceptions for text in _invalid_texts(inner)}
    if isinstance(error, InvalidValue):
        return {error.text}
    return _invalid_texts(error.__cause__) if isinstance(error, RunFailed | Cancelled) else set()


class _Header(msgspec.Struct):
    agentflow_batches: int
    program: str


class BatchFile:
    """The file of a map's batches.

    Args:
        path: The path of the map's results. The file is next to it.
        program: The name of the program.
        begins: An earlier file is dropped: the map has no results to continue from.

    Raises:
        BadArgument: The file is of another program, or another map writes to it, or it is damaged.
    """

    def __init__(self, path: str, program: str, *, begins: bool) -> None:
        self._path = path + FILE_SUFFIX
        self._records: dict[str, BatchRecord] = {}
        try:
            self._file = open_locked(self._path)
        except BlockingIOError:
            raise self._wrong("another map is writing to it: wait for its end") from None
        except OSError as error:
            raise self._wrong(f"it cannot be opened: {error.strerror}") from None
        try:
            if begins:
                os.ftruncate(self._file, 0)
            self._load(program)
        except BaseException:
            self.close()
            raise

    def _wrong(self, why: str) -> BadArgument:
        return BadArgument(f"resume: {self._path}: {why}", param="resume")

    def _load(self, program: str) -> None:
        with open(self._path, "rb") as file:
            lines = file.read().splitlines(keepends=True)
        if lines and not lines[-1].endswith(b"\n"):  # cut by a crash
            lines.pop()
        os.ftruncate(self._file, sum(map(len, lines)))
        if not lines:
            self._write(msgspec.json.encode(_Header(FORMAT, program)))
            return
        try:
            header = msgspec.json.decode(lines[0], type=_Header)
            records = [msgspec.json.decode(line, type=BatchRecord) for line in lines[1:]]
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise self._wrong(f"it is damaged: {error}") from None
        if header.agentflow_batches != FORMAT or header.program != program:
            raise self._wrong(f"it has the batches of program {header.program!r}, not of {program!r}")
        for record in records:
            known = self._records.get(record.tag)
            if known is not None:
                record.requests, record.sent_at = known.requests, known.sent_at
                record.rejected = known.rejected + record.rejected
            self._records[record.tag] = record

    def records(self) -> list[BatchRecord]:
        """The records, in the order in which they were added."""
        return list(self._records.values())

    def add(self, record: BatchRecord) -> None:
        """Adds a record, or its changes, and waits until they are on the disk."""
        is_known = record.tag in self._records
        # The requests of a record never change.
        changed = msgspec.structs.replace(record, requests=(), sent_at=0.0) if is_known else record
        self._write(msgspec.json.encode(changed))
        self._records[record.tag] = record

    def _write(self, data: bytes) -> None:
        append(self._file, data + b"\n")
        os.fsync(self._file)

    def close(self, *, is_whole: bool = False) -> None:
        """Closes the file. It is removed if all inputs have results."""
        if is_whole:
            with suppress(OSError):
                os.unlink(self._path)
        os.close(self._file)
