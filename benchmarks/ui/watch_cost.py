"""The cost of a watching page to the server: the throughput with and without one, alternately."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from benchmarks.report import Report
from benchmarks.server.load_process import load_process
from benchmarks.server.served import port_of, served
from benchmarks.server.suite import ENGINE, NUM_STREAMS, over_http

INTERVAL_S = 0.5  # the interval of the page's watch


@asynccontextmanager
async def watching(port: int) -> AsyncIterator[None]:
    """Runs a process that watches the server while the scope is open."""
    command = [sys.executable, "-m", "benchmarks.ui.watcher", str(port), str(INTERVAL_S)]
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE)
    try:
        assert process.stdout is not None
        assert await process.stdout.readline() == b"watching\n"
        yield
    finally:
        process.terminate()
        await process.wait()


async def measure_watch_cost(report: Report) -> None:
    """Measures ``watch_cost``: the part of the throughput that is lost. Rounds alternate, and so does which
    of the two comes first."""
    rounds = 14 if report.scale == "full" else 2
    losses: list[float] = []
    rates: list[tuple[float, float]] = []
    async with served(**ENGINE) as (server, _), load_process() as clients:
        port = port_of(server)
        await over_http(clients, port, 2 * rounds)
        for number in range(rounds):
            seeds = iter((2 * number, 2 * number + 1))
            alone = 0.0
            if number % 2:
                alone = await over_http(clients, port, next(seeds))
            async with watching(port):
                watched = await over_http(clients, port, next(seeds))
            if not number % 2:
                alone = await over_http(clients, port, next(seeds))
            rates.append((watched, alone))
            losses.append((1 - watched / alone) * 100)
    watched, alone = sorted(rates)[len(rates) // 2]
    note = f"{watched:.0f} against {alone:.0f} output tokens/s, {NUM_STREAMS} streams; steps and tree"
    report.median("ui.watch_cost", losses, "%", goal="< 2", note=note)
