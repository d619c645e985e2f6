"""The loopback hub of the tests of this folder."""

from __future__ import annotations

import types
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants, file_download
from huggingface_hub.utils import _http
from support.engine.hub_models import EXTRA, NAME
from support.engine.random_model import write_random_model
from support.hub_server import HubServer, hub_on_loopback, read_folder


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A hub without a model."""
    for module in (_http, file_download):  # which wait between their attempts
        monkeypatch.setattr(module, "time", types.SimpleNamespace(sleep=lambda seconds: None))
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    with hub_on_loopback(tmp_path / "home", monkeypatch) as server:
        yield server


@pytest.fixture
def tiny(hub: HubServer, folder: Path) -> HubServer:
    """A hub with the model, among other files."""
    hub.add(NAME, read_folder(folder) | EXTRA)
    return hub
