"""Programs in the scheduler, simulated: dependent requests, groups and agent sessions, with and without the
scheduler's knowledge of programs.

Simulated time follows ``GPU``, so the same commit gives the same figures everywhere. The workloads are
generated from seeds in shapes that papers publish, not taken from traces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from rich.console import Console

from agentflow.engine.scheduling.scheduler import SchedulerConfig
from agentflow.engine.simulator.cost_model import CostModel
from agentflow.engine.simulator.simulation import Simulated, simulate
from agentflow.engine.simulator.summary import program_times
from agentflow.engine.simulator.workload import (
    Arrival,
    Workload,
    agent_sessions,
    beside,
    chains,
    map_reduce,
    multi_agent,
    unshared,
)
from benchmarks.engine import program_policies
from benchmarks.report import Report, Result

GPU = CostModel(base_s=5.1e-3, row_s=20.5e-6, logits_s=0.0, read_s=2.5e-8, pair_s=1.2e-9)
"""Chosen by hand to follow the measured steps of a model with the shapes of Llama 3.1 8B on one NVIDIA H200
(``results/nvidia-h200/gpu.json``: decoding of 1 to 256 requests, prefill of 2,048 tokens)."""
GPU_CONTEXT = 160_000
LOAD = 0.7
"""The arrival rate of chats next to programs, as a part of the rate that the engine serves."""


@dataclass(frozen=True)
class Setting:
    """One workload."""

    name: str
    note: str
    arrivals: Sequence[Arrival]
    max_running: int
    kv_tokens: int = 400_000
    goal: str = ""

    def run(self, *, policy: str = "fair-lpm", knows_programs: bool = True) -> Simulated:
        """Simulates the workload under a policy."""
        config = SchedulerConfig(max_running=self.max_running, token_budget=4096, policy=policy)
        return simulate(
            Workload(self.name, self.arrivals, self.kv_tokens),
            config,
            cost=GPU,
            max_context=GPU_CONTEXT,
            knows_programs=knows_programs,
        )


def chats(num_requests: int, per_s: float, seed: int = 5) -> list[Arrival]:
    """Returns single requests of chats."""
    return unshared(num_requests=num_requests, prompt=800, output=200, per_s=per_s, seed=seed)


def chat_rate(max_running: int) -> float:
    """Returns the requests of chats per second that the engine serves."""
    setting = Setting("capacity", "", chats(150, 0.0), max_running)
    return len(setting.arrivals) / setting.run().elapsed_s


def settings(scale: str) -> list[Setting]:
    """Returns the workloads."""
    size = 1 if scale == "small" else 2
    rate = LOAD * chat_rate(16)
    beside_chat = f"beside chats at {LOAD} of the served rate"
    return [
        Setting(
            "chain",
            f"chains of 15 requests {beside_chat}",
            beside(chats(150 * size, rate), chains(num_chains=2 * size, per_s=0.2, length=15, seed=2)),
            16,
            goal=">= 1.5",
        ),
        Setting(
            "many_chains",
            "chains of 15 requests that arrive three a second",
            chains(num_chains=25 * size, per_s=3.0, length=15),
            8,
            goal=">= 1.5",
        ),
        Setting(
            "map_reduce",
            f"24 requests and one over their outputs, {beside_chat}",
            beside(chats(150 * size, rate), map_reduce(num_programs=5 * size, per_s=0.5, width=24)),
            16,
            goal=">= 1.5",
        ),
        Setting(
            "multi_agent",
            "8 coders and 8 reviewers in three rounds, in the shape of MetaGPT",
            multi_agent(num_programs=4 * size, per_s=1.0),
            16,
            goal=">= 1.0",
        ),
        Setting(
            "agents",
            "sessions of 43 turns up to 142,000 tokens, generated in that shape; the pool has half of them",
            agent_sessions(num_sessions=3 * size, per_s=0.2),
            16,
            kv_tokens=142_000 * 3 * size // 2,
            goal=">= 1.0",
        ),
    ]


def mean_s(simulated: Simulated) -> float:
    """Returns the mean time of a program."""
    return float(np.mean([*program_times(simulated).values()]))


def measure(setting: Setting, report: Report) -> None:
    """Adds the ratios of one workload."""
    aware = setting.run()
    unaware = setting.run(knows_programs=False)
    fcfs = setting.run(policy="fcfs", knows_programs=False)
    times = [mean_s(one) for one in (aware, unaware, fcfs)]
    note = f"{setting.note}; mean {times[0]:.2f} s, without programs {times[1]:.2f}, fcfs {times[2]:.2f}"
    report.results += [
        Result(
            f"programs.latency_gain_{setting.name}",
            round(times[1] / times[0], 3),
            "ratio",
            [],
            note=f"{note}; simulated",
            goal=setting.goal,
        ),
        Result(f"programs.latency_gain_{setting.name}_fcfs", round(times[2] / times[0], 3), "ratio", []),
        Result(
            f"programs.throughput_{setting.name}",
            round(unaware.elapsed_s / aware.elapsed_s, 3),
            "ratio",
            [],
            note="the time of the whole workload without knowledge of programs, by the time with it",
            goal=">= 0.97",
        ),
    ]


def measure_recomputed(report: Report, only: str) -> None:
    """Adds the tokens that are computed again in agent sessions, against a cache that knows when each session
    continues, and against one that knows no sessions."""
    arrivals = agent_sessions(num_sessions=8, per_s=1.0, turns=15, first=4000, last=30_000, output=150)
    name = "recomputed_of_optimum"
    if only and name not in only:
        return
    unique = sum({arrival.program: len(arrival.tokens) for arrival in arrivals}.values())

    def recomputed(arrivals: Sequence[Arrival], *, knows_returns: bool = False) -> int:
        config = SchedulerConfig(max_running=16, token_budget=4096)
        workload = Workload(name, arrivals, 8 * 30_000 // 2)
        done = simulate(workload, config, cost=GPU, max_context=GPU_CONTEXT, knows_returns=knows_returns)
        return done.counters.computed_tokens - unique

    ours, optimum = recomputed(arrivals), recomputed(arrivals, knows_returns=True)
    stateless = recomputed([replace(arrival, state="") for arrival in arrivals])
    report.results.append(
        Result(
            f"programs.{name}",
            round(ours / optimum, 3),
            "ratio",
            [],
            note=f"8 sessions of 15 turns up to 30,000 tokens, the pool has half of them: {ours:,} tokens, "
            f"{optimum:,} if the time of each tool is known before, {stateless:,} without states; simulated",
            goal="<= 1.3",
        )
    )


def run(report: Report, console: Console, only: str) -> None:
    """Measures the workloads whose name ``only`` contains, or all."""
    for setting in settings(report.scale):
        if not only or setting.name in only:
            console.print(f"{setting.name}: {len(setting.arrivals):,} requests")
            measure(setting, report)
    measure_recomputed(report, only)
    program_policies.run(report, console, only)
    report.results = [result for result in report.results if only in result.id]
