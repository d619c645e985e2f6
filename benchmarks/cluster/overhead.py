"""The cost of the router on real requests: an engine behind a ``ReplicaSet`` of one replica against the same
engine without a router.

Both engines are loaded, and run alternately (A B A B …), so that other load on the machine affects both.
Latency is measured with requests for one token whose prompt is cached, throughput with a batch of streams.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio

from agentflow.cluster.replicas.open_replicas import replicated_engine
from agentflow.engine.client import EngineClient
from agentflow.engine.local_engine import engine_start, make_deadlines, open_engine, open_tokenizer
from agentflow.engine.options import EngineOptions
from agentflow.engine.store.model_store import resolve_model
from agentflow.protocol.sampling import SamplingParams
from benchmarks.report import Report

KV_TOKENS = 16_384
PROMPT_TOKENS = 512
ROUNDS = {"small": 3, "full": 7}
CALLS = {"small": 20, "full": 60}
"""Requests of a round's latency."""
STREAMS, LENGTH = 16, 64


def overhead(report: Report) -> None:
    """Adds ``cluster.router_overhead_ms`` and ``cluster.router_throughput_share``."""
    anyio.run(_measure, report)


async def _measure(report: Report) -> None:
    waits_ms: list[float] = []
    shares: list[float] = []
    options = EngineOptions(own_process=True, kv_tokens=KV_TOKENS, device="cpu")
    async with open_engine(options) as plain, _routed(options) as routed:
        for client in (plain, routed):
            await _latency_s(client, 5)
            await _throughput(client, 0)
        for number in range(ROUNDS[report.scale]):
            pair = (plain, routed) if number % 2 else (routed, plain)
            latency = {client: await _latency_s(client, CALLS[report.scale]) for client in pair}
            rate = {client: await _throughput(client, number + 1) for client in pair}
            waits_ms.append(1000 * (latency[routed] - latency[plain]))
            shares.append(rate[routed] / rate[plain])
    report.median(
        "cluster.router_overhead_ms",
        waits_ms,
        "ms",
        goal="<= 1",
        note=f"p50 of {CALLS[report.scale]} requests for one token after {PROMPT_TOKENS} cached ones, "
        "with the router minus without it, interleaved",
    )
    report.median(
        "cluster.router_throughput_share",
        shares,
        "ratio",
        goal=">= 0.98",
        note=f"tokens a second of {STREAMS} streams of {LENGTH} tokens, with the router to without it, "
        "interleaved",
    )


@asynccontextmanager
async def _routed(options: EngineOptions) -> AsyncIterator[EngineClient]:
    folder = resolve_model(options.model)
    opening = replicated_engine(
        [engine_start(options, folder, reports=True)],
        lambda: open_tokenizer(options, folder),
        max_running=options.max_running,
        deadlines=make_deadlines(options, folder),
    )
    async with opening as client:
        yield client


async def _latency_s(client: EngineClient, count: int) -> float:
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    prompt = list(range(1000, 1000 + PROMPT_TOKENS))
    times = []
    for _ in range(count):
        began_s = time.perf_counter()
        await client.generate(prompt, params, seed=0)
        times.append(time.perf_counter() - began_s)
    return statistics.median(times)


async def _throughput(client: EngineClient, number: int) -> float:
    """Tokens a second. ``number``: prompts of different numbers share nothing."""
    params = SamplingParams(max_tokens=LENGTH, ignore_eos=True)
    began_s = time.perf_counter()
    async with anyio.create_task_group() as group:
        for stream in range(STREAMS):
            prompt = [2000 + number, *range(3000 + stream, 3064 + stream)]
            group.start_soon(_generate, client, prompt, params)
    return STREAMS * LENGTH / (time.perf_counter() - began_s)


async def _generate(client: EngineClient, prompt: list[int], params: SamplingParams) -> None:
    await client.generate(prompt, params, seed=0)
