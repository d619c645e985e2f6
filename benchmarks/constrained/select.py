"""A select over a cached prompt against one decode step on the same prompt."""

from __future__ import annotations

import random
import time

from agentflow.protocol.sampling import SamplingParams
from benchmarks.engine.foundation import Prompts, engine
from benchmarks.report import Report

NUM_CHOICES = 4
CHOICE_TOKENS = 5
PROMPT_TOKENS = 1_000
DECODED = 32


async def measure_select(report: Report) -> None:
    """Measures both as their callers do, including messages between threads."""
    repeats = 15 if report.scale == "full" else 5
    ratios: list[float] = []
    times: list[tuple[float, float]] = []
    prompts, numbers = Prompts(), random.Random(2)
    async with engine(kv_tokens=20_000) as client:
        prompt = prompts.new(PROMPT_TOKENS)

        async def generate(num_tokens: int) -> float:
            began = time.perf_counter()
            params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
            await client.generate(prompt, params, seed=0, on_text=lambda _: None)
            return time.perf_counter() - began

        async def select() -> float:
            choices = [
                [numbers.randrange(10, 49_000) for _ in range(CHOICE_TOKENS)] for _ in range(NUM_CHOICES)
            ]
            began = time.perf_counter()
            await client.score_choices(prompt, choices)
            return time.perf_counter() - began

        await generate(DECODED)
        await select()
        for _ in range(repeats):
            step_s = (await generate(DECODED + 1) - await generate(1)) / DECODED
            select_s = sorted([await select() for _ in range(3)])[1]
            ratios.append(select_s / step_s)
            times.append((select_s, step_s))
    select_s, step_s = sorted(times)[len(times) // 2]
    note = f"{select_s * 1e3:.1f} ms against a decode step of {step_s * 1e3:.1f} ms"
    report.median("constrained.select_vs_forward", ratios, "ratio", note=note, goal="<= 1.5")
