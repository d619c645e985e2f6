"""The growth of costs: of the time of a step with the batch, the context, the size of a prefix tree and the
depth of the queue, and of memory with the number of cached tokens. Each is a curve with its fitted
exponent."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import psutil

from agentflow.engine.batch import Batch
from agentflow.engine.models.torch_runner import TorchRunner
from agentflow.engine.runner import run_batch
from benchmarks.engine.deep_queue import DeepQueue
from benchmarks.report import Report
from benchmarks.step.growth_plot import Curve, plot
from benchmarks.step.work import Shape, batch_of, median_ms

PLOT = Path(__file__).parents[2] / "docs" / "images" / "step-growth.svg"
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
CONTEXTS = (100, 300, 1_000, 2_000, 4_000, 8_000)
LEAVES = (1, 2, 4, 8, 16, 32, 64)
LEVEL = 100
"""The tokens of each node of a tree."""
QUEUE_DEPTHS = (300, 1_000, 3_000, 10_000)


def measure(runner: TorchRunner, report: Report) -> None:
    """Measures the exponents ``step.growth_*``; at full scale, also draws the plot."""
    runs = 5 if report.scale == "full" else 3
    num_slots, most = runner.info.num_slots, runner.info.max_context
    by_batch = [_step_ms(runner, batch_of(Shape(n, 300), num_slots, most), runs) for n in BATCHES]
    contexts = [c for c in CONTEXTS if c < most]
    by_context = [_step_ms(runner, batch_of(Shape(8, c), num_slots, most), runs) for c in contexts]
    by_tree = [_step_ms(runner, tree_batch(leaves, num_slots, most), runs) for leaves in LEAVES]
    by_depth = [_schedule_ms(depth, runs) for depth in QUEUE_DEPTHS]
    tokens, memory = _memory_of_cached_tokens(num_slots)
    curves = [
        Curve("batch", "streams at 300 tokens", "ms per step", BATCHES, by_batch),
        Curve("context", "tokens of context, 8 streams", "ms per step", contexts, by_context),
        Curve("tree", "leaves of a binary prefix tree", "ms per step", LEAVES, by_tree),
        Curve("queue", "waiting requests", "ms to schedule", QUEUE_DEPTHS, by_depth),
        Curve("memory", "cached tokens", "MB", tokens, memory),
    ]
    for curve in curves:
        values = ", ".join(f"{x:,}: {y:.3g}" for x, y in zip(curve.xs, curve.ys, strict=True))
        slope = round(curve.exponent, 3)
        note = f"exponent of {curve.unit} over {curve.label}; {values}"
        report.add(f"step.growth_{curve.name}", slope, "exponent", [slope], note, "<= 1.05")
    if report.scale == "full":
        PLOT.write_text(plot(curves), encoding="utf-8")


def tree_batch(leaves: int, num_slots: int, max_context: int) -> Batch:
    """Returns requests that are the leaves of a binary tree of runs of ``LEVEL`` tokens: neighbours share all
    runs except the last one."""
    depth = int(math.log2(leaves)) + 1
    batch = batch_of(Shape(leaves, depth * LEVEL), num_slots, max_context)
    table, shared = batch.req_to_token.copy(), []
    for level in range(depth):
        width = leaves >> level  # the leaves below each node
        for first_leaf in range(0, leaves, width):
            first = ((1 << level) + first_leaf // width) * LEVEL
            below = np.arange(first_leaf, first_leaf + width)
            table[below, level * LEVEL : (level + 1) * LEVEL] = np.arange(first, first + LEVEL)
            shared.append(((level + 1) * LEVEL, below))
    own = np.arange(leaves) + num_slots - leaves
    table[:, depth * LEVEL] = own
    return replace(batch, req_to_token=table, write_slots=own.astype(np.int64), shared=shared)


def _step_ms(runner: TorchRunner, batch: Batch, runs: int) -> float:
    run_batch(runner, batch)
    return median_ms(partial(run_batch, runner), batch, runs)


def _schedule_ms(depth: int, runs: int) -> float:
    queue = DeepQueue("fair-lpm", depth)
    steps = [sum(queue.step().values()) for _ in range(20 + 10 * runs)][20:]
    return statistics.median(steps)


def _memory_of_cached_tokens(num_slots: int) -> tuple[list[int], list[float]]:
    """Measures the resident memory of a KV pool of the default model while tokens are written to it."""
    import torch

    from agentflow.engine.models.kv_pool import KvPool

    pool = KvPool(
        num_layers=30,
        num_slots=num_slots,
        num_kv_heads=3,
        head_dim=64,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
    process, written = psutil.Process(), 0
    before = process.memory_info().rss
    tokens, megabytes = [], []
    for end in (num_slots // 16, num_slots // 8, num_slots // 4, num_slots // 2, num_slots):
        for layer in pool.layers:
            layer[written:end].fill_(1)
        written = end
        tokens.append(end)
        megabytes.append((process.memory_info().rss - before) / 1e6)
    return tokens, megabytes
