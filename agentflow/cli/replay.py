"""``agentflow replay``: shows a recording as the fork trees of its runs, with times and tokens.

Each variable has a line below its state, in the order of the ops: its text, its finish reason, its prompt
tokens and how many of them were cached, its output tokens, and the times of its op, its first text and its
end, in seconds since the start. Narrow terminals show fewer of these columns, so that texts remain readable.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from agentflow.cli.command import Command, printable
from agentflow.errors import Cancelled, ProtocolError
from agentflow.protocol.chat import ReplySoFar
from agentflow.protocol.events import Usage, Value, VarFailed
from agentflow.recording.file import Recording, read_recording
from agentflow.recording.runs import RecordedOp, RecordedRun, RecordedRuns, RecordedState, RecordedVariable

# Longer cells are truncated before rich measures them. No terminal shows more of a line.
MAX_CELL = 400
# Deeper levels of a tree are not indented further.
MAX_INDENT = 16
MAX_NAME_CELLS = 28
# Columns of numbers are omitted, in this order, until texts have this width.
MIN_TEXT_CELLS = 24
COLUMNS = ("variable", "text", "finish", "prompt", "cached", "out", "start", "first", "end")
DISPENSABLE = ("first", "start", "cached", "prompt", "out", "end")


def run_replay(path: Path, console: Console | None = None) -> None:
    """Prints a recording. ``BadRecording`` if the file is not one."""
    console = console or Console()
    recording = read_recording(path)
    runs = RecordedRuns(recording)
    header = recording.header
    console.print(
        Text(f"{path}: {header.model}, {header.started}, agentflow {header.agentflow}"),
        style="bold",
    )
    console.print(_table(runs, _TimeFormat(recording), console.width))
    for line in _totals(recording, runs):
        console.print(Text(line))


class _TimeFormat:
    """Formats seconds in at most five characters where possible, with the same number of decimals for all."""

    def __init__(self, recording: Recording) -> None:
        longest = recording.entries[-1].at_s if recording.entries else 0.0
        self._decimals = 3 if longest < 10 else 2 if longest < 100 else 1

    def __call__(self, seconds: float | None) -> str:
        return "" if seconds is None else f"{seconds:.{self._decimals}f}"


def _table(runs: RecordedRuns, time: _TimeFormat, width: int) -> Table:
    rows = [
        dict(zip(COLUMNS, cells, strict=True))
        for run in runs.runs
        for row in _rows(run)
        for cells in [_state_row(row, time) if row.variable is None else _variable_row(row, time)]
    ]
    shown = _columns_that_fit(rows, width)
    table = Table(box=None, padding=(0, 1, 0, 0), expand=True, header_style="bold")
    for name in shown:
        match name:
            case "variable":
                table.add_column(name, no_wrap=True, max_width=min(MAX_NAME_CELLS, width // 3))
            case "text":
                table.add_column(name, no_wrap=True, ratio=1, min_width=12)
            case "finish":
                table.add_column(name, no_wrap=True)
            case _:
                table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*(row[name] for name in shown))
    return table


def _columns_that_fit(rows: Sequence[Mapping[str, Text]], width: int) -> list[str]:
    """The columns of the table that leave enough width for texts."""
    cells = {name: max([len(name), *(row[name].cell_len for row in rows)]) + 1 for name in COLUMNS}
    cells["variable"] = min(cells["variable"], MAX_NAME_CELLS + 1, width // 3 + 1)
    cells["text"] = MIN_TEXT_CELLS + 1
    shown = list(COLUMNS)
    for name in DISPENSABLE:
        if sum(cells[one] for one in shown) <= width:
            break
        shown.remove(name)
    return shown


@dataclass(frozen=True)
class _Row:
    """A state (or the run's root) or one of its variables. ``guides``: the lines of the tree before it."""

    guides: str
    state: RecordedState
    variable: RecordedVariable | None = None


def _rows(run: RecordedRun) -> Iterator[_Row]:
    waiting = [(_Row("", run.root), "")]
    while waiting:  # not recursive: a chain of forks may be deeper than Python's stack
        row, indent = waiting.pop()
        yield row
        if row.variable is not None:
            continue
        parts = [part for op in row.state.ops for part in _parts(op)]
        inner: list[tuple[_Row, str]] = []
        for part in parts:
            is_last = part is parts[-1]
            guides = (indent + ("└ " if is_last else "├ "))[-MAX_INDENT:]
            below = (indent + ("  " if is_last else "│ "))[-MAX_INDENT:]
            inner.append((_make_row(part, guides), below))
        waiting += reversed(inner)


def _make_row(part: RecordedState | RecordedVariable, guides: str) -> _Row:
    return _Row(guides, part) if isinstance(part, RecordedState) else _Row(guides, part.state, part)


def _parts(op: RecordedOp) -> list[RecordedState | RecordedVariable]:
    return [*op.variables, *op.children]


def _state_row(row: _Row, time: _TimeFormat) -> list[Text]:
    state = row.state
    name = f"run {state.run}" if state.parent is None else f"state {state.path}"
    text = Text(_first_text(state), style="dim")
    finish, style = "", ""
    if state.program_failure is not None:
        finish, style = "failed", "red"
        text = Text(_line(str(state.program_failure)), style=style)
    elif state.error is not None:
        is_cancelled = state.error.origin.code == Cancelled.code
        finish, style = ("cancelled", "yellow") if is_cancelled else ("failed", "red")
    elif state.is_cancelled:  # and closed before the backend answered
        finish, style = "cancelled", "yellow"
    start = state.ops[0].at_s if state.ops else None
    return [
        Text(row.guides + name, style="bold" if state.parent is None else ""),
        text,
        Text(finish, style=style),
        *(Text(cell, style="dim") for cell in ("", "", "", time(start), "", time(state.end_s or None))),
    ]


def _variable_row(row: _Row, time: _TimeFormat) -> list[Text]:
    variable = row.variable
    assert variable is not None
    text, finish, style, usage = Text(_line(_shown_text(variable))), "", "", None
    match variable.end:
        case Value():
            finish, usage = variable.end.finish_reason, variable.end.usage
        case VarFailed(error=error):
            is_cancelled = error.origin.code == Cancelled.code
            finish, style = ("cancelled", "yellow") if is_cancelled else ("failed", "red")
            text = Text(_line(f"{error.code}: {error.message}"), style=style)
        case None:
            finish, style = ("cancelled" if variable.state.is_cancelled else "no end"), "yellow"
    tokens = ["", "", ""]
    if usage is not None:
        tokens = [f"{count:,}" for count in (usage.prompt_tokens, usage.cached_tokens, usage.output_tokens)]
    times = [time(variable.at_s), time(variable.first_s), time(variable.end_s)]
    return [
        Text(row.guides) + Text(_line(variable.name), style="cyan"),
        text,
        Text(finish, style=style),
        *map(Text, [*tokens, *times]),
    ]


def _shown_text(variable: RecordedVariable) -> str:
    """The text of a variable; for a reply, its prose and then its calls."""
    if not variable.is_reply:
        return variable.text
    try:
        reply = ReplySoFar().follow(variable.grown).now()
    except ProtocolError:  # the file was changed after the recording
        return variable.text
    return " ".join([reply.text, *(f"{call.name}({call.arguments})" for call in reply.tool_calls)])


def _first_text(state: RecordedState) -> str:
    parts = (
        part for op in state.ops if op.content.kind == "text" for part in dict(op.content.fields)["parts"]
    )
    return _line(next((part for part in parts if isinstance(part, str)), ""))


def _line(text: str) -> str:
    """The beginning of a text on one line, without control characters."""
    return printable(" ".join(text[:MAX_CELL].split()))


def _totals(recording: Recording, runs: RecordedRuns) -> list[str]:
    states = [state for run in runs.runs for state in run.states.values()]
    variables = [variable for state in states for variable in state.variables]
    usage = sum((end.usage for v in variables if isinstance(end := v.end, Value)), Usage())
    num_failed = sum(isinstance(variable.end, VarFailed) for variable in variables)
    lines = [
        f"{_count(len(runs.runs), 'run')}, {_count(len(states), 'state')}, "
        f"{_count(len(variables), 'variable')}{f' ({num_failed} without a value)' if num_failed else ''}, "
        f"{recording.entries[-1].at_s if recording.entries else 0:.3f} s",
        f"tokens: {usage.prompt_tokens:,} prompt, of which {usage.cached_tokens:,} cached "
        f"({usage.hit_rate:.1%}), {usage.output_tokens:,} output",
    ]
    if runs.lost is not None:
        lines.append(f"The connection to the backend was lost: {_line(runs.lost.error.message)}")
    match recording.ending:
        case "failed":
            lines.append("An exception ended the session.")
        case "cancelled":
            lines.append("The session was cancelled.")
        case None:
            lines.append("The recording ends before the session did.")
    return lines


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recording", type=Path, metavar="FILE", help="a recording (.jsonl)")


def _run(options: argparse.Namespace) -> int:
    run_replay(options.recording)
    return 0


COMMAND = Command(
    name="replay",
    summary="show the recording of a session",
    description="""\
Shows a recording of af.session(record=FILE): the fork tree of each run, with
texts, tokens and times. (af.Replay(FILE) repeats the run offline.)""",
    examples="agentflow replay run.jsonl",
    add_options=_add_options,
    run=_run,
)
