"""The file of a recording: every op that a session sends and every event that it receives, one JSON line
each.

The first line is the ``Header``, every other line an ``Entry`` with its time. ``af.session(record=PATH)``
writes a recording, ``af.Replay(PATH)`` runs a program against it, and ``agentflow replay PATH`` shows it.

A recording contains prompts and answers in plain text.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from os import PathLike
from pathlib import Path
from typing import Literal

import anyio
import anyio.to_thread
import msgspec

from agentflow.errors import BadArgument, BadRecording
from agentflow.protocol.backend import Backend, Connection, Deliver, Lost
from agentflow.protocol.batches import BatchNotes, batched
from agentflow.protocol.events import Capabilities, ErrorInfo, Event, GraphReply, StatsReply, Watched
from agentflow.protocol.ops import GetGraph, GetStats, Op, Unwatch, Upload, Want, Watch
from agentflow.protocol.unreadable import UNREADABLE
from agentflow.recording.images import RecordedImages
from agentflow.runtime.locked_file import append, is_locked, open_locked, unlock
from agentflow.version import __version__

logger = logging.getLogger(__name__)

_UNRECORDED_OPS = (GetGraph, Want, Watch, Unwatch)

VERSION = 2
"""Version 1 had the capabilities of a single model, and a gen always had all sampling parameters."""

SessionEnding = Literal["complete", "failed", "cancelled"]
"""How the session's block ended: normally, by an exception, or by a cancellation or an interrupt."""


class Header(msgspec.Struct, frozen=True):
    """The first line."""

    recording: int  # the version of the format
    agentflow: str  # the version of the package
    started: str  # in UTC
    seed: int  # of the session
    model: str  # the default
    models: dict[str, Capabilities]  # by the names that programs use

    @property
    def resolves_params(self) -> bool:
        """Whether gens were recorded with the defaults of ``SamplingParams``."""
        return self.recording == 1


class _FirstHeader(msgspec.Struct, frozen=True):
    """The first line in version 1."""

    recording: int
    agentflow: str
    started: str
    seed: int
    capabilities: Capabilities


