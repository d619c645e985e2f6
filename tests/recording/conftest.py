"""The file of a recording, for all tests of recordings."""

from pathlib import Path

import pytest


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The file that a test records to."""
    return tmp_path / "run.jsonl"
