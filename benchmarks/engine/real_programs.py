"""A chain and map-reduce on the default model, on this machine: as one program, and driven by a client that
waits for each answer and sends the next request after a round trip."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

import anyio

import agentflow as af
from benchmarks.engine.program_shapes import words
from benchmarks.report import Report

MODEL = "smollm2-135m"
ROUND_TRIP_S = 0.25
RUNS = 3
CHUNKS = 6
WORDS = 100
"""The words of a chunk."""
OUTPUT = 12

Program = Callable[[af.Session, str, bool], Awaitable[None]]
"""Called with the session, a name that makes its texts different, and whether it is one program."""


def _summary() -> af.Gen[str]:
    return af.gen("summary", max_tokens=OUTPUT, ignore_eos=True)


async def _round_trip() -> None:
    await anyio.sleep(ROUND_TRIP_S)  # noqa: TID251 - the network between a client and a service


async def chain(flow: af.Session, name: str, is_wired: bool) -> None:
    """Summaries, each over the one before and the next chunk."""
    async with AsyncExitStack() as stack:
        before: object = ""
        for number in range(CHUNKS):
            state = await stack.enter_async_context(flow.state(program=name))
            state += f"Summary: {before}\nText: {words(WORDS, f'{name} {number}')}\nNew summary:"
            state += _summary()
            before = state["summary"] if is_wired else await state["summary"]
            if not is_wired and number < CHUNKS - 1:
                await _round_trip()
        await state["summary"]


async def map_reduce(flow: af.Session, name: str, is_wired: bool) -> None:
    """Summaries of all chunks, and one over them."""
    async with AsyncExitStack() as stack:
        parts: list[af.State] = []
        for number in range(CHUNKS):
            state = await stack.enter_async_context(flow.state(program=name))
            state += f"Text: {words(WORDS, f'{name} {number}')}\nSummary:" + _summary()
            parts.append(state)
        summaries: list[object] = [part["summary"] for part in parts]
        if not is_wired:
            summaries = [await part["summary"] for part in parts]
            await _round_trip()
        whole = await stack.enter_async_context(flow.state(program=name))
        whole += "".join([f"Summary: {summary}\n" for summary in summaries]) + "All together:"
        whole += _summary()
        await whole["summary"]


PROGRAMS: dict[str, Program] = {"chain": chain, "map_reduce": map_reduce}


async def measure_real(report: Report) -> None:
    """Adds the gains on the real model. Runs of both kinds alternate, on texts that are used only once."""
    backend = af.Embedded(MODEL, dtype="bfloat16", device="cpu", threads=2, kv_tokens=20_000)
    async with af.session(backend=backend, seed=0) as flow:
        for name, program in PROGRAMS.items():
            await program(flow, f"{name} first", True)
            ratios: list[float] = []
            times: list[tuple[float, float]] = []
            for number in range(RUNS):
                took_s: list[float] = []
                for is_wired in (False, True):
                    start = time.perf_counter()
                    await program(flow, f"{name} {number} {is_wired}", is_wired)
                    took_s.append(time.perf_counter() - start)
                ratios.append(took_s[0] / took_s[1])
                times.append((took_s[1], took_s[0]))
            wired_s, driven_s = sorted(times)[len(times) // 2]
            delay_ms = round(1e3 * ROUND_TRIP_S)
            note = (
                f"{CHUNKS} chunks of {WORDS} words, {OUTPUT} tokens generated of each, on {MODEL}: "
                f"{wired_s:.2f} s as one program, {driven_s:.2f} s driven by a client over {delay_ms} ms"
            )
            goal = ">= 1.2" if name == "chain" else ">= 1.0"
            report.median(f"programs.real_{name}_gain", ratios, "ratio", note=note, goal=goal)
