"""The cost of serving on top of the engine: throughput and time to first token over HTTP against the engine
driven in process, memory of idle sessions, and goodput in an overload."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Sequence

from rich.console import Console

from agentflow.engine.machine.child_process import lower_priority
from agentflow.engine.messages import FromEngine, Progress
from agentflow.engine.request import Submit
from agentflow.engine.tenant import ANONYMOUS
from agentflow.protocol.sampling import SamplingParams
from agentflow.server.models.models import EngineModel
from benchmarks.report import Report
from benchmarks.server.http_load import WORDS
from benchmarks.server.load_process import LoadProcess, load_process
from benchmarks.server.overload import measure_overload
from benchmarks.server.prompts import measure_long_prompt, measure_prompts
from benchmarks.server.responses import measure_responses
from benchmarks.server.served import port_of, served
from benchmarks.server.sessions import measure_sessions
from benchmarks.server.stalls import measure_stalls

NUM_STREAMS = 32
PROMPT_WORDS = 40
NUM_TOKENS = 64
ENGINE = {"max_running": NUM_STREAMS, "kv_tokens": 20_000}


class InProcess:
    """Drives the engine's client without HTTP, with the same prompts as ids."""

    def __init__(self, model: EngineModel, num_words: int = PROMPT_WORDS) -> None:
        self._model = model
        self._num_words = num_words
        self._rng = random.Random(7)

    def prompt(self) -> list[int]:
        """Returns the next prompt."""
        generator = self._model.generator(ANONYMOUS)
        context = generator.open("")
        generator.begin_role(context, "user")
        generator.fill(context, " ".join([self._rng.choice(WORDS) for _ in range(self._num_words)]))
        generator.end_role(context)
        generator.begin_role(context, "assistant")
        token_ids = context.tokens.ids()
        generator.free(context)
        return token_ids

    async def throughput(self) -> float:
        """Returns the output tokens per second of ``NUM_STREAMS`` streams."""
        prompts = [self.prompt() for _ in range(NUM_STREAMS)]
        params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
        began_s = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for prompt in prompts:
                group.create_task(self._model.client.generate(prompt, params, seed=0, on_progress=_hear))
        return NUM_STREAMS * NUM_TOKENS / (time.perf_counter() - began_s)


class EngineWatch:
    """A ``RequestObserver`` that measures the engine's time to the first text of a request."""

    def __init__(self) -> None:
        self._sent_s = 0.0
        self.ttft_ms = 0.0

    def sent(self, submit: Submit) -> None:
        """Starts the time."""
        self._sent_s, self.ttft_ms = time.perf_counter(), 0.0

    def received(self, messages: Sequence[FromEngine]) -> None:
        """Stops the time at the first text."""
        if not self.ttft_ms and any(isinstance(one, Progress) and one.text for one in messages):
            self.ttft_ms = (time.perf_counter() - self._sent_s) * 1000


def _hear(progress: Progress) -> None:
    """Reads the answer, as a caller would."""


async def over_http(clients: LoadProcess, port: int, seed: int, num_words: int = PROMPT_WORDS) -> float:
    """Returns the output tokens per second of ``NUM_STREAMS`` streams."""
    wall_s, outcomes = await clients.put(
        port=port, streams=NUM_STREAMS, prompt_words=num_words, max_tokens=NUM_TOKENS, seed=seed
    )
    num_tokens = sum(outcome.num_tokens for outcome in outcomes)
    assert num_tokens == NUM_STREAMS * NUM_TOKENS, [outcome.status for outcome in outcomes]
    return num_tokens / wall_s


async def measure_throughput(report: Report, clients: LoadProcess) -> None:
    """Measures ``http_vs_engine`` in alternating rounds, each with different prompts."""
    rounds = 7 if report.scale == "full" else 2
    ratios: list[float] = []
    rates: list[tuple[float, float]] = []
    async with served(**ENGINE) as (server, model):
        port, engine = port_of(server), InProcess(model)
        await engine.throughput()
        await over_http(
            clients, port, rounds
        )  # each seed once, and never its negative, which makes the same prompts
        for number in range(rounds):
            alone = await engine.throughput()
            http = await over_http(clients, port, number)
            rates.append((http, alone))
            ratios.append(http / alone)
    http, alone = sorted(rates)[len(rates) // 2]
    note = f"{http:.0f} against {alone:.0f} output tokens/s, {NUM_STREAMS} streams"
    report.median("server.http_vs_engine", ratios, "ratio", goal=">= 0.9", note=note)


async def measure_ttft(report: Report, clients: LoadProcess) -> None:
    """Measures ``http_ttft_ms``: a client's wait for the first text, minus the wait of the engine's client
    for the same request, because forward passes vary by more than the difference."""
    rounds = 60 if report.scale == "full" else 15
    added: list[float] = []
    alone: list[float] = []
    async with served(**ENGINE) as (server, model):
        watch = EngineWatch()
        model.client.observe(watch)
        for number in range(-3, rounds):
            _, [outcome] = await clients.put(
                port=port_of(server), prompt_words=PROMPT_WORDS, max_tokens=4, seed=rounds + number
            )
            if number >= 0:
                alone.append(watch.ttft_ms)
                added.append(outcome.ttft_s * 1000 - watch.ttft_ms)
    note = f"median of {rounds}, on top of {statistics.median(alone):.1f} ms in the engine"
    report.median("server.http_ttft_ms", added, "ms", goal="<= 5", note=note)


async def measure_max_stall(report: Report, clients: LoadProcess) -> None:
    """Measures ``max_stall_ms``, with a separate client."""
    async with served(**ENGINE) as (server, _):
        await measure_stalls(report, port_of(server))


def run(report: Report, console: Console, only: str) -> None:
    """Measures the figures whose id contains ``only``."""
    asyncio.run(_measure(report, console, only))


async def _measure(report: Report, console: Console, only: str) -> None:
    async with load_process() as clients:
        lower_priority()  # this process is the server; the clients are not part of it
        for name, measure in (
            ("server.http_vs_engine", measure_throughput),
            ("server.http_ttft_ms", measure_ttft),
            ("server.idle_session_kb", measure_sessions),
            ("server.overload_goodput", measure_overload),
            ("server.max_stall_ms", measure_max_stall),
            ("server.short_ttft_beside_long tpot_beside_prefill", measure_prompts),
            ("server.long_prompt_throughput", measure_long_prompt),
            ("server.responses_cached_share responses_vs_chat", measure_responses),
        ):
            if only in name:
                console.print(f"[dim]{name} …[/]")
                await measure(report, clients)
