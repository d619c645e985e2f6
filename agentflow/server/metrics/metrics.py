"""The metrics of the server for Prometheus, in the order of docs/reference/metrics.md.

The engine, usually another process, returns its counters at each scrape; requests are timed in this process.
The counters of a restarted engine begin at 0. The last values of earlier engines are added to them, so that
no counter decreases. If the engine does not answer, its last values are shown.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import anyio
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from agentflow.cluster.replicas.merged_answers import merged_stats
from agentflow.cluster.replicas.replica_set import ReplicaSet, ReplicaStatus
from agentflow.engine.client import RequestObserver
from agentflow.engine.grammar.compiler.compiler import CompileCounts
from agentflow.engine.messages import PHASES, STEP_BOUNDS_S, BucketCounts, EngineStats
from agentflow.engine.process.supervisor import EngineSupervisor
from agentflow.engine.tenant import ANONYMOUS
from agentflow.errors import AgentflowError
from agentflow.protocol.events import MISS_REASONS, Stats
from agentflow.runtime.generator import Generator
from agentflow.server.metrics.api_calls import ApiCallTimes
from agentflow.server.metrics.request_times import TPOT_BOUNDS_S, WAIT_BOUNDS_S, RequestTimes
from agentflow.server.models.api_model import ApiModel
from agentflow.server.models.models import EngineModel, Model, Models
from agentflow.server.programs.programs import Programs
from agentflow.server.websocket.sessions import Sessions

Labelled = Sequence[tuple[Sequence[str], BucketCounts]]
"""Histograms with their label values."""

_ENGINE_COUNTERS = (
    ("generated_tokens", "Tokens of outputs, sampled or forced by a constraint."),
    ("forced_tokens", "Tokens of outputs that a constraint forced."),
    (
        "computed_tokens",
        "Tokens computed, of prompts and outputs, including those computed again.",
    ),
    ("evicted_tokens", "Tokens evicted from the cache."),
    ("preemptions", "Running requests that were preempted because the KV pool was full."),
    ("steps", "Forward passes."),
    ("media_encoded", "Images that were encoded."),
    ("media_evicted", "Images whose features were evicted."),
)


class MetricFamilies(Collector):
    """Converts ``ServerMetrics`` to the families of Prometheus's client library."""

    def __init__(self, metrics: ServerMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        """All families, with their current values."""
        yield from self._gauges()
        yield from self._counters()
        yield from self._histograms()

    @property
    def _models(self) -> Mapping[str, ModelMetrics]:
        return self._metrics.by_model

    @property
    def _engines(self) -> Mapping[str, ModelMetrics]:
        return {name: of for name, of in self._models.items() if of.calls is None}

    @property
    def _apis(self) -> Mapping[str, ApiCallTimes]:
        return {name: of.calls for name, of in self._models.items() if of.calls is not None}

    def _gauges(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("agentflow_sessions", "Open sessions.", value=self._metrics.num_sessions)
        yield GaugeMetricFamily(
            "agentflow_session_bytes",
            "Memory for the ops, states and values of sessions, by estimate.",
            value=self._metrics.session_bytes,
        )
        yield GaugeMetricFamily("agentflow_programs", "Open programs.", value=self._metrics.num_programs)
        yield GaugeMetricFamily(
            "agentflow_program_bytes",
            "Memory for the requests and values of programs, by estimate.",
            value=self._metrics.program_bytes,
        )
        yield GaugeMetricFamily(
            "agentflow_tasks", "Tasks of the server's event loop.", value=self._metrics.num_tasks
        )
        yield self._gauge(
            "engine_up",
            "1 if the engine answered this scrape.",
            {name: int(of.is_engine_up) for name, of in self._engines.items()},
        )
        last = {name: of.totals.last for name, of in self._engines.items()}
        running = {name: stats.running or 0 for name, stats in last.items()}
        running |= {name: calls.num_running for name, calls in self._apis.items()}
        yield self._gauge("running_requests", "Requests in the batch, or calls to an API.", running)
        waiting = {name: stats.waiting or 0 for name, stats in last.items()}
        yield self._gauge("waiting_requests", "Requests that wait to be admitted.", waiting)
        slots = GaugeMetricFamily("agentflow_kv_tokens", "Tokens of the KV pool.", labels=["model", "state"])
        for name, stats in last.items():
            slots.add_metric([name, "free"], stats.free_slots or 0)
            slots.add_metric([name, "cached"], stats.cached_slots or 0)
            slots.add_metric([name, "in_use"], stats.in_use_slots or 0)
        yield slots
        kernels = GaugeMetricFamily(
            "agentflow_kernels", "1 for the kernels that compute the model.", labels=["model", "kernels"]
        )
        for name, of in self._engines.items():
            kernels.add_metric([name, of.kernels], 1)
        yield kernels
        resident = {name: stats.peak_resident_bytes or 0 for name, stats in last.items()}
        yield self._gauge("engine_peak_resident_bytes", "Largest memory of the engine's process.", resident)

        up = GaugeMetricFamily(
            "agentflow_replica_up", "1 if the replica serves.", labels=["model", "replica"]
        )
        for name, of in self._engines.items():
            states = {one.number: int(one.state == "serving") for one in of.replicas}
            for number, is_up in (states or {0: int(of.is_engine_up)}).items():
                up.add_metric([name, str(number)], is_up)
        yield up
        requests = GaugeMetricFamily(
            "agentflow_replica_requests",
            "Unfinished requests of a replica.",
            labels=["model", "replica"],
        )
        for name, of in self._engines.items():
            unended = (last[name].running or 0) + (last[name].waiting or 0)
            for number, num in ({one.number: one.requests for one in of.replicas} or {0: unended}).items():
                requests.add_metric([name, str(number)], num)
        yield requests

        features = {name: getattr(stats, "media_feature_bytes", 0) for name, stats in last.items()}
        yield self._gauge("media_feature_bytes", "Memory of the features of images.", features)
        pixels = {name: getattr(stats, "media_pixel_bytes", 0) for name, stats in last.items()}
        yield self._gauge("media_pixel_bytes", "Memory of the pixels of images that states hold.", pixels)

    def _gauge(self, name: str, text: str, values: Mapping[str, float]) -> Metric:
        family = GaugeMetricFamily(f"agentflow_{name}", text, labels=["model"])
        for model, value in values.items():
            family.add_metric([model], value)
        return family

    def _counters(self) -> Iterator[Metric]:
        prompts = CounterMetricFamily(
            "agentflow_prompt_tokens",
            "Prompt tokens of admitted requests, by source.",
            labels=["model", "source"],
        )
        for model, calls in self._apis.items():
            tokens = calls.all_tokens
            prompts.add_metric([model, "prompt_cache"], tokens.cached)
            prompts.add_metric([model, "computed"], tokens.prompt - tokens.cached)
        for model, of in self._engines.items():
            count = of.totals.count
            cached, cached_output = count("cached_tokens"), count("cached_output_tokens")
            prompts.add_metric([model, "prompt_cache"], cached - cached_output)
            prompts.add_metric([model, "output_cache"], cached_output)
            prompts.add_metric([model, "computed"], count("prompt_tokens") - cached)
        yield prompts
        missed = CounterMetricFamily(
            "agentflow_missed_tokens",
            "Uncached prompt tokens of finished requests with 256 or more of them, by reason.",
            labels=["model", "reason"],
        )
        for model, of in self._engines.items():
            for reason in MISS_REASONS:
                missed.add_metric([model, reason], of.requests.missed_tokens[reason])
        yield missed
        for name, text in _ENGINE_COUNTERS:
            values = {model: of.totals.count(name) for model, of in self._engines.items()}
            if name == "generated_tokens":
                values |= {model: calls.all_tokens.output for model, calls in self._apis.items()}
            yield self._counter(name, text, values)
        embeddings = {model: of.requests.num_embeddings for model, of in self._engines.items()}
        yield self._counter("embeddings", "Embeddings made, one for each text.", embeddings)
        embedded = {model: of.requests.embedding_tokens for model, of in self._engines.items()}
        yield self._counter("embedding_tokens", "Tokens of the texts of embeddings.", embedded)
        yield self._tenant_tokens()
        yield from self._api_counters()
        restarts = {model: of.totals.restarts for model, of in self._engines.items()}
        yield self._counter("engine_restarts", "Engine processes that died.", restarts)
        answers = CounterMetricFamily(
            "agentflow_http_answers", "Answers of the HTTP APIs.", labels=["route", "status"]
        )
        for (route, status), number in sorted(self._metrics.answers.items()):
            answers.add_metric([route, str(status) if status else "gone"], number)
        yield answers
        relaxed = self._metrics.relaxed
        text = "Requests with a schema that the grammar does not fully enforce."
        yield CounterMetricFamily("agentflow_relaxed_requests", text, value=relaxed["requests"])
        outputs = CounterMetricFamily(
            "agentflow_relaxed_outputs",
            "Calls and answers generated under a relaxed schema, by the result of their check.",
            labels=["result"],
        )
        for result in ("valid", "violated", "unchecked"):
            outputs.add_metric([result], relaxed[result])
        yield outputs
        compiling = self._metrics.compile_counts
        for name, text, value in (
            ("constraints_compiled", "Constraints compiled.", compiling.compiled),
            ("constraints_refused", "Requests whose constraint was rejected.", compiling.refused),
            ("constraint_cache_hits", "Constraints found in the cache.", compiling.cache_hits),
            ("compile_processes_killed", "Compiling processes that died or were killed.", compiling.killed),
        ):
            yield CounterMetricFamily(f"agentflow_{name}", text, value=value)

    def _tenant_tokens(self) -> Metric:
        family = CounterMetricFamily(
            "agentflow_tenant_tokens",
            "Tokens of a tenant's finished requests.",
            labels=["model", "tenant", "kind"],
        )
        for model, of in self._models.items():
            for tenant, use in of.requests.tokens.items():
                family.add_metric([model, tenant, "computed_prompt"], use.prompt - use.cached)
                family.add_metric([model, tenant, "cached_prompt"], use.cached)
                family.add_metric([model, tenant, "output"], use.output)
        return family

    def _api_counters(self) -> Iterator[Metric]:
        costs = CounterMetricFamily(
            "agentflow_tenant_cost_dollars",
            "Costs of a tenant's calls to an API, in US dollars, if the price is known.",
            labels=["model", "tenant"],
        )
        errors = CounterMetricFamily(
            "agentflow_api_errors",
            "Calls to an API that failed, by the code of the error.",
            labels=["model", "code"],
        )
        for model, calls in self._apis.items():
            for tenant, cost in calls.cost.items():
                costs.add_metric([model, tenant], cost)
            for code, number in calls.errors.items():
                errors.add_metric([model, code], number)
        yield costs
        yield errors

    def _counter(self, name: str, text: str, values: Mapping[str, float]) -> Metric:
        family = CounterMetricFamily(f"agentflow_{name}", text, labels=["model"])
        for model, value in values.items():
            family.add_metric([model], value)
        return family

    def _histograms(self) -> Iterator[Metric]:
        models = self._models
        ttft = [((model,), of.requests.ttft) for model, of in models.items()]
        yield _histogram("ttft", "Time from acceptance of a request to its first token.", WAIT_BOUNDS_S, ttft)
        tpot = [((model,), of.requests.tpot) for model, of in models.items()]
        text = "Mean time per output token after the first, of a request."
        yield _histogram("tpot", text, TPOT_BOUNDS_S, tpot)
        waits = [
            ((model, tenant), counts)
            for model, of in models.items()
            for tenant, counts in of.requests.queue_wait.items()
        ]
        yield _histogram(
            "queue_wait",
            "Time from acceptance of a request to its first batch.",
            WAIT_BOUNDS_S,
            waits,
            "tenant",
        )
        phases = [
            ((model, phase), counts)
            for model, of in self._engines.items()
            for phase, counts in zip(PHASES, of.totals.phases(), strict=True)
        ]
        yield _histogram("step", "Duration of the phases of a step.", STEP_BOUNDS_S, phases, "phase")


def _histogram(
    name: str, text: str, bounds: Sequence[float], labelled: Labelled, label: str | None = None
) -> Metric:
    """A family of histograms. ``label``: a second label, after ``model``."""
    labels = ["model"] if label is None else ["model", label]
    family = HistogramMetricFamily(f"agentflow_{name}_seconds", text, labels=labels)
    edges = [*map(floatToGoString, bounds), "+Inf"]
    for values, histogram in labelled:
        buckets: list[tuple[str, float]] = []
        sum_so_far = 0
        for edge, count in zip(edges, histogram.counts, strict=True):
            sum_so_far += count
            buckets.append((edge, sum_so_far))
        family.add_metric(values, buckets, histogram.total)
    return family


logger = logging.getLogger(__name__)

CONTENT_TYPE = CONTENT_TYPE_LATEST
# The time limit of the engine's answer to a scrape; it answers between two steps. Prometheus's own limit is
# ten seconds.
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
    "preemptions",
    "media_encoded",
    "media_evicted",
)


@runtime_checkable
class MeasuredGenerator(Protocol):
    """A generator with an engine behind it."""

    async def engine_stats(self) -> EngineStats: ...

    def observe(self, observer: RequestObserver) -> None: ...


class EngineTotals:
    """The sums of the counters of all engine processes so far."""

    def __init__(self) -> None:
        self.last: Stats | EngineStats = Stats(model="")
        self.restarts = 0
        self._before = dict.fromkeys(COUNTERS, 0)
        self._phases_before = [BucketCounts.empty(STEP_BOUNDS_S) for _ in PHASES]
        self._restarts_before = 0

    def update(self, stats: Stats | EngineStats) -> None:
        """Records an answer of the engine, unless it is older than the last one."""
        restarts, last_restarts = stats.restarts or 0, self.last.restarts or 0
        if (restarts, stats.steps or 0) < (last_restarts, self.last.steps or 0):
            return
        if restarts > last_restarts:
            self._keep()
        self.last = stats
        self.restarted(restarts)

    def restarted(self, restarts: int) -> None:
        """Records that the engine's process was replaced ``restarts`` times. It need not answer."""
        self.restarts = self._restarts_before + restarts

    def next_engine(self) -> None:
        """Prepares for another engine, whose counters and restarts begin at 0."""
        self._keep()
        self._restarts_before = self.restarts
        self.last = Stats(model=self.last.model)

    def count(self, name: str) -> int:
        """One of ``COUNTERS``."""
        now: int = getattr(self.last, name, 0)  # before the first answer, some counters are missing
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


class ReplicaTotals:
    """The sums of the counters of all engines of a model, each of which may be replaced."""

    def __init__(self) -> None:
        self.last: Stats | EngineStats = Stats(model="")
        self._each: dict[int, EngineTotals] = {}

    def update(self, stats: Stats | EngineStats, parts: Mapping[int, EngineStats] | None = None) -> None:
        """Records an answer of the model. ``parts``: its replicas' answers; None: there is one engine."""
        for number, part in ({0: stats} if parts is None else parts).items():
            self._each.setdefault(number, EngineTotals()).update(part)
        self.last = self._each[0].last if parts is None else stats

    def restarted(self, number: int, restarts: int) -> None:
        """See ``EngineTotals``. ``number``: the replica's number; 0 for the only engine."""
        self._each.setdefault(number, EngineTotals()).restarted(restarts)

    def next_engine(self) -> None:
        """See ``EngineTotals``, for each engine."""
        for totals in self._each.values():
            totals.next_engine()
        self.last = Stats(model=self.last.model)

    @property
    def restarts(self) -> int:
        """How often a process was replaced."""
        return sum(totals.restarts for totals in self._each.values())

    def count(self, name: str) -> int:
        """One of ``COUNTERS``."""
        return sum(totals.count(name) for totals in self._each.values())

    def phases(self) -> Sequence[BucketCounts]:
        """The times of each of ``PHASES``."""
        summed = [BucketCounts.empty(STEP_BOUNDS_S) for _ in PHASES]
        for totals in self._each.values():
            summed = [one + other for one, other in zip(summed, totals.phases(), strict=True)]
        return summed


class ModelMetrics:
    """The metrics of one model."""

    def __init__(self) -> None:
        self.requests = RequestTimes()
        self.calls: ApiCallTimes | None = None  # calls to the model's API; None: it has an engine
        self.totals = ReplicaTotals()
        self.replicas: Sequence[ReplicaStatus] = ()
        self.is_engine_up = False
        self.kernels = "none"
        self._has_been_watched = False

    def watch_calls(self, model: ApiModel) -> None:
        """Measures the calls to the model's API from now on, in addition to earlier ones."""
        self.calls = self.calls or ApiCallTimes()
        self.requests = self.calls
        self.requests.forget_pending()
        model.observe(self.calls)

    def watch(self, generator: Generator[Any]) -> None:
        """Times the requests of this engine from now on. Its counters add to those of earlier engines."""
        if self._has_been_watched:
            self.totals.next_engine()
            self.requests.forget_pending()
        self._has_been_watched = True
        if isinstance(generator, MeasuredGenerator):
            generator.observe(self.requests)

    async def query(self, generator: Generator[Any], model: Model) -> None:
        """Queries the engine, for at most ``SCRAPE_TIMEOUT_S``."""
        self.is_engine_up = False
        engine = None
        if isinstance(model, EngineModel):
            engine, self.kernels = model.client.engine, model.client.info.kernels
        replicas = engine if isinstance(engine, ReplicaSet) else None
        if replicas is not None:  # a replica that does not answer must not hide the others
            self.replicas = await replicas.refreshed()
            parts = {one.number: one.stats for one in self.replicas if one.stats is not None}
            if parts:
                self.totals.update(merged_stats(0, parts), parts)
            for one in self.replicas:
                self.totals.restarted(one.number, one.restarts)
            self.is_engine_up = any(one.stats is not None and not one.is_silent for one in self.replicas)
            return
        try:
            with anyio.move_on_after(SCRAPE_TIMEOUT_S):
                self.totals.update(await _find_stats(generator))
                self.is_engine_up = True
        except AgentflowError as error:
            logger.debug("the engine returned no stats: %s", error)
        except Exception:  # one model's fault must not end the scrape
            logger.exception("the stats of an engine could not be read")
        if isinstance(engine, EngineSupervisor):  # it counts deaths, also while no process answers
            self.totals.restarted(0, engine.restarts)
        self.replicas = ()


class ServerMetrics:
    """The metrics of one application. It has its own registry."""

    def __init__(self) -> None:
        self.by_model: dict[str, ModelMetrics] = {}
        self.num_sessions = 0
        self.session_bytes = 0
        self.num_programs = 0
        self.program_bytes = 0
        self.answers: Counter[tuple[str, int]] = Counter()
        """The number of answers of the HTTP APIs by route and status; 0: the client had disconnected."""
        self.relaxed: Counter[str] = Counter()
        """The number of ``requests`` with a relaxed schema, and of their answers and tool calls by the result
        of the check: ``valid``, ``violated``, ``unchecked``."""
        self.num_tasks = 0
        self._compiled_before = CompileCounts()  # the counters of earlier models' compilers
        self._models: Models | None = None
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(MetricFamilies(self))

    def of(self, model: str) -> ModelMetrics:
        """The metrics of this model."""
        return self.by_model.setdefault(model, ModelMetrics())

    def watch(self, models: Models) -> None:
        """Measures these models from now on."""
        self._compiled_before = self.compile_counts
        self._models = models
        for model in models:
            if isinstance(model, ApiModel):
                self.of(model.name).watch_calls(model)
            else:
                self.of(model.name).watch(model.generator(ANONYMOUS))

    @property
    def compile_counts(self) -> CompileCounts:
        """The sums of the counters of all compilers so far."""
        if self._models is None:
            return self._compiled_before
        return self._compiled_before + self._models.compile_counts

    async def scrape(
        self,
        models: Models | None = None,
        sessions: Sessions[Any] | None = None,
        programs: Programs | None = None,
    ) -> bytes:
        """Queries the engines, and returns all metrics as text."""
        self.num_sessions = len(sessions) if sessions is not None else 0
        self.session_bytes = sessions.num_bytes if sessions is not None else 0
        self.num_programs = len(programs.store) if programs is not None else 0
        self.program_bytes = programs.store.num_bytes if programs is not None else 0
        self.num_tasks = len(anyio.get_running_tasks())
        for metrics in self.by_model.values():
            metrics.is_engine_up = False
        async with anyio.create_task_group() as group:
            for model in models or ():
                if not isinstance(model, ApiModel):
                    group.start_soon(self.of(model.name).query, model.generator(ANONYMOUS), model)
        return self.text()

    def text(self) -> bytes:
        """All metrics as text: gauges and engine counters from the last scrape, and current request times."""
        return generate_latest(self.registry)


async def _find_stats(generator: Generator[Any]) -> Stats | EngineStats:
    if isinstance(generator, MeasuredGenerator):
        return await generator.engine_stats()
    return await generator.stats()
