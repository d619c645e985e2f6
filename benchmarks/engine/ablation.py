"""An ablation on the real model, as in Fig. 8c of the SGLang paper: programs of three kinds, with everything
on, and with one part off at a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import agentflow as af
from agentflow.backends.local import interpreted
from agentflow.engine.batch import Batch, BatchOutput
from agentflow.engine.cache.nodes import PrefixMatch
from agentflow.engine.cache.prefix_readers import PrefixReaders
from agentflow.engine.cache.radix_cache import RadixCache
from agentflow.engine.cache.token_run import TokenRun, token_run
from agentflow.engine.client import running_engine
from agentflow.engine.engine import Engine
from agentflow.engine.generator.generator import EngineGenerator
from agentflow.engine.local_engine import limit_spinning
from agentflow.engine.request import Request
from agentflow.engine.runner import ModelRunner
from agentflow.engine.scheduling.liveness import Liveness
from agentflow.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from agentflow.engine.store.model_store import resolve_model
from agentflow.engine.text.chat_template import ChatTemplate
from agentflow.engine.text.tokenizer import Tokenizer
from agentflow.protocol.backend import Connection, Deliver, Lost
from benchmarks.engine.program_shapes import SHAPES, UNSHARED, Shape
from benchmarks.report import Report

MODEL = "smollm2-135m"
MAX_RUNNING = 8
MANAGEMENT, HIT_RATE = "ablation.management_overhead", "ablation.hit_rate_vs_optimum"
RUNS = 3


@dataclass(frozen=True)
class Setting:
    """One line of the ablation."""

    name: str
    policy: str = "fair-lpm"
    use_cache: bool = True
    whole_prompts: bool = False  # the cache is a ``WholePromptCache``
    is_parallel: bool = True  # programs and their branches run concurrently
    use_hints: bool = True


SETTINGS = [
    Setting("all on"),
    Setting("no cache", use_cache=False),
    Setting("no tree", whole_prompts=True),
    Setting("fcfs", policy="fcfs"),
    Setting("random", policy="random"),
    Setting("no frontend parallelism", is_parallel=False),
    Setting("no frontend hints", use_hints=False),
]


@dataclass
class LentRunner:
    """A loaded model that outlives its engine, with the number of slots for the workload."""

    runner: ModelRunner
    num_slots: int

    def __post_init__(self) -> None:
        self.info = replace(self.runner.info, num_slots=self.num_slots)

    def launch(self, batch: Batch) -> Any:
        return self.runner.launch(batch)

    def collect(self, handle: Any) -> BatchOutput:
        return self.runner.collect(handle)

    def close(self) -> None:
        """Does nothing: the model stays loaded."""


class WholePromptCache(RadixCache):
    """A table instead of a tree: it matches only complete requests."""

    def __init__(self) -> None:
        super().__init__()
        self._entries: dict[Hashable, set[TokenRun]] = {}

    def record(self, cache_key: Hashable, run: TokenRun) -> None:
        """Records the computed tokens of a request that ended."""
        self._entries.setdefault(cache_key, set()).add(run)

    def match(self, cache_key: Hashable, run: TokenRun, *, lock: bool = False) -> PrefixMatch:
        return super().match(cache_key, self._whole(cache_key, run), lock=lock)

    def peek(self, cache_key: Hashable, run: TokenRun) -> int:
        return super().peek(cache_key, self._whole(cache_key, run))

    def _whole(self, cache_key: Hashable, run: TokenRun) -> TokenRun:
        entries = self._entries.get(cache_key, set())
        return max((entry for entry in entries if run.startswith(entry)), key=len, default=b"")


@dataclass
class Recorded:
    """The requests of an engine in the order in which they ended, from which the optimum follows: their cache
    keys, prompts, computed tokens, and whether they are extra (``Origin.is_extra``)."""

    requests: list[tuple[Hashable, TokenRun, TokenRun, bool]] = field(default_factory=list)

    def watch(self, scheduler: Scheduler) -> None:
        """Records every request that completes."""
        finish = scheduler.waiting.finish

        def noted(request: Request) -> None:
            computed = token_run(request.tokens[: max(request.num_tokens - 1, request.num_prompt)])
            prompt = token_run(request.tokens[: request.num_prompt - 1])
            self.requests.append((request.cache_key, prompt, computed, request.origin.is_extra))
            finish(request)

        scheduler.waiting.finish = noted  # type: ignore[method-assign]

    def optimum(self) -> tuple[float, int]:
        """Returns the hit rate of an unlimited cache, and the size of the working set in tokens."""
        cache = RadixCache()
        cached = total = 0
        for key, prompt, computed, is_extra in self.requests:
            if not is_extra:  # as the engine's hit rate
                cached += cache.peek(key, prompt)
                total += len(prompt) // 4 + 1
            slots = np.zeros(len(computed) // 4, dtype=np.int32)
            cache.extend(cache.match(key, b""), key, computed, slots)
        return cached / max(1, total), cache.num_cached


class AblatedEngine:
    """A backend for ``af.session``: the lent model under one setting."""

    def __init__(self, runner: LentRunner, tokenizer: Tokenizer, setting: Setting) -> None:
        self.runner = runner
        self.tokenizer = tokenizer
        self.setting = setting
        self.recorded = Recorded()
        self.management_s = 0.0
        self._is_in_call = False

    def connect(self, deliver: Deliver, lost: Lost) -> AbstractAsyncContextManager[Connection]:
        """Connects as the embedded engine does."""
        return self._connect(deliver)

    @asynccontextmanager
    async def _connect(self, deliver: Deliver) -> AsyncIterator[Connection]:
        setting = self.setting
        config = SchedulerConfig(max_running=MAX_RUNNING, policy=setting.policy, use_cache=setting.use_cache)
        async with running_engine(lambda: (self.runner, self.tokenizer, config)) as client:
            assert isinstance(client.engine, Engine)
            self._prepare(client.engine.scheduler)
            template = ChatTemplate.from_folder(resolve_model(MODEL))
            generator = EngineGenerator(client, template, use_hints=setting.use_hints)
            async with interpreted(generator, deliver) as connection:
                yield connection

    def _prepare(self, scheduler: Scheduler) -> None:
        memory = scheduler.memory
        self.recorded.watch(scheduler)
        if self.setting.whole_prompts:
            table = memory.cache = WholePromptCache()
            memory.readers = PrefixReaders(table)
            memory.liveness = Liveness(table, memory.slots.total)
            detach = memory.detach

            def recording(request: Request) -> None:
                table.record(request.cache_key, token_run(request.tokens[: request.num_computed]))
                detach(request)

            memory.detach = recording  # type: ignore[method-assign]
        for part, names in (
            (memory.cache, ("match", "peek", "extend", "write_slots", "lock", "unlock", "evict")),
            (scheduler.waiting, ("add", "next", "admit", "tokens_cached", "tokens_evicted")),
        ):
            for name in names:
                setattr(part, name, self._timed(getattr(part, name)))
        memory.on_cached, memory.on_evict = scheduler.waiting.tokens_cached, scheduler.waiting.tokens_evicted

    def _timed(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._is_in_call:  # the policy asks the cache: counted once
                return work(*args, **kwargs)
            self._is_in_call = True
            start = time.thread_time()
            try:
                return work(*args, **kwargs)
            finally:
                self.management_s += time.thread_time() - start
                self._is_in_call = False

        return timed


@dataclass(frozen=True)
class Run:
    """One run of one workload under one setting."""

    took_s: float
    stats: af.Stats
    engine: AblatedEngine


async def run_once(
    runner: ModelRunner, tokenizer: Tokenizer, setting: Setting, shape: Shape, slots: int
) -> Run:
    """Runs all programs of the shape, on an empty cache. ``slots``: the size of the KV pool, in tokens."""
    engine = AblatedEngine(LentRunner(runner, slots), tokenizer, setting)
    async with af.session(backend=engine, seed=0) as flow:
        start = time.perf_counter()
        programs: list[Callable[[], Awaitable[object]]] = [
            lambda number=number: flow.run(shape.program, number, setting.is_parallel)  # type: ignore[misc]
            for number in range(shape.num_programs)
        ]
        if setting.is_parallel:
            async with asyncio.TaskGroup() as group:
                for program in programs:
                    group.create_task(_awaited(program))
        else:
            for program in programs:
                await program()
        took_s = time.perf_counter() - start
        return Run(took_s, await flow.stats(), engine)


async def _awaited(program: Callable[[], Awaitable[object]]) -> None:
    await program()


async def measure(report: Report, console: Console, only: str) -> None:
    """Measures the figures whose id contains ``only``: rounds of all settings, interleaved."""
    limit_spinning()
    from agentflow.engine.models.torch_runner import TorchRunner

    folder = resolve_model(MODEL)
    runner = TorchRunner(folder, num_slots=60_000, dtype="bfloat16", device="cpu", num_threads=2)
    tokenizer = Tokenizer.from_folder(folder)
    rounds = RUNS if report.scale == "full" else 1
    shapes = [shape for shape in SHAPES if any(only in figure for figure in _figures(shape))]
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("ablation", total=len(shapes) * (1 + rounds * len(SETTINGS)) + 1)
        for shape in shapes:
            unlimited = await run_once(runner, tokenizer, SETTINGS[0], shape, 60_000)
            optimum, working_set = unlimited.engine.recorded.optimum()
            progress.advance(task)
            runs: dict[str, list[Run]] = {setting.name: [] for setting in SETTINGS}
            for _ in range(rounds):
                for setting in SETTINGS:
                    runs[setting.name].append(
                        await run_once(runner, tokenizer, setting, shape, working_set // 2)
                    )
                    progress.advance(task)
            _report_shape(report, console, shape, runs, optimum, working_set)
        if only in MANAGEMENT:
            unshared = [
                await run_once(runner, tokenizer, SETTINGS[0], UNSHARED, 60_000) for _ in range(rounds)
            ]
            _report_management(report, unshared)


def _figures(shape: Shape) -> list[str]:
    """The ids of a shape's figures."""
    settings = [setting.name.replace(" ", "_") for setting in SETTINGS[1:]]
    return [f"{HIT_RATE}.{shape.name}", *(f"ablation.{shape.name}.{setting}" for setting in settings)]


