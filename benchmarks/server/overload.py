"""An overload: three times the requests that the server can answer, and their outcomes."""

from __future__ import annotations

import asyncio
import itertools
import math
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from benchmarks.report import Report
from benchmarks.server.http_load import Outcome
from benchmarks.server.load_process import LoadProcess
from benchmarks.server.served import port_of, served

MAX_RUNNING = 16
# The machine's speed changes within a minute by more than the cost of an overload. So goodput is measured in
# short overloads, each between two peaks, and slow failures in a long one.
NUM_SLICES, SLICE_S = 16, 10.0
LONG_S = 60.0
# More clients than places, so that no place is ever free: the peak is the server's maximum.
PEAK_STREAMS = 24
# Answers differ in length: clients in lockstep would be faster than real ones.
LOAD = {"prompt_words": 40, "max_tokens": 32, "spread": 16}
# The time until all places are taken and the first answers have ended. Earlier answers are not counted.
FILL_S = 4.0
# The expected wait above which the server rejects, and the time to first token that counts as good.
MAX_WAIT_S = 3.0
GOOD_TTFT_S = 2 * MAX_WAIT_S
FACTOR = 3
REFUSED = {429, 503}


@dataclass
class LongOverload:
    """The results of a long overload."""

    outcomes: list[Outcome]
    recovery_s: float  # from the last answer until the time to first token is back to normal
    samples: list[int]  # memory in bytes, once per second


async def measure_overload(report: Report, clients: LoadProcess) -> None:
    """Measures ``overload_goodput`` (good requests per second against the peak), lost requests, memory growth
    and recovery."""
    num_slices, duration_s = (NUM_SLICES, LONG_S) if report.scale == "full" else (2, 10.0)
    async with served(max_wait_s=MAX_WAIT_S, max_running=MAX_RUNNING, kv_tokens=20_000) as (server, _):
        port = port_of(server)
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
    note = f"overloads of {SLICE_S:.0f} s at {FACTOR} times the median peak, each between two peaks "
    note += f"of {min(peaks):.1f} to {max(peaks):.1f} good requests/s"
    report.median("server.overload_goodput", goodputs, "ratio", goal=">= 0.9", note=note)
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
    """Returns the peak: good requests per second of a closed loop that leaves no place free."""
    _, outcomes = await clients.put(
        port=port, streams=PEAK_STREAMS, requests=0, duration_s=SLICE_S, seed=seed, **LOAD
    )
    return _good_per_s(outcomes, SLICE_S)


def _good_per_s(outcomes: Sequence[Outcome], duration_s: float) -> float:
    """Returns good answers per second while requests arrive, without the time in which places fill."""
    began_s = min(o.began_s for o in outcomes)
    ends_s = [o.began_s + o.took_s - began_s for o in _good(outcomes)]
    return sum(FILL_S <= end_s <= duration_s for end_s in ends_s) / (duration_s - FILL_S)


async def _recovery_s(clients: LoadProcess, port: int, alone_s: float) -> float:
    """Returns the seconds from the overload's last answer until the time to first token is back to about
    ``alone_s``."""
    began_s = time.perf_counter()
    while await _alone_ttft_s(clients, port) > 2 * alone_s:
        pass
    return time.perf_counter() - began_s


async def _alone_ttft_s(clients: LoadProcess, port: int) -> float:
    """Returns the time to first token of a request on an idle server; infinite if it is rejected."""
    _, [outcome] = await clients.put(port=port, prompt_words=LOAD["prompt_words"], max_tokens=1, seed=5)
    return outcome.ttft_s if outcome.status == 200 else math.inf


async def _watch_memory(samples: list[int], clients_pid: int) -> None:
    """Samples the memory of the server and its engine once per second."""
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
    note = f"neither answered nor rejected, of {len(long.outcomes)} in {duration_s:.0f} s: {good} good, "
    note += f"{counts[200] - good} late, {refused} rejected with 429 or 503"
    report.add("server.overload_lost", lost, "requests", [lost], note, "<= 0")
    note = "from the last answer until the time to first token is back to normal"
    report.median("server.overload_recovery_s", [long.recovery_s], "s", goal="<= 5", note=note)
    _report_growth(report, long.samples)
    refusals_ms = sorted(o.took_s * 1000 for o in long.outcomes if o.status in REFUSED)
    if refusals_ms:
        p99 = refusals_ms[int(len(refusals_ms) * 0.99)]
        report.median(
            "server.refusal_ms_p99", [p99], "ms", note="from the request to the end of the rejection"
        )


def _report_growth(report: Report, samples: Sequence[int]) -> None:
    """Reports the growth of memory over the last two thirds, when all memory has been touched."""
    settled = samples[len(samples) // 3 :]
    third = max(1, len(settled) // 3)
    growth_mb = (statistics.median(settled[-third:]) - statistics.median(settled[:third])) / 1e6
    note = f"of {samples[-1] / 1e6:.0f} MB in the server and the engine, over the last two thirds of the run"
    report.median("server.overload_growth_mb", [growth_mb], "MB", goal="<= 10", note=note)
