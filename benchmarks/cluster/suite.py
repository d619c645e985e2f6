"""Replicas behind a router, simulated: scaling, cache hits, goodput against other routers, and the cost of a
decision.

Time in the simulation follows ``GPU``, so the same commit has the same figures everywhere, except timed
figures: decisions and the large simulation in processor time, overheads, and tensor parallel. A
request is *good* if its first token arrives within a second and each further one within 50 ms, at 0.8 of the
load that one replica serves, times the replicas. Requests are counted as soon as programs end at the rate at
which they begin. Routers are compared on workloads from several seeds. The simulations run in one process for
each core.
"""

from __future__ import annotations

import gc
import hashlib
import multiprocessing
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass

import numpy as np
from rich.console import Console

from agentflow.cluster.simulated.published import PUBLISHED_ROUTERS
from benchmarks.cluster import resume, several_models, tensor_parallel
from benchmarks.cluster.decisions import NUM_REPLICAS, decide
from benchmarks.cluster.gateway import measure_gateway
from benchmarks.cluster.overhead import overhead
from benchmarks.cluster.workloads import CASES, LARGE, LOAD, OURS, Case, Steady, goodput
from benchmarks.report import Report, Result

RAY = "ray"
COMPARED = {"small": 2, "full": 4}
"""Replicas on which all routers run."""
SEEDS = {"small": range(1), "full": range(3)}
"""The seeds of their workloads: a single one is not meaningful if few programs run."""
REPLICAS = {"small": 2, "full": 64}
"""Replicas of the scaling and of the hit rate."""
MANY = {"small": (100, 5_000), "full": (100, 100_000)}
"""Replicas and requests of the large simulation."""


def run(report: Report, console: Console, only: str) -> None:
    """Measures the figures whose id contains ``only``; if ``report.is_exact``, no timed ones."""
    if only in "cluster.decisions_per_s_shared" and not report.is_exact:
        _decisions(report)
    cases = [case for case in CASES if any(only in f"cluster.{figure}_{case.name}" for figure in _OF_A_CASE)]
    is_summary = any(only in f"cluster.{figure}" for figure in _SUMMARIES)
    context = multiprocessing.get_context("spawn")
    chosen = cases or (CASES if is_summary else [])
    earlier = report.earlier()
    measured: dict[str, dict[str, float]] = earlier.get("workloads", {})
    known = [Result(**one) for one in earlier.get("results", [])]
    report.results += [one for one in known if any(one.id.endswith(f"_{name}") for name in measured)]
    if chosen:
        report.extra["workloads"] = measured
    with ProcessPoolExecutor(os.cpu_count(), context, gc.disable) as pool:
        rates = {case.name: pool.submit(_programs_per_s, case.name) for case in chosen}
        served = {name: rate.result() for name, rate in rates.items()}
        left = [case for case in chosen if case.name not in measured]
        running = [_begin(case, report.scale, served[case.name], pool) for case in left]
        many: Future[_Many] | None = None
        if any(only in f"cluster.{figure}" for figure in _OF_MANY):
            many = pool.submit(_many, report.scale, LOAD * served.get("few_shot", 0.0))
        for case, of_case in zip(left, running, strict=True):
            measured[case.name] = _measure(case, report, console, of_case)
            report.write()
        if many is not None:
            _add_many(report, many.result())
            report.write()
    if measured:
        _summarise(report, [*measured.values()])
    if not report.is_exact:
        if any(only in f"cluster.{figure}" for figure in ("router_overhead_ms", "router_throughput_share")):
            overhead(report)
        if only in resume.NAME:
            console.print("a lost replica", style="dim")
            resume.run(report)
        tensor_parallel.run(report, console, only)
    if only in several_models.NAME:
        several_models.run(report)
    measure_gateway(report, console, only, served)
    report.results = [result for result in report.results if only in result.id]


_OF_A_CASE = ("scaling", "hit_rate_gap", "goodput", "goodput_gain", "of_best_published")
_SUMMARIES = ("scaling_64", "hit_rate_gap", "goodput_gain_ray", "of_best_published")
_OF_MANY = ("goodput_100", "simulated_s")


