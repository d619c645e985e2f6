"""The cost of a tenant with hostile constraints to the other tenants: compares their time per token while it
runs, and while a tenant generates the same amount without constraints."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
from collections.abc import Coroutine, Iterator, Sequence

from agentflow.engine.client import EngineClient
from agentflow.engine.grammar.compiler.compiler import ConstraintCompiler, constraint_compiler
from agentflow.errors import AgentflowError
from agentflow.protocol.constraint import Constraint
from agentflow.protocol.sampling import SamplingParams
from benchmarks.engine.foundation import Prompts, engine
from benchmarks.report import Report

NUM_STREAMS = 4
NUM_TOKENS = 96
NEW_PER_S = 10_000 / 60
MAX_IN_FLIGHT = 4
NUM_THROWERS = 4
NUM_BOMBS = 300
ROUND_TRIP_S = 0.02


def bombs() -> Iterator[Constraint]:
    """Yields constraints that all differ, so that none is found in a cache."""
    for n in itertools.count(int(time.time())):
        yield Constraint("regex", f"x{n}.*a.{{{20 + n % 5}}}")
        yield Constraint("regex", f"x{n}((a{{1,999}}){{1,999}}){{1,999}}")
        yield Constraint("regex", f"x{n}(?=.*b)(?=.*c)(?=.*d)(?!.*e.{{9}}).*f.{{9}}")
        yield Constraint("regex", f"x{n}" + "(" * 5_000 + "a" + ")" * 5_000)
        yield Constraint("schema", '{"items":' * 3_000 + f'{{"const":{n}}}' + "}" * 3_000)
        large = {f"field {n}/{i}": {"type": "string", "maxLength": 500} for i in range(2_000)}
        yield Constraint("schema", json.dumps({"type": "object", "properties": large}))
        yield Constraint("grammar", f'start: a\na: a a | "x{n}"')


async def throw_bombs(compiler: ConstraintCompiler, constraints: Sequence[Constraint]) -> None:
    """Sends one after the other, each as soon as the previous one is rejected, but no faster than a remote
    client could: the attacker's computation must not count."""
    for constraint in constraints:
        with contextlib.suppress(AgentflowError):
            await compiler.compile(constraint, tenant="hostile")
        await asyncio.sleep(ROUND_TRIP_S)  # noqa: TID251  a client's round trip


async def flood(client: EngineClient, compiler: ConstraintCompiler) -> None:
    """Sends ten thousand new constraints per minute, and generates a few tokens under each that compiles."""
    prompts, in_flight = Prompts(), asyncio.Semaphore(MAX_IN_FLIGHT)

    async def use(n: int) -> None:
        constraint = Constraint("regex", rf'\{{"id": {n}, "name": "[a-z ]{{1,20}}"\}}')
        try:
            compiled = await compiler.compile(constraint, tenant="hostile")
            if in_flight.locked():
                return
            async with in_flight:
                await client.generate(
                    prompts.new(16),
                    SamplingParams(max_tokens=8),
                    seed=0,
                    on_text=lambda _: None,
                    constraint=compiled,
                )
        except AgentflowError:
            return

    async with asyncio.TaskGroup() as group:
        for n in itertools.count():
            group.create_task(use(n))
            await asyncio.sleep(1 / NEW_PER_S)  # noqa: TID251  the rate of the flood


async def neighbour(client: EngineClient) -> None:
    """Runs as many concurrent generations as the flood, of the same length, without constraints."""
    prompts = Prompts()
    params = SamplingParams(max_tokens=8, ignore_eos=True)

    async def stream() -> None:
        while True:
            await client.generate(prompts.new(16), params, seed=0, on_text=lambda _: None)

    async with asyncio.TaskGroup() as group:
        for _ in range(MAX_IN_FLIGHT):
            group.create_task(stream())


async def time_per_token(client: EngineClient, prompts: Prompts) -> float:
    """Returns the mean seconds per token of concurrent streams."""
    began: list[float] = []
    ended: list[float] = []

    async def stream() -> None:
        seen: list[float] = []
        await client.generate(
            prompts.new(64),
            SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True),
            seed=0,
            on_text=lambda _: seen.append(time.perf_counter()),
        )
        began.append(seen[0])
        ended.append(time.perf_counter())

    async with asyncio.TaskGroup() as group:
        for _ in range(NUM_STREAMS):
            group.create_task(stream())
    return (sum(ended) - sum(began)) / NUM_STREAMS / (NUM_TOKENS - 1)


async def _time_beside(
    work: Sequence[Coroutine[None, None, None]], client: EngineClient, prompts: Prompts
) -> float:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one) for one in work]
        await asyncio.sleep(1)  # noqa: TID251  until the flood has built up
        seconds = await time_per_token(client, prompts)
        for task in tasks:
            task.cancel()
    return seconds


async def measure_hostile(report: Report) -> None:
    """Measures ``hostile_tpot_ratio``, with the engine in a separate process, as in a server."""
    repeats = 5 if report.scale == "full" else 2
    ratios: list[float] = []
    times: list[tuple[float, float, float]] = []
    async with constraint_compiler() as compiler, engine(kv_tokens=20_000, own_process=True) as client:
        prompts = Prompts()
        await compiler.compile(Constraint("regex", "warm"), tenant="hostile")
        await time_per_token(client, prompts)
        every = bombs()
        for _ in range(repeats):
            alone_s = await time_per_token(client, prompts)
            beside_s = await _time_beside([neighbour(client)], client, prompts)
            made = [list(itertools.islice(every, NUM_BOMBS)) for _ in range(NUM_THROWERS)]
            attack = [flood(client, compiler), *(throw_bombs(compiler, thrown) for thrown in made)]
            attacked_s = await _time_beside(attack, client, prompts)
            ratios.append(attacked_s / beside_s)
            times.append((attacked_s, beside_s, alone_s))
        counts = compiler.counts
    attacked_s, beside_s, alone_s = sorted(times)[len(times) // 2]
    note = (
        f"{attacked_s * 1e3:.1f} ms per token, {beside_s * 1e3:.1f} next to a tenant that generates as much "
        f"without constraints, {alone_s * 1e3:.1f} alone; {counts.compiled} compiled, "
        f"{counts.refused} rejected, {counts.killed} killed"
    )
    report.median("constrained.hostile_tpot_ratio", ratios, "ratio", note=note, goal="<= 1.25")
