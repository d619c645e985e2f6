"""An overload: three times as many requests as the server can answer, and what becomes of each."""

from __future__ import annotations

import asyncio
import math
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import psutil

from agentflow.server.local_engine import EngineOptions
from agentflow.server.open_models import open_models
from agentflow.server.serve import RunningServer, running_server
from benchmarks.http_load import Outcome
from benchmarks.load_process import LoadProcess
from benchmarks.report import Report, Result, median_of

MODEL = "smollm2-135m"
MAX_RUNNING = 16
# Rounds between two peaks that differ by more tell of the machine's other guests, not of the server.
STEADY_WITHIN = 0.1
STEADY_ROUNDS, MAX_ROUNDS = 3, 9
PEAK_S = 20.0
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
    engine = EngineOptions(MODEL, device="cpu", num_threads=2, max_running=MAX_RUNNING, kv_tokens=20_000)
    async with running_server(lambda: open_models({MODEL: engine}, max_wait_s=MAX_WAIT_S)) as server:
        yield server


@dataclass
class Round:
    """One overload between two peaks. ``peaks_per_s``, ``per_s``: good requests of theirs and of its own."""

    peaks_per_s: tuple[float, float]
    per_s: float
    outcomes: list[Outcome]
    recovery_s: float
    samples: list[int]

    @property
    def goodput(self) -> float:
        """As a share of the mean peak."""
        return self.per_s / statistics.mean(self.peaks_per_s)

    @property
    def is_steady(self) -> bool:
        """Whether the machine was about as fast after the overload as before it."""
        return min(self.peaks_per_s) >= (1 - STEADY_WITHIN) * max(self.peaks_per_s)


async def measure_overload(report: Report, clients: LoadProcess) -> None:
    """``overload_goodput``: good requests per second against the peak; and that nothing hangs, memory is flat
    and it recovers."""
    steady_rounds, max_rounds, duration_s = 1, 1, 10.0
    if report.scale == "full":
        steady_rounds, max_rounds, duration_s = STEADY_ROUNDS, MAX_ROUNDS, 60.0
    async with served() as server:
        port = int(server.url.rpartition(":")[2])
        await _peak_per_s(clients, port, 1)
        alone_s = statistics.median([await _alone_ttft_s(clients, port) for _ in range(5)])
        before_per_s = await _peak_per_s(clients, port, 2)
        rounds: list[Round] = []
        while len(rounds) < max_rounds and sum(one.is_steady for one in rounds) < steady_rounds:
            rounds.append(await _round(clients, port, duration_s, before_per_s, alone_s, len(rounds)))
            before_per_s = rounds[-1].peaks_per_s[1]
    _tell(report, rounds, duration_s)


async def _round(
    clients: LoadProcess, port: int, duration_s: float, before_per_s: float, alone_s: float, number: int
) -> Round:
    samples: list[int] = []
    seed = 3 + 10 * number
    async with asyncio.TaskGroup() as group:
        watching = group.create_task(_watch_memory(samples, clients.pid))
        _, outcomes = await clients.put(
            port=port, rate_per_s=FACTOR * before_per_s, duration_s=duration_s, seed=seed, **LOAD
        )
        recovery_s = await _recovery_s(clients, port, alone_s)
        watching.cancel()
    after_per_s = await _peak_per_s(clients, port, seed + 1)
    per_s = _good_per_s(outcomes, duration_s)
    return Round((before_per_s, after_per_s), per_s, outcomes, recovery_s, samples)


async def _peak_per_s(clients: LoadProcess, port: int, seed: int) -> float:
    """What the server does at most: good requests per second of a closed loop that leaves no place free."""
    _, outcomes = await clients.put(
        port=port, streams=PEAK_STREAMS, requests=0, duration_s=PEAK_S, seed=seed, **LOAD
    )
    return _good_per_s(outcomes, PEAK_S)


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


def _tell(report: Report, rounds: Sequence[Round], duration_s: float) -> None:
    outcomes = [outcome for one in rounds for outcome in one.outcomes]
    counts = Counter(outcome.status for outcome in outcomes)
    good = len(_good(outcomes))
    refused = sum(counts[status] for status in REFUSED)
    lost = len(outcomes) - refused - counts[200]
    steady = [one for one in rounds if one.is_steady] or rounds
    peak_per_s = statistics.mean(per_s for one in rounds for per_s in one.peaks_per_s)
    note = (
        f"{len(outcomes)} requests in {duration_s * len(rounds):.0f} s, {FACTOR} times the peak of "
        f"{peak_per_s:.1f}/s: {good} good, {counts[200] - good} late, {refused} refused with 429 or 503, "
        f"{lost} without an answer; {len(steady)} of {len(rounds)} rounds between peaks that differ by less "
        f"than {STEADY_WITHIN:.0%}"
    )
    report.results += [
        median_of(
            "server.overload_goodput", [one.goodput for one in steady], "ratio", goal=">= 0.9", note=note
        ),
        Result("server.overload_lost", lost, "requests", [lost], "neither answered nor refused", "<= 0"),
        median_of(
            "server.overload_recovery_s",
            [one.recovery_s for one in rounds],
            "s",
            goal="<= 5",
            note="after the last answer, until the first token comes about as soon as before",
        ),
        _flatness([one.samples for one in rounds]),
    ]
    refusals_ms = sorted(o.took_s * 1000 for o in outcomes if o.status in REFUSED)
    if refusals_ms:
        p99 = refusals_ms[int(len(refusals_ms) * 0.99)]
        report.results.append(median_of("server.refusal_ms_p99", [p99], "ms", note="a refusal's whole time"))


def _flatness(samples_of: Sequence[Sequence[int]]) -> Result:
    """Growth over the last two thirds of each overload, when everything has been touched."""
    growths_mb: list[float] = []
    for samples in samples_of:
        settled = samples[len(samples) // 3 :]
        third = max(1, len(settled) // 3)
        growths_mb.append((statistics.median(settled[-third:]) - statistics.median(settled[:third])) / 1e6)
    note = f"of {samples_of[-1][-1] / 1e6:.0f} MB, server and engine, over the last two thirds"
    return median_of("server.overload_growth_mb", growths_mb, "MB", goal="<= 10", note=note)