def _decisions(report: Report) -> None:
    """Adds the decisions in a second of processor time."""
    size = 1_000 if report.scale == "small" else 4_000
    runs, after, shared = [], [], []
    for seed in range(5):
        times, rest_s = decide(size, seed)
        runs.append(size / sum(times))
        after.append(1e6 * rest_s / size)
        shared.append(size / sum(decide(size, seed, is_shared=True)[0]))
    note = (
        f"{NUM_REPLICAS} replicas with 16 requests each, prompts of 2,240 tokens, of which 2,048 are shared; "
        f"processor time; afterwards first token, reports and end take {statistics.median(after):.0f} us"
    )
    report.median("cluster.decisions_per_s", runs, "1/s", goal=">= 20000", note=note)
    note = "the same, where another model has an engine on each device"
    report.median("cluster.decisions_per_s_shared", shared, "1/s", goal=">= 20000", note=note)


# In processes of the pool, where the garbage of a simulation is collected when it has ended.


def _programs_per_s(name: str) -> float:
    gc.collect()
    return _case(name).programs_per_s()


def _steady(name: str, policy: str, num_replicas: int, per_s: float, seed: int) -> Steady:
    gc.collect()
    return _case(name).steady(policy, num_replicas, per_s, seed)


def _overloaded_per_s(name: str, num_replicas: int, per_s: float) -> float:
    gc.collect()
    return _case(name).overloaded_per_s(num_replicas, per_s)


