"""Fixtures that the tests of the APIs share."""

from __future__ import annotations

import pytest

from agentflow.backends.apis.http import transport


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two attempts, where the server asks for none."""
    monkeypatch.setattr(transport, "FIRST_PAUSE_S", 0.001)
