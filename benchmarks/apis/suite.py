"""Models behind APIs: calls and tokens that speculation saves, the client's cost per call and per token,
stalls under many streams, and prefixes that forks find in a server's cache.

The server is a separate process with models that are functions of their prompts. Prefixes are measured on
``agentflow serve`` with the default model.
"""

from __future__ import annotations

import random
import resource
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import anyio
import anyio.lowlevel
from rich.console import Console

import agentflow as af
from agentflow.engine.machine.resources import collect_garbage_rarely
from benchmarks.apis.chat_server import Counters, chat_server, counters
from benchmarks.apis.decisions import measure_decisions
from benchmarks.apis.forms import FIELDS, PEOPLE, page_of
from benchmarks.apis.overhead import Calls, measure_call_overhead, measure_token_overhead
from benchmarks.report import Report
from benchmarks.server.http_load import WORDS
from benchmarks.server.stalls import LoopWatch
from benchmarks.serving import serving_model

STALL_TOKENS_PER_S = 3.0
NUM_BRANCHES = 8
FOUND_SHARE = 0.8
"""A prefix counts as found if the cache had this share of the prompt."""


@dataclass(frozen=True)
class Size:
    """The amounts of a scale."""

    rounds: int
    calls: Calls
    tokens: Calls
    num_streams: int
    stream_tokens: int
    stall_rounds: int
    prefix_words: int
    questions: int
    text_words: int


SIZES = {
    "small": Size(
        rounds=3,
        calls=Calls(50, 1),
        tokens=Calls(1, 500),
        num_streams=1000,
        stream_tokens=10,
        stall_rounds=1,
        prefix_words=200,
        questions=100,
        text_words=800,
    ),
    "full": Size(
        rounds=7,
        calls=Calls(200, 1),
        tokens=Calls(1, 3000),
        num_streams=1000,
        stream_tokens=30,
        stall_rounds=3,
        prefix_words=400,
        questions=400,
        text_words=3200,
    ),
}


@af.program
async def extract(s: af.State, person: int) -> list[str]:
    """Fills in a form in one turn."""
    s += af.user(f"{page_of(person)}\n\nFill in a form with the lines {', '.join(FIELDS)}.")
    form: list[Any] = []
    for field in FIELDS:
        gen = af.gen(field, stop="\n", max_tokens=40, temperature=0.0)
        form += [f"{field}: " if not form else f"\n{field}: ", gen]
    s += af.assistant(*form)
    return [await s[field] for field in FIELDS]


async def measure_speculation(report: Report, size: Size) -> None:
    """Measures ``calls_share``, ``input_token_share`` and ``output_token_share`` of the same extraction with
    speculation and without it. The values must be equal."""
    counted: list[Counters] = []
    with chat_server() as url:
        for speculate in (True, False):
            before = await counters(url)
            backend = af.OpenAICompatible(url, "forms", flavour="vllm", speculate=speculate)
            async with af.session(backend=backend) as flow:
                for person, expected in enumerate(PEOPLE):
                    values = await flow.run(extract, person)
                    assert values == list(expected), (speculate, values)
            after = await counters(url)
            counted.append(
                Counters(
                    after.calls - before.calls,
                    after.input_tokens - before.input_tokens,
                    after.output_tokens - before.output_tokens,
                )
            )
    with_it, without = counted
    for name, spent, of, goal in (
        ("calls", with_it.calls, without.calls, "<= 0.4"),
        ("input_token", with_it.input_tokens, without.input_tokens, "<= 0.4"),
        ("output_token", with_it.output_tokens, without.output_tokens, "<= 1.2"),
    ):
        share = round(spent / of, 4)
        note = (
            f"{spent} with speculation, {of} without; {len(PEOPLE)} forms of {len(FIELDS)} fields, "
            "equal values"
        )
        report.add(f"apis.{name}_share", share, "ratio", note=note, goal=goal)


async def measure_calls(report: Report, size: Size) -> None:
    """Measures ``call_overhead_ms``."""
    await measure_call_overhead(report, size.calls, size.rounds)


async def measure_tokens(report: Report, size: Size) -> None:
    """Measures ``token_overhead_us``."""
    await measure_token_overhead(report, size.tokens, size.rounds)


