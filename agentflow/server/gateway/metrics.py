"""The metrics of the gateway for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from agentflow.server.gateway.http_proxy import HttpProxy
from agentflow.server.gateway.target import Target
from agentflow.server.gateway.target_choice import TargetChoice

CONTENT_TYPE = CONTENT_TYPE_LATEST
_PREFIX = "agentflow_gateway_"


class GatewayMetrics(Collector):
    """Collects the counters of the gateway."""

    def __init__(self, targets: list[Target], placement: TargetChoice, proxy: HttpProxy) -> None:
        self._targets, self._placement, self._proxy = targets, placement, proxy
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def text(self) -> bytes:
        """The metrics in the format of Prometheus."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """The families, for the client library."""
        base = {target.number: target.base for target in self._targets} | {-1: ""}
        answers = CounterMetricFamily(f"{_PREFIX}answers", "Answers to clients.", labels=["target", "status"])
        for (number, status), count in self._proxy.answers.items():
            answers.add_metric([base[number], str(status)], count)
        yield answers
        decisions = CounterMetricFamily(
            f"{_PREFIX}decisions", "Choices of a target, by reason.", labels=["reason"]
        )
        for reason, count in self._placement.reasons.items():
            decisions.add_metric([reason], count)
        yield decisions
        retries = CounterMetricFamily(
            f"{_PREFIX}retries", "Requests that were sent to another target.", labels=["cause"]
        )
        for cause, count in self._proxy.retries.items():
            retries.add_metric([cause], count)
        yield retries
        counted = (
            ("prompt_bytes", "Bytes of prompts.", self._proxy.num_prompt_bytes),
            (
                "hit_bytes",
                "Bytes of prompts that the target was expected to have cached.",
                self._proxy.num_hit_bytes,
            ),
        )
        for name, text, counts in counted:
            family = CounterMetricFamily(f"{_PREFIX}{name}", text, labels=["target"])
            for target in self._targets:
                family.add_metric([target.base], counts[target.number])
            yield family
        gauges: tuple[tuple[str, str, Callable[[Target], float]], ...] = (
            ("target_up", "Whether the target gets requests.", lambda target: float(target.is_up)),
            ("requests", "Requests in progress.", lambda target: float(target.num_running)),
            ("websockets", "Open websockets.", lambda target: float(target.num_websockets)),
        )
        for name, text, value in gauges:
            gauge = GaugeMetricFamily(f"{_PREFIX}{name}", text, labels=["target"])
            for target in self._targets:
                gauge.add_metric([target.base], value(target))
            yield gauge