def _report_shape(
    report: Report,
    console: Console,
    shape: Shape,
    runs: dict[str, list[Run]],
    optimum: float,
    working_set: int,
) -> None:
    table = Table(
        title=f"{shape.name}: {working_set:,} tokens of working set, half of them fit", title_justify="left"
    )
    for column in ("", "seconds", "against all on", "hit rate", "of the optimum", "computed tokens"):
        table.add_column(column, justify="left" if not column else "right")
    base = [run.took_s for run in runs["all on"]]
    for name, done in runs.items():
        ratios = [run.took_s / all_on for run, all_on in zip(done, base, strict=True)]
        hit_rate = float(np.median([run.stats.hit_rate for run in done]))
        computed = int(np.median([run.stats.computed_tokens for run in done]))
        table.add_row(
            name,
            f"{np.median([run.took_s for run in done]):.1f}",
            f"{np.median(ratios):.2f}x",
            f"{hit_rate:.1%}",
            f"{hit_rate / optimum:.1%}",
            f"{computed:,}",
        )
        if name != "all on":
            report.median(
                f"ablation.{shape.name}.{name.replace(' ', '_')}",
                ratios,
                "ratio",
                note=f"time without it, divided by the time with everything on; hit rate {hit_rate:.1%}",
            )
    console.print(table)
    ratios = [run.stats.hit_rate / optimum for run in runs["all on"]]
    report.median(
        f"{HIT_RATE}.{shape.name}",
        ratios,
        "ratio",
        goal=">= 0.99",
        note=f"optimum {optimum:.1%} if the cache held everything",
    )


def _report_management(report: Report, runs: list[Run]) -> None:
    percents = [100 * run.engine.management_s / run.took_s for run in runs]
    last = runs[-1]
    note = (
        f"processor time of cache and policy; in the last run {last.engine.management_s * 1e3:.1f} ms "
        f"of {last.took_s:.1f} s; hit rate {last.stats.hit_rate:.1%}"
    )
    report.median(MANAGEMENT, percents, "%", note=note, goal="<= 0.3")


def run(report: Report, console: Console, only: str) -> None:
    """Measures the figures whose id contains ``only``."""
    asyncio.run(measure(report, console, only))
    shapes = [result for result in report.results if result.id.startswith(f"{HIT_RATE}.")]
    if len(shapes) == len(SHAPES):
        worst = min(shapes, key=lambda result: result.value)
        report.results.append(replace(worst, id=HIT_RATE, note=f"the lowest: {worst.id}"))
    report.results = [result for result in report.results if only in result.id]