async def measure_stalls(report: Report, size: Size) -> None:
    """Measures ``max_stall_ms``: how late a timer fires while many streams of one session begin and run."""
    collect_garbage_rarely()  # as ``agentflow run`` and ``serve`` do
    starts: list[float] = []
    runs: list[float] = []
    for _ in range(size.stall_rounds):
        with chat_server(STALL_TOKENS_PER_S) as url:
            start_ms, stream_ms = await _longest_stalls(url, size)
        starts.append(start_ms)
        runs.append(max(start_ms, stream_ms))
    note = (
        f"{size.num_streams} streams of {size.stream_tokens} tokens, {STALL_TOKENS_PER_S:g} a second each; "
        f"until all had begun: {max(starts):.0f}"
    )
    report.median("apis.max_stall_ms", runs, "ms", note=note, goal="<= 50")


async def _longest_stalls(url: str, size: Size) -> tuple[float, float]:
    """Returns the longest stall until all streams have begun, and after that, in milliseconds."""
    watch = LoopWatch()
    num_begun, start_s = 0, 0.0

    @af.program
    async def stream(s: af.State) -> None:
        nonlocal num_begun, start_s
        s += af.user("Where does the river go?") + af.assistant(
            af.gen("words", max_tokens=size.stream_tokens)
        )
        has_begun = False
        async for _ in s["words"]:
            if not has_begun:
                has_begun = True
                num_begun += 1
                if num_begun == size.num_streams:
                    start_s, watch.longest_s = watch.longest_s, 0.0

    backend = af.OpenAICompatible(url, "words", flavour="generic")
    async with af.session(backend=backend) as flow, anyio.create_task_group() as group:
        group.start_soon(watch.run)
        async with anyio.create_task_group() as programs:
            for _ in range(size.num_streams):
                programs.start_soon(flow.run, stream)
                await anyio.lowlevel.checkpoint()
        group.cancel_scope.cancel()
    assert num_begun == size.num_streams
    return start_s * 1e3, watch.longest_s * 1e3


@af.program
async def branches(s: af.State, prefix: str) -> list[af.Usage]:
    """Asks several questions about one text, and returns their usage."""
    s += af.system(prefix)
    async with s.fork(NUM_BRANCHES) as forks:
        for number, fork in enumerate(forks):
            fork += af.user(f"Question {number}?") + af.assistant(af.gen("answer", max_tokens=4))
    await forks.gather("answer")
    return [fork["answer"].usage for fork in forks]


async def measure_prefixes(report: Report, size: Size) -> None:
    """Measures ``fork_prefix_hits``: the branches of a fork whose prompt was in the cache of the server."""
    rng = random.Random(5)
    hits: list[float] = []
    shares: list[float] = []
    with serving_model(kv_tokens=20_000) as (url, _):
        api = af.OpenAICompatible(f"{url.replace('ws', 'http', 1)}/v1")
        async with af.session(backend=api) as flow:
            for _ in range(size.rounds):
                prefix = " ".join([rng.choice(WORDS) for _ in range(size.prefix_words)])
                usages = await flow.run(branches, prefix)
                found = sorted([usage.cached_tokens / usage.prompt_tokens for usage in usages])
                hits.append(sum([share >= FOUND_SHARE for share in found]))
                shares += found[-NUM_BRANCHES + 1 :]
    note = f"of {NUM_BRANCHES} branches over a new prefix; {min(shares):.0%} of their prompts at least"
    report.median("apis.fork_prefix_hits", hits, "branches", note=note, goal=">= 7")


async def measure_questions(report: Report, size: Size) -> None:
    """Measures ``decisions_gain`` and ``decisions_gain_cached``."""
    await measure_decisions(report, size.questions, size.text_words, rounds=1)  # two and a half minutes


def run(report: Report, console: Console, only: str) -> None:
    """Measures the figures whose id contains ``only``."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # each stream has a connection
    size = SIZES[report.scale]
    measures: dict[str, Callable[[Report, Size], Awaitable[None]]] = {
        "calls_share input_token_share output_token_share": measure_speculation,
        "call_overhead_ms bare_call_ms": measure_calls,
        "token_overhead_us bare_token_us": measure_tokens,
        "max_stall_ms": measure_stalls,
        "fork_prefix_hits": measure_prefixes,
        "decisions_gain decisions_gain_cached": measure_questions,
    }
    for names, measure in measures.items():
        if any(only in f"apis.{name}" for name in names.split()):
            with console.status(names):
                anyio.run(measure, report, size)
