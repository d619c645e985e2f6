"""Settings that all tests share, made before DSPy is imported: its cache is a folder of this run's own."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest

_FOLDER = tempfile.TemporaryDirectory(prefix="dspy-cache-")
os.environ["DSPY_CACHEDIR"] = _FOLDER.name
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
for _name in ("AGENTFLOW_URL", "AGENTFLOW_API_KEY"):
    os.environ.pop(_name, None)

import dspy  # noqa: E402
from hypothesis import settings  # noqa: E402

settings.register_profile("agentflow", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("agentflow")

collect_ignore = []
if tuple(int(part) for part in dspy.__version__.split(".")[:2]) < (3, 4):
    collect_ignore += ["test_engines.py"]


@pytest.fixture(autouse=True)
def own_settings() -> Iterator[None]:
    """A test's settings apply to that test only."""
    before: dict[str, Any] = dict(dspy.settings.config)
    dspy.configure(callbacks=[], trace=[], lm=None, adapter=None, track_usage=False)
    yield
    dspy.configure(**before)
