"""An engine process on the fake model, and how tests use it."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio
from anyio.lowlevel import checkpoint
from support.engine_loaders import start
from support.fake_engine import TOKENIZER
from support.holds import Hold, until
from support.plain_model import alone
from support.processes import signal_child

from agentflow.engine.client import EngineClient
from agentflow.engine.messages import Finished
from agentflow.engine.process.deadlines import Deadlines
from agentflow.engine.process.shutdown_budget import ShutdownBudget
from agentflow.engine.process.supervisor import supervised_engine
from agentflow.protocol.sampling import SamplingParams

PROMPT = [5, 6, 7]
LENGTH = 20
PLAIN = alone(PROMPT, SamplingParams(max_tokens=LENGTH, ignore_eos=True))


class Ticks:
    """Time for an engine's deadlines that passes only when a test advances it. Delays before restarts take no
    time, or one tick (``holds_delays``)."""

    def __init__(self, *, holds_delays: bool = False) -> None:
        self.delays: list[float] = []  # before restarts
        self.deadlines = Deadlines(sleep=self._sleep)
        self._holds_delays = holds_delays
        self._next = anyio.Event()

    async def _sleep(self, delay_s: float) -> None:
        if delay_s != self.deadlines.slice_s:
            self.delays.append(delay_s)
            if not self._holds_delays:
                return
        await self._next.wait()

    async def tick(self) -> None:
        """Ends every sleep."""
        os.sched_yield()  # the engine process may need this processor
        before, self._next = self._next, anyio.Event()
        before.set()
        await checkpoint()

    async def until(self, is_so: Callable[[], bool]) -> None:
        """Lets time pass until something is so."""
        while not is_so():
            await self.tick()


@asynccontextmanager
async def process_engine(
    max_unfinished: int | None = None,
    *,
    ticks: Ticks | None = None,
    exits_when_down: bool = False,
    shutdown: ShutdownBudget | None = None,
    **options,
) -> AsyncIterator[EngineClient]:
    """An engine process on the fake model. ``options`` as of ``engine_loaders.load``. When it ends,
    nothing may be held."""
    opening = supervised_engine(
        start(**options),
        lambda: TOKENIZER,
        max_unfinished=max_unfinished,
        deadlines=None if ticks is None else ticks.deadlines,
        exits_when_down=exits_when_down,
        shutdown=shutdown,
    )
    async with opening as client:
        yield client
        if client.num_calls == 0 and client.engine.is_ready and shutdown is None:
            stats = await client.stats()
            assert (stats.running, stats.waiting, stats.in_use_slots) == (0, 0, 0)
            assert len(client.engine._journal) == len(client._unfinished) == 0


async def generate(
    client: EngineClient, prompt: list[int] = PROMPT, *, seed: int = 0, **params
) -> tuple[Finished, list[str]]:
    """The end of a generation, and the deltas before it."""
    deltas: list[str] = []
    params = {"max_tokens": LENGTH, "ignore_eos": True} | params
    end = await client.generate(prompt, SamplingParams(**params), seed=seed, on_text=deltas.append)
    return end, deltas


def text_after(prompt: list[int]) -> str:
    return alone(prompt, SamplingParams(max_tokens=LENGTH, ignore_eos=True)).text


async def progress(client: EngineClient) -> None:
    """Waits until each running request has a token of the present process. A request that meets two deaths
    without one is suspected."""
    journal = client.engine._journal
    await until(lambda: not any(entry.deaths_since_progress for entry in journal._sent.values()))


def kill(client: EngineClient, held_at: Hold) -> None:
    signal_child(client.engine.pid, signal.SIGKILL)
    held_at.release()
