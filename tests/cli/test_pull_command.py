"""``agentflow pull`` compiles the CPU kernels where they are not there yet, and says where they cannot be
had."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from agentflow.cli.pull import COMMAND
from agentflow.engine.store import model_store
from agentflow.kernels import native_library


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The levels that were compiled, into a cache that is empty at first."""
    levels: list[str] = []

    def compile_one(level: str, path: Path) -> None:
        levels.append(level)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()

    monkeypatch.setenv("AGENTFLOW_CACHE", str(tmp_path))
    monkeypatch.setenv("AGENTFLOW_CPU", "avx2")
    monkeypatch.setattr(native_library, "cpu_flags", lambda: frozenset(native_library.AVX2))
    monkeypatch.setattr(native_library, "_compile", compile_one)
    monkeypatch.setattr(native_library.ctypes, "CDLL", lambda path: path)
    monkeypatch.setattr(model_store, "pull_model", lambda name: tmp_path / name)
    return levels


def test_the_kernels_are_compiled_once(compiled: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        assert COMMAND.run(argparse.Namespace(model="some-model")) == 0
    assert compiled == ["avx2"]
    first, second, third = capsys.readouterr().out.splitlines()
    assert first.startswith("some-model is ready in ")
    assert second == "compiling the CPU kernels for avx2 (about 25 seconds) …"
    assert third == first


@pytest.mark.usefixtures("compiled")
def test_without_a_compiler_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(native_library, "compiler", lambda: ("false",))
    assert COMMAND.run(argparse.Namespace(model="some-model")) == 0
    told = capsys.readouterr().out.splitlines()[1]
    assert "torch kernels" in told
    assert "the compiler failed" in told
