"""Warns of code that blocks the event loop: ``time.sleep``, a synchronous HTTP client, a long computation.

While such code runs, no other program of the session runs and no text arrives, and nothing shows why.
``LoopWatch`` reads the stack of the loop's thread from a separate thread, twenty times a second while
programs run, and does nothing else until it finds a line of the program there. Then it schedules a call in
the loop and takes samples until the loop runs it. ``BlockingDetector`` decides whether one line has blocked
the loop. A false alarm is worse than a miss, so a thread that only waits for a processor or for the
interpreter's lock does not count.

Lines of this package, of the standard library and of installed packages are never blamed: the line of the
program that called them is. Imports and debuggers are ignored.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from agentflow.errors import BadArgument, BlockingWarning, ProgramError
from agentflow.language.failures.stack_frames import ProgramLine, program_frames
from agentflow.runtime.task_group import loop_caller

ENVIRONMENT = "AGENTFLOW_BLOCKING_MS"
DEFAULT_MS = 100.0
_POLL_S = 0.05
_SAMPLES = 4  # in the time that is long enough to warn
_LITTLE_S = 0.005  # of processor time, in which a thread goes to sleep


def threshold_s(environment: Mapping[str, str] = os.environ) -> float:
    """The time after which code blocks, in seconds, from ``AGENTFLOW_BLOCKING_MS``; 0 turns the watch off."""
    text = environment.get(ENVIRONMENT, "")
    try:
        threshold_ms = float(text) if text else DEFAULT_MS
    except ValueError:
        threshold_ms = -1.0
    if not threshold_ms >= 0:
        raise BadArgument(
            f"{ENVIRONMENT} must be a number of milliseconds, 0 for no warnings, not {text!r}",
            param=ENVIRONMENT,
        )
    return threshold_ms / 1000


class ThreadUsage(NamedTuple):
    """The system's data about a thread: ``cpu_s``, its processor time; ``is_asleep``, whether it waits in a
    system call; ``num_waits``, the number of such waits. None: unknown."""

    cpu_s: float | None = None
    is_asleep: bool | None = None
    num_waits: int | None = None


class BlockingDetector:
    """Finds the frame that has blocked the loop for ``threshold_s``, in samples of one step of the loop.

    That frame is in every sample. The thread has computed for ``threshold_s``, or slept for ``threshold_s``
    without waking. A thread that waits for the interpreter's lock wakes every 5 ms, a thread that waits for a
    processor is not asleep, and late samples show a busy machine."""

    def __init__(self, threshold_s: float) -> None:
        self._threshold_s = threshold_s
        self._common: list[Any] = []  # frames in all samples, the innermost first
        self._began = ThreadUsage()
        self._asleep_since: tuple[float, ThreadUsage] = 0.0, ThreadUsage()
        self._last_s = 0.0

    def see(self, now_s: float, frames: Sequence[Any], usage: ThreadUsage) -> Any | None:
        """The blocking frame, or None. ``frames``: the program's, the innermost first."""
        self._common = [frame for frame in self._common if any(frame is other for other in frames)]
        if not self._common:
            self._common, self._began = list(frames), usage
            self._asleep_since = now_s, usage
        elif now_s - self._last_s > self._threshold_s / 2 or not _slept(self._asleep_since[1], usage):
            self._asleep_since = now_s, usage
        self._last_s = now_s
        if not self._common:
            return None
        has_slept = now_s - self._asleep_since[0] >= self._threshold_s
        has_computed = _spent_s(self._began, usage) >= self._threshold_s
        return self._common[0] if has_slept or has_computed else None

    def forget(self) -> None:
        """Drops the frames."""
        self._common = []


def _spent_s(began: ThreadUsage, now: ThreadUsage) -> float:
    return 0.0 if began.cpu_s is None or now.cpu_s is None else now.cpu_s - began.cpu_s


def _slept(began: ThreadUsage, now: ThreadUsage) -> bool:
    """Whether the thread has slept the whole time, as far as is known."""
    has_not_run = _spent_s(began, now) < _LITTLE_S and began.num_waits == now.num_waits
    return has_not_run and now.is_asleep is not False


class LoopWatch:
    """Watches the event loop of the thread that makes it. ``wake`` begins, and the watch pauses by itself
    while ``is_active`` returns false. ``fail`` is called in the loop, if the filters made the warning an
    error."""

    def __init__(
        self, threshold_s: float, is_active: Callable[[], bool], fail: Callable[[Exception], None]
    ) -> None:
        self._threshold_s = threshold_s
        self._is_active = is_active
        self._fail = fail
        self._thread_id = threading.get_ident()
        self._native_id = threading.get_native_id()
        self._call_in_loop = loop_caller()
        self._woken = threading.Event()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def wake(self) -> None:
        """Begins to watch, or continues."""
        if self._woken.is_set():
            return
        self._woken.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="agentflow loop watch", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Ends the watch. Does not wait for its thread."""
        self._stopped.set()
        self._woken.set()

    def _watch(self) -> None:
        with suppress(RuntimeError):  # the loop has ended without a stop
            while not self._stopped.wait(_POLL_S):
                if not self._is_active():
                    self._woken.clear()
                    if not self._is_active():  # it may have begun meanwhile
                        self._woken.wait()
                elif self._frames():  # not kept: objects of the frames must not be finalised in this thread
                    self._look_closely()

    def _look_closely(self) -> None:
        """Takes samples until the loop continues."""
        detector = BlockingDetector(self._threshold_s)
        goes_on = threading.Event()

        def go_on() -> None:
            detector.forget()
            goes_on.set()

        self._call_in_loop(go_on)
        has_warned = False
        while not goes_on.wait(self._threshold_s / _SAMPLES) and not self._stopped.is_set():
            if has_warned:
                continue
            usage = thread_usage(self._thread_id, self._native_id)
            frame = detector.see(time.monotonic(), self._frames(), usage)
            if frame is not None:
                has_warned = True
                detector.forget()
                self._warn(frame)

    def _frames(self) -> list[FrameType]:
        return program_frames(sys._current_frames().get(self._thread_id))

    def _warn(self, frame: FrameType) -> None:
        code, names = frame.f_code, frame.f_globals
        place = ProgramLine(code.co_filename, frame.f_lineno, code.co_name)
        message = (
            f"{place}, has blocked the event loop for {self._threshold_s * 1000:.0f} ms: meanwhile no other "
            "program runs and no text arrives. Await something asynchronous there, or run it in a thread: "
            "`await anyio.to_thread.run_sync(function)`"
        )
        try:
            warnings.warn_explicit(
                message,
                BlockingWarning,
                code.co_filename,
                frame.f_lineno,
                names.get("__name__"),
                names.setdefault("__warningregistry__", {}),
            )
        except BlockingWarning:
            self._call_in_loop(lambda: self._fail(ProgramError(message)))


def thread_usage(thread_id: int, native_id: int) -> ThreadUsage:
    """The usage of a thread of this process, as far as the system reports it."""
    cpu_s = None
    with suppress(AttributeError, OSError):  # not on every system
        cpu_s = time.clock_gettime(time.pthread_getcpuclockid(thread_id))
    try:
        status = Path(f"/proc/self/task/{native_id}/status").read_text()
    except OSError:  # not on Linux
        return ThreadUsage(cpu_s)
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    num_waits = int(fields.get("voluntary_ctxt_switches", "0"))
    return ThreadUsage(cpu_s, fields.get("State", "S").strip().startswith("S"), num_waits)
