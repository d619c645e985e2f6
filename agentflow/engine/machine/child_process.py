"""A child process of the server: exchanges frames with it over a socket, and ends it.

A frame is its length in four bytes, big-endian, then msgpack. The child also gets a lifeline: a pipe that
carries no data, and closes when the server closes it or dies. A child can make the kernel send it a signal
then. The socket is unsuitable for this: a frame causes the same signal, which may arrive late, when the child
has already read the frame and works on it.

``lower_priority`` makes the server's thread yield the processor to its engines. An engine on the CPU computes
in threads that wait for each other many times a step. If the server runs for a fraction of a millisecond
meanwhile, all of them wait; at a lower priority, the server runs between two steps instead. (Measured on two
cores with 25 requests a second, most of them rejected: a fifth more steps.) On Linux each thread has a
separate priority, and a process inherits the priority of the thread that starts it. Only root may raise a
priority again, so a thread that keeps the old priority starts the engines.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO, Self

import anyio
import anyio.to_thread
import msgspec

_LENGTH = struct.Struct("!I")
READ_BYTES = 256 * 1024
_encoder = msgspec.msgpack.Encoder()


def to_frame(content: object) -> bytes:
    """Returns a message, or a list of messages, as one frame. Raises ``OverflowError`` for integers that do
    not fit into 64 bits."""
    frame = bytearray(_LENGTH.size)
    _encoder.encode_into(content, frame, _LENGTH.size)
    _LENGTH.pack_into(frame, 0, len(frame) - _LENGTH.size)
    return bytes(frame)


class FrameBuffer:
    """Reassembles frames from the pieces that a socket returns."""

    def __init__(self) -> None:
        self._received = bytearray()

    def push(self, piece: bytes) -> list[bytes]:
        """Returns the contents of the frames that ``piece`` completes."""
        self._received += piece
        frames: list[bytes] = []
        start = 0
        while len(self._received) - start >= _LENGTH.size:
            begin = start + _LENGTH.size
            end = begin + _LENGTH.unpack_from(self._received, start)[0]
            if end > len(self._received):
                break
            frames.append(bytes(self._received[begin:end]))
            start = end
        del self._received[:start]
        return frames


class FrameConnection:
    """The server's end of a socket, for frames in both directions."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._buffer = FrameBuffer()

    async def send(self, frame: bytes) -> None:
        """Sends a frame; waits while the socket is full. Raises ``OSError`` if the other end is closed."""
        rest = memoryview(frame)
        while rest:
            try:
                rest = rest[self._connection.send(rest) :]
            except BlockingIOError:
                await anyio.wait_writable(self._connection)

    async def receive(self) -> list[bytes]:
        """Waits for data and returns the frames that it completes, if any. Raises ``EOFError`` if the other
        end is closed."""
        await anyio.wait_readable(self._connection)
        try:
            piece = self._connection.recv(READ_BYTES)
        except BlockingIOError:
            return []
        except OSError:  # the process ended with frames unread
            piece = b""
        if not piece:
            raise EOFError
        return self._buffer.push(piece)

    def close(self) -> None:
        """Closes the socket."""
        self._connection.close()


def received_frames(connection: socket.socket) -> Iterator[bytes]:
    """Yields the contents of the frames that a child receives, until the server closes the socket or
    exits."""
    buffer = FrameBuffer()
    with contextlib.suppress(OSError):  # the server exited with frames unread
        while piece := connection.recv(READ_BYTES):
            yield from buffer.push(piece)


NICENESS = 5
"""The increase of the thread's nice value. If all processors are busy, the thread still gets about a quarter
of one."""

_starter: ThreadPoolExecutor | None = None
_popen: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen


def lower_priority() -> None:
    """Permanently lowers the priority of this thread, and of threads that it starts, below the priority of
    processes from ``start_process``. A second call has no effect. Only on Linux."""
    global _starter
    if sys.platform != "linux":
        return
    if _starter is None:
        _starter = ThreadPoolExecutor(1, thread_name_prefix="process starter")
    before = os.getpriority(os.PRIO_PROCESS, _starter.submit(threading.get_native_id).result())
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), before + NICENESS)