def _case(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


@dataclass(frozen=True)
class _Running:
    """The simulations of one workload: the requests that end in a second on many replicas and on one under
    overload, many replicas and one large engine at LOAD, and all routers on few replicas."""

    overloaded: list[Future[float]]
    gap: list[Future[Steady]]
    compared: dict[str, list[Future[Steady]]]


def _begin(case: Case, scale: str, served_per_s: float, pool: ProcessPoolExecutor) -> _Running:
    few, many, per_s = COMPARED[scale], REPLICAS[scale], LOAD * served_per_s
    large = pool.submit(_steady, case.name, LARGE, many, per_s, 0)
    compared = {
        name: [pool.submit(_steady, case.name, name, few, per_s, seed) for seed in SEEDS[scale]]
        for name in (OURS, *PUBLISHED_ROUTERS)
    }
    ours = compared[OURS][0] if few == many else pool.submit(_steady, case.name, OURS, many, per_s, 0)
    overloaded = [pool.submit(_overloaded_per_s, case.name, number, served_per_s) for number in (many, 1)]
    return _Running(overloaded, [ours, large], compared)


def _measure(case: Case, report: Report, console: Console, running: _Running) -> dict[str, float]:
    """Adds the figures of one workload, and returns the figures for the summary."""
    few, many = COMPARED[report.scale], REPLICAS[report.scale]
    compared, gap, overloaded = running.compared, running.gap, running.overloaded
    of_each = {name: Steady.mean([one.result() for one in futures]) for name, futures in compared.items()}
    ours = of_each[OURS]
    waits = [
        f"{name} {one.goodput:.3f} (hits {one.hit_rate:.3f}, first token p99 {1e3 * one.ttft_p99_s:.0f} ms, "
        f"mean of a request {one.latency_s:.2f} s)"
        for name, one in of_each.items()
    ]
    num_seeds = len(SEEDS[report.scale])
    count = f"{ours.num_requests:,} requests of {num_seeds} seeds"
    note = f"{case.note}; {few} replicas, {count}: {'; '.join(waits)}"
    report.add(f"cluster.goodput_{case.name}", round(ours.goodput, 4), "of the requests", note=note)
    gain = ours.goodput / max(of_each[RAY].goodput, 1e-3)
    _add_ratio(report, f"goodput_gain_{case.name}", gain, "against Ray's router")
    best = min(PUBLISHED_ROUTERS, key=lambda name: of_each[name].latency_s)
    part = ours.latency_s / of_each[best].latency_s
    each = [
        round(mine.result().latency_s / theirs.result().latency_s, 3)
        for mine, theirs in zip(compared[OURS], compared[best], strict=True)
    ]
    best_goodput = max(PUBLISHED_ROUTERS, key=lambda name: of_each[name].goodput)
    missed = of_each[best_goodput].goodput - ours.goodput
    text = (
        f"the mean time of a request, by that with {best}; good requests {100 * missed:+.1f} points with "
        f"{best_goodput}"
    )
    _add_ratio(report, f"of_best_published_{case.name}", part, text, "<= 1.03", each)
    hit_rates = [future.result().hit_rate for future in gap]
    points = 100 * (hit_rates[1] - hit_rates[0])
    text = f"{many} replicas {hit_rates[0]:.4f}, one engine {many} times as large {hit_rates[1]:.4f}"
    report.add(f"cluster.hit_rate_gap_{case.name}", round(points, 2), "points", note=text)
    served = [future.result() for future in overloaded]
    scaling = served[0] / served[1] / many
    text = (
        f"requests that {many} replicas end in a second under overload ({served[0]:,.0f}), by {many} times "
        f"the requests of one ({served[1]:.1f})"
    )
    _add_ratio(report, f"scaling_{case.name}", scaling, text)
    console.print(f"{case.name}: simulated", style="dim")
    goodputs = {name: one.goodput for name, one in of_each.items()}
    return {"gap": points, "scaling": scaling, "part": part, "missed": missed, **goodputs}


def _summarise(report: Report, measured: list[Mapping[str, float]]) -> None:
    """Adds the figures over all workloads."""
    ours, ray = (float(np.mean([one[name] for one in measured])) for name in (OURS, RAY))
    others = ", ".join(f"{name} {np.mean([one[name] for one in measured]):.3f}" for name in PUBLISHED_ROUTERS)
    note = f"the mean part of good requests over {len(measured)} workloads: ours {ours:.3f}, {others}"
    _add_ratio(report, "goodput_gain_ray", ours / ray, note, ">= 1.3")
    text = (
        f"the most of {len(measured)} workloads; good requests at most "
        f"{100 * max(one['missed'] for one in measured):.1f} points under the best"
    )
    _add_ratio(report, "of_best_published", max(one["part"] for one in measured), text, "<= 1.03")
    text = f"the largest of {len(measured)} workloads, against one large cache"
    gap = max(one["gap"] for one in measured)
    report.add("cluster.hit_rate_gap", round(gap, 2), "points", note=text, goal="<= 3")
    text = f"the least of {len(measured)} workloads, {REPLICAS[report.scale]} replicas"
    _add_ratio(report, "scaling_64", min(one["scaling"] for one in measured), text, ">= 0.9")


@dataclass(frozen=True)
class _Many:
    """A large simulation. ``digest``: a digest of the times of all requests."""

    num_requests: int
    elapsed_s: float
    num_steps: int
    goodput: float
    took_s: float  # of the processor
    digest: str


def _many(scale: str, per_s: float) -> _Many:
    gc.collect()
    case = _case("few_shot")
    count, num_requests = MANY[scale]
    per_s = per_s or LOAD * case.programs_per_s()
    workload = case.workload(count, per_s, num_requests / count / per_s)
    start = time.process_time()
    simulated = case.run(workload, count, case.router())
    took_s = time.process_time() - start
    times = np.array([(one.arrived_s, one.first_s, one.ended_s) for one in simulated.served])
    return _Many(
        len(workload.arrivals),
        simulated.elapsed_s,
        simulated.counters.steps,
        goodput(simulated.served),
        took_s,
        hashlib.blake2b(times.tobytes(), digest_size=4).hexdigest(),
    )


def _add_many(report: Report, many: _Many) -> None:
    """Adds the figures of the large simulation."""
    note = (
        f"{many.num_requests:,} requests on {MANY[report.scale][0]} replicas, {many.elapsed_s:.0f} simulated "
        f"seconds, {many.num_steps:,} steps; the digest of all times is {many.digest}"
    )
    report.add("cluster.goodput_100", round(many.goodput, 4), "of the requests", note=note)
    if not report.is_exact:
        report.add("cluster.simulated_s", round(many.took_s, 1), "s", note="the same; processor time")


def _add_ratio(
    report: Report, name: str, value: float, note: str, goal: str = "", runs: Sequence[float] = ()
) -> None:
    report.add(f"cluster.{name}", round(value, 3), "ratio", runs, note, goal)
