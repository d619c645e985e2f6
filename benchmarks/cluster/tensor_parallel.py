"""One model on two processes of this machine (tensor parallel), against the same model in one process.

The model has the shape of Qwen3-0.6B and random weights in bfloat16. Both ways have two threads. On a
machine with two cores they share the same memory bandwidth and divide the same products, so two processes
cannot be faster: the figures show the cost of the sums over the processes.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from rich.console import Console

from agentflow.engine.machine.resources import collect_garbage_rarely
from agentflow.engine.models.tensor_parallel.runner import TensorParallelRunner
from agentflow.engine.models.torch_runner import TorchRunner
from agentflow.engine.runner import ModelRunner, run_batch
from agentflow.kernels.native_ops.team import part_seconds
from benchmarks.report import Report
from benchmarks.step.work import Shape, batch_of, median_ms

NUM_SLOTS, MAX_CONTEXT, NUM_THREADS = 16_384, 4_096, 2
HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 1024, 3072, 16, 8, 128, 151_936
LAYERS = {"small": 7, "full": 28}
SHAPES = {
    "decode": Shape(1, 200),
    "decode_16": Shape(16, 200),
    "prefill": Shape(1, 0, 512),
}
STEPS = {"decode": 20, "decode_16": 10, "prefill": 1}
NUM_RUNS = 5


def run(report: Report, console: Console, only: str) -> None:
    """Measures the figures whose id contains ``only``."""
    names = [name for name in SHAPES if only in f"cluster.tensor_parallel_{name}"]
    names += [name for name in SHAPES if only in f"cluster.tensor_parallel_gloo_{name}" and name not in names]
    if not names:
        return
    console.print("measuring a model on two processes …", style="dim")
    torch.set_num_threads(NUM_THREADS)
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), LAYERS[report.scale])
        collect_garbage_rarely()  # as ``agentflow serve`` does: transformers has 400,000 objects
        alone = TorchRunner(folder, num_slots=NUM_SLOTS, device="cpu", num_threads=NUM_THREADS)
        for collective in ("shared", "gloo"):
            with divided(Path(folder), collective) as runner:
                for name in names:
                    _compare(name, collective, alone, runner, report)
        alone.close()


@contextmanager
def divided(folder: Path, collective: str) -> Iterator[TensorParallelRunner]:
    """The model on two processes, which add their results with ``collective``."""
    with mock.patch.dict(os.environ, AGENTFLOW_RANKS=collective):
        runner = TensorParallelRunner(folder, 2, num_slots=NUM_SLOTS, device="cpu", num_threads=NUM_THREADS)
    yield runner
    runner.close()


def _compare(name: str, collective: str, alone: ModelRunner, runner: ModelRunner, report: Report) -> None:
    """Adds the speed of a step on two processes by the speed on one, in turns."""
    batch, steps = batch_of(SHAPES[name], NUM_SLOTS, MAX_CONTEXT), STEPS[name]
    runs, times, waits = [], [], []
    for _ in range(NUM_RUNS):
        torch.set_num_threads(NUM_THREADS)
        one_ms = median_ms(partial(run_batch, alone), batch, steps)
        torch.set_num_threads(1)
        part_seconds()
        two_ms = median_ms(partial(run_batch, runner), batch, steps)
        waits.append(1e3 * part_seconds()["ranks"] / steps)
        runs.append(one_ms / two_ms)
        times.append((one_ms, two_ms))
    best = [min(each) for each in zip(*times, strict=True)]
    num_sums = 2 * LAYERS[report.scale] + 1
    note = (
        f"speed divided by the speed of one process; {SHAPES[name]}: "
        f"{best[0]:.1f} ms in one process, {best[1]:.1f} on two, of which {min(waits):.2f} "
        f"for {num_sums} sums with their waits; the logits of a row are {4 * VOCABULARY / 2e3:.0f} kB of "
        "another process"
    )
    prefix = "cluster.tensor_parallel" + ("" if collective == "shared" else f"_{collective}")
    report.median(f"{prefix}_{name}", runs, "ratio", note=note)


def write_model(folder: Path, num_layers: int) -> None:
    """Writes a folder with random weights, without a tokenizer."""
    import transformers

    config = transformers.AutoConfig.for_model(
        "qwen3",
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=num_layers,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=MAX_CONTEXT,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    kind: Any = transformers.AutoModelForCausalLM
    kind.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
