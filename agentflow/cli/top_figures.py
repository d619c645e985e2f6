"""The figures of ``agentflow top``, from two scrapes of a server's metrics and the time between them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

NO_NAME = "-"
"""The model of metrics that name none, and the tenant of those that name none."""

Buckets = Sequence[tuple[float, float]]
"""Upper bounds, the last infinite, with how many values each bucket has."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One line of metrics."""

    name: str
    labels: dict[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Scrape:
    """``at_s``: on some clock."""

    at_s: float
    samples: Sequence[Sample]

    def values(self, label: str) -> list[str]:
        """All values of a label, in order."""
        return list(dict.fromkeys(one.labels[label] for one in self.samples if label in one.labels))

    def total(self, name: str, **labels: str) -> float:
        """The sum of all samples of that name with these labels; one that a sample lacks counts as equal."""
        return sum(one.value for one in self._found(name, labels))

    def cumulated(self, name: str, **labels: str) -> dict[float, float]:
        """A histogram: how many values are up to each bound."""
        found: dict[float, float] = {}
        for one in self._found(f"{name}_bucket", labels):
            bound = float(one.labels["le"])
            found[bound] = found.get(bound, 0.0) + one.value
        return found

    def _found(self, name: str, labels: dict[str, str]) -> Iterable[Sample]:
        for one in self.samples:
            if one.name == name and all(
                one.labels.get(label, value) == value for label, value in labels.items()
            ):
                yield one


@dataclass(frozen=True, slots=True)
class Quantiles:
    """In seconds; None where there was nothing to measure."""

    p50_s: float | None
    p95_s: float | None


@dataclass(frozen=True, slots=True)
class ModelFigures:
    """Tokens and rates of one model's engine. Rates, quantiles and ``hit_rate`` are of the time between the
    scrapes, ``hit_rate_ever`` is of all that the server did; None where there were no prompts."""

    name: str
    is_up: bool
    running: int
    waiting: int
    input_per_s: float
    output_per_s: float
    hit_rate: float | None
    hit_rate_ever: float | None
    kv_held: int
    kv_cached: int
    kv_free: int
    ttft: Quantiles
    tpot: Quantiles
    restarts: int


@dataclass(frozen=True, slots=True)
class TenantFigures:
    """``requests``: that began between the scrapes; ``requests_ever``: that began at all."""

    name: str
    requests: int
    requests_ever: int
    queue_wait: Quantiles


@dataclass(frozen=True, slots=True)
class Figures:
    """``over_s``: the time between the scrapes."""

    over_s: float
    sessions: int
    models: list[ModelFigures]
    tenants: list[TenantFigures]


def figures(before: Scrape, now: Scrape) -> Figures:
    """What happened between two scrapes of one server.

    >>> figures(before, now).models[0].output_per_s
    37.5
    """
    over_s = max(now.at_s - before.at_s, 1e-9)
    models = now.values("model") or [NO_NAME]
    tenants = now.values("tenant")
    return Figures(
        over_s=over_s,
        sessions=int(now.total("agentflow_sessions")),
        models=[_model(name, before, now, over_s) for name in models],
        tenants=[_tenant(name, before, now) for name in tenants],
    )


def _model(name: str, before: Scrape, now: Scrape, over_s: float) -> ModelFigures:
    def grown(counter: str, **labels: str) -> float:
        return growth(before.total(counter, model=name, **labels), now.total(counter, model=name, **labels))

    prompts, computed = "agentflow_prompt_tokens_total", {"source": "computed"}
    kv = {
        state: int(now.total("agentflow_kv_tokens", model=name, state=state))
        for state in ("held", "cached", "free")
    }
    return ModelFigures(
        name=name,
        is_up=now.total("agentflow_engine_up", model=name) > 0,
        running=int(now.total("agentflow_running_requests", model=name)),
        waiting=int(now.total("agentflow_waiting_requests", model=name)),
        input_per_s=grown(prompts) / over_s,
        output_per_s=grown("agentflow_generated_tokens_total") / over_s,
        hit_rate=_share(grown(prompts), grown(prompts, **computed)),
        hit_rate_ever=_share(now.total(prompts, model=name), now.total(prompts, model=name, **computed)),
        kv_held=kv["held"],
        kv_cached=kv["cached"],
        kv_free=kv["free"],
        ttft=_quantiles("agentflow_ttft_seconds", before, now, model=name),
        tpot=_quantiles("agentflow_tpot_seconds", before, now, model=name),
        restarts=int(now.total("agentflow_engine_restarts_total", model=name)),
    )


def _tenant(name: str, before: Scrape, now: Scrape) -> TenantFigures:
    began = "agentflow_queue_wait_seconds_count"
    ever = now.total(began, tenant=name)
    return TenantFigures(
        name=name,
        requests=int(growth(before.total(began, tenant=name), ever)),
        requests_ever=int(ever),
        queue_wait=_quantiles("agentflow_queue_wait_seconds", before, now, tenant=name),
    )


def growth(before: float, now: float) -> float:
    """Of a counter; one that fell began anew at 0."""
    return now - before if now >= before else now


def _share(prompts: float, computed: float) -> float | None:
    """Of the prompt tokens, those that were in the cache."""
    return 1 - computed / prompts if prompts > 0 else None


def _quantiles(name: str, before: Scrape, now: Scrape, **labels: str) -> Quantiles:
    old, new = before.cumulated(name, **labels), now.cumulated(name, **labels)
    buckets = buckets_between(old, new)
    return Quantiles(quantile(buckets, 0.5), quantile(buckets, 0.95))


def buckets_between(old: dict[float, float], new: dict[float, float]) -> Buckets:
    """A histogram's values between two scrapes, bucket by bucket. One that has fewer values than before
    began anew."""
    has_begun_anew = any(new[bound] < old.get(bound, 0.0) for bound in new)
    so_far = 0.0
    buckets: list[tuple[float, float]] = []
    for bound in sorted(new):
        cumulated = new[bound] - (0.0 if has_begun_anew else old.get(bound, 0.0))
        buckets.append((bound, cumulated - so_far))
        so_far = cumulated
    return buckets


def quantile(buckets: Buckets, share: float) -> float | None:
    """The value that so large a share of all does not exceed, as if values lay evenly in their bucket; those
    beyond all bounds count as the last bound. None without values.

    >>> quantile([(1.0, 0), (2.0, 10), (math.inf, 0)], 0.5)
    1.5
    """
    total = sum(count for _, count in buckets)
    if total <= 0:
        return None
    wanted, so_far, lower = share * total, 0.0, 0.0
    for bound, count in buckets:
        if count > 0 and so_far + count >= wanted:
            return lower if math.isinf(bound) else lower + (bound - lower) * (wanted - so_far) / count
        so_far += count
        lower = lower if math.isinf(bound) else bound
    return lower
