"""The runs of a session, for ``flow.runs``: their costs, and how they ended."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, overload

from agentflow.errors import AgentflowError
from agentflow.language.display.svg import Bar, runs_svg
from agentflow.language.observing.spans import RunSpan, SessionSpan
from agentflow.protocol.events import Usage

MAX_RUNS: Final = 200
"""The number of latest runs that a session keeps."""
MAX_DRAWN: Final = 50


class RunRecord:
    """A run: one call of a program, a graph, or a state without a program. ``program``: its name. ``usage``:
    the tokens of its complete variables. ``error``: the code or type of the error that it ended with, or
    ``""``."""

    __slots__ = ("_began_s", "_ended_s", "error", "program", "span", "usage")

    def __init__(self, program: str, span: RunSpan | None) -> None:
        self.program = program
        self.usage = Usage()
        self.error = ""
        self.span = span
        self._began_s = time.perf_counter()
        self._ended_s: float | None = None

    def __repr__(self) -> str:
        return f"<run of {self.program}: {self.summary}>"

    @property
    def summary(self) -> str:
        """Its duration, tokens and end in one line."""
        usage = self.usage
        cached = f", {usage.hit_rate:.0%} cached" if usage.prompt_tokens else ""
        how = self.error or ("" if self.is_done else "running")
        tokens = f"{usage.prompt_tokens:,} + {usage.output_tokens:,} tokens{cached}"
        seconds = self.duration_s
        duration = f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"
        return f"{duration}, {tokens}{', ' if how else ''}{how}"

    @property
    def is_done(self) -> bool:
        """Whether the run has ended."""
        return self._ended_s is not None

    @property
    def began_s(self) -> float:
        """When it began, in seconds on the clock of ``time.perf_counter``."""
        return self._began_s

    @property
    def duration_s(self) -> float:
        """Its seconds so far."""
        return (time.perf_counter() if self._ended_s is None else self._ended_s) - self._began_s

    def fail(self, error: BaseException) -> None:
        """The run ends with this error."""
        self.error = error.code if isinstance(error, AgentflowError) else type(error).__name__
        if self.span is not None:
            self.span.fail(error)

    def end(self) -> None:
        """The run has ended. May be repeated."""
        if self._ended_s is None:
            self._ended_s = time.perf_counter()
            if self.span is not None:
                self.span.end()
                self.span = None

    def current(self) -> AbstractContextManager[Any]:
        """A scope in which the run's span is the current one."""
        return nullcontext() if self.span is None else self.span.current()


class Runs(Sequence[RunRecord]):
    """The latest runs of a session, at most ``MAX_RUNS``, in the order in which they began. In a notebook
    they are drawn on a time line; ``print(flow.runs)`` shows a table.

    >>> grade = await flow.run(judge, essay)
    >>> flow.runs[-1].program, flow.runs[-1].is_done
    ('judge', True)
    >>> flow.runs[-1].usage.output_tokens > 0
    True
    """

    def __init__(self) -> None:
        self._records: deque[RunRecord] = deque(maxlen=MAX_RUNS)

    def begin(self, program: str, spans: SessionSpan | None) -> RunRecord:
        """Adds a run. For the session."""
        record = RunRecord(program, None if spans is None else spans.begin_run(program))
        self._records.append(record)
        return record

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[RunRecord]:
        return iter(self._records)

    @overload
    def __getitem__(self, index: int) -> RunRecord: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[RunRecord]: ...
    def __getitem__(self, index: int | slice) -> RunRecord | Sequence[RunRecord]:
        return list(self._records)[index] if isinstance(index, slice) else self._records[index]

    def __repr__(self) -> str:
        return f"<{len(self)} runs>"

    def __str__(self) -> str:
        return "\n".join([f"{record.program:<24} {record.summary}" for record in self]) or "no runs"

    def _repr_svg_(self) -> str:
        """For notebooks."""
        bars = []
        for record in list(self)[-MAX_DRAWN:]:
            color = "#cf6a62" if record.error else "#57a773" if record.is_done else "#5b8def"
            ended_s = record.began_s + record.duration_s
            bars.append(Bar(record.program, record.began_s, ended_s, record.summary, color))
        return runs_svg(bars)
