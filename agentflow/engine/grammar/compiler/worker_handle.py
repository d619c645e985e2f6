"""The server's handle on one compiling process. It compiles one constraint at a time."""

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
from agentflow.engine.machine.child_limits import ONE_THREAD, OWN_FAULTS
from agentflow.engine.machine.child_process import ChildProcess, to_frame
from agentflow.errors import EngineFailed, RequestRefused
from agentflow.protocol.constraint import Constraint

# The time for a process whose socket has closed to exit by itself, so that its exit status is known.
LAST_WORDS_S = 1.0


class CannotCompile(Exception):
    """The process will never be able to compile; the message contains the reason."""


class CompileWorkerHandle(ChildProcess):
    """The handle on a process. Created by ``start``. After ``ready``, it accepts constraints while
    ``is_usable``; ``end`` ends the process. ``module``: runs in the process. ``has_died``: the process died
    while compiling."""

    module = "agentflow.engine.grammar.compiler.worker"
    is_usable = True
    has_died = False
    _limits: CompileLimits

    @classmethod
    def start(cls, loader: str, limits: CompileLimits) -> CompileWorkerHandle:
        """Starts a process, which begins to load. Raises ``OSError`` if no process can be created."""
        first = StartCompiling(loader, limits.cpu_s, limits.memory_bytes, limits.compiled_bytes)
        worker = cls.run(cls.module, first, **ONE_THREAD)
        worker._limits = limits
        return worker

    async def ready(self) -> None:
        """Waits until the process has loaded. Raises ``CannotCompile`` if it cannot, ``EOFError`` if it
        died."""
        answer = ready_decoder.decode(await self.next_frame())
        if answer.problem:
            raise CannotCompile(answer.problem)

    def cpu_s(self) -> float:
        """Processor time used by the process; infinite once it has ended."""
        try:
            times = psutil.Process(self.pid).cpu_times()
        except psutil.Error:
            return math.inf  # it has ended
        return float(times.user + times.system)

    def pause(self) -> None:
        """Stops the process until ``go_on``."""
        self.signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Resumes the process after ``pause``."""
        self.signal(signal.SIGCONT)

    async def watch(self) -> None:
        """Waits between two constraints until the process dies, and then raises ``EOFError``."""
        await self.next_frame()

    async def compile(self, constraint: Constraint) -> CompileEnd:
        """Returns the process's answer or, if it dies, a failure with the cause. After a cancellation, the
        handle must not be used again."""
        self.is_usable = False
        try:
            await self.send(to_frame(constraint))
            end = end_decoder.decode(await self.next_frame())
        except (OSError, EOFError):
            self.has_died = True
            how = await self.end(LAST_WORDS_S)
            return CompileEnd(failure=self._obituary(constraint, how))
        self.is_usable = not end.is_last
        return end

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
