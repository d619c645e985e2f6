"""Fixtures that the tests of benchmarks share."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def _usual_garbage_collection() -> Iterator[None]:
    """Many benchmarks make collections rare, as servers do. Other tests run in this process later."""
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)
