"""The server under test, and the record of what passed."""

from __future__ import annotations

import gc
import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from subjects import LONG

HERE = Path(__file__).parents[1]
PYTHON = os.environ.get("AGENTFLOW_PYTHON", str(HERE.parents[1] / ".venv" / "bin" / "python"))

# Clients read these when they are imported. None of them may report to its makers or ask the network.
os.environ.update(
    OPENAI_API_KEY="no-key",
    ANTHROPIC_API_KEY="no-key",
    OPENAI_AGENTS_DISABLE_TRACING="1",
    LITELLM_LOCAL_MODEL_COST_MAP="True",
    HF_HUB_OFFLINE="1",
    DO_NOT_TRACK="1",
)


class Server:
    """The address, and what the server counts."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.v1 = f"{url}/v1"

    def count(self, metric: str) -> float:
        """The sum of a metric over its labels."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        return sum(float(value) for value in re.findall(rf"^{metric}(?:{{.*}})? (\S+)$", text, re.MULTILINE))

    @contextmanager
    def aborts(self) -> Iterator[None]:
        """Checks that the server stops an answer to ``LONG`` that a client stops reading in the block."""
        before = self.count("agentflow_generated_tokens_total")
        yield
        gc.collect()  # some clients leave the connection to the collector
        deadline = time.monotonic() + 30
        while self.count("agentflow_running_requests") and time.monotonic() < deadline:
            pass
        assert self.count("agentflow_running_requests") == 0
        assert 0 < self.count("agentflow_generated_tokens_total") - before < len(LONG) / 2


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    command = [PYTHON, str(HERE / "server.py")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield Server(process.stdout.readline().strip())
        finally:
            process.stdin.close()
            process.wait(30)


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, server: Server, tmp_path: Path) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", server.v1)
    monkeypatch.setenv("ANTHROPIC_BASE_URL", server.url)
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    marker = item.get_closest_marker("client")
    assert marker is not None, f"{item.nodeid} lacks the mark client(PACKAGE)"
    report.user_properties = [("client", marker.args[0]), ("absent", marker.kwargs)]
    return report


class _Record:
    """For each client, what was tested, and whether it passed; or why it cannot be tested."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found: dict[str, dict[str, bool | str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        properties: dict[str, Any] = dict(report.user_properties)
        done = self._found.setdefault(properties["client"], {})
        done.update(properties["absent"])
        subject = report.nodeid.rpartition("::")[2].partition("[")[0].removeprefix("test_")
        done[subject] = done.get(subject, True) and report.outcome == "passed"

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if session.config.option.collectonly:
            return
        self._path.parent.mkdir(exist_ok=True)
        self._path.write_text(json.dumps(self._found, indent=1) + "\n", encoding="utf-8")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Record(HERE / "build" / f"{Path(sys.prefix).name}.json"))
