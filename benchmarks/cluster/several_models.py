"""Two models on shared GPUs, simulated, with routers that know about each other or do not.

The small model takes 0.3 of the time of the large one. Engines on one GPU share it by time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, replace

import numpy as np

from agentflow.cluster.routing.devices import SharedDevices
from agentflow.cluster.routing.load import EngineShape
from agentflow.cluster.routing.router import Router
from agentflow.cluster.simulated.several_models import SimulatedModel, SimulatedModels
from agentflow.cluster.simulated.simulation import MODEL
from agentflow.engine.scheduling.scheduler import SchedulerConfig
from agentflow.engine.simulator.cost_model import CostModel
from agentflow.engine.simulator.generators import chat, combined, few_shot, two_models
from agentflow.engine.simulator.workload import Arrival, Workload
from benchmarks.cluster.workloads import TPOT_S
from benchmarks.engine.programs import GPU
from benchmarks.report import Report

NUM_GPUS = 2
KV_TOKENS = 100_000
MAX_RUNNING = 64
MAX_CONTEXT = 16_384
SPEED = {"small": 0.3, "large": 1.0}
SEEDS = {"small": range(1), "full": range(3)}
NAME = "cluster.several_models"


def run(report: Report) -> None:
    """Adds the mean time of a request with routers that know about each other, relative to the others."""
    parts, notes = [], []
    for seed in SEEDS[report.scale]:
        for name, arrivals, num_large in _workloads(seed):
            known, unknown = (_mean_s(arrivals, num_large, knows=knows) for knows in (True, False))
            parts.append(known / unknown)
            notes.append(f"{name} {known:.3f} s ({unknown:.3f})")
    note = (
        f"the mean over workloads of two models on {NUM_GPUS} GPUs: the mean time of a request where the "
        f"routers know each other's work on a GPU, by that where they do not: {'; '.join(notes)}"
    )
    report.add(NAME, round(float(np.mean(parts)), 3), "ratio", note=note, goal="<= 1")


def _workloads(seed: int) -> list[tuple[str, Sequence[Arrival], int]]:
    """The requests, and the GPUs of the large model; the small one has all."""
    questions = few_shot(num_requests=600, per_s=14.0, num_tasks=8, output=60, seed=seed + 1)
    large_questions = few_shot(num_requests=200, per_s=4.0, num_tasks=4, output=60, seed=seed)
    chats = [chat(num_chats=60, per_s=2.4, seed=seed + number) for number in range(2)]
    return [
        ("programs over both models", two_models(num_programs=60, per_s=0.9, seed=seed), NUM_GPUS),
        ("chats on each", combined(_of("large", chats[0]), _of("small", chats[1])), NUM_GPUS),
        ("the large one on one GPU", combined(_of("large", large_questions), _of("small", questions)), 1),
    ]


def _of(model: str, arrivals: Sequence[Arrival]) -> list[Arrival]:
    return [replace(arrival, model=model) for arrival in arrivals]


def _mean_s(arrivals: Sequence[Arrival], num_large: int, *, knows: bool) -> float:
    gpus = [f"cuda:{number}" for number in range(NUM_GPUS)]
    config = SchedulerConfig(max_running=MAX_RUNNING, token_budget=2048)
    models = {}
    for name, factor in SPEED.items():
        cost = CostModel(*[factor * part for part in astuple(GPU)])
        router = Router(EngineShape(cost, MAX_RUNNING, KV_TOKENS, TPOT_S), MODEL)
        devices = gpus[:num_large] if name == "large" else gpus
        models[name] = SimulatedModel(router, cost, config, KV_TOKENS, devices)
    simulated = SimulatedModels(
        Workload("several models", arrivals, KV_TOKENS),
        models,
        max_context=MAX_CONTEXT,
        shared=SharedDevices() if knows else None,
    ).run()
    return float(np.mean([one.ended_s - one.arrived_s for one in simulated.served]))
