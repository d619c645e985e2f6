"""Fixtures that several tests of the language share."""

from collections.abc import AsyncIterator

import pytest
from support.observed_backends import assert_idle
from support.programs import echo

import agentflow as af


@pytest.fixture
async def flow() -> AsyncIterator[af.Session]:
    """A session whose answers repeat the prompt. Nothing runs in its backend at the end."""
    backend = af.Scripted(echo)
    async with af.session(backend=backend) as session:
        yield session
    assert_idle(backend)
