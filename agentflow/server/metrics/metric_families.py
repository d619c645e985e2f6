"""The metrics as Prometheus' client library has them, in the order of docs/metrics.md."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from agentflow.engine.step_times import PHASES, STEP_BOUNDS_S, BucketCounts
from agentflow.server.metrics.request_times import TPOT_BOUNDS_S, WAIT_BOUNDS_S

if TYPE_CHECKING:
    from agentflow.server.metrics.metrics import ModelMetrics, ServerMetrics

Labelled = Sequence[tuple[Sequence[str], BucketCounts]]
"""Histograms with their label values."""

_ENGINE_COUNTERS = (
    ("generated_tokens", "Tokens of outputs, sampled or forced by a constraint."),
    ("forced_tokens", "Of these, tokens that a constraint forced."),
    ("computed_tokens", "Rows computed: prompts and output, also those computed again."),
    ("evicted_tokens", "Tokens evicted from the cache."),
    ("retractions", "Running requests that gave way for want of KV."),
    ("steps", "Forward passes."),
)


class MetricFamilies(Collector):
    """What is shown of ``metrics``."""

    def __init__(self, metrics: ServerMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        """All families, with what is known now."""
        yield from self._gauges()
        yield from self._counters()
        yield from self._histograms()

    @property
    def _models(self) -> Mapping[str, ModelMetrics]:
        return self._metrics.by_model

    def _gauges(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("agentflow_sessions", "Open sessions.", value=self._metrics.num_sessions)
        yield GaugeMetricFamily(
            "agentflow_session_bytes",
            "Memory for the ops, states and values of sessions, by estimate.",
            value=self._metrics.session_bytes,
        )
        yield GaugeMetricFamily(
            "agentflow_tasks", "Tasks of the server's event loop.", value=self._metrics.num_tasks
        )
        yield self._gauge(
            "engine_up",
            "1 if the engine answered this scrape.",
            {name: int(of.is_engine_up) for name, of in self._models.items()},
        )
        last = {name: of.totals.last for name, of in self._models.items()}
        running = {name: stats.running for name, stats in last.items()}
        yield self._gauge("running_requests", "Requests in the batch.", running)
        waiting = {name: stats.waiting for name, stats in last.items()}
        yield self._gauge("waiting_requests", "Requests that wait to be admitted.", waiting)
        slots = GaugeMetricFamily("agentflow_kv_tokens", "Tokens of the KV pool.", labels=["model", "state"])
        for name, stats in last.items():
            slots.add_metric([name, "free"], stats.free_slots)
            slots.add_metric([name, "cached"], stats.cached_slots)
            slots.add_metric([name, "held"], stats.held_slots)
        yield slots
        resident = {name: stats.peak_resident_bytes for name, stats in last.items()}
        yield self._gauge("engine_peak_resident_bytes", "Largest memory of the engine's process.", resident)

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
        for model, of in self._models.items():
            count = of.totals.count
            cached, cached_output = count("cached_tokens"), count("cached_output_tokens")
            prompts.add_metric([model, "prompt_cache"], cached - cached_output)
            prompts.add_metric([model, "output_cache"], cached_output)
            prompts.add_metric([model, "computed"], count("prompt_tokens") - cached)
        yield prompts
        for name, text in _ENGINE_COUNTERS:
            values = {model: of.totals.count(name) for model, of in self._models.items()}
            yield self._counter(name, text, values)
        yield self._tenant_tokens()
        restarts = {model: of.totals.restarts for model, of in self._models.items()}
        yield self._counter("engine_restarts", "Engine processes that died.", restarts)
        answers = CounterMetricFamily(
            "agentflow_http_answers", "Answers of the HTTP APIs.", labels=["route", "status"]
        )
        for (route, status), number in sorted(self._metrics.answers.items()):
            answers.add_metric([route, str(status) if status else "gone"], number)
        yield answers
        compiling = self._metrics.compile_counts
        for name, text, value in (
            ("constraints_compiled", "Constraints compiled.", compiling.compiled),
            ("constraints_refused", "Requests whose constraint was refused.", compiling.refused),
            ("constraint_cache_hits", "Constraints found in the cache.", compiling.cache_hits),
            ("compile_processes_killed", "Compiling processes lost to a constraint.", compiling.killed),
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

    def _counter(self, name: str, text: str, values: Mapping[str, float]) -> Metric:
        family = CounterMetricFamily(f"agentflow_{name}", text, labels=["model"])
        for model, value in values.items():
            family.add_metric([model], value)
        return family

    def _histograms(self) -> Iterator[Metric]:
        models = self._models
        ttft = [((model,), of.requests.ttft) for model, of in models.items()]
        yield _histogram("ttft", "Request accepted to first token.", WAIT_BOUNDS_S, ttft)
        tpot = [((model,), of.requests.tpot) for model, of in models.items()]
        text = "Mean time per output token after the first, of a request."
        yield _histogram("tpot", text, TPOT_BOUNDS_S, tpot)
        waits = [
            ((model, tenant), counts)
            for model, of in models.items()
            for tenant, counts in of.requests.queue_wait.items()
        ]
        yield _histogram("queue_wait", "Accepted to first batch.", WAIT_BOUNDS_S, waits, "tenant")
        phases = [
            ((model, phase), counts)
            for model, of in models.items()
            for phase, counts in zip(PHASES, of.totals.phases(), strict=True)
        ]
        yield _histogram("step", "Time of a step's phases.", STEP_BOUNDS_S, phases, "phase")


def _histogram(
    name: str, text: str, bounds: Sequence[float], labelled: Labelled, label: str | None = None
) -> Metric:
    """``label``: what there is beside the model."""
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
