"""The scheduler compared with published policies for programs, simulated, with a pool that is too small.

``python -m benchmarks programs`` adds these figures to its report. Each policy follows its paper's rule
(``agentflow.engine.simulator.published``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rich.console import Console

from agentflow.engine.scheduling.scheduler import SchedulerConfig
from agentflow.engine.simulator.cost_model import CostModel
from agentflow.engine.simulator.generators import agent_sessions
from agentflow.engine.simulator.published import published_rules
from agentflow.engine.simulator.simulation import Simulated, simulate
from agentflow.engine.simulator.summary import program_times
from agentflow.engine.simulator.workload import Arrival, Workload
from benchmarks.report import Report

SLOW = CostModel(base_s=5.1e-3, row_s=2.05e-4, logits_s=0.0, read_s=2.5e-7, pair_s=1.2e-7)
"""Contexts of a tenth take as long as on the GPU of ``programs``: the same times in a tenth of the work."""
LAST = 14_200
"""Tokens of a session at its end."""
OURS = "ours"


@dataclass(frozen=True)
class Shortage:
    """Programs that need twice the pool."""

    name: str
    arrivals: Sequence[Arrival]
    pool: int

    def run(self, name: str) -> Simulated:
        """Simulates the programs under a published policy, or under ours."""
        config = SchedulerConfig(max_running=16, token_budget=409)
        rules = None if name == OURS else published_rules(SLOW)[name]
        return simulate(
            Workload(self.name, self.arrivals, self.pool),
            config,
            cost=SLOW,
            max_context=2 * LAST,
            rules=rules,
        )


def shortages(scale: str) -> list[Shortage]:
    """Returns the settings."""
    numbers = (3, 4) if scale == "small" else (3, 4, 6, 8)
    return [
        Shortage(
            f"{number}_sessions",
            agent_sessions(num_sessions=number, per_s=0.2, first=LAST // 12, last=LAST),
            number * LAST // 2,
        )
        for number in numbers
    ]


def measure(shortage: Shortage, report: Report) -> None:
    """Adds the gains over LRU with ``fcfs`` and over the best published policy, and the recomputed tokens."""
    names = [OURS, *published_rules(SLOW)]
    done = {name: shortage.run(name) for name in names}
    mean_s = {name: float(np.mean([*program_times(one).values()])) for name, one in done.items()}
    unique = sum({one.program: len(one.tokens) for one in shortage.arrivals}.values())
    again = {name: one.counters.computed_tokens - unique for name, one in done.items()}
    published = [name for name in names if name not in (OURS, "clairvoyant")]
    best = min(published, key=mean_s.__getitem__)
    of_each = ", ".join([f"{name} {mean_s[name]:.0f} s and {again[name]:,} tokens again" for name in names])
    gain = round(mean_s["lru-fcfs"] / mean_s[OURS], 3)
    note = f"the pool has half of the working set; mean of a session: {of_each}; simulated"
    report.add(f"programs.gain_over_lru_fcfs_{shortage.name}", gain, "ratio", note=note, goal=">= 1.6")
    part = round(mean_s[OURS] / mean_s[best], 3)
    note = f"the mean time of a session, divided by the mean time with {best}"
    report.add(f"programs.of_best_published_{shortage.name}", part, "ratio", note=note, goal="<= 1.03")
    part = round(again[OURS] / again["clairvoyant"], 3)
    note = "clairvoyant: first come, first served; the tokens that are needed last are evicted first"
    report.add(f"programs.recomputed_of_clairvoyant_{shortage.name}", part, "ratio", note=note, goal="<= 1.3")


def run(report: Report, console: Console, only: str) -> None:
    """Measures the settings whose name ``only`` contains, or all."""
    for shortage in shortages(report.scale):
        if not only or shortage.name in only:
            console.print(f"{shortage.name}: {len(shortage.arrivals):,} requests")
            with report.timed(shortage.name):
                measure(shortage, report)
