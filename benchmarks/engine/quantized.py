"""Quantised weights against the same weights in bfloat16: steps, memory, loading, and what rounding costs.

Both models come from the default model's GGUF file (Q4_1) and run in turn in one process. Errors are those of
the logits over the project's own documentation, against the dequantised weights in float32.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from agentflow.engine.models.torch_runner import TorchRunner
from agentflow.engine.store.gguf.file import find_gguf
from agentflow.engine.store.model_store import resolve_model
from agentflow.engine.text.tokenizer import Tokenizer
from agentflow.kernels.inputs import AttentionBatch, ForwardInput
from benchmarks.peers.llamacpp_peer import VARIABLE, LlamaCpp
from benchmarks.report import Report, Result, median_of
from benchmarks.step.work import Shape, batch_of, median_ms

MODEL = "smollm2-135m"
ROOT = Path(__file__).parent.parent.parent
NUM_THREADS = 2
NUM_SLOTS = 20_000
CHUNK = 256
STEPS = {
    "single": (Shape(1, 100), 40, ""),
    "batch32": (Shape(32, 300), 10, ">= 1.3"),
    "ttft128": (Shape(1, 0, 128), 10, ">= 2"),
    "prefill2000": (Shape(1, 0, 2_000), 2, ">= 1.3"),
}
LOADING = """
import json, sys, time
from pathlib import Path
from agentflow.engine.models.torch_runner import TorchRunner
def memory(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024
before = memory("VmRSS:")
Path("/proc/self/clear_refs").write_text("5")  # VmHWM is the peak since
start = time.perf_counter()
runner = TorchRunner(sys.argv[1], num_slots=64, dtype="auto", num_threads=2)
took = time.perf_counter() - start
size = runner.info.weight_bytes
print(json.dumps([took, (memory("VmHWM:") - before) / size, size]))
"""


def run(report: Report, console: Console, only: str) -> None:
    """``only``: "steps", "peer", "loading", "errors" or "" for all."""
    torch.set_num_threads(NUM_THREADS)
    path = find_gguf(resolve_model(MODEL)) or resolve_model(MODEL)
    if only in "steps":
        console.print("measuring steps …")
        measure_steps(path, report)
    if only in "peer":
        if LlamaCpp.is_there():
            console.print("measuring against llama.cpp …")
            measure_against_llamacpp(path, report)
        else:
            console.print(f"llama.cpp is left out: set {VARIABLE} to the folder of its llama-bench")
    if only in "loading":
        console.print("measuring how the model loads …")
        measure_loading(path, report)
    if only in "errors":
        console.print("measuring errors …")
        measure_errors(path, report)


def measure_steps(path: Path, report: Report) -> None:
    """The time of a step in bfloat16 over that with quantised weights, in turn."""
    dense, quantised = (TorchRunner(path, num_slots=NUM_SLOTS, dtype=dtype) for dtype in ("bfloat16", "auto"))
    runs = 7 if report.scale == "full" else 3
    for name, (shape, repeats, goal) in STEPS.items():
        batch = batch_of(shape, NUM_SLOTS, dense.info.max_context)
        ratios, times = [], []
        for _ in range(runs):
            dense_ms, quantised_ms = (median_ms(runner, batch, repeats) for runner in (dense, quantised))
            ratios.append(dense_ms / quantised_ms)
            times.append((dense_ms, quantised_ms))
        best = [min(column) for column in zip(*times, strict=True)]
        note = f"{shape}: at best {best[0]:.1f} ms in bfloat16, {best[1]:.1f} ms quantised"
        report.results.append(median_of(f"quantized.{name}_vs_bf16", ratios, "ratio", note=note, goal=goal))


def measure_against_llamacpp(path: Path, report: Report) -> None:
    """Tokens per second over those of llama.cpp on the same file, in turn: bare steps of both, without a
    server."""
    runner, peer = TorchRunner(path, num_slots=NUM_SLOTS, dtype="auto"), LlamaCpp(path, NUM_THREADS)
    single, batched, prefill = (STEPS[name][0] for name in ("single", "batch32", "prefill2000"))
    measured: dict[str, tuple[Shape, int, str, Callable[[], float]]] = {
        "single": (single, 40, ">= 1.2", lambda: peer.decode_tokens_s(single.context, 100)),
        "batch32": (
            batched,
            10,
            ">= 4",
            lambda: peer.batched_tokens_s(batched.num_requests, batched.context, 32),
        ),
        "prefill2000": (prefill, 2, "", lambda: peer.prefill_tokens_s(prefill.num_rows)),
    }
    for name, (shape, repeats, goal, theirs) in measured.items():
        batch = batch_of(shape, NUM_SLOTS, runner.info.max_context)
        num_tokens, ratios, speeds = shape.num_requests * shape.num_rows, [], []
        for _ in range(5 if report.scale == "full" else 2):
            ours = num_tokens / median_ms(runner, batch, repeats) * 1_000
            speeds.append((ours, theirs()))
            ratios.append(ours / speeds[-1][1])
        best = [max(column) for column in zip(*speeds, strict=True)]
        note = f"{shape}: at best {best[0]:,.0f} tokens/s, llama.cpp {best[1]:,.0f}"
        report.results.append(
            median_of(f"quantized.{name}_vs_llamacpp", ratios, "ratio", note=note, goal=goal)
        )


def measure_loading(path: Path, report: Report) -> None:
    """The time and the peak of memory of loading, each in a process of its own with the file in memory."""
    took, peaks, size = [], [], 0
    for _ in range(5 if report.scale == "full" else 2):
        command = [sys.executable, "-c", LOADING, str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
        seconds, peak, size = json.loads(done.stdout)
        took.append(seconds)
        peaks.append(peak)
    note = f"{path.stat().st_size / 1e6:.0f} MB on disk, {size / 1e6:.0f} MB of weights"
    report.results.append(median_of("quantized.load_s", took, "s", note=note))
    note = "growth of the resident memory at its peak, over the weights; the mapped file is part of it"
    report.results.append(median_of("quantized.load_peak", peaks, "ratio", note=note, goal="<= 1.3"))


@dataclass(frozen=True)
class Errors:
    """``logits``: relative, of all logits together. ``divergence``: Kullback-Leibler, in nats per token."""

    logits: float
    divergence: float
    perplexity: float


def measure_errors(path: Path, report: Report) -> None:
    """What rounding weights and activations costs."""
    texts = [ROOT / "README.md", *sorted((ROOT / "docs" / "concepts").glob("*.md"))]
    text = "\n".join(file.read_text(encoding="utf-8") for file in texts)
    num_tokens = 8_192 if report.scale == "full" else 1_024
    tokens = np.array(Tokenizer.from_folder(path).encode(text)[:num_tokens], dtype=np.int64)
    chunks = [tokens[first : first + CHUNK] for first in range(0, len(tokens), CHUNK)]
    exact = _logits(path, "float32", chunks)
    perplexity = _perplexity(exact, chunks)
    for name, dtype, goal in (("", "auto", "<= 0.02"), ("bf16_", "bfloat16", "")):
        errors = _errors(_logits(path, dtype, chunks), exact, chunks)
        note = f"{len(tokens):,} tokens; perplexity {errors.perplexity:.3f}, exactly {perplexity:.3f}"
        results = (
            (f"quantized.{name}logits_error", errors.logits, "ratio", goal, note),
            (f"quantized.{name}divergence", errors.divergence, "nats", "", "per token, against float32"),
            (f"quantized.{name}perplexity", errors.perplexity / perplexity, "ratio", goal and "<= 1.01", ""),
        )
        for figure, value, unit, wanted, remark in results:
            report.results.append(Result(figure, round(value, 5), unit, [], remark, wanted))


def _logits(path: Path, dtype: str, chunks: list[np.ndarray]) -> list[Tensor]:
    runner = TorchRunner(path, num_slots=CHUNK, dtype=dtype, num_threads=NUM_THREADS)
    model, kernels = runner._model, runner._kernels
    places = np.arange(CHUNK)
    table = places.astype(np.int32)[None]
    made = []
    with torch.inference_mode():
        for tokens in chunks:
            rows = places[: len(tokens)]
            num = np.array([len(tokens)])
            batch = AttentionBatch(table, np.array([0]), num, num, None)
            plan = kernels.plan_attention(batch, runner.kv_layers[0].dtype, torch.device("cpu"))
            hidden = model.forward(ForwardInput(tokens, rows, rows, runner.kv_layers, plan, rows))
            made.append(model.logits(hidden).clone())
    return made


def _errors(found: list[Tensor], exact: list[Tensor], chunks: list[np.ndarray]) -> Errors:
    difference = sum(float((f - e).square().sum()) for f, e in zip(found, exact, strict=True))
    size = sum(float(e.square().sum()) for e in exact)
    divergence, count = 0.0, 0
    for f, e in zip(found, exact, strict=True):
        log_p, log_q = e.log_softmax(-1), f.log_softmax(-1)
        divergence += float((log_p.exp() * (log_p - log_q)).sum())
        count += len(e)
    return Errors((difference / size) ** 0.5, divergence / count, _perplexity(found, chunks))


def _perplexity(logits: list[Tensor], chunks: list[np.ndarray]) -> float:
    """Of each chunk's tokens after its first."""
    losses = []
    for made, tokens in zip(logits, chunks, strict=True):
        chosen = made[:-1].log_softmax(-1).gather(1, torch.from_numpy(tokens[1:])[:, None])
        losses.append(chosen.flatten())
    return float(torch.exp(-torch.cat(losses).mean()))
