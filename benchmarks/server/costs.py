"""The costs of a server: memory with a full KV pool, and CPU time while it is idle."""

from __future__ import annotations

import random

import anyio
import psutil

import agentflow as af
from benchmarks.report import Report
from benchmarks.server.http_load import WORDS
from benchmarks.serving import serving_model

KV_TOKENS = 100_000
PROMPT_WORDS = 400
IDLE_S = 10.0


async def fill_pool(flow: af.Session, num_tokens: int) -> None:
    """Sends distinct prompts until the pool holds this many tokens."""
    rng = random.Random(2)
    while ((await flow.stats()).cached_slots or 0) < num_tokens:
        async with flow.state() as root:
            branches = root.fork(16)
            for branch in branches:
                branch += " ".join(rng.choice(WORDS) for _ in range(PROMPT_WORDS))
                branch += af.gen("x", max_tokens=1)
            await branches


def busy_s(processes: list[psutil.Process]) -> float:
    """Returns the CPU time that the processes have used, in seconds."""
    return float(sum(sum(each.cpu_times()[:2]) for each in processes))


async def measure_server(report: Report) -> None:
    """Measures ``resident_gb`` with a full pool, and ``idle_core_percent`` with a client connected."""
    with serving_model(kv_tokens=KV_TOKENS) as (url, pid):
        process = psutil.Process(pid)
        async with af.session(url) as flow:
            share = 0.97 if report.scale == "full" else 0.05
            await fill_pool(flow, int(KV_TOKENS * share))
            stats = await flow.stats()
            processes = [process, *process.children(recursive=True)]  # including the engine's process
            resident_gb = sum(each.memory_info().rss for each in processes) / 1e9
            idle: list[float] = []
            for _ in range(3):
                before = busy_s(processes)
                await anyio.sleep(IDLE_S)  # noqa: TID251 - the benchmark measures idle time
                idle.append(100 * (busy_s(processes) - before) / IDLE_S)
    note = f"{stats.cached_slots:,} of {stats.total_slots:,} KV tokens in use"
    report.median("foundation.resident_gb", [resident_gb], "GB", goal="<= 4", note=note)
    report.median("foundation.idle_core_percent", idle, "%", goal="<= 2", note="one session connected")
