"""``flow.stats()`` where there are none just now: the session goes on."""

from __future__ import annotations

import pytest
from support.wire_peer import WireGenerator

import agentflow as af
from agentflow.backends.local import interpreted

pytestmark = pytest.mark.anyio


class _Backend:
    def __init__(self) -> None:
        self.generator = WireGenerator()

    def connect(self, deliver, lost):
        return interpreted(self.generator, deliver)


async def test_statistics_of_an_engine_that_restarts_can_be_asked_for_again():
    backend = _Backend()
    async with af.session(backend=backend) as flow:
        backend.generator.stats_fault = af.EngineFailed("it restarts")
        with pytest.raises(af.EngineFailed, match="it restarts"):
            await flow.stats()
        backend.generator.stats_fault = None
        assert (await flow.stats()).model == "scripted"


async def test_a_replay_says_again_that_there_were_none(tmp_path):
    backend, file = _Backend(), tmp_path / "run.jsonl"
    backend.generator.stats_fault = af.EngineFailed("it restarts")
    async with af.session(backend=backend, record=file) as flow:
        with pytest.raises(af.EngineFailed, match="it restarts"):
            await flow.stats()
    async with af.session(backend=af.Replay(file)) as flow:
        with pytest.raises(af.EngineFailed, match="it restarts"):
            await flow.stats()
