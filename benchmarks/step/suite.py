"""The budget of a step: its necessary reads and operations, their minimum time on this machine, the actual
time, and the parts of the difference.

The limits are measured in the same run. ``of_limit`` is the sum of the minimum times for the bytes and for
the operations, divided by the time of the step. A step that overlaps the two can take less than their sum.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table

from agentflow.engine.models.config import DecoderConfig
from agentflow.engine.models.families.registry import read_config
from agentflow.engine.models.torch_runner import TorchRunner
from agentflow.engine.runner import run_batch
from agentflow.engine.store.model_store import resolve_model
from agentflow.kernels.native_ops import team
from benchmarks.report import Report
from benchmarks.step import engine as step_engine
from benchmarks.step import growth as step_growth
from benchmarks.step import http as step_http
from benchmarks.step.limits import Limits, measure_limits
from benchmarks.step.work import Shape, batch_of, median_ms, work_of, work_of_parts

MODEL = "smollm2-135m"
NUM_THREADS = 2
NUM_SLOTS = 120_000
BATCHES = (1, 8, 32, 128)
CONTEXTS = (100, 1_000, 4_000)
SINGLE, BATCH32 = Shape(1, 100), Shape(32, 300)
PREFILL, PROMPT = Shape(1, 0, 2_000), Shape(1, 0, 128)
SHARED, UNSHARED = Shape(32, 1_600, shared=1_500), Shape(32, 1_600)


def run(report: Report, console: Console, only: str) -> None:
    """``only``: "budget", "growth", "http" or "" for all."""
    torch.set_num_threads(NUM_THREADS)
    os.environ.setdefault("AGENTFLOW_KERNELS", "native")  # the parts of these kernels are timed
    folder = resolve_model(MODEL)
    config = read_config(folder)
    runner = runner_on(os.environ["AGENTFLOW_KERNELS"])
    if only in "budget":
        console.print("measuring the budget of a step …")
        show_budget(runner, config, report, console)
        runs = 7 if report.scale == "full" else 3
        measure_figures(runner, config, report, runs)
        measure_kernels(runner, config, report, runs)
        measure_against_torch(runner, report, runs)
    if only in "growth":
        console.print("measuring how costs grow …")
        step_growth.measure(runner, report)
    runner.close()
    if only in "budget":
        console.print("measuring the time outside the kernels …")
        step_engine.measure(report, folder)
    if only in "http":
        console.print("measuring over HTTP …")
        step_http.measure(report)


def runner_on(kernels: str) -> TorchRunner:
    """Returns the default model in bfloat16 on the kernels of this name, with data in every slot: untouched
    pages all map to one page of zeros, and reading them costs nothing."""
    with patch.dict(os.environ, AGENTFLOW_KERNELS=kernels):
        runner = TorchRunner(
            resolve_model(MODEL), num_slots=NUM_SLOTS, dtype="bfloat16", device="cpu", num_threads=NUM_THREADS
        )
    for layer in runner.kv_layers:
        layer.normal_()
    return runner


def step_ms(runner: TorchRunner, shape: Shape, runs: int = 5) -> tuple[float, dict[str, float]]:
    """Returns the median time of some steps, and the mean time of each part of the kernels."""
    batch = batch_of(shape, NUM_SLOTS, runner.info.max_context)
    run_batch(runner, batch)
    team.part_seconds()
    took = median_ms(partial(run_batch, runner), batch, runs)
    parts = {part: 1e3 * seconds / runs for part, seconds in team.part_seconds().items()}
    return took, parts


def show_budget(runner: TorchRunner, config: DecoderConfig, report: Report, console: Console) -> None:
    """Prints a table of steps, their limits, and the times of their parts."""
    limits = measure_limits()
    title = f"limits: {limits.bytes_s / 1e9:.1f} GB/s, {limits.flops / 1e9:.0f} GFLOP/s"
    table = Table(title=title, title_justify="left", show_lines=True)
    table.add_column("step, and where it goes (ms)", overflow="fold")
    for column in ("MB", "GFLOP", "needs, ms", "takes", "of limit"):
        table.add_column(column, justify="right", no_wrap=True)
    shapes = [Shape(num, context) for num in BATCHES for context in CONTEXTS]
    for shape in [*shapes, BATCH32, SHARED, PROMPT, PREFILL]:
        work = work_of(shape, config)
        took, parts = step_ms(runner, shape, 3 if report.scale == "full" else 1)
        shares = {part: ms for part, ms in parts.items() if ms >= 0.005 * took}
        shares["rest"] = took - sum(parts.values())
        where = ", ".join(f"{part} {ms:.1f}" for part, ms in shares.items())
        table.add_row(
            f"{shape}\n[dim]{where}[/]",
            f"{work.num_bytes / 1e6:,.0f}",
            f"{work.flops / 1e9:.1f}",
            f"{limits.bytes_ms(work):.1f} + {limits.flops_ms(work):.1f}",
            f"{took:.1f}",
            f"{limits.ms(work) / took:.2f}",
        )
    console.print(table)


def measure_kernels(runner: TorchRunner, config: DecoderConfig, report: Report, runs: int) -> None:
    """Measures for each kernel the minimum time of its bytes and operations, as a share of its time."""
    for label, shape in (("decode1", SINGLE), ("decode32", BATCH32), ("prefill2000", PREFILL)):
        shares: dict[str, list[float]] = {}
        notes: dict[str, str] = {}
        for _ in range(runs):
            limits = measure_limits(3)
            _, parts = step_ms(runner, shape, 5 if shape.num_rows == 1 else 1)
            for part, work in work_of_parts(shape, config).items():
                shares.setdefault(part, []).append(limits.ms(work) / parts[part])
                notes[part] = (
                    f"{shape}: {work.num_bytes / 1e6:,.1f} MB, {work.flops / 1e9:,.1f} GFLOP, "
                    f"{limits.bytes_ms(work):.2f} + {limits.flops_ms(work):.2f} ms; took {parts[part]:.2f}"
                )
        for part, values in shares.items():
            report.median(f"step.kernel_{part}_{label}", values, "ratio", note=notes[part])


def measure_figures(runner: TorchRunner, config: DecoderConfig, report: Report, runs: int) -> None:
    """Measures the shares of the limits, which are measured just before each."""
    for name, shape, goal in (
        ("single_of_limit", SINGLE, ">= 0.75"),
        ("batch32_of_limit", BATCH32, ">= 0.6"),
        ("prefill_of_limit", PREFILL, ">= 0.6"),
    ):
        shares, times = [], []
        work = work_of(shape, config)
        for _ in range(runs):
            limits = measure_limits(3)
            took, _ = step_ms(runner, shape, 5 if shape.num_rows == 1 else 1)
            shares.append(_limit_ms(name, limits, shape, config) / took)
            times.append(took)
        note = (
            f"{shape}: {statistics.median(times):.1f} ms; {work.num_bytes / 1e6:,.0f} MB, "
            f"{work.flops / 1e9:.1f} GFLOP; last limits {limits.bytes_s / 1e9:.1f} GB/s, "
            f"{limits.flops / 1e9:.0f} GFLOP/s"
        )
        report.median(f"step.{name}", shares, "ratio", note=note, goal=goal)
    first_token = [step_ms(runner, PROMPT, 3)[0] for _ in range(runs)]
    note = "a prompt of 128 tokens, the runner's step; the goal is for a processor with AMX"
    report.median("step.prompt128_ms", first_token, "ms", note=note, goal="< 30")
    gains = []
    for _ in range(runs):
        together = step_ms(runner, SHARED, 2)[1]["attention"]
        apart = step_ms(runner, UNSHARED, 2)[1]["attention"]
        gains.append(apart / together)
    note = (
        f"attention, {apart:.1f} ms with separate prefixes and {together:.1f} ms with a shared one "
        f"(last run); {SHARED}"
    )
    report.median("step.shared_prefix_gain", gains, "ratio", note=note, goal=">= 5")


def _limit_ms(name: str, limits: Limits, shape: Shape, config: DecoderConfig) -> float:
    """Returns the limit: the bytes for a single stream, the operations for a prefill, both for a batch."""
    work = work_of(shape, config)
    if name == "single_of_limit":
        return limits.bytes_ms(work)
    return limits.flops_ms(work) if name == "prefill_of_limit" else limits.ms(work)


def measure_against_torch(runner: TorchRunner, report: Report, runs: int) -> None:
    """Measures the same steps on torch's kernels, interleaved: plain products in bfloat16, or in float32 for
    more than 8 rows on a processor without bfloat16 instructions. Results before November 2026 compare with
    weights in oneDNN's blocked layout, whose steps take the same time for few rows and longer for many."""
    other = runner_on("torch")
    for name, shape in (("single", SINGLE), ("batch32", BATCH32), ("prompt128", PROMPT)):
        ratios = []
        for _ in range(runs):
            ours, theirs = step_ms(runner, shape, 3)[0], step_ms(other, shape, 3)[0]
            ratios.append(theirs / ours)
        note = f"{shape}: {ours:.1f} against {theirs:.1f} ms (last run)"
        report.median(f"step.{name}_vs_torch", ratios, "ratio", note=note)
    slower, theirs = [], 0.0
    for _ in range(runs):
        quiet = step_ms(runner, SINGLE, 5)[0]
        with _busy_neighbour():
            slower.append(step_ms(runner, SINGLE, 9)[0] / quiet)
            theirs = step_ms(other, SINGLE, 9)[0]
    note = (
        f"{SINGLE}: a step next to a busy process, against one without; 1.5 is a fair "
        f"share of the cores. Last run: {slower[-1] * quiet:.1f} ms next to it, torch's kernels {theirs:.1f}"
    )
    report.median("step.busy_neighbour_slowdown", slower, "ratio", note=note)
    other.close()


@contextmanager
def _busy_neighbour() -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()
