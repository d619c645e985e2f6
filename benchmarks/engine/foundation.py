"""Compares the engine with the generation loop of transformers, runs with and without the prefix cache, and
measures an idle server. All runs have the same weights and number of threads, and are interleaved."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any

from rich.console import Console

from agentflow.engine.client import EngineClient
from agentflow.engine.local_engine import open_engine
from agentflow.engine.options import EngineOptions
from agentflow.engine.store.model_store import resolve_model
from agentflow.protocol.sampling import SamplingParams
from benchmarks.peers.transformers_peer import Transformers
from benchmarks.report import Report
from benchmarks.server.costs import measure_server

NUM_THREADS = 2
MODEL = "smollm2-135m"
RUNS = 5


class Prompts:
    """Returns random token ids, different on each call, so that nothing is shared by accident."""

    def __init__(self) -> None:
        self._random = random.Random(1)

    def new(self, length: int) -> list[int]:
        """Returns one prompt."""
        return [self._random.randrange(10, 49_000) for _ in range(length)]


def exactly(num_tokens: int) -> SamplingParams:
    """Returns parameters for greedy generation of exactly this many tokens."""
    return SamplingParams(max_tokens=num_tokens, ignore_eos=True)


async def generate_s(client: EngineClient, prompts: list[list[int]], num_tokens: int) -> float:
    """Submits all prompts together. Returns the seconds until each has generated this many tokens."""
    start = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for prompt in prompts:
            group.create_task(client.generate(prompt, exactly(num_tokens), seed=0, on_text=lambda _: None))
    return time.perf_counter() - start


def engine(**options: Any) -> AbstractAsyncContextManager[EngineClient]:
    """Runs the engine in bfloat16 on two threads."""
    return open_engine(EngineOptions(MODEL, dtype="bfloat16", device="cpu", threads=NUM_THREADS, **options))


async def measure_decode(report: Report, peer: Transformers) -> None:
    """Measures decode speed for 1 and 16 streams: the time for 65 tokens minus the time for one, per
    token."""
    prompts = Prompts()
    single: list[float] = []
    batched: list[float] = []
    notes: list[tuple[float, float, float]] = []
    async with engine(kv_tokens=20_000) as client:

        async def ours(num_streams: int) -> float:
            def fresh() -> list[list[int]]:
                return [prompts.new(64) for _ in range(num_streams)]

            extra_s = await generate_s(client, fresh(), 65) - await generate_s(client, fresh(), 1)
            return num_streams * 64 / extra_s

        def theirs() -> float:
            prompt = prompts.new(64)
            return 64 / (peer.generate_s(prompt, 65) - peer.generate_s(prompt, 1))

        await ours(1)
        await ours(16)
        theirs()
        for _ in range(RUNS):
            peer_rate, one, sixteen = theirs(), await ours(1), await ours(16)
            single.append(one / peer_rate)
            batched.append(sixteen / peer_rate)
            notes.append((peer_rate, one, sixteen))
    peer_rate, one, sixteen = sorted(notes)[len(notes) // 2]
    report.median(
        "foundation.single_stream_vs_transformers",
        single,
        "ratio",
        goal=">= 1.5",
        note=f"{one:.1f} against {peer_rate:.1f} tokens/s",
    )
    report.median(
        "foundation.batch16_vs_transformers",
        batched,
        "ratio",
        goal=">= 8",
        note=f"{sixteen:.1f} against {peer_rate:.1f} tokens/s",
    )


async def measure_prefill(report: Report, peer: Transformers) -> None:
    """Measures the prompt tokens per second of one unshared prompt."""
    prompts = Prompts()
    length = 512 if report.scale == "full" else 128
    ratios: list[float] = []
    rates: list[tuple[float, float]] = []
    async with engine(kv_tokens=20_000) as client:
        await generate_s(client, [prompts.new(length)], 1)
        for _ in range(RUNS):
            theirs = length / peer.prefill_s(prompts.new(length))
            ours = length / await generate_s(client, [prompts.new(length)], 1)
            ratios.append(ours / theirs)
            rates.append((ours, theirs))
    ours, theirs = sorted(rates)[len(rates) // 2]
    note = f"{ours:.0f} against {theirs:.0f} prompt tokens/s, {length} tokens"
    report.median("foundation.prefill_vs_transformers", ratios, "ratio", goal=">= 0.9", note=note)


async def measure_prefix_cache(report: Report) -> None:
    """Measures many requests over one long prefix, with the cache and without."""
    is_full = report.scale == "full"
    num_requests, shared, own, outputs = (64, 1500, 40, 8) if is_full else (16, 500, 40, 8)
    prompts = Prompts()
    ratios: list[float] = []
    times: list[tuple[float, float]] = []
    kv_tokens = num_requests * (shared + own + outputs) + 1000

    async def workload(cache: bool) -> float:
        async with engine(kv_tokens=kv_tokens, max_running=num_requests, cache=cache) as client:
            await generate_s(client, [prompts.new(64)], 4)
            prefix = prompts.new(shared)
            return await generate_s(client, [prefix + prompts.new(own) for _ in range(num_requests)], outputs)

    for _ in range(3 if is_full else 1):
        without_s, with_s = await workload(cache=False), await workload(cache=True)
        ratios.append(without_s / with_s)
        times.append((with_s, without_s))
    with_s, without_s = sorted(times)[len(times) // 2]
    note = f"{with_s:.1f} s with, {without_s:.1f} s without; {num_requests} x ({shared} + {own}) tokens"
    report.median("foundation.prefix_cache_gain", ratios, "ratio", goal=">= 6", note=note)


def run(report: Report, console: Console, only: str) -> None:
    """Measures the figures whose id contains ``only``."""

    def wanted(*names: str) -> bool:
        return any(only in f"foundation.{name}" for name in names)

    async def measure(title: str, work: Coroutine[Any, Any, None]) -> None:
        console.print(f"measuring {title} …", style="dim")
        await work

    async def measure_all() -> None:
        if wanted("single_stream_vs_transformers", "batch16_vs_transformers", "prefill_vs_transformers"):
            with Transformers(resolve_model(MODEL), NUM_THREADS) as peer:
                await measure("decode", measure_decode(report, peer))
                await measure("prefill", measure_prefill(report, peer))
        if wanted("prefix_cache_gain"):
            await measure("the prefix cache", measure_prefix_cache(report))
        if wanted("resident_gb", "idle_core_percent"):
            await measure("a server", measure_server(report))

    asyncio.run(measure_all())
