"""The figures of a simulation: waiting times by kind of request, cache hits, fairness, evictions."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import msgspec
import numpy as np

from agentflow.engine.simulator.simulation import Served, Simulated


class Waits(msgspec.Struct, frozen=True):
    """Percentiles, in seconds, of the time to the first token (ttft) and of the time per token after it
    (tpot)."""

    num_requests: int
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    tpot_p50_s: float
    tpot_p99_s: float


class Summary(msgspec.Struct, frozen=True):
    """The figures of the simulation of one policy."""

    policy: str
    hit_rate: float  # cached prompt tokens / prompt tokens
    output_tokens_per_s: float
    elapsed_s: float  # simulated time
    all: Waits
    by_label: dict[str, Waits]  # for each kind of request
    # Jain's index (Jain, Chiu and Hawe 1984) over each tenant's tokens per second of waiting, from 1 (all
    # equal) down to 1 / tenants.
    fairness: float
    refused: int  # requests
    steps: int
    computed_tokens: int
    evicted_tokens: int
    preemptions: int
    scheduling_ms: float  # the mean of a step
    speedup: float  # simulated time / real time


def summarise(simulated: Simulated) -> Summary:
    """Returns the figures of a simulation."""
    ended = [served for served in simulated.served if not served.is_refused]
    labels = sorted({served.arrival.label for served in ended})
    counters = simulated.counters
    return Summary(
        policy=simulated.config.policy,
        hit_rate=simulated.hit_rate,
        output_tokens_per_s=counters.generated_tokens / max(simulated.elapsed_s, 1e-9),
        elapsed_s=simulated.elapsed_s,
        all=_waits(ended),
        by_label={label: _waits([s for s in ended if s.arrival.label == label]) for label in labels},
        fairness=_fairness(ended),
        refused=len(simulated.served) - len(ended),
        steps=counters.steps,
        computed_tokens=counters.computed_tokens,
        evicted_tokens=counters.evicted_tokens,
        preemptions=counters.preemptions,
        scheduling_ms=1e3 * float(np.mean(simulated.scheduling_s)) if simulated.scheduling_s else 0.0,
        speedup=simulated.elapsed_s / max(simulated.real_s, 1e-9),
    )


def program_times(simulated: Simulated) -> dict[str, float]:
    """Returns the seconds of each program, from its first arrival to its last end."""
    arrived: dict[str, float] = {}
    ended: dict[str, float] = {}
    for served in simulated.served:
        name = served.arrival.program
        if name:
            arrived[name] = min(served.arrived_s, arrived.get(name, served.arrived_s))
            ended[name] = max(served.ended_s, ended.get(name, served.ended_s))
    return {name: ended[name] - arrived[name] for name in arrived}


def _waits(served: Sequence[Served]) -> Waits:
    ttft = np.array([s.ttft_s for s in served]) if served else np.zeros(1)
    tpot = np.array([s.tpot_s for s in served if len(s.arrival.output) > 1] or [0.0])
    return Waits(
        len(served),
        *(float(np.percentile(ttft, q)) for q in (50, 90, 99)),
        *(float(np.percentile(tpot, q)) for q in (50, 99)),
    )


def _fairness(served: Sequence[Served]) -> float:
    tokens: Counter[str] = Counter()
    waited_s: defaultdict[str, float] = defaultdict(float)
    for one in served:
        tokens[one.arrival.tenant] += len(one.arrival.prompt) - one.num_cached + len(one.arrival.output)
        waited_s[one.arrival.tenant] += one.ended_s - one.arrived_s
    rates = np.array([tokens[tenant] / max(waited_s[tenant], 1e-9) for tenant in tokens])
    return float(rates.sum() ** 2 / (len(rates) * (rates**2).sum())) if len(rates) else 1.0
