"""``make test-compiled`` runs the tests of the core on what mypyc made of it, and not on the sources."""

from __future__ import annotations

import os

import pytest

from agentflow.server.core import radix_cache, scheduler


@pytest.mark.skipif(os.environ.get("AGENTFLOW_COMPILED") != "1", reason="the tests run on the sources")
def test_the_core_is_the_compiled_one():
    for module in (radix_cache, scheduler):
        assert not module.__file__.endswith(".py")
