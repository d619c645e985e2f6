"""A lost replica: the wait of its streams for their next token once the loss is known.

Two engine processes with the default model serve streams, and one is killed. The loss is known when its
supervisor logs it. Streams that the other process serves have their next token soon in any case, so the wait
is the longest of all.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager

import anyio
import psutil

from agentflow.cluster.replicas.open_replicas import replicated_engine
from agentflow.engine.client import EngineClient
from agentflow.engine.local_engine import engine_start, make_deadlines, open_tokenizer
from agentflow.engine.messages import Progress
from agentflow.engine.options import EngineOptions
from agentflow.engine.store.model_store import resolve_model
from agentflow.protocol.sampling import SamplingParams
from benchmarks.report import Report

NAME = "cluster.resume_s"
WORKER = "agentflow.engine.process.worker"
KV_TOKENS = 16_384
STREAMS, PROMPT_TOKENS, LENGTH = 8, 128, 2_000
"""No stream ends before it is cancelled."""
TOKENS_BEFORE = 8
"""The tokens of each stream before a process is killed."""
ROUNDS = {"small": 1, "full": 5}
WAIT_S = 120.0


def run(report: Report) -> None:
    """Adds the longest wait."""
    waits_s, moved = anyio.run(_measure, ROUNDS[report.scale])
    note = (
        f"the longest wait for the next token of {STREAMS} streams from when it is known that one of two "
        f"replicas was killed; {', '.join(map(str, moved))} of the streams continue on the other one"
    )
    report.add(NAME, round(max(waits_s), 3), "s", [round(one, 3) for one in waits_s], note, "<= 2")


async def _measure(rounds: int) -> tuple[list[float], list[int]]:
    options = EngineOptions(own_process=True, kv_tokens=KV_TOKENS, device="cpu")
    folder = resolve_model(options.model)
    waits_s, moved = [], []
    for number in range(rounds):
        with _losses() as losses:
            async with replicated_engine(
                [engine_start(options, folder, reports=True)] * 2,
                lambda: open_tokenizer(options, folder),
                max_running=options.max_running,
                deadlines=make_deadlines(options, folder),
            ) as client:
                waits_s.append(await _wait_s(client, losses, number))
        moved.append(losses.num_moved)
    return waits_s, moved


class _Losses(logging.Handler):
    """Reads the log: the time when a loss was known, and the number of requests that continue elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.known_at = 0.0
        self.num_moved = 0

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if "was killed by" in text:
            self.known_at = time.perf_counter()
        elif "continue elsewhere" in text:
            self.num_moved = int(text.rpartition(" ")[2])


@contextmanager
def _losses() -> Iterator[_Losses]:
    logger, losses = logging.getLogger("agentflow"), _Losses()
    level, propagates = logger.level, logger.propagate
    logger.addHandler(losses)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield losses
    finally:
        logger.removeHandler(losses)
        logger.setLevel(level)
        logger.propagate = propagates


async def _wait_s(client: EngineClient, losses: _Losses, number: int) -> float:
    """Kills a replica while streams run. Returns the longest wait."""
    counts, next_at = [0] * STREAMS, [0.0] * STREAMS
    changed = anyio.Event()

    async def generate(stream: int) -> None:
        def on_progress(progress: Progress) -> None:
            nonlocal changed
            counts[stream] += 1
            if losses.known_at and not next_at[stream]:
                next_at[stream] = time.perf_counter()
            changed.set()
            changed = anyio.Event()

        params = SamplingParams(max_tokens=LENGTH, ignore_eos=True)
        prompt = [3000 + 8 * number + stream] * 2 + list(range(1000, 1000 + PROMPT_TOKENS))
        await client.generate(prompt, params, seed=stream, on_progress=on_progress)

    with anyio.fail_after(WAIT_S):
        async with anyio.create_task_group() as group:
            for stream in range(STREAMS):
                group.start_soon(generate, stream)
            while min(counts) < TOKENS_BEFORE:
                await changed.wait()
            workers = [one for one in psutil.Process().children() if WORKER in one.cmdline()]
            random.Random(number).choice(workers).kill()
            while not all(next_at):
                await changed.wait()
            group.cancel_scope.cancel()
    return max(next_at) - losses.known_at
