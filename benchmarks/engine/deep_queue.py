"""One scheduling step with thousands of requests waiting.

``python -m benchmarks.engine.deep_queue QUEUE STEPS`` measures in a separate process and prints JSON.
``python -m benchmarks scheduler`` runs it several times, interleaved, and reports the results.

All steps do the same work, so that their mean is the cost of a step. It includes garbage collections.
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
from agentflow.engine.cache.token_run import TokenArray
from agentflow.engine.machine.resources import collect_garbage_rarely
from agentflow.engine.request import Origin, Request, Submit
from agentflow.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from agentflow.protocol.sampling import SamplingParams
from benchmarks.report import Report

ROOT = Path(__file__).parents[2]
NUM_WAITING = 10_000
NUM_TENANTS = 5_000
NUM_SIBLINGS = 5_000
PER_STEP = 100
WARM_UP = 60
_PARAMS = SamplingParams()


class DeepQueue:
    """A queue of ``num_waiting`` requests. In every step, 100 arrive, 100 are admitted, 100 others end, and
    as many tokens are evicted as are computed."""

    per_step = PER_STEP

    def __init__(self, policy: str = "fair-lpm", num_waiting: int = NUM_WAITING) -> None:
        self.scheduler = self.new_scheduler(policy)
        self.numbers = np.random.default_rng(0)
        self.prefixes = [self.tokens(150) for _ in range(500)]
        self.num_made = 0
        if self.per_step:
            # Half of the batch runs. If the queue filled all of it, all would end in the same step, and only
            # every second step would admit requests.
            self.step()
        for request in self.new(num_waiting):
            self.scheduler.add(request)

    def new_scheduler(self, policy: str) -> Scheduler:
        config = SchedulerConfig(max_running=2 * PER_STEP, token_budget=64 * 256, policy=policy)
        return Scheduler(num_slots=40_000, max_context=512, config=config)

    def tokens(self, count: int) -> TokenArray:
        return self.numbers.integers(10, 49_000, count, dtype=np.int32)

    def new(self, count: int) -> list[Request]:
        made = [self.request(number) for number in range(self.num_made, self.num_made + count)]
        self.num_made += count
        return made

    def request(self, number: int) -> Request:
        own = self.tokens(50)
        prompt = np.concatenate((self.prefixes[self.numbers.integers(500)], own))
        return Request.of(Submit(number, [], _PARAMS), prompt, 2)

    def step(self) -> dict[str, float]:
        """Runs one step. Returns the milliseconds of each part."""
        scheduler, arriving = self.scheduler, self.new(self.per_step)
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
        timed("finishes", lambda: deque(map(scheduler.finish, ended)))
        return parts


class ManyTenants(DeepQueue):
    """The same with 5,000 tenants that wait and have cached tokens."""

    def new_scheduler(self, policy: str) -> Scheduler:
        config = SchedulerConfig(max_running=2 * PER_STEP, token_budget=64 * 256, policy=policy)
        return Scheduler(num_slots=40 * NUM_TENANTS, max_context=512, config=config)

    def request(self, number: int) -> Request:
        origin = Origin(tenant=f"tenant {number % NUM_TENANTS}")
        return Request.of(Submit(number, [], _PARAMS, origin=origin), self.tokens(40), 2)


class ManySiblings(DeepQueue):
    """5,000 branches of one program wait until one of them has computed their shared prompt."""

    per_step = 0

    def __init__(self) -> None:
        self.shared = np.arange(8_000, dtype=np.int32)
        super().__init__(num_waiting=NUM_SIBLINGS)

    def new_scheduler(self, policy: str) -> Scheduler:
        config = SchedulerConfig(max_running=2 * PER_STEP, token_budget=32, policy=policy)
        return Scheduler(num_slots=40_000, max_context=8_192, config=config)

    def request(self, number: int) -> Request:
        prompt = np.concatenate((self.shared, self.tokens(20)))
        return Request.of(Submit(number, [], _PARAMS, origin=Origin(task_group=1)), prompt, 2)


QUEUES: dict[str, Callable[[], DeepQueue]] = {
    "fair-lpm": DeepQueue,
    "lpm": partial(DeepQueue, "lpm"),
    "fcfs": partial(DeepQueue, "fcfs"),
    "tenants": ManyTenants,
    "siblings": ManySiblings,
}

GOALS = {"fair-lpm": "<= 3", "tenants": "<= 10", "siblings": "<= 10"}
"""The goals for a step with each queue, in milliseconds."""


def measure_deep_queue(report: Report) -> None:
    """Measures a scheduling step with a deep queue: the median of several processes, interleaved."""
    rounds, steps = (7, 80) if report.scale == "full" else (3, 30)
    runs: dict[str, list[dict[str, float]]] = {queue: [] for queue in QUEUES}
    for _ in range(rounds):
        for queue in QUEUES:
            runs[queue].append(_measured(queue, steps))
    for queue, measured in runs.items():
        longest_ms = float(np.median([parts.pop("longest") for parts in measured]))
        means = {name: float(np.median([parts[name] for parts in measured])) for name in measured[0]}
        note = ", ".join(f"{name} {ms:.2f}" for name, ms in means.items())
        note += f"; longest of {steps} steps {longest_ms:.1f}"
        report.median(
            "scheduler.step_ms_at_10000_waiting" + ("" if queue == "fair-lpm" else f".{queue}"),
            [sum(parts.values()) for parts in measured],
            "ms",
            goal=GOALS.get(queue, ""),
            note=note,
        )


def _measured(queue: str, steps: int) -> dict[str, float]:
    command = [sys.executable, "-P", "-m", "benchmarks.engine.deep_queue", queue, str(steps)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    printed = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    measured: dict[str, float] = json.loads(printed)
    return measured


def main() -> None:
    """Measures the milliseconds of each part of a step, and of the longest step. Prints them."""
    queue = QUEUES[sys.argv[1]]()
    collect_garbage_rarely()  # as the engine's process does
    steps = [queue.step() for _ in range(WARM_UP + int(sys.argv[2]))][WARM_UP:]
    means = {name: float(np.mean([parts[name] for parts in steps])) for name in steps[0]}
    print(json.dumps({**means, "longest": max(sum(parts.values()) for parts in steps)}))


if __name__ == "__main__":
    main()
