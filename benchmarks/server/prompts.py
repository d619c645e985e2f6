"""Concurrent prompts and streams: the wait of a short request during long prompts, the slowdown of a stream
during prompts, and the slowdown of a long prompt by the limits of a step."""

from __future__ import annotations

import asyncio
import math
import statistics
import time
from unittest.mock import patch

import numpy as np

from agentflow.engine.local_engine import limit_spinning
from agentflow.engine.request import Request, Submit
from agentflow.engine.runner import run_batch
from agentflow.engine.scheduling import scheduler as scheduler_module
from agentflow.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from agentflow.engine.store.model_store import resolve_model
from agentflow.protocol.sampling import SamplingParams
from benchmarks.report import Report
from benchmarks.server.http_load import Outcome
from benchmarks.server.load_process import LoadProcess, load_process
from benchmarks.server.served import MODEL, port_of, served

NUM_LONG = 3
LONG_TOKENS = 7_600
SHORT_WORDS = 40
PROMPT_TOKENS = 2_000
STREAM_TOKENS = 150
KV_TOKENS = 40_000


def _ttft_ms(outcomes: list[Outcome]) -> float:
    assert all(outcome.status == 200 for outcome in outcomes), [outcome.status for outcome in outcomes]
    return 1e3 * statistics.median(outcome.ttft_s for outcome in outcomes)


def _tpot_ms(outcome: Outcome) -> float:
    assert outcome.num_tokens == STREAM_TOKENS, outcome.status
    return 1e3 * (outcome.took_s - outcome.ttft_s) / (outcome.num_tokens - 1)


async def measure_prompts(report: Report, clients: LoadProcess) -> None:
    """Measures ``short_ttft_beside_long`` and ``tpot_beside_prefill``: alternately alone and during
    prompts."""
    rounds = 5 if report.scale == "full" else 2
    waits: list[tuple[float, float]] = []
    steps: list[tuple[float, float]] = []
    async with served(kv_tokens=KV_TOKENS) as (server, _), load_process() as others:
        port = port_of(server)
        await clients.put(port=port, requests=3, prompt_words=SHORT_WORDS, max_tokens=2, seed=999)
        for number in range(1, rounds + 1):
            waits.append(await _short_beside_long(clients, others, port, number))
            steps.append(await _stream_beside_prompts(clients, others, port, number))
    alone, beside = sorted(waits, key=lambda pair: pair[1] / pair[0])[rounds // 2]
    note = f"{beside:.0f} against {alone:.0f} ms; {NUM_LONG} prompts of {LONG_TOKENS:,} words"
    ratios = [beside / alone for alone, beside in waits]
    report.median("server.short_ttft_beside_long", ratios, "ratio", goal="<= 10", note=note)
    alone, beside = sorted(steps, key=lambda pair: pair[1] / pair[0])[rounds // 2]
    note = (
        f"{beside:.1f} against {alone:.1f} ms per token; "
        f"prompts of {PROMPT_TOKENS:,} words one after the other"
    )
    ratios = [beside / alone for alone, beside in steps]
    report.median("server.tpot_beside_prefill", ratios, "ratio", goal="<= 3", note=note)


async def _short_beside_long(
    clients: LoadProcess, others: LoadProcess, port: int, seed: int
) -> tuple[float, float]:
    """Returns the wait of short requests alone, and while long prompts are computed, in milliseconds."""
    short = {"port": port, "prompt_words": SHORT_WORDS, "max_tokens": 2}
    _, outcomes = await clients.put(**short, requests=8, seed=10 * seed)
    alone_ms = _ttft_ms(outcomes)
    async with asyncio.TaskGroup() as group:
        long = group.create_task(
            others.put(
                port=port, streams=NUM_LONG, prompt_words=LONG_TOKENS, max_tokens=1, seed=10 * seed + 1
            )
        )
        await asyncio.sleep(0.5)  # noqa: TID251  the long prompts are in the engine by then
        _, outcomes = await clients.put(**short, requests=12, seed=10 * seed + 2)
        assert not long.done(), "the long prompts ended before the short requests"
    _, longs = long.result()
    assert all(outcome.status == 200 for outcome in longs), [outcome.status for outcome in longs]
    return alone_ms, _ttft_ms(outcomes)


async def _stream_beside_prompts(
    clients: LoadProcess, others: LoadProcess, port: int, seed: int
) -> tuple[float, float]:
    """Returns the milliseconds per token of a stream alone, and while prompts are computed."""
    stream = {"port": port, "prompt_words": SHORT_WORDS, "max_tokens": STREAM_TOKENS}
    _, [outcome] = await clients.put(**stream, seed=10 * seed + 3)
    alone_ms = _tpot_ms(outcome)
    async with asyncio.TaskGroup() as group:
        beside = group.create_task(clients.put(**stream, seed=10 * seed + 4))
        await asyncio.sleep(0.1)  # noqa: TID251  the stream has begun by then
        number = 0
        while not beside.done():
            await others.put(port=port, prompt_words=PROMPT_TOKENS, max_tokens=1, seed=1000 * seed + number)
            number += 1
    _, [outcome] = beside.result()
    return alone_ms, _tpot_ms(outcome)


async def measure_long_prompt(report: Report, clients: LoadProcess) -> None:
    """Measures ``long_prompt_throughput``: a long prompt alone, in limited steps against full steps."""
    limit_spinning()
    from agentflow.engine.models.torch_runner import TorchRunner

    runner = TorchRunner(
        resolve_model(MODEL), num_slots=KV_TOKENS, dtype="bfloat16", device="cpu", num_threads=2
    )
    numbers = np.random.default_rng(0)

    def prompt_s() -> float:
        scheduler = Scheduler(num_slots=KV_TOKENS, max_context=8_192, config=SchedulerConfig())
        took: list[float] = []
        for number in range(2):  # the scheduler learns the cost of steps from the first one
            prompt = numbers.integers(10, 49_000, LONG_TOKENS, dtype=np.int32)
            request = Request.of(Submit(number, [], SamplingParams()), prompt, 1)
            scheduler.add(request)
            began_s = time.perf_counter()
            while not request.num_generated:
                batch = scheduler.schedule()
                assert batch is not None
                step_s = time.perf_counter()
                output = run_batch(runner, batch)
                scheduler.complete(output, time.perf_counter() - step_s)
            took.append(time.perf_counter() - began_s)
            scheduler.release(request)
        return took[1]

    ratios: list[float] = []
    for _ in range(5 if report.scale == "full" else 2):
        limited_s = prompt_s()
        with patch.object(scheduler_module, "LONE_PROMPT_STEP_S", math.inf):
            unlimited_s = prompt_s()
        ratios.append(unlimited_s / limited_s)
    runner.close()
    note = f"{LONG_TOKENS:,} tokens: {limited_s:.2f} against {unlimited_s:.2f} s without limit (last run)"
    report.median("server.long_prompt_throughput", ratios, "ratio", goal=">= 0.9", note=note)
