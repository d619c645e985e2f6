"""Replicas behind a router, simulated: scaling, cache hits, goodput against other routers, and the cost of a
decision.

Time in the simulation follows ``GPU``, so the same commit gives the same figures everywhere, except
``cluster.decisions_per_s``, which is measured in processor time. A request is *good* if its first token comes
within a second and each further one within 50 ms, at 0.8 of the load that one replica serves, times the
replicas.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import numpy as np
from rich.console import Console

from agentflow.cluster.published import PUBLISHED_ROUTERS
from agentflow.cluster.router import Policy
from benchmarks.cluster import tensor_parallel
from benchmarks.cluster.decisions import NUM_REPLICAS, decide
from benchmarks.cluster.gateway import measure_gateway
from benchmarks.cluster.workloads import CASES, LOAD, Case, goodput
from benchmarks.report import Report, Result, median_of

RAY = "ray"
SECONDS = {"small": 4.0, "full": 10.0}
"""The arrivals of a workload."""
OVERLOADED_S = {"small": 10.0, "full": 30.0}
"""The arrivals of the scaling: long against the time of a request."""
COMPARED = {"small": 4, "full": 16}
"""Replicas on which all routers run."""
REPLICAS = {"small": 4, "full": 64}
"""Replicas of the scaling and of the hit rate."""
MANY = {"small": (100, 5_000), "full": (100, 100_000)}
"""Replicas and requests of ``cluster.simulated``."""


def run(report: Report, console: Console, only: str) -> None:
    """Measures the figures whose id contains ``only``."""
    if only in "cluster.decisions_per_s":
        _decisions(report)
    cases = [case for case in CASES if any(only in f"cluster.{figure}_{case.name}" for figure in _OF_A_CASE)]
    is_summary = any(only in f"cluster.{figure}" for figure in _SUMMARIES)
    measured = [_measure(case, report, console) for case in (cases or (CASES if is_summary else []))]
    if measured:
        _summarise(report, measured)
    if only in "cluster.simulated_s":
        _many(report, console)
    measure_gateway(report, console, only)
    tensor_parallel.run(report, console, only)
    report.results = [result for result in report.results if only in result.id]


_OF_A_CASE = ("scaling", "hit_rate_gap", "goodput", "goodput_gain")
_SUMMARIES = ("scaling_64", "hit_rate_gap", "goodput_gain_ray")


def _decisions(report: Report) -> None:
    """Adds the decisions in a second of processor time."""
    size = 1_000 if report.scale == "small" else 4_000
    runs, after = [], []
    for seed in range(5):
        times, rest_s = decide(size, seed)
        runs.append(size / sum(times))
        after.append(1e6 * rest_s / size)
    note = (
        f"{NUM_REPLICAS} replicas with 16 requests each, prompts of 2,240 tokens, of which 2,048 are shared; "
        f"processor time; afterwards first token, reports and end take {statistics.median(after):.0f} us"
    )
    report.results.append(median_of("cluster.decisions_per_s", runs, "1/s", goal=">= 20000", note=note))


def _measure(case: Case, report: Report, console: Console) -> Mapping[str, float]:
    """Adds the figures of one workload, and returns those of the summary."""
    count, seconds = COMPARED[report.scale], SECONDS[report.scale]
    per_s = LOAD * case.programs_per_s()
    workload = case.workload(count, per_s, seconds)
    console.print(
        f"{case.name}: {len(workload.arrivals):,} requests on {count} replicas, simulated", style="dim"
    )
    policies: Mapping[str, Callable[[], Policy]] = {"ours": case.router, **PUBLISHED_ROUTERS}
    parts: dict[str, float] = {}
    hits: dict[str, float] = {}
    waits: list[str] = []
    for name, new in policies.items():
        simulated, _ = case.run(workload, count, new())
        parts[name], hits[name] = goodput(simulated), simulated.hit_rate
        ttft = float(np.percentile([one.ttft_s for one in simulated.served], 99))
        waits.append(f"{name} {parts[name]:.3f} (hits {hits[name]:.3f}, first token p99 {1e3 * ttft:.0f} ms)")
    note = f"{case.note}; {count} replicas, {len(workload.arrivals):,} requests: {'; '.join(waits)}"
    add = report.results.append
    add(Result(f"cluster.goodput_{case.name}", round(parts["ours"], 4), "of the requests", [], note=note))
    add(_ratio(f"goodput_gain_{case.name}", parts["ours"] / max(parts[RAY], 1e-3), "against Ray's router"))
    many = REPLICAS[report.scale]
    hit_rate = hits["ours"]
    if many != count:
        workload = case.workload(many, per_s, seconds / 2)
        console.print(f"{case.name}: {len(workload.arrivals):,} on {many} replicas, simulated", style="dim")
        hit_rate = case.run(workload, many, case.router())[0].hit_rate
    large = case.run_one_large(workload, many).hit_rate
    gap = 100 * (large - hit_rate)
    text = f"{many} replicas {hit_rate:.4f}, one engine {many} times as large {large:.4f}"
    add(Result(f"cluster.hit_rate_gap_{case.name}", round(gap, 2), "points", [], note=text))
    served = [case.overloaded_per_s(number, per_s / LOAD, OVERLOADED_S[report.scale]) for number in (many, 1)]
    scaling = served[0] / served[1] / many
    text = f"requests that {many} replicas end in a second under overload, by {many} times those of one"
    add(_ratio(f"scaling_{case.name}", scaling, text))
    return {"goodput": parts["ours"], "ray": parts[RAY], "gap": gap, "scaling": scaling, **parts}


def _summarise(report: Report, measured: list[Mapping[str, float]]) -> None:
    """Adds the figures over all workloads."""
    add = report.results.append
    ours, ray = (float(np.mean([one[name] for one in measured])) for name in ("goodput", "ray"))
    others = ", ".join(f"{name} {np.mean([one[name] for one in measured]):.3f}" for name in PUBLISHED_ROUTERS)
    note = f"the mean part of good requests over {len(measured)} workloads: ours {ours:.3f}, {others}"
    add(_ratio("goodput_gain_ray", ours / ray, note, ">= 1.3"))
    text = f"the largest of {len(measured)} workloads, against one large cache"
    gap = max(one["gap"] for one in measured)
    add(Result("cluster.hit_rate_gap", round(gap, 2), "points", [], note=text, goal="<= 3"))
    text = f"the least of {len(measured)} workloads, {REPLICAS[report.scale]} replicas"
    add(_ratio("scaling_64", min(one["scaling"] for one in measured), text, ">= 0.9"))


def _many(report: Report, console: Console) -> None:
    """Adds the time of a large simulation."""
    case = next(case for case in CASES if case.name == "few_shot")
    count, num_requests = MANY[report.scale]
    per_s = LOAD * case.programs_per_s()
    workload = case.workload(count, per_s, num_requests / count / per_s)
    console.print(f"{len(workload.arrivals):,} requests on {count} replicas, simulated", style="dim")
    start = time.process_time()
    simulated, _ = case.run(workload, count, case.router())
    took_s = time.process_time() - start
    note = (
        f"{len(workload.arrivals):,} requests on {count} replicas, {simulated.elapsed_s:.0f} simulated "
        f"seconds, {simulated.counters.steps:,} steps; processor time; "
        f"{goodput(simulated):.3f} of the requests are good"
    )
    report.results.append(Result("cluster.simulated_s", round(took_s, 1), "s", [], note=note))


def _ratio(name: str, value: float, note: str = "", goal: str = "") -> Result:
    return Result(f"cluster.{name}", round(value, 3), "ratio", [], note=note, goal=goal)
