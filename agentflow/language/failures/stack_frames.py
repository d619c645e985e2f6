"""Finds the frames of the program among the frames of this package, of libraries and of the event loop."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterable
from contextvars import ContextVar
from functools import lru_cache
from traceback import walk_tb
from types import FrameType, TracebackType
from typing import Literal, NamedTuple, TypeVar

import anyio

from agentflow.errors import AgentflowError

ErrorT = TypeVar("ErrorT", bound=BaseException)

PACKAGE = os.path.abspath(__file__).removesuffix(os.path.join("language", "failures", "stack_frames.py"))
"""The common beginning of the paths of this package's files."""


class ProgramLine(NamedTuple):
    """A line outside this package."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{os.path.basename(self.file)}:{self.line}, in {self.function}"


STARTED_AT: ContextVar[ProgramLine | None] = ContextVar("STARTED_AT", default=None)
"""In a task of this package: the line of the program that started it."""


def calling_line() -> ProgramLine | None:
    """The innermost line on the stack that is outside this package; in a task of this package, the line that
    started it. Takes about a microsecond."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith(PACKAGE):
            if _find_kind(frame) == "loop":
                return STARTED_AT.get()
            return ProgramLine(code.co_filename, frame.f_lineno, code.co_name)
        frame = frame.f_back  # type: ignore[assignment]
    return None


def program_line() -> ProgramLine | None:
    """The innermost line on the stack that is in no library, such as ``collections``; without one, as
    ``calling_line``."""
    frame = sys._getframe(1)
    while frame is not None and (kind := _find_kind(frame)) != "loop":
        if kind == "program":
            return ProgramLine(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back  # type: ignore[assignment]
    return calling_line()


_LIBRARIES = (
    *{os.path.join(sysconfig.get_path(kind), "") for kind in ("stdlib", "platstdlib", "purelib", "platlib")},
    os.path.join(os.path.dirname(os.path.dirname(anyio.__file__)), ""),  # with --target, for example
)
_LOOPS = frozenset({"asyncio", "trio", "uvloop", "anyio"})
_IGNORED = frozenset({"bdb", "pdb", "debugpy", "pydevd", "_pydevd_bundle", "importlib"})


def program_frames(frame: FrameType | None) -> list[FrameType]:
    """The frames of the program in the running step of the event loop, the innermost first. None of them if
    this package runs, or an import or a debugger."""
    found: list[FrameType] = []
    while frame is not None:
        kind = _find_kind(frame)
        if kind == "ignored":
            return []
        if kind == "package" or (kind == "loop" and found):
            return found
        if kind == "program":
            found.append(frame)
        frame = frame.f_back
    return []  # not in an event loop


FrameOwner = Literal["package", "program", "loop", "library", "ignored"]


def is_in_program(frame: FrameType) -> bool:
    """Whether the frame belongs to the program, and not to this package or to a library."""
    return _find_kind(frame) == "program"


def _find_kind(frame: FrameType) -> FrameOwner:
    return find_owner(frame.f_code.co_filename, frame.f_globals.get("__name__") or "")


@lru_cache(maxsize=10_000)
def find_owner(file: str, module: str) -> FrameOwner:
    """The owner of a frame of ``file`` in ``module``."""
    root = module.partition(".")[0]
    if root in _IGNORED or file.startswith("<frozen importlib"):
        return "ignored"
    if root in _LOOPS:
        return "loop"
    if file.startswith(PACKAGE):
        return "package"
    return "library" if file.startswith(_LIBRARIES) else "program"


def raised_at(error: BaseException) -> ProgramLine | None:
    """The innermost line of the program in the traceback of ``error``."""
    found = None
    for frame, line in walk_tb(error.__traceback__):
        if _find_kind(frame) == "program":
            code = frame.f_code
            found = ProgramLine(code.co_filename, line, code.co_name)
    return found


def without_internals(error: ErrorT) -> ErrorT:
    """The error with a shorter traceback. For errors of this package, it has only the program's frames. For
    other errors, it begins with the program's first frame, and is complete if there is none."""
    steps = list(_steps(error.__traceback__))
    kept = [step for step in steps if _find_kind(step.tb_frame) == "program"]
    if not isinstance(error, AgentflowError):
        kept = steps[steps.index(kept[0]) :] if kept else steps
    trace: TracebackType | None = None
    for step in reversed(kept):
        trace = TracebackType(trace, step.tb_frame, step.tb_lasti, step.tb_lineno)
    return error.with_traceback(trace)


def _steps(trace: TracebackType | None) -> Iterable[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next
