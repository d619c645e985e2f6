"""Quantised weights against the same weights in bfloat16: steps, memory, loading, and rounding errors.

Both models come from the default model's GGUF file (Q4_1) and run alternately in one process. Errors are
measured on the logits over a novel, against the dequantised weights in float32:
``workloads/persuasion.txt.xz`` has the first 14 chapters of Jane Austen's *Persuasion* (1818, in the public
domain), a line for each paragraph.
"""

from __future__ import annotations

import json
import lzma
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from agentflow.engine.models.torch_runner import TorchRunner
from agentflow.engine.runner import run_batch
from agentflow.engine.store.gguf.file import find_gguf
from agentflow.engine.store.model_store import resolve_model
from agentflow.engine.text.tokenizer import Tokenizer
from agentflow.kernels.inputs import AttentionBatch, ForwardInput
from benchmarks.peers.llamacpp_peer import VARIABLE, LlamaCpp
from benchmarks.report import Report
from benchmarks.step.work import Shape, batch_of, median_ms

MODEL = "smollm2-135m"
ROOT = Path(__file__).parent.parent.parent
NUM_THREADS = 2
NUM_SLOTS = 20_000
TEXT = ROOT / "benchmarks" / "workloads" / "persuasion.txt.xz"
CHUNK = 512
"""The tokens of one pass; each is predicted from the tokens before it in its chunk."""
NUM_ERROR_TOKENS = {"full": 50_000, "small": 2_048}
STEPS = {
    "single": (Shape(1, 100), 40, ""),
    "batch32": (Shape(32, 300), 10, ">= 1.3"),
    "ttft128": (Shape(1, 0, 128), 10, ">= 2"),
    "prefill2000": (Shape(1, 0, 2_000), 2, ">= 1.3"),
}
ROWS = {1: ">= 1", 4: ">= 1", 16: ">= 1", 64: ">= 1", 128: ">= 1", 512: ">= 1.25", 2_000: ">= 1.25"}
"""The rows of steps, and the goals of quantised weights against bfloat16."""
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
    """Measures the ratio of the time of a step in bfloat16 to a step with quantised weights, alternately."""
    dense, quantised = (TorchRunner(path, num_slots=NUM_SLOTS, dtype=dtype) for dtype in ("bfloat16", "auto"))
    runs = 7 if report.scale == "full" else 3
    steps = {f"{name}_vs_bf16": step for name, step in STEPS.items()}
    steps |= {f"vs_bf16_{num}": (Shape(1, 0, num), max(2, 40 // num), goal) for num, goal in ROWS.items()}
    for name, (shape, repeats, goal) in steps.items():
        batch = batch_of(shape, NUM_SLOTS, dense.info.max_context)
        ratios, times = [], []
        for _ in range(runs):
            dense_ms, quantised_ms = (
                median_ms(partial(run_batch, runner), batch, repeats) for runner in (dense, quantised)
            )
            ratios.append(dense_ms / quantised_ms)
            times.append((dense_ms, quantised_ms))
        best = [min(column) for column in zip(*times, strict=True)]
        note = f"{shape}: at best {best[0]:.1f} ms in bfloat16, {best[1]:.1f} ms quantised"
        report.median(f"quantized.{name}", ratios, "ratio", note=note, goal=goal)


def measure_against_llamacpp(path: Path, report: Report) -> None:
    """Measures the ratio of tokens per second to llama.cpp's on the same file, alternately: bare steps of
    both, without a server."""
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
            ours = num_tokens / median_ms(partial(run_batch, runner), batch, repeats) * 1_000
            speeds.append((ours, theirs()))
            ratios.append(ours / speeds[-1][1])
        best = [max(column) for column in zip(*speeds, strict=True)]
        note = f"{shape}: at best {best[0]:,.0f} tokens/s, llama.cpp {best[1]:,.0f}"
        report.median(f"quantized.{name}_vs_llamacpp", ratios, "ratio", note=note, goal=goal)


def measure_loading(path: Path, report: Report) -> None:
    """Measures the time and the peak memory of loading, each in a separate process with the file in the page
    cache."""
    took, peaks, size = [], [], 0
    for _ in range(5 if report.scale == "full" else 2):
        command = [sys.executable, "-c", LOADING, str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
        seconds, peak, size = json.loads(done.stdout)
        took.append(seconds)
        peaks.append(peak)
    note = f"{path.stat().st_size / 1e6:.0f} MB on disk, {size / 1e6:.0f} MB of weights"
    report.median("quantized.load_s", took, "s", note=note)
    note = "growth of the resident memory at its peak, over the weights; the mapped file is part of it"
    report.median("quantized.load_peak", peaks, "ratio", note=note, goal="<= 1.3")


@dataclass
class Errors:
    """Sums over all tokens, and the errors that follow from them."""

    differences: float = 0.0  # the squared differences of all logits
    sizes: float = 0.0  # the squares of the exact logits
    divergences: float = 0.0  # Kullback-Leibler, in nats
    losses: list[Tensor] = field(default_factory=list)  # of each chunk
    num_tokens: int = 0

    def add(self, found: Tensor, exact: Tensor, tokens: Tensor) -> None:
        """Adds a chunk. ``found`` and ``exact`` [tokens, vocabulary]: logits."""
        self.differences += float((found - exact).square().sum())
        self.sizes += float(exact.square().sum())
        log_p, log_q = exact.log_softmax(-1), found.log_softmax(-1)
        self.divergences += float((log_p.exp() * (log_p - log_q)).sum())
        self.losses.append(-log_q[:-1].gather(1, tokens[1:, None]).flatten())
        self.num_tokens += len(tokens)

    @property
    def logits(self) -> float:
        """The norm of all differences divided by the norm of all logits."""
        return float((self.differences / self.sizes) ** 0.5)

    @property
    def divergence(self) -> float:
        """The Kullback-Leibler divergence, in nats per token."""
        return self.divergences / self.num_tokens

    @property
    def perplexity(self) -> float:
        """The perplexity of all tokens except the first of each chunk."""
        return float(torch.cat(self.losses).mean().exp())


def measure_errors(path: Path, report: Report) -> None:
    """Measures the errors from rounding weights and activations."""
    text = lzma.decompress(TEXT.read_bytes()).decode()
    tokens = torch.tensor(Tokenizer.from_folder(path).encode(text)[: NUM_ERROR_TOKENS[report.scale]])
    dtypes = {"": "auto", "bf16_": "bfloat16", "exact": "float32"}
    runners = {
        name: TorchRunner(path, num_slots=CHUNK, dtype=dtype, num_threads=NUM_THREADS)
        for name, dtype in dtypes.items()
    }
    errors = {name: Errors() for name in dtypes}
    for chunk in torch.split(tokens, CHUNK):
        exact = logits_of(runners["exact"], chunk)
        for name, runner in runners.items():
            errors[name].add(exact if name == "exact" else logits_of(runner, chunk), exact, chunk)
    perplexity = errors["exact"].perplexity
    for name, goal in (("", "<= 0.02"), ("bf16_", "")):
        found = errors[name]
        note = f"{len(tokens):,} tokens; perplexity {found.perplexity:.3f}, exactly {perplexity:.3f}"
        results = (
            (f"quantized.{name}logits_error", found.logits, "ratio", goal, note),
            (f"quantized.{name}divergence", found.divergence, "nats", "", "per token, against float32"),
            (f"quantized.{name}perplexity", found.perplexity / perplexity, "ratio", goal and "<= 1.01", ""),
        )
        for figure, value, unit, wanted, remark in results:
            report.add(figure, round(value, 5), unit, [], remark, wanted)


@torch.inference_mode()
def logits_of(runner: TorchRunner, tokens: Tensor) -> Tensor:
    """Returns the logits of a text of at most ``CHUNK`` tokens: [tokens, vocabulary]."""
    model, kernels = runner._model, runner._kernels
    num, places = np.array([len(tokens)]), np.arange(len(tokens))
    batch = AttentionBatch(places.astype(np.int32)[None], np.array([0]), num, num, None)
    plan = kernels.attention.plan(batch, runner.kv_layers[0].dtype, torch.device("cpu"))
    given = ForwardInput(tokens.numpy(), places, places, runner.kv_layers, plan, places)
    return model.logits(model.forward(given))
