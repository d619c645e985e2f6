"""Fixtures and settings that all tests share. Nothing heavy is imported here."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from support.wire_server import ThreadServer

# Before anything imports torch or transformers: two threads (the machine of the CI has two cores, and
# tests run beside other work), and no look at a model hub, whatever a test loads.
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # other work runs on the same cores
os.environ["HF_HUB_OFFLINE"] = "1"
# Tests compute in the event loop, and would be warned of it.
os.environ.setdefault("AGENTFLOW_BLOCKING_MS", "0")

# A shell ignores SIGINT in what it runs in the background, and children would inherit that: tests that
# interrupt something must mean the same there.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples in every run, so that a red run can be repeated; HYPOTHESIS_PROFILE=thorough searches
# for new ones. `make test-full` has four times as many.
settings.register_profile("agentflow", deadline=None, derandomize=True, max_examples=25)
settings.register_profile("full", deadline=None, derandomize=True, max_examples=100)
settings.register_profile("few", deadline=None, derandomize=True, max_examples=5)  # for slow emulators
settings.register_profile("thorough", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "agentflow"))


@pytest.hookimpl(tryfirst=True)  # before those are left out that are marked
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is marked ``trio_in_full`` is ``full`` where it runs on trio."""
    for item in items:
        on_trio = getattr(item, "callspec", None) is not None and "trio" in item.callspec.params.values()  # type: ignore[attr-defined]
        if on_trio and item.get_closest_marker("trio_in_full"):
            item.add_marker(pytest.mark.full)


def pytest_collection_finish() -> None:
    """Excludes the imported modules from garbage collections, which many tests run."""
    gc.collect()
    gc.freeze()


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Tests marked ``anyio`` run on both event loops, unless their file overrides this fixture."""
    return str(request.param)


@pytest.fixture(scope="session")
def model_folder() -> Path:
    """The default model's folder in the user's own store; the first test that asks for it pulls it."""
    from agentflow.engine.store.model_store import pull_model
    from agentflow.protocol.wire import DEFAULT_MODEL

    return pull_model(DEFAULT_MODEL, progress=False)


@pytest.fixture(scope="session")
def model_url(model_folder: Path) -> Iterator[str]:
    """The address of a server on the default model, for all tests that need nothing special of it. It
    computes in float32: other batches, and an embedded engine, then give the same tokens."""
    from support.commands import served

    with served("--dtype", "float32", "--kv-tokens", "6000", "--threads", "2") as (url, _):
        yield url


@pytest.fixture(scope="session")
def server() -> Iterator[ThreadServer]:
    """A server on the scripted backend for the tests that need one with the default limits. It waits 60 s for
    a client whose connection is broken, longer than any test takes to resume."""
    from support.wire_server import thread_server

    from agentflow.server.config.limits import ServerLimits

    with thread_server(ServerLimits(resume_grace_s=60.0)) as running:
        yield running
