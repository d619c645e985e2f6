"""The progress of a pull: lines where nothing can be redrawn, bars in a terminal."""

from __future__ import annotations

from io import StringIO
from typing import get_args

import pytest
from rich.console import Console

from agentflow.engine.store.pull_progress import Phase, PullListener, show_pull


@pytest.fixture(autouse=True)
def _ordinary_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """rich looks at these; the tests say themselves whether there is a terminal."""
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)


def _play(listener: PullListener) -> None:
    listener.note("waiting for another pull of the same model")
    for phase in get_args(Phase):
        listener.begin(phase)
        listener.advance(1_000_000, 3_000_000)


def test_outside_a_terminal_each_phase_is_one_line() -> None:
    out = StringIO()
    with show_pull(Console(file=out), "tiny") as listener:
        _play(listener)
    assert out.getvalue().splitlines() == [
        "tiny: waiting for another pull of the same model",
        "tiny: downloading",
        "tiny: checking the hashes",
        "tiny: storing",
    ]


def test_a_terminal_that_cannot_redraw_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    out = StringIO()
    with show_pull(Console(file=out, force_terminal=True), "tiny") as listener:
        _play(listener)
    assert out.getvalue().splitlines()[-1] == "tiny: storing"


def test_in_a_terminal_each_phase_is_a_bar_that_ends_full() -> None:
    out = StringIO()
    with show_pull(Console(file=out, force_terminal=True, width=120), "tiny") as listener:
        _play(listener)
    last_frame = [line for line in out.getvalue().splitlines() if "tiny" in line][-3:]
    for line, says in zip(last_frame, ["downloading", "checking", "storing"], strict=True):
        assert says in line
        assert line.count("━") == 40
        assert "3.0/3.0 MB" in line


def test_a_pull_that_ends_early_leaves_its_bar_as_it_was() -> None:
    out = StringIO()
    try:
        with show_pull(Console(file=out, force_terminal=True, width=120), "tiny") as listener:
            listener.begin("download")
            listener.advance(1_000_000, 3_000_000)
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        last_frame = [line for line in out.getvalue().splitlines() if "tiny" in line][-1]
    assert "1.0/3.0 MB" in last_frame
