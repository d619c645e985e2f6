"""The processes of the other ranks, as the engine's process sees them.

Each is connected by a socket. A rank on this machine also has a lifeline, a pipe: when the engine's process
closes it or dies, the kernel kills the rank, even if the rank is stopped or waits for another rank and does
not read its socket. So no rank outlives the engine. ``cluster.ray`` starts ranks on other machines, and ends
them with the engine.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any

import msgspec

from agentflow.engine.machine.child_process import import_path, received_frames, start_process, to_frame
from agentflow.errors import EngineFailed
from agentflow.version import __version__

logger = logging.getLogger(__name__)

RANK_MODULE = "agentflow.engine.models.tensor_parallel.rank_process"
END_S = 5.0
LOST_RANK_S = 300.0
"""How long a rank waits for another one. The supervisor kills a hanging engine process earlier."""
_LENGTH = struct.Struct("!I")


def framed(content: bytes) -> bytes:
    """Returns bytes as one frame, like ``to_frame`` but without msgpack."""
    return _LENGTH.pack(len(content)) + content


class LoadPart(msgspec.Struct, frozen=True):
    """The first message to a rank."""

    options: dict[str, Any]  # the arguments of its ``TorchRunner``, without ``ranks``
    rank: int
    size: int
    collective: str  # shared, gloo or nccl
    store: str  # the address of the store of ranks on several machines, HOST:PORT; empty on one machine
    limit_s: float  # as in ``Ranks``
    keeps_order: bool
    log_level: int
    version: str = __version__  # rank 0's version of agentflow


class PartLoaded(msgspec.Struct, frozen=True, tag=True):
    """A rank is ready. ``weight_bytes``: the size of its part."""

    weight_bytes: int


class PartFailed(msgspec.Struct, frozen=True, tag=True):
    """A rank ends: it cannot load its part, or a batch failed."""

    message: str


class PartLogged(msgspec.Struct, frozen=True, tag=True):
    """A log message of a rank."""

    level: int
    name: str
    text: str


from_rank_decoder: msgspec.msgpack.Decoder[PartLoaded | PartFailed | PartLogged] = msgspec.msgpack.Decoder(
    PartLoaded | PartFailed | PartLogged
)


class RankGroup:
    """Ranks 1 to ``size`` - 1, which import torch and wait for ``load``. This process can import torch
    meanwhile.

    Args:
        size: the number of ranks.
        remote: connections to ranks on other machines, instead of starting processes here. The group closes
            them.
        host: the address of this machine for remote ranks; empty: all ranks are on this machine.

    Raises:
        EngineFailed: a process cannot be started.
    """

    def __init__(self, size: int, remote: Sequence[socket.socket] = (), host: str = "") -> None:
        self.host = host
        # The file for ``joining.join`` on this machine.
        self.file = -1 if remote else os.memfd_create("agentflow-ranks", os.MFD_CLOEXEC)
        self._ranks: list[_Rank] = []
        self._lost = ""
        self._is_closing = False
        self._abort: Any = None
        self._changed: SimpleQueue[int | None] = SimpleQueue()  # bytes of a loaded part; None: one is lost
        try:
            for number in range(1, size):
                rank = _RemoteRank(remote[number - 1]) if remote else _LocalRank(self.file)
                self._ranks.append(rank)
                rank.thread = threading.Thread(
                    target=self._watch, args=(number, rank), name=f"rank-{number}", daemon=True
                )
                rank.thread.start()
        except (OSError, RuntimeError) as error:  # RuntimeError: no thread can be started
            self.close()
            raise EngineFailed(f"cannot start the processes of tensor_parallel: {error}") from error

    @property
    def pids(self) -> list[int]:
        """The process ids of the other ranks that run on this machine."""
        return [rank.process.pid for rank in self._ranks if isinstance(rank, _LocalRank)]

    def load(self, parts: Sequence[LoadPart]) -> None:
        """Makes the ranks load their parts. ``parts``: from rank 1 on. Raises ``EngineFailed`` if a rank has
        ended."""
        try:
            for rank, part in zip(self._ranks, parts, strict=True):
                rank.connection.sendall(to_frame(part))
        except OSError as error:
            raise EngineFailed(self._lost or "a rank of the model has ended") from error

    def wait_until_loaded(self) -> int:
        """Returns the size of the weights of these ranks. Raises ``EngineFailed`` if a rank has ended."""
        total = 0
        for _ in self._ranks:
            num_bytes = self._changed.get()
            if num_bytes is None:
                raise EngineFailed(self._lost)
            total += num_bytes
        return total

    def abort_by(self, abort: Any) -> None:
        """Calls ``abort`` in another thread when a rank ends."""
        self._abort = abort
        if self._lost:
            abort()

    def send(self, message: bytes) -> None:
        """Sends a message to all ranks. Raises ``ConnectionError`` if a rank has ended."""
        frame = framed(message)
        try:
            for rank in self._ranks:
                rank.connection.sendall(frame)
        except OSError as error:
            raise ConnectionError(self._lost or "another rank of the model has ended") from error

    @property
    def lost(self) -> str:
        """Why the group can no longer be used; empty while it can."""
        return self._lost

    def close(self) -> None:
        """Ends all ranks. Does not call ``abort`` afterwards. A second call does nothing."""
        self._is_closing = True
        for rank in self._ranks:
            rank.end()
        for rank in self._ranks:
            rank.wait()
            # Not closed before: the thread that reads it ends when the process does.
            with contextlib.suppress(OSError):
                rank.connection.shutdown(socket.SHUT_RDWR)
            if rank.thread is not None and rank.thread.ident is not None:
                rank.thread.join(END_S)
            rank.connection.close()
        self._ranks.clear()
        if self.file >= 0:
            os.close(self.file)
            self.file = -1

    def _watch(self, number: int, rank: _Rank) -> None:
        """Reads the messages of a rank until it ends."""
        why = "it ended"
        with rank.connection:
            for frame in received_frames(rank.connection):
                message = from_rank_decoder.decode(frame)
                if isinstance(message, PartLoaded):
                    self._changed.put(message.weight_bytes)
                elif isinstance(message, PartLogged):
                    logging.getLogger(message.name).log(message.level, "rank %d: %s", number, message.text)
                else:
                    why = message.message
            if self._is_closing:
                return
            self._lost = self._lost or f"rank {number} of the model is lost: {why}"
            self._changed.put(None)
            if self._abort is not None:
                self._abort()


class _Rank:
    """A rank at the other end of a connection."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.thread: threading.Thread | None = None  # reads the connection
        # Not a socket timeout, which would also apply to the reading thread.
        limit = struct.pack("ll", int(LOST_RANK_S), 0)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def end(self) -> None:
        """Starts to end the rank."""

    def wait(self) -> None:
        """Waits until the rank has ended."""


class _RemoteRank(_Rank):
    """A rank on another machine, which ends when the connection closes. If it waits for another rank at that
    time, ``cluster.ray`` ends it."""


class _LocalRank(_Rank):
    """A rank in a child process."""

    def __init__(self, file: int) -> None:
        with contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours:
            connection, other_end = socket.socketpair()
            ours.enter_context(connection)
            theirs.enter_context(other_end)
            super().__init__(connection)
            read_end, write_end = os.pipe()
            self.lifeline = ours.enter_context(open(write_end, "wb", buffering=0))
            theirs.enter_context(open(read_end, "rb", buffering=0))
            numbers = [other_end.fileno(), read_end, file]
            self.process = start_process(
                [sys.executable, "-P", "-m", RANK_MODULE, *map(str, numbers)],
                pass_fds=numbers,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": import_path()},
                process_group=0,
            )
            ours.pop_all()

    def end(self) -> None:
        self.lifeline.close()

    def wait(self) -> None:
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            logger.error("process %d of a rank does not end", self.process.pid)
