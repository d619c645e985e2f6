"""An overload: three times as many requests as the server can answer, and what becomes of each."""

from __future__ import annotations

import asyncio
import itertools
import math
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import psutil

from agentflow.engine.options import EngineOptions
from agentflow.server.open_models import open_models
from agentflow.server.serve import RunningServer, running_server
from benchmarks.report import Report, Result, median_of
from benchmarks.server.http_load import Outcome
from benchmarks.server.load_process import LoadProcess

MODEL = "smollm2-135m"
MAX_RUNNING = 16
# The machine's speed changes within a minute, by more than an overload may cost. So the goodput is measured
# in short overloads, each between two peaks, and what takes its time to go wrong in a long one.
NUM_SLICES, SLICE_S = 16, 10.0
LONG_S = 60.0
# More clients than places, so that none is ever free: the peak is what the server can do at most.
PEAK_STREAMS = 24
# Answers differ in length: clients in step, who all begin and end at once, are quicker than any real ones.
LOAD = {"prompt_words": 40, "max_tokens": 32, "spread": 16}
# Until every place is taken and the first answers have ended; what ends before is not counted.
FILL_S = 4.0
# What a request may expect to wait, and the time to first token that counts as good.
MAX_WAIT_S = 3.0
GOOD_TTFT_S = 2 * MAX_WAIT_S
FACTOR = 3
REFUSED = {429, 503}


@asynccontextmanager
async def served() -> AsyncIterator[RunningServer]:
    """A server that refuses what would wait for longer than ``MAX_WAIT_S``."""
    engine = EngineOptions(MODEL, device="cpu", threads=2, max_running=MAX_RUNNING, kv_tokens=20_000)
    async with running_server(lambda: open_models({MODEL: engine}, max_wait_s=MAX_WAIT_S)) as server:
        yield server


@dataclass
class LongOverload:
    """What became of each request of it, when the server had recovered, and bytes once a second."""

    outcomes: list[Outcome]
    recovery_s: float
    samples: list[int]


async def measure_overload(report: Report, clients: LoadProcess) -> None:
    """``overload_goodput``: good requests per second against the peak; and that nothing hangs, memory is flat
    and it recovers."""
    num_slices, duration_s = (NUM_SLICES, LONG_S) if report.scale == "full" else (2, 10.0)
    async with served() as server:
        port = int(server.url.rpartition(":")[2])
        await _peak_per_s(clients, port, 1)
        alone_s = statistics.median([await _alone_ttft_s(clients, port) for _ in range(5)])
        peaks, slices = [await _peak_per_s(clients, port, 2)], []
        for seed in range(10, 10 + 2 * num_slices, 2):
            outcomes = await _overload(clients, port, SLICE_S, statistics.median(peaks), seed)
            slices.append(_good_per_s(outcomes, SLICE_S))
            peaks.append(await _peak_per_s(clients, port, seed + 1))
        long = await _long_overload(clients, port, duration_s, statistics.median(peaks), alone_s)
    around = [statistics.mean(two) for two in itertools.pairwise(peaks)]
    goodputs = [one / peak for one, peak in zip(slices, around, strict=True)]
    note = f"overloads of {SLICE_S:.0f} s at {FACTOR} times the median peak, each between two, "
    note += f"of {min(peaks):.1f} to {max(peaks):.1f} good requests/s"
    report.results.append(median_of("server.overload_goodput", goodputs, "ratio", goal=">= 0.9", note=note))
    _tell(report, long, duration_s)


async def _overload(
    clients: LoadProcess, port: int, duration_s: float, peak_per_s: float, seed: int
) -> list[Outcome]:
    rate_per_s = FACTOR * peak_per_s
    _, outcomes = await clients.put(
        port=port, rate_per_s=rate_per_s, duration_s=duration_s, seed=seed, **LOAD
    )
    return outcomes


