"""``make gpu-check``: whether the model runs correctly on this machine's GPU, and how close it is to the
GPU's limits.

Needs Python, torch, numpy and a few small packages; the Makefile's ``WHEELS=`` supplies missing ones. Without
a GPU it prints a line and exits with 0; with one, it exits with 1 if a check fails. ``--device cpu --tiny``
tests the program itself.
"""

from __future__ import annotations

import argparse
import datetime
import re
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step.gpu_check")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="small sizes instead of those of Llama 3.1 8B")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="instead of benchmarks/results/GPU/DATE.json"
    )
    options = parser.parse_args()
    try:
        import torch
    except ModuleNotFoundError:
        print("gpu-check: torch is not installed here, so nothing was checked")
        return 0
    if options.device == "cuda" and not torch.cuda.is_available():
        print("gpu-check: there is no CUDA GPU here, so nothing was checked")
        return 0
    return _check(options.device, options.tiny, options.json)


def _check(device_name: str, is_tiny: bool, file: Path | None) -> int:
    import torch
    from rich.console import Console

    from benchmarks.report import Report
    from benchmarks.step.random_llama import LLAMA_8B, TINY

    console, report = Console(), Report("small" if is_tiny else "full")
    device = torch.device(device_name)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    console.print(f"checking {name} with torch {torch.__version__} …")
    wrong = differing_tokens(device)
    console.print("greedy ids equal the CPU's" if not wrong else f"greedy ids differ from the CPU's: {wrong}")
    measure(report, device, TINY if is_tiny else LLAMA_8B, 2_000 if is_tiny else 140_000)
    report.show(console)
    folder = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    file = file or RESULTS / folder / f"{datetime.date.today().isoformat()}.json"
    report.extra = {"gpu": name, "greedy_ids_equal_cpu": not wrong, "differing": wrong}
    report.write(file)
    console.print(f"written to {file}")
    return 1 if wrong else 0


def differing_tokens(device: Any, num_tokens: int = 48) -> list[str]:
    """Returns the differences between greedy token ids on ``device`` and on the CPU, for a random model in
    float32: prompts of several lengths in one batch, one of them after a prefix that another computed."""
    import torch

    from benchmarks.step.random_llama import TINY, RandomRunner

    torch.backends.cuda.matmul.allow_tf32 = False
    ids = [
        _greedy_ids(RandomRunner(TINY, 4_000, torch.float32, each), num_tokens)
        for each in (torch.device("cpu"), device)
    ]
    return [
        f"request {request}, token {token}: {ours} instead of {theirs}"
        for request, (cpu, other) in enumerate(zip(*ids, strict=True))
        for token, (theirs, ours) in enumerate(zip(cpu, other, strict=True))
        if ours != theirs
    ][:5]


PROMPTS = (5, 300, 130, 64)
SHARED = 200
"""Tokens of the second prompt with which the last request begins."""


def _greedy_ids(runner: Any, num_tokens: int) -> list[list[int]]:
    import numpy as np

    from benchmarks.step.work import Shape, batch_of

    lengths = [*PROMPTS[:3], SHARED + PROMPTS[3]]
    num = len(lengths)
    rng = np.random.default_rng(1)
    tokens = [rng.integers(0, 1_000, length).tolist() for length in lengths]
    tokens[3][:SHARED] = tokens[1][:SHARED]
    form = batch_of(Shape(num, 1), 4_000, 1_000)
    table = np.zeros((num, 1_000), dtype=np.int32)
    for request in range(num):
        table[request] = 1_000 * request + np.arange(1_000)
    table[3, :SHARED] = table[1, :SHARED]
    cached = [0, 0, 0, SHARED]
    prompts = list(tokens)
    tokens = [list(prompt) for prompt in prompts]

    def step(requests: list[int]) -> None:
        counts = [len(tokens[r]) - cached[r] for r in requests]
        new = [np.arange(cached[r], len(tokens[r])) for r in requests]
        ends = np.cumsum(counts) - 1
        batch = replace(
            form,
            token_ids=np.concatenate([np.array(tokens[r][cached[r] :]) for r in requests]),
            positions=np.concatenate(new),
            write_slots=np.concatenate([table[r, p] for r, p in zip(requests, new, strict=True)]).astype(
                np.int64
            ),
            req_to_token=table,
            req_rows=np.array(requests),
            query_lens=np.array(counts),
            kv_lens=np.array([len(tokens[r]) for r in requests]),
            sampled=replace(form.sampled.part(0, len(requests)), rows=ends),
        )
        for request, token in zip(requests, runner.run(batch).tolist(), strict=True):
            cached[request] = len(tokens[request])
            tokens[request].append(token)

    step([1])
    step([0, 2, 3])
    for _ in range(num_tokens):
        step([0, 1, 2, 3])
    return [made[len(prompt) :] for made, prompt in zip(tokens, prompts, strict=True)]


def measure(report: Any, device: Any, config: Any, num_slots: int) -> None:
    """Compares decode and prefill with this GPU's memory bandwidth and matrix throughput."""
    import torch

    from benchmarks.report import median_of
    from benchmarks.step.limits import Limits
    from benchmarks.step.random_llama import RandomRunner
    from benchmarks.step.work import Shape, batch_of, work_of

    is_small = num_slots < 10_000
    read_s, multiply_flops = _read_bytes_s(device, is_small), _multiply_flops(device, is_small)
    limits = Limits(read_s, multiply_flops)
    report.results.append(median_of("gpu.read_gb_s", [read_s / 1e9], "GB/s", note="the best of some sums"))
    report.results.append(
        median_of("gpu.bf16_tflops", [multiply_flops / 1e12], "TFLOP/s", note="square product")
    )
    runner = RandomRunner(config, num_slots, torch.bfloat16, device)
    context = 100 if is_small else 1_000
    for name, shape in (
        ("decode1", Shape(1, context)),
        ("decode32", Shape(32 if not is_small else 4, context)),
        ("decode128", Shape(128 if not is_small else 8, context)),
        ("prefill2048", Shape(1, 0, 256 if is_small else 2_048)),
    ):
        batch = batch_of(shape, num_slots, config.max_context)
        took = _timed_ms(lambda batch=batch: runner.run(batch), device, 7)  # type: ignore[misc]
        work = work_of(shape, config)
        shares = [limits.ms(work) / ms for ms in took]
        note = (
            f"{shape}: {statistics.median(took):.2f} ms, {work.num_bytes / 1e9:.1f} GB and "
            f"{work.flops / 1e12:.2f} TFLOP need {limits.ms(work):.2f}"
        )
        report.results.append(median_of(f"gpu.{name}_of_limit", shares, "ratio", note=note))


def _read_bytes_s(device: Any, is_small: bool) -> float:
    import torch

    memory = torch.ones((1 << 22) if is_small else (1 << 30), dtype=torch.float32, device=device)
    return memory.nbytes / (min(_timed_ms(memory.sum, device, 10)) / 1e3)


def _multiply_flops(device: Any, is_small: bool) -> float:
    import torch

    size = 512 if is_small else 8192
    left, right = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    return 2 * size**3 / (min(_timed_ms(lambda: left @ right, device, 10)) / 1e3)


def _timed_ms(call: Callable[[], object], device: Any, runs: int) -> list[float]:
    """Returns the time of each run until the device is done, after two warm-up runs."""
    import torch

    took = []
    for run in range(runs + 2):
        began = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if run >= 2:
            took.append(1e3 * (time.perf_counter() - began))
    return took


if __name__ == "__main__":
    sys.exit(main())
