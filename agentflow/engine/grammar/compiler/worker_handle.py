"""The server's handle on one compiling process: one constraint at a time goes there and comes back."""

from __future__ import annotations

import math
import signal

import psutil

from agentflow.engine.grammar.compiler.messages import (
    CompileEnd,
    CompileFailure,
    CompileLimits,
    StartCompiling,
    end_decoder,
    megabytes,
    over_cpu_time,
    ready_decoder,
)
from agentflow.engine.process.child import ChildProcess, to_frame
from agentflow.errors import EngineFailed, RequestRefused
from agentflow.protocol.constraint import Constraint

# How long a process whose socket has ended may take to say how it ended.
LAST_WORDS_S = 1.0
# Each thread that a library starts, and each heap that the C library makes for one, would count against
# the memory limit; and one job needs one thread.
ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "RAYON_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",
}
# What the kernel ends a process with because of what it did itself.
OWN_FAULTS = (-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS, -signal.SIGILL, -signal.SIGFPE)


class CannotCompile(Exception):
    """The process says why it will never compile anything."""


class CompileWorkerHandle(ChildProcess):
    """Started with ``start``; after ``ready`` it takes constraints for as long as ``is_usable``, and is ended
    with ``end``. ``has_died``: it did so while it compiled."""

    is_usable = True
    has_died = False
    _limits: CompileLimits

    @classmethod
    def start(cls, loader: str, limits: CompileLimits) -> CompileWorkerHandle:
        """A process that begins to load. OSError when there can be no more processes."""
        first = StartCompiling(loader, limits.cpu_s, limits.memory_bytes, limits.compiled_bytes)
        worker = cls.run("agentflow.engine.grammar.compiler.worker", first, **ONE_THREAD)
        worker._limits = limits
        return worker

    async def ready(self) -> None:
        """Waits until it has loaded. ``CannotCompile``, or EOFError when it has died."""
        answer = ready_decoder.decode(await self._next_frame())
        if answer.problem:
            raise CannotCompile(answer.problem)

    def cpu_s(self) -> float:
        """Processor time that the process has had; while it has none, nothing is its constraint's fault."""
        try:
            times = psutil.Process(self.pid).cpu_times()
        except psutil.Error:
            return math.inf  # it has ended
        return float(times.user + times.system)

    def pause(self) -> None:
        """It gets no processor until ``go_on``."""
        self.signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """After ``pause``."""
        self.signal(signal.SIGCONT)

    async def watch(self) -> None:
        """Between two constraints: waits until it dies, and raises EOFError then."""
        await self._next_frame()

    async def compile(self, constraint: Constraint) -> CompileEnd:
        """Its answer; where it dies of the constraint, what is to be said about that. Not to be used again
        after it was cancelled."""
        self.is_usable = False
        try:
            await self.send(to_frame(constraint))
            end = end_decoder.decode(await self._next_frame())
        except (OSError, EOFError):
            self.has_died = True
            how = await self.end(LAST_WORDS_S)
            return CompileEnd(failure=self._obituary(constraint, how))
        self.is_usable = not end.is_last
        return end

    async def _next_frame(self) -> bytes:
        frames: list[bytes] = []
        while not frames:
            frames = await self.receive()
        return frames[0]

    def _obituary(self, constraint: Constraint, how: str) -> CompileFailure:
        if self.exit_code == -signal.SIGXCPU:
            return over_cpu_time(constraint, self._limits.cpu_s)
        if self.exit_code in OWN_FAULTS:
            most = megabytes(self._limits.memory_bytes)
            message = (
                f"{constraint.kind}: the compiling process {how} of it: it nests too deeply, or needs more "
                f"than {most} of memory, which is the limit for compiling a constraint"
            )
            return CompileFailure(RequestRefused.code, message)
        message = f"{constraint.kind}: the compiling process {how} while it compiled this constraint"
        return CompileFailure(EngineFailed.code, f"{message}: try again", is_final=False)
