"""An engine process on the fake model, and what tests do with it."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fake_engine import TOKENIZER
from plain_engine import alone
from server.engine_loaders import start
from server.holds import Hold

from agentflow.sampling import SamplingParams
from agentflow.server.engine_client import EngineClient
from agentflow.server.engine_messages import Finished
from agentflow.server.engine_supervisor import supervised_engine

PROMPT = [5, 6, 7]
LENGTH = 20
PLAIN = alone(PROMPT, SamplingParams(max_tokens=LENGTH, ignore_eos=True))


@asynccontextmanager
async def process_engine(max_unfinished: int | None = None, **options) -> AsyncIterator[EngineClient]:
    """An engine process on the fake model. ``options`` as of ``engine_loaders.load``. When it ends,
    nothing may be held."""
    opening = supervised_engine(start(**options), lambda: TOKENIZER, max_unfinished=max_unfinished)
    async with opening as client:
        yield client
        if client.num_calls == 0:
            stats = await client.stats()
            assert (stats.running, stats.waiting, stats.held_slots) == (0, 0, 0)
            assert len(client.engine._ledger) == len(client._unfinished) == 0


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


def kill(client: EngineClient, held_at: Hold) -> None:
    os.kill(client.engine.pid, signal.SIGKILL)
    held_at.release()
