"""Limits the work in a child process that processes input of clients.

``LimitedWork.run`` enforces each limit twice: by an exception in Python code, after which the process
continues, and by the kernel, which ends a process whose native code does not return to Python. The server
then starts another process.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import math
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import BinaryIO, TypeVar

import psutil

T = TypeVar("T")

# The time between the two limits of processor time; the kernel's limit is in whole seconds.
CPU_GRACE_S = 1.0
# Python may drop the exception for processor time (for example in a destructor), so it is raised repeatedly.
REPEAT_S = 0.1
# Threads of libraries, and the heaps that the C library allocates for them, would count as used memory.
ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "RAYON_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",
}
# Exit codes of a process that the kernel ended for a fault of that process.
OWN_FAULTS = (-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS, -signal.SIGILL, -signal.SIGFPE)


class OverCpuTime(Exception):
    """The work exceeded its processor time."""


class ServerGone(ConnectionError):
    """The server ended."""


class _CpuTimeOver(BaseException):
    """A ``BaseException``, so that ``except Exception`` in the work does not catch it."""


class LimitedWork:
    """Runs pieces of work one after another. Create it when everything is loaded: garbage collections skip
    all objects that exist by then.

    Args:
        lifeline: As in ``ChildProcess``: if it closes, the process is killed, even during work.
        cpu_s: The processor time of a piece of work.
        memory_bytes: The memory of a piece of work, in addition to the memory in use.
        file_bytes: The largest file that it may write; a library may unpack into a file.
    """

    def __init__(self, lifeline: BinaryIO, cpu_s: float, memory_bytes: int, file_bytes: int = 0) -> None:
        self._lifeline = lifeline
        self._cpu_s = cpu_s
        self._memory_bytes = memory_bytes
        self._file_bytes = file_bytes
        self._is_counting = False
        signal.signal(signal.SIGPROF, self._on_cpu_time_over)
        gc.collect()
        gc.freeze()
        self._loaded_bytes = _address_space_bytes()

    def run(self, work: Callable[[], T], cpu_s: float | None = None) -> T:
        """Returns the result of ``work``, or raises its exception.

        Args:
            work: A piece of work.
            cpu_s: Its processor time; None: the default.

        Raises:
            OverCpuTime: It reached its limit of processor time.
            MemoryError: It reached its limit of memory.
            ServerGone: The server has ended.
        """
        cpu_s = self._cpu_s if cpu_s is None else cpu_s
        with _ending_with(self._lifeline), self._kernel_limits(cpu_s):
            try:
                try:
                    self._count_cpu_time(cpu_s)
                    return work()
                finally:
                    self._stop_counting()
            except _CpuTimeOver:
                self._stop_counting()  # the exception may have prevented the call above
                raise OverCpuTime from None

    @property
    def has_grown(self) -> bool:
        """Whether the work has left enough memory in use to justify a new process."""
        return _address_space_bytes() - self._loaded_bytes > self._memory_bytes // 2

    def _count_cpu_time(self, cpu_s: float) -> None:
        self._is_counting = True
        signal.setitimer(signal.ITIMER_PROF, cpu_s, REPEAT_S)

    def _stop_counting(self) -> None:
        self._is_counting = False
        signal.setitimer(signal.ITIMER_PROF, 0)

    def _on_cpu_time_over(self, number: int, frame: FrameType | None) -> None:
        if self._is_counting:
            raise _CpuTimeOver

    @contextlib.contextmanager
    def _kernel_limits(self, cpu_s: float) -> Iterator[None]:
        """Sets the kernel's limits of memory (in addition to the memory in use), processor time and file
        size."""
        _set_limit(resource.RLIMIT_CPU, math.ceil(time.process_time() + cpu_s + CPU_GRACE_S))
        _set_limit(resource.RLIMIT_AS, _address_space_bytes() + self._memory_bytes)
        _set_limit(resource.RLIMIT_FSIZE, self._file_bytes)
        try:
            yield
        finally:
            _set_limit(resource.RLIMIT_FSIZE, resource.RLIM_INFINITY)
            _set_limit(resource.RLIMIT_AS, resource.RLIM_INFINITY)
            _set_limit(resource.RLIMIT_CPU, resource.RLIM_INFINITY)


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
    """Within this context, SIGIO kills the process as soon as the lifeline closes. On systems other than
    Linux, the process first finishes its work."""
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    flags = fcntl.fcntl(lifeline, fcntl.F_GETFL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, flags | os.O_ASYNC)
    try:
        ended = select.poll()  # not select(), which rejects descriptors above 1023
        ended.register(lifeline, select.POLLIN)
        if ended.poll(0):  # closed before the signal was set up
            raise ServerGone
        yield
    finally:
        fcntl.fcntl(lifeline, fcntl.F_SETFL, flags)


def be_killed_first() -> None:
    """Makes this process the first that the kernel kills when memory is short."""
    with contextlib.suppress(OSError):  # Linux only
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")


def inherited_files() -> list[int]:
    """Prepares a child of ``ChildProcess.run``: ignores signals for the server, and disables core dumps.
    Returns the file descriptors in the arguments, which children of this process do not inherit."""
    for ignored in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)  # the server ends this process
    _set_limit(resource.RLIMIT_CORE, 0)
    numbers = [int(argument) for argument in sys.argv[1:]]
    for number in numbers:
        os.set_inheritable(number, False)
    return numbers
