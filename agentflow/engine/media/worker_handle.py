"""The server's handle of one reading process, which reads one medium at a time."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
from numpy.typing import NDArray

from agentflow.engine.machine.child_limits import ONE_THREAD, OWN_FAULTS
from agentflow.engine.machine.child_process import ChildProcess, to_frame
from agentflow.engine.media.messages import (
    ArrayInFile,
    MediaLimits,
    MediumRead,
    ReadMedium,
    StartReading,
    read_decoder,
    ready_decoder,
)
from agentflow.engine.media.settings import MediaSettings
from agentflow.engine.media_run import MediaPiece, PreparedMedium
from agentflow.errors import BadArgument, EngineFailed, NotSupported

# How long to wait after a process closes its socket until it exits, so that its exit status is known.
LAST_WORDS_S = 1.0
_FAULTS = (*OWN_FAULTS, -signal.SIGXCPU)
"""Exit codes of a process that the kernel ended for a fault of that process."""
_MAX_RANK = 4


class Killed(Exception):
    """The process ended for an external reason, for example because other processes needed memory."""


class MediaWorkerHandle(ChildProcess):
    """Created by ``start``. After ``ready``, it reads media while ``is_usable``; ``end`` ends the process.
    ``cpu_s``: the processor time of the last medium; None if it was not finished."""

    is_usable = True
    cpu_s: float | None = None
    _file: int
    _limits: MediaLimits
    _threads: anyio.CapacityLimiter

    @classmethod
    def start(cls, settings: MediaSettings, limits: MediaLimits) -> MediaWorkerHandle:
        """Starts a process, which then loads. Raises ``OSError`` if no process can be created."""
        file = _nameless_file()
        try:
            worker = cls.run(
                "agentflow.engine.media.worker", StartReading(settings, limits), file, **ONE_THREAD
            )
        except BaseException:
            os.close(file)
            raise
        worker._file, worker._limits = file, limits
        worker._threads = anyio.CapacityLimiter(1)  # the server's worker threads may all be busy
        return worker

    async def ready(self) -> None:
        """Waits until the process has loaded. Raises ``NotSupported`` if a package is missing, and
        ``EngineFailed`` if the process has ended."""
        self.is_usable = False
        try:
            answer = ready_decoder.decode(await self.next_frame())
        except EOFError:
            raise EngineFailed("the process that reads images could not be started") from None
        if answer.problem:
            raise NotSupported(f"images cannot be read: {answer.problem}")
        self.is_usable = True

    async def read(self, medium: ReadMedium, data: bytes) -> PreparedMedium:
        """Returns the prepared medium, or raises its failure, or ``Killed``. After a cancellation, only
        ``end`` may be called."""
        self.is_usable, self.cpu_s = False, None
        await self._in_thread(_write, self._file, data)
        try:
            await self.send(to_frame(medium))
            answer = read_decoder.decode(await self.next_frame())
        except (OSError, EOFError):
            how = await self.end(LAST_WORDS_S)
            if self.exit_code in _FAULTS:
                raise BadArgument(
                    f"{medium.kind}: the process that decoded it {how}: the file is damaged, or takes too "
                    "long to decode",
                    param=medium.kind,
                ) from None
            raise Killed(how) from None
        self.cpu_s = answer.cpu_s
        if answer.failure is not None:
            self.is_usable = not answer.is_last
            raise answer.failure.to_exception()
        prepared: PreparedMedium = await self._in_thread(self._fetch, answer)
        self.is_usable = not answer.is_last
        return prepared

    async def end(self, grace_s: float = 0.0) -> str:
        """Like ``ChildProcess.end``; also closes the file."""
        how = await super().end(grace_s)
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        return how

    async def _in_thread(self, function: Any, *args: Any) -> Any:
        return await anyio.to_thread.run_sync(function, *args, limiter=self._threads)

    def _fetch(self, answer: MediumRead) -> PreparedMedium:
        # A process that a hostile file controls may answer anything.
        left = 2 * self._limits.prepared_bytes

        def array(stored: ArrayInFile) -> NDArray[Any]:
            nonlocal left
            dtype, shape = np.dtype(stored.dtype), stored.shape
            if dtype.hasobject or len(shape) > _MAX_RANK or any(length < 0 for length in shape):
                raise EngineFailed("the process that reads images returned an invalid array")
            num_bytes = dtype.itemsize * int(np.prod(shape, dtype=object))
            left -= num_bytes
            if left < 0:
                raise EngineFailed("the process that reads images returned arrays that are too large")
            found = np.empty(shape, dtype)
            _read_into(self._file, found.reshape(-1).view(np.uint8).data, stored.at)
            found.setflags(write=False)
            return found

        try:
            return PreparedMedium(
                answer.identity,
                {name: array(stored) for name, stored in answer.arrays.items()},
                tuple(
                    [
                        piece
                        if isinstance(piece, str)
                        else MediaPiece(array(piece.positions), piece.first, piece.sees_all)
                        for piece in answer.pieces
                    ]
                ),
            )
        finally:
            os.ftruncate(self._file, 0)


def _nameless_file() -> int:
    """Opens an unnamed file, in memory on Linux, else in the folder for temporary files."""
    if sys.platform == "linux":
        return os.memfd_create("media")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _write(file: int, data: bytes) -> None:
    os.ftruncate(file, 0)
    rest, done = memoryview(data), 0
    while rest:
        written = os.pwrite(file, rest, done)
        rest, done = rest[written:], done + written


def _read_into(file: int, rest: memoryview, at: int) -> None:
    while rest:
        num_bytes = os.preadv(file, [rest], at)
        if not num_bytes:
            raise EngineFailed("the process that reads images returned less data than announced")
        rest, at = rest[num_bytes:], at + num_bytes
