"""The vendors of the tests of batches."""

from __future__ import annotations

import pytest
from support.apis.batch_sessions import VENDORS
from support.apis.batch_vendors import FakeVendor

from agentflow.backends.apis.batches import collector
from agentflow.language.batch import retries


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FIRST_POLL_S", "MAX_POLL_S", "FIRST_LOOK_S"):
        monkeypatch.setattr(collector, name, 0.001)
    monkeypatch.setattr(retries, "FIRST_PAUSE_S", 0.0)


@pytest.fixture(params=VENDORS)
def vendor(request: pytest.FixtureRequest) -> FakeVendor:
    return VENDORS[request.param]()