def start_process(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
    """Like ``subprocess.Popen``, with the priority from before ``lower_priority``."""
    if _starter is None:
        return _popen(command, **options)
    return _starter.submit(_popen, command, **options).result()


# How long to wait after SIGKILL: a process that waits for a device in the kernel may never end.
KILL_S = 1.0


class ChildProcess:
    """One process, from ``run`` to ``end``."""

    def __init__(
        self, process: subprocess.Popen[bytes], connection: socket.socket, lifeline: BinaryIO
    ) -> None:
        self._process = process
        self._connection = FrameConnection(connection)
        self._lifeline = lifeline

    @classmethod
    def run(cls, module: str, first: object, *files: int, **environment: str) -> Self:
        """Starts a process that runs ``module``. Takes milliseconds.

        The process gets file descriptors as arguments: its socket, its end of the lifeline, and ``files``.

        Args:
            module: the module to run.
            first: the first message on the socket.
            files: more file descriptors.
            environment: variables to add to this process's environment.

        Raises:
            OSError: no process can be started.
        """
        with contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours:
            connection, other_end = socket.socketpair()
            ours.enter_context(connection)
            theirs.enter_context(other_end)
            read_end, write_end = os.pipe()
            lifeline = ours.enter_context(open(write_end, "wb", buffering=0))
            theirs.enter_context(open(read_end, "rb", buffering=0))
            connection.send(to_frame(first))  # a new socket has room for it
            numbers = [other_end.fileno(), read_end, *files]
            process = start_process(
                # Not multiprocessing, which would run the program's main module again in the child.
                [sys.executable, "-P", "-m", module, *map(str, numbers)],
                pass_fds=numbers,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": import_path(), **environment},
                process_group=0,  # Ctrl-C is for the server only
            )
            ours.pop_all()
        return cls(process, connection, lifeline)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """The exit code; None before ``end``. Negative: the signal that killed the process."""
        return self._process.returncode

    async def send(self, frame: bytes) -> None:
        """Sends a frame; waits while the socket is full. Raises ``OSError`` if the process has ended."""
        await self._connection.send(frame)

    async def receive(self) -> list[bytes]:
        """Waits for data and returns the frames that it completes, if any. Raises ``EOFError`` if the process
        has ended."""
        return await self._connection.receive()

    async def next_frame(self) -> bytes:
        """Returns the next frame of a process that sends one at a time."""
        frames: list[bytes] = []
        while not frames:
            frames = await self.receive()
        return frames[0]

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal. No effect if the process has ended."""
        self._process.send_signal(number)

    async def end(self, grace_s: float = 0.0) -> str:
        """Ends the process, with SIGKILL if it does not exit by itself within ``grace_s``. Returns a phrase
        for messages: how it ended. Cannot be cancelled."""
        self._connection.close()
        self._lifeline.close()
        with anyio.CancelScope(shield=True):
            limiter = anyio.CapacityLimiter(1)  # the server's worker threads may all be busy
            code = await anyio.to_thread.run_sync(self._reap, grace_s, limiter=limiter)
        return exit_phrase(code)

    def _reap(self, grace_s: float) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(grace_s)
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(KILL_S)
        # Reaps the process when it ends; otherwise it would stay a zombie.
        threading.Thread(target=self._process.wait, name="process reaper", daemon=True).start()
        return None


def import_path() -> str:
    """Returns a ``PYTHONPATH`` with which a child finds the same modules as this process."""
    return os.pathsep.join(entry or os.getcwd() for entry in sys.path)


def exit_phrase(code: int | None) -> str:
    """Returns how a process with this exit code ended, for messages; None: it could not be killed.

    >>> exit_phrase(-9)
    'was killed by SIGKILL'
    """
    if code is None:
        return "could not be killed and was abandoned"
    return f"was killed by {_signal_name(-code)}" if code < 0 else f"ended with exit code {code}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
