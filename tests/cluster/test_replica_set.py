"""Several engines behind one client: the same texts as one engine alone, whatever happens to the engines."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fake_replicas import Replicas
from support.plain_model import alone

from agentflow.engine.client import EngineClient
from agentflow.engine.messages import Finished, Progress
from agentflow.engine.submit import Origin
from agentflow.errors import BadArgument, EngineFailed, Overloaded
from agentflow.protocol.sampling import SamplingParams

pytestmark = pytest.mark.anyio

POISON = 8


@dataclass(eq=False)
class Job:
    """A request, and what came of it."""

    prompt: list[int]
    length: int = 12
    origin: Origin = field(default_factory=Origin)
    ids: list[int] = field(default_factory=list)
    text: str = ""
    end: Finished | None = None
    error: Exception | None = None

    async def run(self, client: EngineClient) -> None:
        params = SamplingParams(max_tokens=self.length)
        try:
            self.end = await client.generate(
                self.prompt, params, seed=0, origin=self.origin, on_progress=self._progress
            )
        except EngineFailed as error:
            self.error = error

    def _progress(self, progress: Progress) -> None:
        assert not progress.num_dropped
        self.ids += progress.token_ids
        self.text += progress.text

    def check(self) -> None:
        """It gave what it gives alone, and each token once."""
        expected = alone(self.prompt, SamplingParams(max_tokens=self.length))
        assert self.end is not None
        assert self.end.text == expected.text
        assert self.end.text.startswith(self.text)
        assert self.end.finish_reason == expected.reason
        assert self.ids == expected.ids


def replica(client: EngineClient, number: int):
    return client.engine.replicas[number]


@settings(max_examples=60)
@given(data=st.data())
def test_texts_are_the_same_whatever_happens_to_replicas(data: st.DataObject) -> None:
    async def run() -> None:
        count = data.draw(st.integers(1, 3), "replicas")
        replicas = Replicas(count)
        replicas.loses = lambda: data.draw(st.booleans(), "a report is lost")
        jobs: list[Job] = []
        async with replicas.open() as client:
            await replicas.settle()
            replicas.is_automatic = False
            async with anyio.create_task_group() as group:
                for _ in range(data.draw(st.integers(5, 40), "events")):
                    number = data.draw(st.integers(0, count - 1), "number")
                    event = data.draw(
                        st.sampled_from(["submit", "step", "step", "step", "die", "hang", "drain"]), "event"
                    )
                    match event:
                        case "submit":
                            for _ in range(data.draw(st.integers(1, 3), "siblings")):
                                stem = [10] * data.draw(st.sampled_from([3, 70, 130]), "stem")
                                jobs.append(
                                    Job([*stem, 20 + len(jobs)], origin=Origin(task_group=1 + len(jobs) % 2))
                                )
                                group.start_soon(jobs[-1].run, client)
                        case "step":
                            replicas.children[number].step()
                        case "die":
                            replicas.children[number].die()
                        case "hang":
                            replicas.children[number].hangs = True
                        case "drain":
                            with contextlib.suppress(BadArgument, Overloaded):
                                client.engine.drain(number)
                    await replicas.settle()
                replicas.become_automatic()
                await replicas.ticks.until(lambda: all(job.end or job.error for job in jobs))
            for job in jobs:
                # A request may be blamed for deaths that the test has caused: three while it ran alone.
                if job.error is None:
                    job.check()
                else:
                    assert "died" in str(job.error)
            await replicas.ticks.until(lambda: all(one.state == "serving" for one in client.engine.replicas))
            for child in replicas.children.values():
                child.engine.scheduler.check_idle()
            assert all(one.requests == 0 for one in client.engine.replicas)

    anyio.run(run)
