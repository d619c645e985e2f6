"""The progress of a map: a bar that fits its terminal, or a line every 30 s."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from io import StringIO

import pytest
from rich.cells import cell_len
from rich.console import Console
from support.programs import ask, echo

import agentflow as af
from agentflow.language.batch.map import ProgramMap, Tally
from agentflow.language.batch.progress import MapProgress, ProgressConsole, show_tally
from agentflow.runtime.generator import Generated


@pytest.fixture(autouse=True)
def _ordinary_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """rich reads these variables; each test sets whether there is a terminal."""
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("FORCE_COLOR", "NO_COLOR", "COLUMNS", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)


class Clock:
    """A clock that a test moves, in seconds."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def progress_at(elapsed_s: float, tally: Tally) -> MapProgress:
    clock = Clock()
    progress = MapProgress(tally, clock)
    clock.now_s += elapsed_s
    return progress


def drawn(progress: MapProgress, width: int) -> list[str]:
    console = Console(file=StringIO(), force_terminal=True, width=width, color_system=None)
    with console.capture() as capture:
        console.print(progress)
    return capture.get().splitlines()


FULL = Tally(100_000, 1234, 3, af.Usage(1000, 812, 5))


def test_the_line_has_the_progress_the_rate_the_hit_rate_and_the_time_left() -> None:
    middle = "81% cached  1k tokens in, 5 out  3 failed"
    assert progress_at(20, FULL).line() == f"1,234/100,000  61.7/s  {middle}  26:41 left"
    assert progress_at(5, FULL).line() == f"1,234/100,000  247/s  {middle}  6:40 left"
    assert progress_at(10_000, FULL).line().endswith(f"0.123/s  {middle}  222:19:33 left")
    assert progress_at(20, Tally(None, 40)).line() == "40 done  2/s"
    assert progress_at(0, Tally(10)).line() == "0/10"
    resumed = Tally(100, 60, 0, af.Usage(), num_retries=2, num_resumed=50)
    assert progress_at(10, resumed).line() == "60/100  1/s  50 resumed  2 retried  0:40 left"
    paid = Tally(100, 10, 0, af.Usage(90, 0, 10, cost=0.01234))
    assert progress_at(10, paid).line() == "10/100  1/s  0% cached  90 tokens in, 10 out  $0.0123  1:30 left"
    finished = progress_at(64, Tally(128, 128))
    finished.finish()
    assert finished.line() == "128/128  2/s  in 1:04"


def test_the_line_fits_every_terminal() -> None:
    for width in range(1, 130):
        [line] = drawn(progress_at(20, FULL), width)
        assert cell_len(line) <= width
        if width >= len("1,234/100,000"):
            assert "1,234/100,000" in line
        if width >= 90:
            assert progress_at(20, FULL).line() in line


def test_a_narrow_line_omits_the_least_important_parts() -> None:
    progress = progress_at(20, FULL)
    assert progress.line(60) == "1,234/100,000  61.7/s  81% cached  3 failed  26:41 left"
    assert progress.line(45) == "1,234/100,000  61.7/s  81% cached  3 failed"
    assert progress.line(35) == "1,234/100,000  61.7/s  3 failed"
    assert progress.line(25) == "1,234/100,000  3 failed"
    assert progress.line(15) == "1,234/100,000"


@pytest.mark.parametrize(("num_done", "total", "cells"), [(0, 8, 0), (2, 8, 10), (8, 8, 40), (0, 0, 40)])
def test_the_bar_shows_the_fraction_done(num_done: int, total: int, cells: int) -> None:
    console = Console(file=StringIO(), force_terminal=True, width=120, color_system="truecolor")
    with console.capture() as capture:
        console.print(progress_at(1, Tally(total, num_done)))
    # Each part of the bar has a separate colour: the finished part comes first.
    strokes = [part.partition("m")[2] for part in capture.get().split("\x1b[")]
    assert sum(stroke.count(cell) for stroke in strokes for cell in "━╸╺") == 40
    plain = drawn(progress_at(1, Tally(total, num_done)), 120)[0]
    assert f"{num_done}/{total}" in plain
    if 0 < cells < 40:
        assert strokes[1].count("━") == cells


async def mapped(console: Console, inputs: object, **options: object) -> list[object]:
    async with af.session(backend=af.Scripted(echo)) as flow:
        return await ProgramMap(
            flow._link, ask, inputs, show=lambda tally: show_tally(console, tally), **options
        )


@pytest.mark.anyio
async def test_the_final_bar_stays_in_a_terminal() -> None:
    out = StringIO()
    await mapped(Console(file=out, force_terminal=True, width=100), ["a", "b!", "c"], on_error="return")
    text = out.getvalue()
    last = text.rstrip("\x1b[?25h\n").splitlines()[-1]
    assert "3/3" in last
    assert "0% cached" in last
    assert "1 failed" in last
    assert " in 0:00" in last
    assert text.index("\x1b[?25l") < text.rindex("\x1b[?25h")  # the cursor is back


