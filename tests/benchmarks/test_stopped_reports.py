"""Reports of runs that were stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import machine
from benchmarks.__main__ import main
from benchmarks.engine import radix
from benchmarks.report import Report, Result

COMMIT = "0123456789ab"


@pytest.mark.parametrize(
    ("commit", "scale", "is_exact", "goes_on"),
    [
        (COMMIT, "full", True, True),
        ("a" * 12, "full", True, False),  # other code may have other figures
        (COMMIT, "small", True, False),
        (COMMIT, "full", False, False),  # timed figures of two runs do not mix
    ],
)
def test_a_run_goes_on_only_from_the_same_exact_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, commit: str, scale: str, is_exact: bool, goes_on: bool
) -> None:
    file = tmp_path / "deep" / "cluster.json"
    monkeypatch.setattr(machine, "commit", lambda: COMMIT)
    stopped = Report("full", [Result("cluster.scaling_chat", 0.95, "ratio", [])], is_exact=True, file=file)
    stopped.extra["workloads"] = {"chat": {"scaling": 0.95}}
    stopped.write()
    monkeypatch.setattr(machine, "commit", lambda: commit)
    earlier = Report(scale, is_exact=is_exact, file=file).earlier()
    assert earlier.get("workloads") == ({"chat": {"scaling": 0.95}} if goes_on else None)
    assert [one["id"] for one in earlier.get("results", [])] == ["cluster.scaling_chat"] * goes_on


def test_a_run_of_changed_files_begins_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "commit", lambda: f"{COMMIT}-dirty")
    report = Report("full", is_exact=True, file=tmp_path / "cluster.json")
    report.write()
    assert report.earlier() == {}


def test_writing_a_tracked_file_does_not_change_the_measured_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "gpu.json"
    file.write_text("{}")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org"]
    for command in (["init", "-q"], ["add", "gpu.json"], ["commit", "-qm", "Measure"]):
        subprocess.run([*git, *command], cwd=tmp_path, check=True)
    monkeypatch.setattr(machine, "__file__", str(tmp_path / "machine.py"))
    report = Report("full", file=file)
    for _ in range(2):
        report.write()
        assert "dirty" not in json.loads(file.read_text())["commit"]
    assert machine.commit().endswith("-dirty")


def test_a_stopped_run_keeps_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(report: Report, console: Console, only: str) -> None:
        report.results.append(Result("radix.evict_us", 6.9, "us", []))
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()

    file = tmp_path / "radix.json"
    monkeypatch.setattr(radix, "run", run)
    monkeypatch.setattr(sys, "argv", ["benchmarks", "radix", "--json", str(file)])
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert main() == 130
    finally:
        signal.signal(signal.SIGTERM, before)
    assert [one["id"] for one in json.loads(file.read_text())["results"]] == ["radix.evict_us"]


def test_a_run_that_is_killed_while_it_writes_keeps_what_it_has_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "gpu.json"
    report = Report("small", [Result("one", 1.0, "ms", [])], file=file)
    report.write()
    before = file.read_bytes()

    def killed_half_way(self: Path, text: str, **options: str) -> None:
        self.write_bytes(text.encode()[:100])
        raise KeyboardInterrupt

    report.results.append(Result("two", 2.0, "ms", []))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", killed_half_way)
        with pytest.raises(KeyboardInterrupt):
            report.write()
    assert file.read_bytes() == before
    report.write()
    assert [one["id"] for one in json.loads(file.read_bytes())["results"]] == ["one", "two"]
    assert [*tmp_path.iterdir()] == [file]
