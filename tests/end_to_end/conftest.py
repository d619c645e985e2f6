"""Fixtures that the tests of whole commands share."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.engine.random_model import write_random_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that loads and generates quickly, for tests that do not depend on the text."""
    return write_random_model(tmp_path_factory.mktemp("tiny"), max_position_embeddings=8192)
