"""The client's view: output tokens per second of 32 unshared requests over HTTP, and the time to first token
of a short prompt. The clients are a separate process on the same cores."""

from __future__ import annotations

import asyncio
import statistics

from agentflow.engine.machine.child_process import lower_priority
from agentflow.server.models.models import EngineModel
from benchmarks.report import Report
from benchmarks.server.load_process import LoadProcess, load_process
from benchmarks.server.served import port_of, served
from benchmarks.server.suite import ENGINE, NUM_STREAMS, NUM_TOKENS, InProcess, over_http

PROMPT_TOKENS, SHORT_PROMPT_TOKENS = 256, 128


def measure(report: Report) -> None:
    """Measures ``http_tokens_s`` and ``http_ttft_ms``."""
    asyncio.run(_measure(report, 5 if report.scale == "full" else 2))


async def _measure(report: Report, runs: int) -> None:
    async with load_process() as clients, served(**ENGINE) as (server, model):
        lower_priority()
        port, words = port_of(server), _words_for(model, PROMPT_TOKENS)
        # Each seed once: its prompts would otherwise be in the cache.
        rates = [await over_http(clients, port, seed, words) for seed in range(1, runs + 2)][1:]
        first = [await _ttft_ms(clients, port, model, 100 + seed) for seed in range(5 * runs + 3)][3:]
    note = f"{NUM_STREAMS} unshared requests of {PROMPT_TOKENS} + {NUM_TOKENS} tokens; the goal is for AMX"
    report.median("step.http_tokens_s", rates, "tokens/s", note=note, goal=">= 650")
    note = f"a prompt of {SHORT_PROMPT_TOKENS} tokens, on an idle server; the goal is for AMX"
    found = [statistics.median(first)]
    report.median("step.http_ttft_ms", found, "ms", note=note, goal="< 30")


def _words_for(model: EngineModel, num_tokens: int) -> int:
    """Returns the number of words in a prompt of about ``num_tokens`` tokens; a word with its space is one
    token."""
    in_template = len(InProcess(model, 1).prompt()) - 1
    return num_tokens - in_template


async def _ttft_ms(clients: LoadProcess, port: int, model: EngineModel, seed: int) -> float:
    words = _words_for(model, SHORT_PROMPT_TOKENS)
    _, [outcome] = await clients.put(port=port, prompt_words=words, max_tokens=2, seed=seed)
    return 1e3 * outcome.ttft_s
