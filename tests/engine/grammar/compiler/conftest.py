"""Fixtures of all tests that run a compiling process."""

from __future__ import annotations

import pytest

from agentflow.engine.machine import child_process


@pytest.fixture(autouse=True)
def patience_with_killed_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a killed process of the idle class waits for its last moment on a processor."""
    monkeypatch.setattr(child_process, "KILL_S", 60.0)
