"""One scheduling step with ten thousand requests waiting.

``python -m benchmarks.engine.deep_queue POLICY STEPS`` measures in its own process and prints JSON.
``python -m benchmarks scheduler`` runs it several times, interleaved, and reports the results.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from agentflow.engine.batch import Batch, BatchOutput
from agentflow.engine.machine import collect_garbage_rarely
from agentflow.engine.request import Request
from agentflow.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from agentflow.protocol.sampling import SamplingParams
from benchmarks.report import Report, median_of

ROOT = Path(__file__).parents[2]
NUM_WAITING = 10_000
PER_STEP = 100
WARM_UP = 20
_PARAMS = SamplingParams()


class DeepQueue:
    """A queue of ``num_waiting`` requests. In every step, 100 arrive, 100 are admitted, 100 end, and 100
    leaves are evicted."""

    def __init__(self, policy: str, num_waiting: int = NUM_WAITING) -> None:
        config = SchedulerConfig(max_running=2 * PER_STEP, token_budget=64 * 256, policy=policy)
        self.scheduler = Scheduler(num_slots=40_000, max_context=512, config=config)
        self.numbers = np.random.default_rng(0)
        self.prefixes = [self.numbers.integers(10, 49_000, 150, dtype=np.int32) for _ in range(500)]
        self.num_made = 0
        for request in self.new(num_waiting):
            self.scheduler.add(request)

    def new(self, count: int) -> list[Request]:
        made = []
        for _ in range(count):
            own = self.numbers.integers(10, 49_000, 50, dtype=np.int32)
            prompt = np.concatenate((self.prefixes[self.numbers.integers(500)], own))
            made.append(Request.create(self.num_made, prompt, 2, _PARAMS))
            self.num_made += 1
        return made

    def step(self) -> dict[str, float]:
        """Runs one step. Returns the milliseconds of each part."""
        scheduler, arriving = self.scheduler, self.new(PER_STEP)
        parts: dict[str, float] = {}

        def timed(name: str, work: Callable[[], object]) -> object:
            start = time.perf_counter()
            result = work()
            parts[name] = (time.perf_counter() - start) * 1e3
            return result

        timed("arrivals", lambda: deque(map(scheduler.add, arriving)))
        batch = timed("schedule", scheduler.schedule)
        assert isinstance(batch, Batch)
        output = BatchOutput(np.zeros(len(batch.sampled.rows), dtype=np.int64), None)
        results = timed("complete", partial(scheduler.complete, output))
        assert isinstance(results, list)
        ended = [r.request for r in results if r.request.num_generated == 2]
        timed("finishes", lambda: deque(map(scheduler.release, ended)))
        return parts


def measure_deep_queue(report: Report) -> None:
    """Measures a scheduling step with a deep queue: the median of several processes, interleaved."""
    kinds = {"": "fair-lpm", ".lpm": "lpm", ".fcfs": "fcfs"}
    rounds, steps = (7, 80) if report.scale == "full" else (3, 30)
    runs: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    for _ in range(rounds):
        for kind, policy in kinds.items():
            runs[kind].append(_measured(policy, steps))
    for kind, measured in runs.items():
        means = {name: float(np.median([parts[name] for parts in measured])) for name in measured[0]}
        note = ", ".join(f"{name} {ms:.2f}" for name, ms in means.items())
        report.results.append(
            median_of(
                "scheduler.step_ms_at_10000_waiting" + kind,
                [sum(parts.values()) for parts in measured],
                "ms",
                goal="" if kind else "<= 3",
                note=f"{note}; {PER_STEP} of each per step",
            ),
        )


def _measured(policy: str, steps: int) -> dict[str, float]:
    command = [sys.executable, "-P", "-m", "benchmarks.engine.deep_queue", policy, str(steps)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    printed = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    measured: dict[str, float] = json.loads(printed)
    return measured


def main() -> None:
    """Measures and prints the milliseconds of each part of a step."""
    queue = DeepQueue(sys.argv[1])
    collect_garbage_rarely()  # as the engine's process does
    steps = [queue.step() for _ in range(WARM_UP + int(sys.argv[2]))][WARM_UP:]
    print(json.dumps({name: float(np.median([parts[name] for parts in steps])) for name in steps[0]}))


if __name__ == "__main__":
    main()
