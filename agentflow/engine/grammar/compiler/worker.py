"""The compiling process.

``python -m agentflow.engine.grammar.compiler.worker SOCKET LIFELINE``: the file descriptors of a socket and a
pipe that the server leaves open (``ChildProcess``). It compiles one constraint after the other, at the lowest
priority of the machine and within limits (``LimitedWork``).
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import socket
import sys
from typing import BinaryIO

from agentflow.engine.grammar.compiler.messages import (
    CompileConstraint,
    CompileEnd,
    CompileFailure,
    Ready,
    constraint_decoder,
    megabytes,
    over_limit,
    start_decoder,
)
from agentflow.engine.machine.child_limits import (
    LimitedWork,
    OverCpuTime,
    ServerGone,
    be_killed_first,
    inherited_files,
)
from agentflow.engine.machine.child_process import received_frames, to_frame
from agentflow.errors import AgentflowError, incident
from agentflow.protocol.constraint import Constraint

logger = logging.getLogger(__name__)


class CompileWorker:
    """The process's end of the socket, and the compiling function once it is loaded."""

    def __init__(self, connection: socket.socket, lifeline: BinaryIO) -> None:
        self._connection = connection
        self._lifeline = lifeline

    def run(self) -> int:
        """Compiles until the socket ends. Returns the exit code."""
        frames = received_frames(self._connection)
        first = next(frames, None)
        if first is None:
            return 0
        self._limits = start_decoder.decode(first)
        with contextlib.suppress(OSError):  # the server is gone
            try:
                self._compile = _load(self._limits.loader)
            except Exception as error:
                self._send(Ready(_why_not(error)))
                return 1
            self._work = LimitedWork(self._lifeline, self._limits.cpu_s, self._limits.memory_bytes)
            take_only_what_is_left()
            self._send(Ready())
            for frame in frames:
                end = self._run_job(constraint_decoder.decode(frame))
                self._send(end)
                if end.is_last:
                    break
        return 0

    def _run_job(self, constraint: Constraint) -> CompileEnd:
        compiled, failure, reached = None, None, ""
        is_out_of_memory = False
        try:
            compiled = self._work.run(lambda: self._compile(constraint))
        except OverCpuTime:
            reached = f"takes more than {self._limits.cpu_s:g} s of processor time"
        except MemoryError:
            is_out_of_memory = True  # handled below: the memory is in use until this block ends
        except RecursionError:
            reached = f"nests deeper than {sys.getrecursionlimit()} calls"
        except AgentflowError as error:
            failure = CompileFailure(error.code, str(error), param=error.param)
        except ServerGone:
            raise
        except Exception as error:
            logged = incident(logger, f"{constraint.kind}: compiling it", error)
            failure = CompileFailure(logged.code, str(logged))
        if is_out_of_memory:
            reached = f"needs more than {megabytes(self._limits.memory_bytes)} of memory"
        elif compiled is not None and len(compiled.payload) > self._limits.compiled_bytes:
            reached = f"is larger than {megabytes(self._limits.compiled_bytes)} when compiled"
        if reached:
            compiled, failure = None, over_limit(constraint, reached)
        return CompileEnd(compiled, failure, is_out_of_memory or self._work.has_grown)

    def _send(self, content: object) -> None:
        self._connection.sendall(to_frame(content))


def _load(name: str) -> CompileConstraint:
    module, _, function = name.partition(":")
    compile_constraint: CompileConstraint = getattr(importlib.import_module(module), function)
    return compile_constraint


def _why_not(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError):
        return f"the package {error.name!r} is not installed: pip install 'agentflow-lm[engine]'"
    logger.error("the compiling process cannot be loaded", exc_info=error)
    return repr(error)


def go_behind_others() -> None:
    """Gives the process the lowest priority, and makes it the first to be killed when memory is short."""
    os.nice(19)
    be_killed_first()


def take_only_what_is_left() -> None:
    """Runs the process only on idle processors from now on.

    Any thread that wakes up gets the processor immediately, so time slices of this process do not delay
    threads that wait for each other, as in a forward pass. While all processors are busy it makes almost no
    progress (measured: 4 ms of compiling took 1 to 4 s, and 0.25 s with nice 19 alone), so this is not used
    while the process loads: requests may wait for it.
    """
    if hasattr(os, "SCHED_IDLE"):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def main() -> int:
    """Compiles for the socket and the lifeline whose descriptors are the arguments."""
    numbers = inherited_files()
    go_behind_others()
    with socket.socket(fileno=numbers[0]) as connection, open(numbers[1], "rb", buffering=0) as lifeline:
        return CompileWorker(connection, lifeline).run()


if __name__ == "__main__":
    sys.exit(main())
