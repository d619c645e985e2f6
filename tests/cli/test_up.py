"""``agentflow up``: a missing model is pulled, the server runs, the browser gets the page, Ctrl-C ends it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.engine.random_model import write_random_model
from support.process_template import start_command

from agentflow.cli.operating.serve import pull_missing
from agentflow.cli.operating.up import has_screen, quiet
from agentflow.engine.store import model_store
from agentflow.server.config.config import Effective, Flags, load_config


def configured(*models: str, **values: str) -> Effective:
    return load_config(Flags(values, models, None), {})


def test_known_models_are_pulled_where_they_are_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pulled: list[str] = []
    monkeypatch.setenv("AGENTFLOW_CACHE", str(tmp_path))
    monkeypatch.setattr(model_store, "pull_model", pulled.append)
    config = configured("smollm2-135m", f"other={tmp_path}", "again=smollm2-135m").config
    pull_missing(config)
    assert set(pulled) == {"smollm2-135m"}
    pulled.clear()
    monkeypatch.setattr(model_store, "pulled_folder", lambda name: tmp_path)
    pull_missing(config)
    assert pulled == []


def test_the_level_of_logs_is_warning_unless_one_is_set() -> None:
    assert quiet(configured()).logs.log_level == "warning"
    assert quiet(configured(log_level="info")).logs.log_level == "info"


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere there is always a screen")
def test_a_terminal_without_a_screen_has_no_browser(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"):
        monkeypatch.delenv(name, raising=False)
    assert not has_screen()
    monkeypatch.setenv("DISPLAY", ":0")
    assert has_screen()


@contextlib.contextmanager
def running(*options: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """The command in a separate process, on any free port."""
    pipe, environment = subprocess.PIPE, {**os.environ, **environment}
    with start_command(
        "up", "--port", "0", *options, env=environment, stdout=pipe, stderr=pipe, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def test_the_browser_opens_the_page_and_ctrl_c_ends_it(tmp_path: Path) -> None:
    opened = tmp_path / "opened"
    os.mkfifo(opened)
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" > {opened}\n')
    browser.chmod(0o755)
    model = write_random_model(tmp_path / "model")
    with running("--model", f"tiny={model}", "--kv-tokens", "200", BROWSER=f"{browser} %s") as process:
        page = opened.read_text().strip()
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/ui/", page)
        with urllib.request.urlopen(page, timeout=30) as response:
            assert response.headers["content-type"].startswith("text/html")
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=30)
    assert process.returncode == 0, errors
    assert page in output
    assert page.replace("http", "ws", 1).removesuffix("/ui/") in output
