"""The main module of a rank's process: ``python -m ... FD LIFELINE FILE``, from ``rank_group``. On a machine
without rank 0, there is no FILE, and FD is a TCP connection.

The first frame on the socket is ``LoadPart``; each later one is a batch (``steps``). The process ends with
the engine's process, or when a batch fails, because the ranks then have different KV.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import signal
import socket
import sys
from pathlib import Path

import msgspec

from agentflow.engine.machine.child_process import received_frames, to_frame
from agentflow.engine.models.tensor_parallel.rank_group import LoadPart, PartFailed, PartLoaded, PartLogged
from agentflow.engine.models.tensor_parallel.steps import StepReader
from agentflow.errors import EngineFailed
from agentflow.version import __version__

_F_SETSIG = 10  # of Linux; the fcntl module has no name for it


def die_with(lifeline: int) -> None:
    """Makes the kernel kill this process when the other end of a pipe closes, even while it is stopped."""
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, _F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        os.read(lifeline, 1)  # closed before the signal was set up
        os._exit(0)


class _GroupLog(logging.Handler):
    """Sends agentflow's log messages to rank 0."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__()
        self._connection = connection

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):
            self._connection.sendall(to_frame(PartLogged(record.levelno, record.name, self.format(record))))


def run_rank(connection: socket.socket, file: int | None) -> int:
    """Loads a part of the model and computes batches. Returns the exit code."""
    frames = received_frames(connection)
    ours = logging.getLogger("agentflow")
    ours.addHandler(_GroupLog(connection))
    try:
        # Imports before the first message arrives: it takes seconds.
        from agentflow.engine.models.tensor_parallel.joining import join, join_over_tcp
        from agentflow.engine.models.torch_runner import TorchRunner
        from agentflow.kernels.native_library import keep_order

        first = next(frames, None)
        if first is None:
            return 0
        part = msgspec.msgpack.decode(first, type=LoadPart)
        ours.setLevel(part.log_level)
        if part.version != __version__:
            raise EngineFailed(f"it has agentflow {__version__}, and rank 0 {part.version}")
        if part.keeps_order:
            keep_order()
        options = part.options | {"folder": Path(part.options["folder"])}
        place = part.rank, part.size, options["device"], part.limit_s
        if file is None:
            ranks = join_over_tcp(part.store, *place, host=connection.getsockname()[0])
        else:
            ranks = join(part.collective, file, *place)
        runner = TorchRunner(**options, ranks=ranks)
        connection.sendall(to_frame(PartLoaded(runner.info.weight_bytes)))
        steps = StepReader()
        for frame in frames:
            runner.collect_part(runner.launch(steps.batch(frame)))
    except Exception as error:
        ours.debug("a rank fails", exc_info=True)
        with contextlib.suppress(OSError):
            connection.sendall(to_frame(PartFailed(str(error) or repr(error))))
        return 1
    return 0


def main() -> None:
    """Runs the rank with the file descriptors in the arguments."""
    for ignored in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)
    numbers = [*map(int, sys.argv[1:])]
    for number in numbers:
        os.set_inheritable(number, False)
    socket_fd, lifeline, *files = numbers
    die_with(lifeline)
    code = run_rank(socket.socket(fileno=socket_fd), files[0] if files else None)
    os._exit(code)  # without the destructors of torch's threads


if __name__ == "__main__":
    main()