class Entry(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line, with one of the fields after ``at_s``. Consecutive events with the same time were delivered
    together."""

    at_s: float  # after the start
    sent: Op | None = None
    received: Event | None = None
    refused: ErrorInfo | None = None  # the error with which ``send`` rejected ``ops``
    ops: tuple[Op, ...] = ()
    lost: ErrorInfo | None = None  # the error that ended the backend
    ending: SessionEnding | None = None  # in the last line only


@dataclass(frozen=True)
class Recording:
    """A recording that was read from a file."""

    path: Path
    header: Header
    entries: list[Entry]

    @property
    def ending(self) -> SessionEnding | None:
        """How the session ended; None if the file ends before that."""
        return self.entries[-1].ending if self.entries else None

    @property
    def is_truncated(self) -> bool:
        """Whether the recording ends before the last answer."""
        return self.ending in (None, "cancelled")


class Recorded:
    """Wraps a backend, and writes its ops and events to the file ``path``.

    Until the backend is connected, the lines are written to ``PATH.part``, and an earlier recording is kept.
    Then the file is renamed. Live graphs and ``Want`` ops are not recorded. Ops that are sent together, and
    events that are delivered together, are written together; a process that is killed loses at most the lines
    of one write. If the disk fails, the recording ends with an error in the log, and the program continues.
    """

    def __init__(self, backend: Backend, path: str | PathLike[str], seed: int) -> None:
        self._backend = backend
        self._path = _check_path(path, "record", "record")
        self._seed = seed
        self._writer: _Writer | None = None  # while a session is open
        self._model = ""  # the default

    @property
    def is_replay(self) -> bool:
        """The value of the recorded backend."""
        return bool(getattr(self._backend, "is_replay", False))

    @asynccontextmanager
    async def connect(self, deliver: Deliver, lost: Lost) -> AsyncIterator[Connection]:
        """Opens the file, then the backend."""
        writer = self._writer = _Writer(self._path)
        try:
            receive = writer.recording(deliver)

            def lose(error: Exception, *, is_final: bool = True) -> None:
                if is_final:  # otherwise the events before it report the failure
                    writer.write([Entry(writer.now_s(), lost=ErrorInfo.of(error))])
                lost(error, is_final=is_final)

            recorded: _RecordedConnection | None = None
            try:
                async with self._backend.connect(receive, lose) as connection:
                    self._model = next(iter(connection.models))
                    writer.begin(self._seed, connection.models)
                    recorded = _RecordedConnection(connection, writer)
                    yield recorded
            finally:
                if recorded is not None:  # here, because events may arrive while the connection is closed
                    writer.write([Entry(writer.now_s(), ending=recorded.ending)])
        finally:
            self._writer = None
            try:
                await writer.finish_images()
            finally:
                writer.close()

    def batches(self, notes: BatchNotes) -> Backend:
        """The backend for one map in batches, whose ops and events are part of the recording.
        ``NotSupported`` if the recorded backend has none. For the session."""
        writer = self._writer
        assert writer is not None, "the session is open"
        return _RecordedBatches(batched(self._backend, notes, self._model), writer)


class _RecordedBatches:
    """The backend of one map in batches. Its counters are not recorded, because a replay has no batches."""

    def __init__(self, backend: Backend, writer: _Writer) -> None:
        self._backend = backend
        self._writer = writer

    @asynccontextmanager
    async def connect(self, deliver: Deliver, lost: Lost) -> AsyncIterator[Connection]:
        receive = self._writer.recording(deliver, has_stats=False)
        async with self._backend.connect(receive, lost) as connection:
            yield _RecordedConnection(connection, self._writer, has_stats=False)


class _RecordedConnection:
    def __init__(self, connection: Connection, writer: _Writer, *, has_stats: bool = True) -> None:
        self.models = connection.models
        self.ending: SessionEnding = "cancelled"  # until ``end`` is called
        self._connection = connection
        self._writer = writer
        self._has_stats = has_stats

    @property
    def is_connected(self) -> bool:
        return self._connection.is_connected

    @property
    def has_room(self) -> bool:
        return self._connection.has_room

    def send(self, ops: Sequence[Op]) -> None:
        at_s = self._writer.now_s()
        try:  # first, so that an op that cannot be written does not run
            dropped = _UNRECORDED_OPS if self._has_stats else (*_UNRECORDED_OPS, GetStats)
            lines = [
                _encode(Entry(at_s, sent=self._writer.without_bytes(op)))
                for op in ops
                if not isinstance(op, dropped)
            ]
        except UnicodeEncodeError as error:
            raise BadArgument(
                f"an op cannot be recorded: a text holds half a surrogate pair: {error}"
            ) from None
        try:
            self._connection.send(ops)
        except Exception as error:
            self._writer.write([Entry(at_s, refused=ErrorInfo.of(error), ops=tuple(map(_without_data, ops)))])
            raise
        self._writer.write_lines(lines)

    def end(self, error: BaseException | None) -> None:
        if error is None:
            self.ending = "complete"
        else:
            self.ending = "failed" if isinstance(error, Exception) else "cancelled"
        self._connection.end(error)


class _Writer:
    """The open file. Only opening it raises. A forked child writes nothing."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._started_s = time.monotonic()
        self._has_failed = False
        self._pid = os.getpid()
        self._is_locked = False
        self._images: RecordedImages | None = None  # once there is one
        self._part: str | None = None  # the file until the backend is connected
        try:
            self._target = os.path.realpath(path)  # a link stays a link
            if os.path.exists(self._target) and not os.path.isfile(self._target):
                self._file = os.open(path, os.O_WRONLY)  # a device or a pipe, which others may use, too
            else:
                self._part = f"{self._target}.part"
                self._file = open_locked(self._part)
                self._is_locked = True
        except BlockingIOError:
            raise self._in_use_error() from None
        except (OSError, ValueError) as error:  # ValueError: a path that no file can have
            raise BadArgument(
                f"cannot record to {str(path)!r}: {getattr(error, 'strerror', None) or error}", param="record"
            ) from error
        if self._part is not None and is_locked(self._target):
            self.close()
            raise self._in_use_error()

    def _in_use_error(self) -> BadArgument:
        return BadArgument(
            f"cannot record to {str(self._path)!r}: another session is recording to it: give each session "
            "its own file",
            param="record",
        )

    def now_s(self) -> float:
        """Seconds since the start."""
        return round(time.monotonic() - self._started_s, 6)

    def without_bytes(self, op: Op) -> Op:
        """The op as it is recorded: the bytes of images are in a folder next to the file, by digest."""
        if not isinstance(op, Upload):
            return op
        is_file = self._part is None and not self._has_failed and os.path.isfile(self._target)
        if is_file and os.getpid() == self._pid:
            if self._images is None:
                self._images = RecordedImages(self._target, os.fstat(self._file).st_mode)
            self._images.add(op)
        return _without_data(op)

    async def finish_images(self) -> None:
        """Waits until the images are written."""
        if self._images is not None and os.getpid() == self._pid:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(self._images.close)

    def begin(self, seed: int, models: Mapping[str, Capabilities]) -> None:
        """Writes the header, renames the file, and starts the clock."""
        self._started_s = time.monotonic()
        started = datetime.now(UTC).isoformat(timespec="seconds")
        header = Header(VERSION, __version__, started, seed, next(iter(models)), dict(models))
        try:
            if self._part is not None:
                os.ftruncate(self._file, 0)  # the rest of a process that was killed
        except OSError as error:
            self._give_up(error)
        self.write_lines([_encode(header)])
        if self._part is not None and not self._has_failed:
            try:
                with suppress(FileNotFoundError):
                    os.fchmod(self._file, os.stat(self._target).st_mode & 0o7777)
                os.replace(self._part, self._target)
                self._part = None
            except OSError as error:
                self._give_up(error)

    def recording(self, deliver: Deliver, *, has_stats: bool = True) -> Deliver:
        """A ``deliver`` that writes the events first. ``has_stats``: it also writes counters."""
        dropped = (GraphReply, Watched) if has_stats else (GraphReply, Watched, StatsReply)

        def receive(events: Iterable[Event]) -> None:
            received, at_s = list(events), self.now_s()  # one time, because they are delivered together
            self.write([Entry(at_s, received=event) for event in received if not isinstance(event, dropped)])
            deliver(received)

        return receive

    def write(self, entries: Iterable[Entry]) -> None:
        """Writes entries together."""
        lines = []
        error: UnicodeEncodeError | None = None
        for entry in entries:
            try:
                lines.append(_encode(entry))
            except UnicodeEncodeError as found:  # a script may answer with half a surrogate pair
                error = found
                break
        self.write_lines(lines)
        if error is not None:
            self._give_up(error)

    def write_lines(self, lines: Iterable[bytes]) -> None:
        """Writes lines together."""
        data = b"".join(lines)
        if self._has_failed or os.getpid() != self._pid:
            return
        try:
            append(self._file, data)
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """Closes the file. Removes it if it was not renamed."""
        try:
            if os.getpid() == self._pid:
                if self._part is not None:
                    with suppress(FileNotFoundError):
                        os.unlink(self._part)
                if self._is_locked:
                    unlock(self._file)  # a forked child may have a copy of the descriptor
        except OSError as error:
            self._give_up(error)
        finally:
            os.close(self._file)

    def _give_up(self, error: Exception) -> None:
        if not self._has_failed:
            logger.error("the recording %s ends here: %s", self._path, error)
        self._has_failed = True


def _without_data(op: Op) -> Op:
    """The op without the bytes of an upload."""
    return msgspec.structs.replace(op, data=b"") if isinstance(op, Upload) else op


def _check_path(path: str | PathLike[str], where: str, param: str) -> Path:
    """``path`` as a ``Path``. ``BadArgument`` if it is not a path."""
    if not isinstance(path, str | PathLike):
        raise BadArgument(f"{where}: the path must be a string or a Path, not {path!r:.200}", param=param)
    return Path(path)


_encoder = msgspec.json.Encoder()


def _encode(line: Header | Entry) -> bytes:
    return _encoder.encode(line) + b"\n"


def read_recording(path: str | PathLike[str]) -> Recording:
    """Reads a recording. If it is truncated, reads all complete lines.

    ``BadRecording`` for a file that is missing, not a recording, damaged, or of another version.
    """
    path = _check_path(path, "Replay", "path")
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except (OSError, ValueError) as error:  # ValueError: a path that no file can have
        raise BadRecording(
            f"cannot read {str(path)!r}: {getattr(error, 'strerror', None) or error}"
        ) from error
    if lines and not lines[-1].endswith(b"\n"):
        lines.pop()  # the process was killed while it wrote
    if not lines:
        raise BadRecording(f"{path} is not a recording: it has no complete line")
    header = _read_header(path, lines[0])
    decoder = msgspec.json.Decoder(Entry)
    entries: list[Entry] = []
    for number, line in enumerate(lines[1:], start=2):
        try:
            entries.append(decoder.decode(line))
        except UNREADABLE as error:
            raise BadRecording(f"{path}, line {number}: not a line of a recording ({error})") from None
    return Recording(path, header, entries)


def _read_header(path: Path, line: bytes) -> Header:
    class Version(msgspec.Struct):
        recording: int

    try:
        version = msgspec.json.decode(line, type=Version).recording
        if version == 1:
            first = msgspec.json.decode(line, type=_FirstHeader)
            models = {first.capabilities.model: first.capabilities}
            return Header(1, first.agentflow, first.started, first.seed, first.capabilities.model, models)
        if version != VERSION:
            raise BadRecording(
                f"{path} has version {version} of the format, and this agentflow reads versions 1 to "
                f"{VERSION}: record it again"
            )
        header = msgspec.json.decode(line, type=Header)
        if header.model not in header.models:
            raise BadRecording(f"{path} does not describe its model {header.model[:200]!r}")
        return header
    except UNREADABLE as error:
        raise BadRecording(f"{path} is not a recording: its first line is not a header ({error})") from None
