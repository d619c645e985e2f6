"""What the server measures, as Prometheus reads it: docs/metrics.md lists it.

The engine counts, mostly in another process, and tells its counters when asked; requests are timed on
this side. When the engine process is started again its counters begin anew: what the dead ones had
told is kept and added, so that no counter goes backwards. Where the engine does not answer, what it
told last is shown.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import anyio
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from agentflow.engine.client import RequestObserver
from agentflow.engine.grammar.compiler.compiler import CompileCounts
from agentflow.engine.process.ipc import EngineStats
from agentflow.engine.step_times import PHASES, STEP_BOUNDS_S, BucketCounts
from agentflow.runtime.generator import Generator, Stats
from agentflow.server.metrics.metric_families import MetricFamilies
from agentflow.server.metrics.request_times import RequestTimes
from agentflow.server.models import Models
from agentflow.server.tenants.tenant import NOBODY_ELSE
from agentflow.server.websocket.sessions import Sessions

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


class ModelMetrics:
    """Of one model."""

    def __init__(self) -> None:
        self.requests = RequestTimes()
        self.totals = EngineTotals()
        self.is_engine_up = False
        self._has_been_watched = False

    def watch(self, generator: Generator[Any]) -> None:
        """From now on the requests of this engine are timed; counters go on where others left them."""
        if self._has_been_watched:
            self.totals.begin_anew()
            self.requests.forget_pending()
        self._has_been_watched = True
        if isinstance(generator, MeasuredGenerator):
            generator.observe(self.requests)

    async def ask(self, generator: Generator[Any]) -> None:
        """Asks the engine, and waits for it no longer than ``SCRAPE_TIMEOUT_S``."""
        self.is_engine_up = False
        try:
            with anyio.move_on_after(SCRAPE_TIMEOUT_S):
                self.totals.take(await _stats_of(generator))
                self.is_engine_up = True
        except Exception as error:  # whatever it is: the engine does not answer as it should
            logger.debug("metrics without the engine: %s", error)


class ServerMetrics:
    """The metrics of one application, in a registry of their own."""

    def __init__(self) -> None:
        self.by_model: dict[str, ModelMetrics] = {}
        self.num_sessions = 0
        self.session_bytes = 0
        self.answers: Counter[tuple[str, int]] = Counter()
        """Of the HTTP APIs, by route and status; 0: the client had gone."""
        self.num_tasks = 0
        self._compiled_before = CompileCounts()  # for the models before these
        self._models: Models | None = None
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(MetricFamilies(self))

    def of(self, model: str) -> ModelMetrics:
        """The model's."""
        return self.by_model.setdefault(model, ModelMetrics())

    def watch(self, models: Models) -> None:
        """From now on these are the models that are served."""
        self._compiled_before = self.compile_counts
        self._models = models
        for model in models:
            self.of(model.name).watch(model.generator(NOBODY_ELSE))

    @property
    def compile_counts(self) -> CompileCounts:
        """Of the compilers for all models, one after the other."""
        if self._models is None:
            return self._compiled_before
        return self._compiled_before + self._models.compile_counts

    async def scrape(self, models: Models | None = None, sessions: Sessions[Any] | None = None) -> bytes:
        """All metrics as text, of the engines as they answer now."""
        self.num_sessions = len(sessions) if sessions is not None else 0
        self.session_bytes = sessions.num_bytes if sessions is not None else 0
        self.num_tasks = len(anyio.get_running_tasks())
        for metrics in self.by_model.values():
            metrics.is_engine_up = False
        async with anyio.create_task_group() as group:
            for model in models or ():
                group.start_soon(self.of(model.name).ask, model.generator(NOBODY_ELSE))
        return self.text()

    def text(self) -> bytes:
        """All metrics as they were at the last scrape, and the times of requests as they are."""
        return generate_latest(self.registry)


async def _stats_of(generator: Generator[Any]) -> Stats | EngineStats:
    if isinstance(generator, MeasuredGenerator):
        return await generator.engine_stats()
    return await generator.stats()
