"""Shapes of popular models, with random weights: steps as shares of the machine's limits; adapters in a
batch; the memory of a server.

A model of 4 bits is created in 4 bits, matrix by matrix, without a file or a copy in 16 bits. The limit of a
decode step is reading weights and KV once, and the limit of a prefill is its operations: for products with
weights of 4 bits, the faster rate of byte products and bfloat16 products; for attention, the rate of bfloat16
products.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import anyio
import numpy as np
import psutil
import torch
from rich.console import Console
from safetensors.torch import save_file

import agentflow as af
from agentflow.engine.batch import BatchAdapters
from agentflow.engine.models.config import DecoderConfig
from agentflow.engine.models.torch_runner import TorchRunner
from agentflow.engine.runner import run_batch
from agentflow.engine.store.model_store import resolve_model
from benchmarks.engine import families
from benchmarks.report import Report
from benchmarks.server.costs import fill_pool
from benchmarks.serving import serving_model
from benchmarks.step.limits import Limits, measure_byte_flops, measure_limits
from benchmarks.step.random_llama import RandomRunner, llama_config
from benchmarks.step.work import Shape, Work, batch_of, median_ms, work_of_parts

NUM_THREADS = 2
NUM_SLOTS = 4_096
CPU = torch.device("cpu")
BITS_OF_Q4_1 = 5.0  # a scale and a minimum of 16 bits for 32 codes

QWEN2_1_5B = llama_config(1536, 8960, 28, 12, 2, 151_936, is_tied=True)
MISTRAL_7B = llama_config(4096, 14_336, 32, 32, 8, 32_000)
# In bfloat16 the larger one would need 14 GB.
MODELS = {
    "7b": (MISTRAL_7B, True, ">= 0.75", ">= 0.6"),
    "1_5b": (QWEN2_1_5B, True, "", ""),
    "1_5b_bf16": (QWEN2_1_5B, False, "", ""),
}
DECODE = Shape(1, 200)
PREFILL_ROWS = {"full": 512, "small": 64}

DEFAULT_MODEL = "smollm2-135m"
BATCH = Shape(32, 300)
NUM_ADAPTERS, RANK = 4, 16
SERVER_KV_TOKENS = 50_000


def run(report: Report, console: Console, only: str) -> None:
    """``only``: "7b", "1_5b", "lora", "server", "decode_" with a name of ``families.MODELS``, or ""."""
    torch.set_num_threads(NUM_THREADS)
    families.run(report, console, only)
    for name in MODELS:
        if only in name:
            console.print(f"measuring {name} …")
            measure_shape(name, report)
    if only in "lora":
        console.print("measuring adapters …")
        measure_adapters(report)
    if only in "server":
        console.print("measuring the memory of a server …")
        anyio.run(measure_server, report)


def measure_shape(name: str, report: Report) -> None:
    """Measures the steps of one model."""
    config, is_4_bit, decode_goal, prefill_goal = MODELS[name]
    runner = RandomRunner(config, NUM_SLOTS, torch.bfloat16, CPU, is_4_bit=is_4_bit)
    for layer in runner.pool.layers:
        layer.normal_()  # untouched pages all map to one page of zeros, and reading them costs nothing
    prefill = Shape(1, 0, PREFILL_ROWS[report.scale])
    runs = 5 if report.scale == "full" else 2
    for figure, shape, goal in (("decode", DECODE, decode_goal), ("prefill", prefill, prefill_goal)):
        batch = batch_of(shape, NUM_SLOTS, config.max_context)
        shares, times = [], []
        for _ in range(runs):
            limits, byte_flops = measure_limits(3), measure_byte_flops(3)
            took = median_ms(runner.run, batch, 5 if shape.num_rows == 1 else 1)
            bytes_ms, flops_ms = least_ms(shape, config, limits, byte_flops, is_4_bit=is_4_bit)
            shares.append((bytes_ms if shape.num_rows == 1 else flops_ms) / took)
            times.append(took)
        note = (
            f"{shape}: {min(times):,.0f} ms at best; {runner.model.nbytes / 1e9:.2f} GB of weights; "
            f"last limits {limits.bytes_s / 1e9:.1f} GB/s, {limits.flops / 1e9:,.0f} GFLOP/s, of bytes "
            f"{byte_flops / 1e9:,.0f}: {bytes_ms:,.0f} ms for the bytes, {flops_ms:,.0f} for the operations"
        )
        report.median(f"models.{figure}_{name}_of_limit", shares, "ratio", note=note, goal=goal)


def least_ms(
    shape: Shape, config: DecoderConfig, limits: Limits, byte_flops: float, *, is_4_bit: bool
) -> tuple[float, float]:
    """Returns the least milliseconds for the bytes of a step, and for its operations.

    Args:
        shape: the batch.
        config: the model.
        limits: of the machine.
        byte_flops: operations per second of byte products.
        is_4_bit: the weights have 4 bits.
    """
    parts = work_of_parts(shape, config)
    attention = parts.pop("attention")
    products = sum(parts.values(), Work(0, 0))
    if not is_4_bit:
        return limits.bytes_ms(products + attention), limits.flops_ms(products + attention)
    products = Work(products.num_bytes * BITS_OF_Q4_1 / 16, products.flops)
    fastest = replace(limits, flops=max(limits.flops, byte_flops))
    return limits.bytes_ms(products + attention), fastest.flops_ms(products) + limits.flops_ms(attention)


def measure_adapters(report: Report) -> None:
    """Measures the ratio of tokens per second of a batch whose requests use different adapters to a batch
    without adapters."""
    runner = TorchRunner(
        resolve_model(DEFAULT_MODEL), num_slots=20_000, dtype="auto", num_threads=NUM_THREADS
    )
    for layer in runner.kv_layers:
        layer.normal_()
    config = runner._shape
    assert isinstance(config, DecoderConfig)
    with tempfile.TemporaryDirectory() as adapters:
        folders = [write_adapter(Path(adapters) / str(seed), config, seed) for seed in range(NUM_ADAPTERS)]
        identities = [runner.install_adapter(runner.read_adapter(folder)).identity for folder in folders]
    plain = batch_of(BATCH, 20_000, runner.info.max_context)
    of_tokens = np.arange(BATCH.num_requests) % NUM_ADAPTERS
    adapted = replace(plain, adapters=BatchAdapters(tuple(identities), of_tokens))
    shares, best = [], [float("inf")] * 2
    for _ in range(7 if report.scale == "full" else 3):
        took = [median_ms(partial(run_batch, runner), batch, 10) for batch in (plain, adapted)]
        shares.append(took[0] / took[1])
        best = [min(pair) for pair in zip(best, took, strict=True)]
    note = (
        f"{BATCH}: {best[0]:.1f} ms at best without adapters, {best[1]:.1f} with {NUM_ADAPTERS} of rank "
        f"{RANK} on all projections"
    )
    report.median("models.lora_batch_share", shares, "ratio", note=note)


def write_adapter(folder: Path, config: DecoderConfig, seed: int) -> Path:
    """Writes a random adapter of all projections."""
    generator = torch.Generator().manual_seed(seed)
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    tensors = {}
    for layer in range(config.num_layers):
        for name, (num_out, num_in) in shapes.items():
            module = f"base_model.model.model.layers.{layer}.{name}"
            for kind, shape in (("A", (RANK, num_in)), ("B", (num_out, RANK))):
                values = torch.randn(shape, generator=generator) * 0.01
                tensors[f"{module}.lora_{kind}.weight"] = values.bfloat16()
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


async def measure_server(report: Report) -> None:
    """Measures the peak memory of ``agentflow serve`` with the default model in the format of its file."""
    with serving_model(kv_tokens=SERVER_KV_TOKENS, dtype="auto") as (url, pid):
        process = psutil.Process(pid)
        async with af.session(url) as flow:
            await fill_pool(flow, int(SERVER_KV_TOKENS * (0.97 if report.scale == "full" else 0.05)))
            stats = await flow.stats()
        processes = [process, *process.children(recursive=True)]  # the engine's and the compiler's
        peak_gb = sum(_peak_bytes(each.pid) for each in processes) / 1e9
    note = (
        f"{stats.cached_slots:,} of {stats.total_slots:,} KV tokens in use; the sum of the processes' peaks, "
        "in which shared pages count several times"
    )
    report.median("models.server_gb", [peak_gb], "GB", note=note, goal="<= 2")


def _peak_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:")) * 1024