async def _long_overload(
    clients: LoadProcess, port: int, duration_s: float, peak_per_s: float, alone_s: float
) -> LongOverload:
    samples: list[int] = []
    async with asyncio.TaskGroup() as group:
        watching = group.create_task(_watch_memory(samples, clients.pid))
        outcomes = await _overload(clients, port, duration_s, peak_per_s, seed=3)
        recovery_s = await _recovery_s(clients, port, alone_s)
        watching.cancel()
    return LongOverload(outcomes, recovery_s, samples)


async def _peak_per_s(clients: LoadProcess, port: int, seed: int) -> float:
    """What the server does at most: good requests per second of a closed loop that leaves no place free."""
    _, outcomes = await clients.put(
        port=port, streams=PEAK_STREAMS, requests=0, duration_s=SLICE_S, seed=seed, **LOAD
    )
    return _good_per_s(outcomes, SLICE_S)


def _good_per_s(outcomes: Sequence[Outcome], duration_s: float) -> float:
    """Good answers that ended while requests came, per second, without the time in which places fill."""
    began_s = min(o.began_s for o in outcomes)
    ends_s = [o.began_s + o.took_s - began_s for o in _good(outcomes)]
    return sum(FILL_S <= end_s <= duration_s for end_s in ends_s) / (duration_s - FILL_S)


async def _recovery_s(clients: LoadProcess, port: int, alone_s: float) -> float:
    """From the last answer of the overload on: until a request has its first token about as soon as before,
    which was ``alone_s``."""
    began_s = time.perf_counter()
    while await _alone_ttft_s(clients, port) > 2 * alone_s:
        pass
    return time.perf_counter() - began_s


async def _alone_ttft_s(clients: LoadProcess, port: int) -> float:
    """Time to first token of a request that nobody else is there with; infinite where it is refused."""
    _, [outcome] = await clients.put(port=port, prompt_words=LOAD["prompt_words"], max_tokens=1, seed=5)
    return outcome.ttft_s if outcome.status == 200 else math.inf


async def _watch_memory(samples: list[int], clients_pid: int) -> None:
    """Of the server and its engine, once a second."""
    server = psutil.Process()
    while True:
        processes = [server, *server.children(recursive=True)]
        samples.append(sum(one.memory_info().rss for one in processes if one.pid != clients_pid))
        await asyncio.sleep(1)  # noqa: TID251  the rate of sampling


def _good(outcomes: Sequence[Outcome]) -> list[Outcome]:
    return [o for o in outcomes if o.status == 200 and o.num_tokens and o.ttft_s <= GOOD_TTFT_S]


def _tell(report: Report, long: LongOverload, duration_s: float) -> None:
    counts = Counter(outcome.status for outcome in long.outcomes)
    good = len(_good(long.outcomes))
    refused = sum(counts[status] for status in REFUSED)
    lost = len(long.outcomes) - refused - counts[200]
    note = f"neither answered nor refused, of {len(long.outcomes)} in {duration_s:.0f} s: {good} good, "
    note += f"{counts[200] - good} late, {refused} refused with 429 or 503"
    report.results += [
        Result("server.overload_lost", lost, "requests", [lost], note, "<= 0"),
        median_of(
            "server.overload_recovery_s",
            [long.recovery_s],
            "s",
            goal="<= 5",
            note="after the last answer, until the first token comes about as soon as before",
        ),
        _flatness(long.samples),
    ]
    refusals_ms = sorted(o.took_s * 1000 for o in long.outcomes if o.status in REFUSED)
    if refusals_ms:
        p99 = refusals_ms[int(len(refusals_ms) * 0.99)]
        report.results.append(median_of("server.refusal_ms_p99", [p99], "ms", note="a refusal's whole time"))


def _flatness(samples: Sequence[int]) -> Result:
    """Growth over the last two thirds of the overload, when everything has been touched."""
    settled = samples[len(samples) // 3 :]
    third = max(1, len(settled) // 3)
    growth_mb = (statistics.median(settled[-third:]) - statistics.median(settled[:third])) / 1e6
    note = f"of {samples[-1] / 1e6:.0f} MB, server and engine, over the last two thirds"
    return median_of("server.overload_growth_mb", [growth_mb], "MB", goal="<= 10", note=note)
