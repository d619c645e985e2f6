"""Rank 1 of many models, one after the other: ``python -m support.engine.rank_peer FD MEMORY STORE``.

A frame on the socket is a batch, or ``load:`` with the options of a runner as JSON, or ``add:`` with the
arguments of ``numbers`` and the name of a collective. A process that loads one model takes seconds to start.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from support.process_template import start_python
from torch import Tensor

from agentflow.engine.batch import Batch, BatchOutput
from agentflow.engine.machine.child_process import received_frames
from agentflow.engine.models.tensor_parallel.joining import join, prepare
from agentflow.engine.models.tensor_parallel.rank_group import framed
from agentflow.engine.models.tensor_parallel.steps import StepReader, StepWriter
from agentflow.engine.models.torch_runner import TorchRunner
from agentflow.kernels.ranks import Ranks

LIMIT_S = 60.0


def numbers(rank: int, count: int, dtype: str) -> Tensor:
    """The values that a rank adds."""
    return torch.randn(count, generator=torch.Generator().manual_seed(rank)).to(getattr(torch, dtype))


def matrix(rank: int, num_rows: int, width: int) -> Tensor:
    """The part of a matrix that a rank gathers."""
    return torch.randn(num_rows, width, generator=torch.Generator().manual_seed(rank))


class DividedRunner:
    """``ModelRunner`` whose other half is in the peer."""

    def __init__(self, peer: Peer, collective: str, options: dict[str, Any]) -> None:
        self._peer, self._steps = peer, StepWriter()
        peer.send(f"load:{json.dumps([collective, options])}".encode())
        self.runner = TorchRunner(**options, ranks=peer.ranks[collective])
        self.info = self.runner.info

    def launch(self, batch: Batch) -> Any:
        self._peer.send(self._steps.message(batch))
        return self.runner.launch(batch)

    def collect(self, handle: Any) -> BatchOutput:
        return self.runner.collect(handle)

    def close(self) -> None:
        self.runner.close()


class Peer:
    """The other process, as rank 0 has it."""

    def __init__(self, connection: socket.socket, ranks: dict[str, Ranks]) -> None:
        self._connection, self.ranks = connection, ranks

    def send(self, content: bytes) -> None:
        self._connection.sendall(framed(content))

    def load(self, folder: Path, collective: str = "shared", **options: Any) -> DividedRunner:
        defaults = {"num_slots": 1000, "device": "cpu", "dtype": "float32", "num_threads": 1}
        return DividedRunner(self, collective, defaults | {"folder": str(folder)} | options)


@contextlib.contextmanager
def running_peer() -> Iterator[Peer]:
    """A peer that has joined this process by all collectives of CPUs."""
    connection, other_end = socket.socketpair()
    files = {name: os.memfd_create(name) for name in ("shared", "gloo")}
    for name, file in files.items():
        prepare(name, file, 2)
    numbers_of_files = [other_end.fileno(), *files.values()]
    process = start_python(
        "-m", "support.engine.rank_peer", *map(str, numbers_of_files), pass_fds=numbers_of_files
    )
    other_end.close()
    try:
        ranks = {name: join(name, file, 0, 2, "cpu", LIMIT_S) for name, file in files.items()}
        with connection:
            yield Peer(connection, ranks)
        process.wait(10)
    finally:
        process.kill()
        process.wait()
        for file in files.values():
            os.close(file)


def main() -> None:
    """Runs rank 1 until the socket closes."""
    torch.set_num_threads(1)
    socket_fd, memory, store = map(int, sys.argv[1:])
    ranks = {"shared": join("shared", memory, 1, 2, "cpu", LIMIT_S)}
    ranks["gloo"] = join("gloo", store, 1, 2, "cpu", LIMIT_S)
    runner: TorchRunner | None = None
    steps = StepReader()
    for frame in received_frames(socket.socket(fileno=socket_fd)):
        if frame.startswith(b"load:"):
            collective, options = json.loads(frame[5:])
            runner, steps = TorchRunner(**options, ranks=ranks[collective]), StepReader()
        elif frame.startswith(b"add:"):
            collective, count, dtype, num_rows, widths = json.loads(frame[4:])
            ranks[collective].add(numbers(1, count, dtype))
            ranks[collective].gather(matrix(1, num_rows, widths[1]), widths)
        else:
            assert runner is not None
            runner.collect_part(runner.launch(steps.batch(frame)))
    os._exit(0)


if __name__ == "__main__":
    main()
