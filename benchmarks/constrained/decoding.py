"""Jump-forward against plain masked decoding and against free text: records by a regular expression.

The workload follows the JSON decoding of the SGLang paper (Zheng et al., 2024, section 6.1): records with
text, numbers, and fields that have one of a few values.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from agentflow.engine.client import EngineClient
from agentflow.engine.grammar.compiler.compile import compile_constraint
from agentflow.engine.grammar.compiler.messages import CompiledConstraint
from agentflow.engine.messages import Finished
from agentflow.protocol.constraint import Constraint
from agentflow.protocol.sampling import SamplingParams
from benchmarks.engine.foundation import engine
from benchmarks.report import Report

FIELDS = {
    "title": r'"[A-Z][A-Za-z0-9 ]{2,30}"',
    "category": '"(?:book|record|film|board game|instrument)"',
    "maker": '"[A-Z][A-Za-z ]{2,30}"',
    "country of origin": '"[A-Z][A-Za-z ]{2,20}"',
    "year": "(?:19|20)[0-9]{2}",
    "price": r"[1-9][0-9]{0,2}\.[0-9]{2}",
    "currency": '"(?:EUR|USD|GBP|JPY)"',
    "in stock": "(?:true|false)",
    "condition": '"(?:new|like new|good|acceptable)"',
    "number of reviews": "(?:0|[1-9][0-9]{0,3})",
}
RECORD = r"\{\n" + r",\n".join(f'    "{name}": {value}' for name, value in FIELDS.items()) + r"\n\}"
THINGS = ["a chess set", "a violin", "a jazz record", "a cook book", "a science fiction film", "a globe"]
BATCH = 32
MAX_TOKENS = 400


@dataclass(frozen=True)
class Run:
    """One batch."""

    ends: list[Finished]
    seconds: float  # from its submission to its end
    num_steps: int  # of the engine

    @property
    def num_tokens(self) -> list[int]:
        return [end.output_tokens for end in self.ends]

    @property
    def tokens_per_s(self) -> float:
        return sum(self.num_tokens) / self.seconds


class Records:
    """The batch's prompts, and the ways to run them."""

    def __init__(self, client: EngineClient, first: int = 0) -> None:
        encode = client.tokenizer.encode
        self._client = client
        self.prompts = [
            encode(f"Offer {n}: {THINGS[n % len(THINGS)]}. The record of what is offered, as JSON:\n")
            for n in range(first, first + BATCH)
        ]

    async def run(self, constraints: list[CompiledConstraint], *, jump_forward: bool = True) -> Run:
        """Runs the batch under these constraints, one per prompt."""
        params = SamplingParams(max_tokens=MAX_TOKENS)
        return await self._run([params] * BATCH, list(constraints), jump_forward)

    async def free(self, num_tokens: list[int]) -> Run:
        """Generates this many tokens of free text per prompt."""
        params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in num_tokens]
        return await self._run(params, [None] * BATCH, True)

    async def _run(
        self, params: list[SamplingParams], constraints: list[CompiledConstraint | None], jumps: bool
    ) -> Run:
        client = self._client
        before = (await client.stats()).steps
        began = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(
                    client.generate(
                        prompt, own, seed=0, on_text=lambda _: None, constraint=constraint, jump_forward=jumps
                    )
                )
                for prompt, own, constraint in zip(self.prompts, params, constraints, strict=True)
            ]
        seconds = time.perf_counter() - began
        ends = [task.result() for task in tasks]
        return Run(ends, seconds, (await client.stats()).steps - before)


async def measure_jump_forward(report: Report) -> None:
    """Runs the batch of records in each way, interleaved, with the prompts in the cache."""
    repeats = 5 if report.scale == "full" else 2
    compiled = compile_constraint(Constraint("regex", RECORD))
    gains: list[float] = []
    masked_vs_free: list[float] = []
    jump_vs_free: list[float] = []
    async with engine(kv_tokens=30_000) as client:
        records = Records(client)
        shared = [compiled] * BATCH
        await records.run(shared)  # warms up: masks, and the prompts in the cache
        await records.run(shared, jump_forward=False)
        for _ in range(repeats):
            jump = await records.run(shared)
            masked = await records.run(shared, jump_forward=False)
            free = await records.free(masked.num_tokens)
            free_as_jump = await records.free(jump.num_tokens)
            gains.append(masked.seconds / jump.seconds)
            masked_vs_free.append(free.seconds / masked.seconds)
            jump_vs_free.append(free_as_jump.seconds / jump.seconds)
    note = (
        f"{BATCH / jump.seconds:.2f} against {BATCH / masked.seconds:.2f} records/s; "
        f"{jump.num_steps} against {masked.num_steps} steps, "
        f"{sum(jump.num_tokens)} against {sum(masked.num_tokens)} tokens"
    )
    report.median("constrained.jump_forward_gain", gains, "ratio", note=note, goal=">= 1.6")
    note = f"{masked.tokens_per_s:.0f} against {free.tokens_per_s:.0f} tokens/s, the same number of tokens"
    report.median("constrained.masked_vs_free", masked_vs_free, "ratio", note=note, goal=">= 0.9")
    note = f"{jump.tokens_per_s:.0f} against {free_as_jump.tokens_per_s:.0f} tokens/s"
    report.median("constrained.jump_forward_vs_free", jump_vs_free, "ratio", note=note, goal=">= 1")


async def measure_reuse(report: Report) -> None:
    """Compares requests that share a compiled constraint and its masks with requests that each have a
    separate constraint."""
    repeats = 3 if report.scale == "full" else 1
    gains: list[float] = []
    async with engine(kv_tokens=30_000) as client:
        records = Records(client)
        shared = compile_constraint(Constraint("regex", RECORD))
        await records.run([shared] * BATCH)
        for repeat in range(repeats):
            reused = await records.run([shared] * BATCH)
            began = time.perf_counter()
            own = []
            for n in range(BATCH):
                compiled = compile_constraint(Constraint("regex", RECORD))
                own.append(CompiledConstraint(f"{repeat}/{n}", compiled.form, compiled.payload))
            compile_s = time.perf_counter() - began
            alone = await records.run(own)
            gains.append((alone.seconds + compile_s) / reused.seconds)
    note = f"compiling {BATCH} times took {compile_s:.2f} s of {alone.seconds + compile_s:.2f} s"
    report.median("constrained.reuse_gain", gains, "ratio", note=note)
