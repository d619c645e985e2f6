"""What the server measures, as Prometheus reads it: docs/metrics.md lists it.

The engine counts, mostly in another process, and tells its counters when asked; requests are timed on
this side. When the engine process is started again its counters begin anew: what the dead ones had
told is kept and added, so that no counter goes backwards. Where the engine does not answer, what it
told last is shown.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import anyio
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from agentflow.generator import Generator, Stats
from agentflow.server.constraint_compiler import CompileCounts
from agentflow.server.engine_client import RequestObserver
from agentflow.server.engine_messages import EngineStats
from agentflow.server.request_times import TPOT_BOUNDS_S, WAIT_BOUNDS_S, RequestTimes
from agentflow.server.step_times import PHASES, STEP_BOUNDS_S, BucketCounts

logger = logging.getLogger(__name__)

CONTENT_TYPE = CONTENT_TYPE_LATEST
# How long a scrape waits for the engine, which answers between two steps. Prometheus itself gives up
# after ten seconds.
SCRAPE_TIMEOUT_S = 3.0

COUNTERS = (
    "steps",
    "prompt_tokens",
    "cached_tokens",
    "cached_output_tokens",
    "computed_tokens",
    "generated_tokens",
    "forced_tokens",
    "evicted_tokens",
    "retractions",
)


@runtime_checkable
class MeasuredGenerator(Protocol):
    """A generator with an engine behind it."""

    @property
    def compile_counts(self) -> CompileCounts: ...

    async def engine_stats(self) -> EngineStats: ...

    def observe(self, observer: RequestObserver) -> None: ...


class EngineTotals:
    """The counters of all engine processes that there have been, one after the other."""

    def __init__(self) -> None:
        self.last: Stats | EngineStats = Stats(model="")
        self.restarts = 0
        self._before = dict.fromkeys(COUNTERS, 0)
        self._phases_before = [BucketCounts.empty(STEP_BOUNDS_S) for _ in PHASES]
        self._restarts_before = 0

    def take(self, stats: Stats | EngineStats) -> None:
        """What the engine says now. An answer older than the last one is ignored."""
        if (stats.restarts, stats.steps) < (self.last.restarts, self.last.steps):
            return
        if stats.restarts > self.last.restarts:
            self._keep()
        self.last = stats
        self.restarts = self._restarts_before + stats.restarts

    def begin_anew(self) -> None:
        """Another engine comes, which has restarted never."""
        self._keep()
        self._restarts_before = self.restarts
        self.last = Stats(model=self.last.model)

    def count(self, name: str) -> int:
        """One of ``COUNTERS``."""
        now: int = getattr(self.last, name)
        return self._before[name] + now

    def phases(self) -> Sequence[BucketCounts]:
        """The times of each of ``PHASES``."""
        now: Sequence[BucketCounts] = getattr(self.last, "step_times", ())
        if not now:
            return self._phases_before
        return [before + counts for before, counts in zip(self._phases_before, now, strict=True)]

    def _keep(self) -> None:
        self._before = {name: self.count(name) for name in COUNTERS}
        self._phases_before = [*self.phases()]


class ServerMetrics:
    """The metrics of one application, in a registry of their own."""

    def __init__(self) -> None:
        self.requests = RequestTimes()
        self.totals = EngineTotals()
        self.num_sessions = 0
        self.is_engine_up = False
        self._compiled_before = CompileCounts()  # by the generators before this one
        self._generator: MeasuredGenerator | None = None
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(_Families(self))
        self._has_watched = False

    def watch(self, generator: Generator[Any]) -> None:
        """From now on requests of this generator are timed; counters go on where others left them."""
        if self._has_watched:
            self.totals.begin_anew()
            self.requests.forget_pending()
        self._has_watched = True
        self._compiled_before = self.compile_counts
        self._generator = None
        if isinstance(generator, MeasuredGenerator):
            generator.observe(self.requests)
            self._generator = generator

    @property
    def compile_counts(self) -> CompileCounts:
        """Of the compilers of all generators, one after the other."""
        if self._generator is None:
            return self._compiled_before
        return self._compiled_before + self._generator.compile_counts

    async def scrape(self, generator: Generator[Any] | None, num_sessions: int) -> bytes:
        """All metrics as text. Asks the engine, and waits for it no longer than ``SCRAPE_TIMEOUT_S``."""
        has_answered = False
        if generator is not None:
            try:
                with anyio.move_on_after(SCRAPE_TIMEOUT_S):
                    self.totals.take(await _stats_of(generator))
                    has_answered = True
            except Exception as error:  # whatever it is: the engine does not answer as it should
                logger.debug("metrics without the engine: %s", error)
        self.num_sessions, self.is_engine_up = num_sessions, has_answered
        return self.text()

    def text(self) -> bytes:
        """All metrics as they were at the last scrape, and the times of requests as they are."""
        return generate_latest(self.registry)


async def _stats_of(generator: Generator[Any]) -> Stats | EngineStats:
    if isinstance(generator, MeasuredGenerator):
        return await generator.engine_stats()
    return await generator.stats()


class _Families(Collector):
    """What is shown, in the order of docs/metrics.md."""

    def __init__(self, metrics: ServerMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        yield from self._gauges()
        yield from self._counters()
        yield from self._histograms()

    def _gauges(self) -> Iterator[Metric]:
        metrics, last = self._metrics, self._metrics.totals.last
        yield _gauge("engine_up", "1 if the engine answered this scrape.", int(metrics.is_engine_up))
        yield _gauge("sessions", "Open sessions.", metrics.num_sessions)
        yield _gauge("running_requests", "Requests in the batch.", last.running)
        yield _gauge("waiting_requests", "Requests that wait to be admitted.", last.waiting)
        slots = GaugeMetricFamily("agentflow_kv_tokens", "Tokens of the KV pool.", labels=["state"])
        for state, value in (
            ("free", last.free_slots),
            ("cached", last.cached_slots),
            ("held", last.held_slots),
        ):
            slots.add_metric([state], value)
        yield slots
        yield _gauge(
            "engine_peak_resident_bytes", "Largest memory of the engine's process.", last.peak_resident_bytes
        )

    def _counters(self) -> Iterator[Metric]:
        count = self._metrics.totals.count
        prompts = CounterMetricFamily(
            "agentflow_prompt_tokens", "Prompt tokens of admitted requests, by source.", labels=["source"]
        )
        cached, cached_output = count("cached_tokens"), count("cached_output_tokens")
        prompts.add_metric(["prompt_cache"], cached - cached_output)
        prompts.add_metric(["output_cache"], cached_output)
        prompts.add_metric(["computed"], count("prompt_tokens") - cached)
        yield prompts
        for name, text in (
            ("generated_tokens", "Tokens of outputs, sampled or forced by a constraint."),
            ("forced_tokens", "Of these, tokens that a constraint forced."),
            ("computed_tokens", "Rows computed: prompts and output, also those computed again."),
            ("evicted_tokens", "Tokens evicted from the cache."),
            ("retractions", "Running requests that gave way for want of KV."),
            ("steps", "Forward passes."),
        ):
            yield CounterMetricFamily(f"agentflow_{name}", text, value=count(name))
        yield CounterMetricFamily(
            "agentflow_engine_restarts", "Engine processes that died.", value=self._metrics.totals.restarts
        )
        compiling = self._metrics.compile_counts
        for name, text, value in (
            ("constraints_compiled", "Constraints compiled.", compiling.compiled),
            ("constraints_refused", "Requests whose constraint was refused.", compiling.refused),
            ("constraint_cache_hits", "Constraints found in the cache.", compiling.cache_hits),
            ("compile_processes_killed", "Compiling processes lost to a constraint.", compiling.killed),
        ):
            yield CounterMetricFamily(f"agentflow_{name}", text, value=value)

    def _histograms(self) -> Iterator[Metric]:
        requests = self._metrics.requests
        yield _histogram("ttft", "Request accepted to first token.", WAIT_BOUNDS_S, {"": requests.ttft})
        yield _histogram(
            "tpot",
            "Mean time per output token after the first, of a request.",
            TPOT_BOUNDS_S,
            {"": requests.tpot},
        )
        yield _histogram(
            "queue_wait", "Accepted to first batch.", WAIT_BOUNDS_S, requests.queue_wait, label="tenant"
        )
        phases = dict(zip(PHASES, self._metrics.totals.phases(), strict=True))
        yield _histogram("step", "Time of a step's phases.", STEP_BOUNDS_S, phases, label="phase")


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"agentflow_{name}", text, value=value)


def _histogram(
    name: str, text: str, bounds: Sequence[float], by_value: dict[str, BucketCounts], *, label: str = ""
) -> Metric:
    """``by_value``: a histogram for each value of ``label``."""
    family = HistogramMetricFamily(f"agentflow_{name}_seconds", text, labels=[label] if label else [])
    edges = [*map(floatToGoString, bounds), "+Inf"]
    for value, histogram in by_value.items():
        buckets: list[tuple[str, float]] = []
        sum_so_far = 0
        for edge, count in zip(edges, histogram.counts, strict=True):
            sum_so_far += count
            buckets.append((edge, sum_so_far))
        family.add_metric([value] if label else [], buckets, histogram.total)
    return family