@pytest.mark.anyio
async def test_the_bar_of_a_failed_map_stays_in_a_terminal() -> None:
    out = StringIO()
    with pytest.raises(af.errors.EngineFailed):
        await mapped(Console(file=out, force_terminal=True, width=100), ["a", "b!", "c"], concurrency=1)
    last = out.getvalue().rstrip("\x1b[?25h\n").splitlines()[-1]
    assert "1/3" in last
    assert "1 failed" in last


@pytest.mark.anyio
@pytest.mark.parametrize("term", ["dumb", "xterm"])
async def test_outside_a_terminal_one_line_is_printed_at_the_end(
    monkeypatch: pytest.MonkeyPatch, term: str
) -> None:
    monkeypatch.setenv("TERM", term)
    out = StringIO()
    await mapped(Console(file=out, force_terminal=term == "dumb", width=20), (c for c in "abc"))
    [line] = out.getvalue().splitlines()
    assert line.startswith("map: 3 done, ")
    assert line.endswith("0% cached, 3 tokens in, 3 out, in 0:00")


def test_outside_a_terminal_a_line_is_printed_every_30_s() -> None:
    out, clock, tally = StringIO(), Clock(), Tally(100)
    with show_tally(Console(file=out), tally, clock) as tick:
        for _ in range(100):
            tally.num_done += 1
            clock.now_s += 1
            tick()
    assert [line.split(",")[0] for line in out.getvalue().splitlines()] == [
        "map: 30/100",
        "map: 60/100",
        "map: 90/100",
        "map: 100/100",
    ]


def test_redirected_output_is_not_drawn_above_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    file, terminal = StringIO(), StringIO()
    monkeypatch.setattr(sys, "stdout", file)
    with show_tally(Console(file=terminal, force_terminal=True), Tally(1)):
        print("a result")
    assert file.getvalue() == "a result\n"
    assert "a result" not in terminal.getvalue()


@pytest.mark.anyio
async def test_progress_is_printed_to_stderr_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    async with af.session(backend=af.Scripted(echo)) as flow:
        await flow.map(ask, ["a"])
        assert capsys.readouterr() == ("", "")
        await flow.map(ask, ["a"], progress=True)
        out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("map: 1/1, ")


class HalfCached(af.Scripted):
    """Reports that a part of each prompt was cached."""

    def __init__(self) -> None:
        super().__init__(echo)
        scripted = self.generator.generate

        async def generate(*args: object) -> Generated:
            end = await scripted(*args)
            return Generated(end.text, end.finish_reason, af.Usage(10, 4, 1))

        self.generator.generate = generate


@pytest.mark.anyio
async def test_the_hit_rate_counts_only_the_runs_of_the_map() -> None:
    @af.program
    async def forking(s: af.State, i: int) -> str:
        async with s.fork(3) as branches:
            for branch in branches:
                branch += "a" + af.gen("x")
        if i == 2:
            branches[0].cancel()
        return await branches[1]["x"]

    def inputs() -> Iterator[int]:
        yield from range(4)

    async with af.session(backend=HalfCached()) as flow:
        await flow.run(forking, 0)  # not part of the map
        results = flow.map(forking, inputs(), concurrency=1)
        assert await results == ["<a>"] * 4
        usage = results._work.tally.usage
        assert usage in (af.Usage(120, 48, 12), af.Usage(110, 44, 11))  # the cancelled one may have ended
        assert usage.hit_rate == 0.4


def test_in_a_notebook_one_line_is_redrawn() -> None:
    shell = import_module("IPython.core.interactiveshell").InteractiveShell
    publisher = import_module("IPython.core.displaypub").CapturingDisplayPublisher()
    clock, tally = Clock(), Tally(8)
    shown = shell.instance(display_pub_class=type(publisher), history_manager=None)
    try:
        shown.display_pub = publisher
        with show_tally(Console(file=StringIO(), force_jupyter=True), tally, clock) as tick:
            for _ in range(8):
                tally.num_done += 1
                clock.now_s += 0.2
                tick()
                tick()
    finally:
        shell.clear_instance()
    texts = [output["data"]["text/plain"] for output in publisher.outputs]
    assert len({output["transient"]["display_id"] for output in publisher.outputs}) == 1
    assert [output["update"] for output in publisher.outputs] == [False] + [True] * (len(texts) - 1)
    assert 4 < len(texts) <= 8 + 2
    assert texts[-1].startswith(f"{'█' * 40}  8/8")
    assert "4:" not in texts[-1]


class ClosedPipe(StringIO):
    """A pipe whose reader has closed it."""

    def write(self, text: str) -> int:
        raise BrokenPipeError


@pytest.mark.anyio
@pytest.mark.parametrize("is_terminal", [False, True])
async def test_a_closed_pipe_ends_the_progress_and_not_the_map(is_terminal: bool) -> None:
    console = ProgressConsole(file=ClosedPipe(), force_terminal=is_terminal)
    assert await mapped(console, ["a", "b"]) == ["<a>", "<b>"]
    assert console.quiet


class FullDisk(StringIO):
    """A file on a full disk."""

    def write(self, text: str) -> int:
        raise OSError("no space left")


@pytest.mark.anyio
async def test_an_error_while_printing_progress_is_raised_by_the_map() -> None:
    with pytest.raises(OSError, match="no space left"):
        await mapped(ProgressConsole(file=FullDisk()), ["a"])
