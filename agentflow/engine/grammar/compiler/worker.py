"""The compiling process.

``python -m agentflow.engine.grammar.compiler.worker SOCKET LIFELINE``: the file descriptors of a socket and a
pipe that the server leaves open (``ChildProcess``). It compiles one constraint after the other, at the lowest
priority of the machine and within limits. Each limit is enforced twice: by an exception in Python code, after
which the process continues; and, for native code that does not return to Python, by the kernel, which ends
the process; the server then starts another one.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import logging
import math
import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import BinaryIO

import psutil

from agentflow.engine.child_process import READ_BYTES, FrameBuffer, to_frame
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
from agentflow.errors import AgentflowError, incident
from agentflow.protocol.constraint import Constraint

logger = logging.getLogger(__name__)

# The time between the two limits of processor time; the kernel's limit is in whole seconds.
CPU_GRACE_S = 1.0
# Python may drop the exception for processor time (for example in a destructor), so it is raised repeatedly.
REPEAT_S = 0.1


class _CpuTimeOver(BaseException):
    """A ``BaseException``, so that code for compiling does not catch it."""


class CompileWorker:
    """The process's end of the socket, and the compiling function once it is loaded."""

    def __init__(self, connection: socket.socket, lifeline: BinaryIO) -> None:
        self._connection = connection
        self._lifeline = lifeline
        self._is_counting = False

    def run(self) -> int:
        """Compiles until the socket ends. Returns the exit code."""
        frames = self._receive()
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
            self._prepare()
            self._send(Ready())
            for frame in frames:
                end = self._run_job(constraint_decoder.decode(frame))
                self._send(end)
                if end.is_last:
                    break
        return 0

    def _prepare(self) -> None:
        signal.signal(signal.SIGPROF, self._on_cpu_time_over)
        gc.collect()
        gc.freeze()  # loaded modules stay: later collections skip them
        self._loaded_bytes = _address_space_bytes()
        take_only_what_is_left()

    def _run_job(self, constraint: Constraint) -> CompileEnd:
        compiled, failure, reached = None, None, ""
        is_out_of_memory = False
        with _ending_with(self._lifeline), self._kernel_limits():
            try:
                try:
                    self._count_cpu_time()
                    compiled = self._compile(constraint)
                finally:
                    self._stop_counting()
            except _CpuTimeOver:
                self._stop_counting()  # it may have been raised before the one above ran
                reached = f"takes more than {self._limits.cpu_s:g} s of processor time"
            except MemoryError:
                is_out_of_memory = True  # handled below: the memory is in use until this block ends
            except RecursionError:
                reached = f"nests deeper than {sys.getrecursionlimit()} calls"
            except AgentflowError as error:
                failure = CompileFailure(error.code, str(error), param=error.param)
            except Exception as error:
                logged = incident(logger, f"{constraint.kind}: compiling it", error)
                failure = CompileFailure(logged.code, str(logged))
        if is_out_of_memory:
            reached = f"needs more than {megabytes(self._limits.memory_bytes)} of memory"
        elif compiled is not None and len(compiled.payload) > self._limits.compiled_bytes:
            reached = f"is larger than {megabytes(self._limits.compiled_bytes)} when compiled"
        if reached:
            compiled, failure = None, over_limit(constraint, reached)
        return CompileEnd(compiled, failure, is_out_of_memory or self._has_grown())

    def _count_cpu_time(self) -> None:
        self._is_counting = True
        signal.setitimer(signal.ITIMER_PROF, self._limits.cpu_s, REPEAT_S)

    def _stop_counting(self) -> None:
        self._is_counting = False
        signal.setitimer(signal.ITIMER_PROF, 0)

    def _on_cpu_time_over(self, number: int, frame: FrameType | None) -> None:
        if self._is_counting:
            raise _CpuTimeOver

    @contextlib.contextmanager
    def _kernel_limits(self) -> Iterator[None]:
        """Sets the kernel's limits of memory (in addition to the memory in use) and of processor time."""
        cpu_s = math.ceil(time.process_time() + self._limits.cpu_s + CPU_GRACE_S)
        _set_limit(resource.RLIMIT_CPU, cpu_s)
        _set_limit(resource.RLIMIT_AS, _address_space_bytes() + self._limits.memory_bytes)
        try:
            yield
        finally:
            _set_limit(resource.RLIMIT_AS, resource.RLIM_INFINITY)
            _set_limit(resource.RLIMIT_CPU, resource.RLIM_INFINITY)

    def _has_grown(self) -> bool:
        """Whether jobs have left enough memory in use to justify a new process."""
        return _address_space_bytes() - self._loaded_bytes > self._limits.memory_bytes // 2

    def _send(self, content: object) -> None:
        self._connection.sendall(to_frame(content))

    def _receive(self) -> Iterator[bytes]:
        buffer = FrameBuffer()
        with contextlib.suppress(OSError):  # the server exited with frames unread
            while piece := self._connection.recv(READ_BYTES):
                yield from buffer.push(piece)


def _load(name: str) -> CompileConstraint:
    module, _, function = name.partition(":")
    compile_constraint: CompileConstraint = getattr(importlib.import_module(module), function)
    return compile_constraint


def _why_not(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError):
        return f"the package {error.name!r} is not installed: pip install 'agentflow-lm[engine]'"
    logger.error("the compiling process cannot be loaded", exc_info=error)
    return repr(error)


def _address_space_bytes() -> int:
    num_bytes: int = psutil.Process().memory_info().vms
    return num_bytes


def _set_limit(which: int, value: int) -> None:
    """Sets a limit, capped by the hard limit of the process."""
    most = resource.getrlimit(which)[1]
    if most != resource.RLIM_INFINITY:
        value = most if value == resource.RLIM_INFINITY else min(value, most)
    resource.setrlimit(which, (value, most))


@contextlib.contextmanager
def _ending_with(lifeline: BinaryIO) -> Iterator[None]:
    """Within this context, SIGIO kills the process as soon as the lifeline closes. Only on Linux; elsewhere
    the process first finishes its job."""
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    flags = fcntl.fcntl(lifeline, fcntl.F_GETFL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, flags | os.O_ASYNC)
    try:
        ended = select.poll()  # not select(), which rejects descriptors above 1023
        ended.register(lifeline, select.POLLIN)
        if ended.poll(0):  # closed before the signal was set up
            raise ConnectionResetError
        yield
    finally:
        fcntl.fcntl(lifeline, fcntl.F_SETFL, flags)


def go_behind_others() -> None:
    """Gives the process the lowest priority, and makes it the first to be killed when memory is short."""
    os.nice(19)
    with contextlib.suppress(OSError):  # Linux only
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")


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
    for ignored in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)  # the server ends this process
    _set_limit(resource.RLIMIT_CORE, 0)
    go_behind_others()
    numbers = [int(argument) for argument in sys.argv[1:]]
    for number in numbers:
        os.set_inheritable(number, False)
    with socket.socket(fileno=numbers[0]) as connection, open(numbers[1], "rb", buffering=0) as lifeline:
        return CompileWorker(connection, lifeline).run()


if __name__ == "__main__":
    sys.exit(main())
