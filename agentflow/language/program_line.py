"""Which line of the user's program is being run: so that an op that fails later can name it."""

from __future__ import annotations

import os
import sys
from bisect import bisect_left
from typing import NamedTuple

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


class ProgramLine(NamedTuple):
    """A line outside this package."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{os.path.basename(self.file)}:{self.line}, in {self.function}"


def calling_line() -> ProgramLine | None:
    """The innermost line on the stack that is not this package's own. About a microsecond."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith(_PACKAGE):
            return ProgramLine(code.co_filename, frame.f_lineno, code.co_name)
        frame = frame.f_back  # type: ignore[assignment]
    return None


class LineTable:
    """From the number of an op in its state to the line that appended it."""

    def __init__(self) -> None:
        self._ends: list[int] = []
        self._lines: list[ProgramLine | None] = []

    def add(self, end: int, line: ProgramLine | None) -> None:
        """The ops up to number ``end``, from the end of those before, come from ``line``."""
        if self._lines and self._lines[-1] == line:
            self._ends[-1] = end
        else:
            self._ends.append(end)
            self._lines.append(line)

    def line_of(self, number: int) -> ProgramLine | None:
        """Where op ``number`` (from 1) was appended."""
        index = bisect_left(self._ends, number)
        return self._lines[index] if index < len(self._lines) else None
