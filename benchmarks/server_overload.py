"""An overload: three times as many requests as the server can answer, and what becomes of each."""

from __future__ import annotations

import asyncio
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
PROMPT_WORDS = 40
NUM_TOKENS = 32
# What a request may expect to wait, and the time to first token that counts as good.
MAX_WAIT_S = 3.0
GOOD_TTFT_S = 2 * MAX_WAIT_S
FACTOR = 3
REFUSED = {429, 503}


@dataclass
class Peak:
    """What the server does at most: ``per_s`` good requests, with as many clients as it has places."""

    per_s: float
    ttft_s: float


@asynccontextmanager
async def served() -> AsyncIterator[RunningServer]:
    """A server that refuses what would wait for longer than ``MAX_WAIT_S``."""
    engine = EngineOptions(MODEL, device="cpu", num_threads=2, max_running=MAX_RUNNING, kv_tokens=20_000)
    async with running_server(lambda: open_models({MODEL: engine}, max_wait_s=MAX_WAIT_S)) as server:
        yield server


@dataclass
class Round:
    """One overload between two peaks. ``per_s``: the mean of theirs, for the machine's own speed changes."""

    per_s: float
    wall_s: float
    outcomes: list[Outcome]
    recovery_s: float
    samples: list[int]

    @property
    def goodput(self) -> float:
        """Good requests per second, as a share of the peak."""
        return len(_good(self.outcomes)) / self.wall_s / self.per_s


async def measure_overload(report: Report, clients: LoadProcess) -> None:
    """``overload_goodput``: good requests per second against the peak; and that nothing hangs, memory is flat
    and it recovers."""
    num_rounds, duration_s = (3, 60.0) if report.scale == "full" else (1, 10.0)
    async with served() as server:
        port = int(server.url.rpartition(":")[2])
        await _peak(clients, port, 1)
        before = await _peak(clients, port, 2)
        rounds: list[Round] = []
        for _ in range(num_rounds):
            samples: list[int] = []
            async with asyncio.TaskGroup() as group:
                watching = group.create_task(_watch_memory(samples, clients.pid))
                wall_s, outcomes = await clients.put(
                    port=port,
                    rate_per_s=FACTOR * before.per_s,
                    duration_s=duration_s,
                    prompt_words=PROMPT_WORDS,
                    max_tokens=NUM_TOKENS,
                    seed=3 + 10 * len(rounds),
                )
                recovery_s = await _recovery_s(clients, port, before)
                watching.cancel()
            after = await _peak(clients, port, 4 + 10 * len(rounds))
            per_s = statistics.mean((before.per_s, after.per_s))
            rounds.append(Round(per_s, wall_s, outcomes, recovery_s, samples))
            before = after
    _tell(report, rounds)


async def _peak(clients: LoadProcess, port: int, seed: int) -> Peak:
    """A closed loop that keeps every place of the batch taken."""
    wall_s, outcomes = await clients.put(
        port=port,
        streams=MAX_RUNNING,
        requests=5,
        prompt_words=PROMPT_WORDS,
        max_tokens=NUM_TOKENS,
        seed=seed,
    )
    return Peak(len(_good(outcomes)) / wall_s, statistics.median(o.ttft_s for o in outcomes))


async def _recovery_s(clients: LoadProcess, port: int, peak: Peak) -> float:
    """From the last answer of the overload on: until a request has its first token as soon as ever."""
    began_s = time.perf_counter()
    while True:
        _, [outcome] = await clients.put(port=port, prompt_words=PROMPT_WORDS, max_tokens=1, seed=5)
        if outcome.status == 200 and outcome.ttft_s <= 2 * peak.ttft_s:
            return time.perf_counter() - began_s


async def _watch_memory(samples: list[int], clients_pid: int) -> None:
    """Of the server and its engine, once a second."""
    server = psutil.Process()
    while True:
        processes = [server, *server.children(recursive=True)]
        samples.append(sum(one.memory_info().rss for one in processes if one.pid != clients_pid))
        await asyncio.sleep(1)  # noqa: TID251  the rate of sampling


def _good(outcomes: Sequence[Outcome]) -> list[Outcome]:
    return [o for o in outcomes if o.status == 200 and o.num_tokens and o.ttft_s <= GOOD_TTFT_S]


def _tell(report: Report, rounds: Sequence[Round]) -> None:
    outcomes = [outcome for one in rounds for outcome in one.outcomes]
    counts = Counter(outcome.status for outcome in outcomes)
    good = len(_good(outcomes))
    refused = sum(counts[status] for status in REFUSED)
    lost = len(outcomes) - refused - counts[200]
    note = (
        f"{len(outcomes)} requests in {sum(one.wall_s for one in rounds):.0f} s, {FACTOR} times the peak of "
        f"{statistics.mean(one.per_s for one in rounds):.1f}/s: {good} good, {counts[200] - good} late, "
        f"{refused} refused with 429 or 503, {lost} without an answer"
    )
    report.results += [
        median_of("server.overload_goodput", [o.goodput for o in rounds], "ratio", goal=">= 0.9", note=note),
        Result("server.overload_lost", lost, "requests", [lost], "neither answered nor refused", "<= 0"),
        median_of(
            "server.overload_recovery_s",
            [one.recovery_s for one in rounds],
            "s",
            goal="<= 5",
            note="after the last answer, until the first token comes as soon as before",
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
