"""The scheduler in figures: fairness, hits, deep queues and a full pool, in simulated time.

Simulated time follows the package's cost model, so the same commit gives the same figures everywhere.
``--only cost`` fits a cost model to forward passes of the real model on this machine.
"""

from __future__ import annotations

import time
from dataclasses import astuple
from pathlib import Path

import msgspec
import numpy as np
from rich.console import Console

from agentflow.engine.batch import Batch, BatchOutput
from agentflow.engine.request import Request, Submit
from agentflow.engine.runner import run_batch
from agentflow.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from agentflow.engine.simulator.cost_model import CostModel, default_cost, features, fit_cost
from agentflow.engine.simulator.generators import make_arrivals, unshared
from agentflow.engine.simulator.simulation import Simulated, simulate
from agentflow.engine.simulator.workload import Workload
from agentflow.engine.simulator.workload_file import read_workload
from agentflow.protocol.sampling import SamplingParams
from benchmarks.engine.deep_queue import measure_deep_queue
from benchmarks.report import Report

WORKLOADS = Path(__file__).parents[1] / "workloads"
COST_FILE = Path("agentflow/engine/simulator/default_cost.json")
COLD_SEEDS = 12
_PARAMS = SamplingParams()


def fit_cost_model(console: Console) -> CostModel:
    """Measures forward passes of the real model over random batches, and fits a cost model to them."""
    from agentflow.engine.local_engine import limit_spinning

    limit_spinning()  # as the engine sets it; before torch is loaded
    from agentflow.engine.models.torch_runner import TorchRunner
    from agentflow.engine.store.model_store import resolve_model

    runner = TorchRunner(
        resolve_model("smollm2-135m"), num_slots=20_000, dtype="bfloat16", device="cpu", num_threads=2
    )
    samples: list[tuple[tuple[float, ...], float]] = []

    def timed(batch: Batch) -> BatchOutput:
        start = time.perf_counter()
        output = run_batch(runner, batch)
        samples.append((features(batch), time.perf_counter() - start))
        return output

    numbers = np.random.default_rng(0)
    for num_running in (1, 2, 4, 8, 16, 32):
        config = SchedulerConfig(max_running=num_running, policy="fcfs")
        scheduler = Scheduler(num_slots=20_000, max_context=2048, config=config)
        for number in range(num_running * 2):
            prompt = numbers.integers(10, 49_000, int(numbers.integers(20, 600)), dtype=np.int32)
            scheduler.add(Request.of(Submit(number, [], _PARAMS), prompt, 24))
        while (batch := scheduler.schedule()) is not None:
            for result in scheduler.complete(timed(batch)):
                if result.request.num_generated == 24:
                    scheduler.finish(result.request)
    runner.close()
    model = fit_cost(samples)
    errors = [abs(float(np.dot(astuple(model), x)) / seconds - 1) for x, seconds in samples]
    console.print(f"{model}, fitted to {len(samples)} passes; median error {np.median(errors):.1%}")
    return model


def measure_fairness(report: Report, cost: CostModel) -> None:
    """Measures the cold tail: requests that share nothing, in a burst of requests that share much."""
    workload = read_workload(WORKLOADS / "cold-tail.json")
    fair, lpm = (_simulated(workload, policy, cost) for policy in ("fair-lpm", "lpm"))
    tail = round(_ttft_s(lpm, "cold", 99) / _ttft_s(lpm, "", 50), 2)
    note = "the known failure: p99 TTFT of cold requests under plain lpm, divided by the median of all"
    report.add("scheduler.cold_tail_of_lpm", tail, "ratio", note=note)
    share = round(fair.hit_rate / lpm.hit_rate, 4)
    note = f"{fair.hit_rate:.1%} against {lpm.hit_rate:.1%}"
    report.add("scheduler.fair_hit_rate_vs_lpm", share, "ratio", note=note, goal=">= 0.95")


def measure_cold_tails(report: Report, cost: CostModel) -> None:
    """Measures the cold tail in bursts from several random seeds. The third longest wait of a burst decides
    its ratio, so that one burst tells little."""
    spec = msgspec.json.decode((WORKLOADS / "cold-tail.json").read_bytes())
    runs: list[float] = []
    tails: list[list[float]] = []
    medians: list[list[float]] = []
    for seed in range(COLD_SEEDS):
        arrivals = make_arrivals(spec["generator"], {**spec["parameters"], "seed": seed})
        workload = Workload("cold-tail", arrivals, spec["kv_tokens"])
        done = [_simulated(workload, policy, cost) for policy in ("fair-lpm", "fcfs")]
        tails.append([_ttft_s(one, "cold", 99) for one in done])
        medians.append([_ttft_s(one, "", 50) for one in done])
        runs.append(tails[-1][0] / tails[-1][1])
    (cold_fair, cold_fcfs), (all_fair, all_fcfs) = np.median(tails, axis=0), np.median(medians, axis=0)
    note = (
        f"median of {COLD_SEEDS} seeds, {min(runs):.2f} to {max(runs):.2f}; cold p99 {cold_fair:.0f} s "
        f"(fcfs {cold_fcfs:.0f}), median of all {all_fair:.1f} s ({all_fcfs:.0f})"
    )
    report.median("scheduler.cold_ttft_p99_vs_fcfs", runs, "ratio", note=note, goal="<= 1.5")


def _simulated(workload: Workload, policy: str, cost: CostModel) -> Simulated:
    return simulate(workload, SchedulerConfig(max_running=32, policy=policy), cost=cost)


def _ttft_s(simulated: Simulated, label: str, percent: float) -> float:
    """A percentile of the times to the first token, of requests with this label (empty: of all)."""
    waits = [served.ttft_s for served in simulated.served if label in ("", served.arrival.label)]
    return float(np.percentile(waits, percent))


def measure_overcommit(report: Report, cost: CostModel) -> None:
    """Measures one pool with a batch size that fills it, and with twice this size."""
    arrivals = unshared(num_requests=600, prompt=100, output=200)
    pool = 32 * 300

    def tokens_per_s(num_running: int) -> tuple[float, int]:
        config = SchedulerConfig(max_running=num_running)
        done = simulate(Workload("overcommit", arrivals, pool), config, cost=cost)
        return done.counters.generated_tokens / done.elapsed_s, done.counters.preemptions

    (once, _), (twice, preemptions) = tokens_per_s(32), tokens_per_s(64)
    note = f"{twice:.0f} against {once:.0f} tokens/s; {preemptions} preemptions for 600 requests"
    report.add("scheduler.overcommit_throughput", round(twice / once, 4), "ratio", note=note, goal=">= 0.8")


def run(report: Report, console: Console, only: str) -> None:
    """Measures the figures whose id contains ``only``; ``cost`` fits a cost model instead."""
    if only == "cost":
        fit_cost_model(console).write(COST_FILE)
        console.print(f"written to {COST_FILE}")
        return
    cost = default_cost()
    measure_fairness(report, cost)
    if only in "scheduler.cold_ttft_p99_vs_fcfs":
        measure_cold_tails(report, cost)
    measure_overcommit(report, cost)
    if not only or "step_ms" in only:
        measure_deep_queue(report)
    report.results = [result for result in report.results if only in result.id]
