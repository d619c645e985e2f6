"""The sections of ``gpu_check``: comparisons with the CPU, and measurements."""

from __future__ import annotations

import contextlib
import datetime
import gc
import os
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from agentflow.engine.batch import Batch, PendingTokens
from agentflow.engine.models.config import DecoderConfig
from agentflow.engine.models.weights.quantising import quantised
from agentflow.kernels.attention.backend import AttentionRule
from agentflow.kernels.inputs import AttentionBatch, BlockMatrix, ChoiceRows
from agentflow.kernels.platforms import TORCH, kernels_for
from benchmarks.report import Report, one_line
from benchmarks.step.device_time import kernels_ms, timed_ms
from benchmarks.step.limits import Limits
from benchmarks.step.random_llama import LLAMA_8B, TINY, TINY_MIXTURE, RandomRunner
from benchmarks.step.work import Shape, batch_of, work_of

RESULTS = Path(__file__).parents[1] / "results"


@dataclass
class Check:
    """The state that all sections share."""

    report: Report
    device: torch.device
    config: DecoderConfig  # the shape of the model
    num_slots: int  # of KV pools
    is_small: bool
    say: Callable[[str], None]  # prints a line
    write: Callable[[], None]  # writes the results so far

    @cached_property
    def limits(self) -> Limits:
        """The limits of this GPU, measured and reported when they are first needed."""
        bytes_s = _read_bytes_s(self.device, self.is_small)
        flops = _multiply_flops(self.device, self.is_small)
        self.report.median("gpu.read_gb_s", [bytes_s / 1e9], "GB/s", note="the best of some sums")
        self.report.median("gpu.bf16_tflops", [flops / 1e12], "TFLOP/s", note="square product")
        return Limits(bytes_s, flops)


def run(device_name: str, is_tiny: bool, only: Sequence[str], file: Path | None) -> int:
    """Runs sections in their order. One that fails is reported, and the others run."""
    console, report = Console(), Report("small" if is_tiny else "full")
    device = torch.device(device_name)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    chosen = [section for section in SECTIONS if section in only]
    if file is None:
        folder = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
        part = "" if len(chosen) == len(SECTIONS) else "-" + "-".join(chosen)
        file = RESULTS / folder / f"gpu{part}.json"
    report.extra = {"gpu": name, "date": datetime.date.today().isoformat()}
    report.file = file

    console.print(f"checking {name} with torch {torch.__version__} …")
    config, num_slots = (TINY, 2_000) if is_tiny else (LLAMA_8B, 280_000)
    shared = Check(
        report, device, config, num_slots, is_tiny, partial(console.print, markup=False), report.write
    )
    failed = {}
    for section in chosen:
        began = time.perf_counter()
        try:
            SECTIONS[section](shared)
        except Exception as error:
            failed[section] = one_line(error)
            report.extra["failed"] = failed
            shared.say(f"{section} failed: {failed[section]}")
        report.write()
        console.print(f"{section}: {time.perf_counter() - began:.0f} s")
        gc.collect()  # a model and its graphs refer to each other
        with contextlib.suppress(RuntimeError):  # of a GPU that has failed
            if device.type == "cuda":
                torch.cuda.empty_cache()
    report.show(console)
    console.print(f"written to {file}")
    faults = ("differing", "differing_choices", "wrong_8_bit_floats", "wrong_grouped_products")
    return 1 if failed or any(report.extra.get(fault) for fault in faults) else 0


def _check_tokens(check: Check) -> None:
    """Compares with the CPU."""
    wrong = differing_tokens(check.device)
    check.say("greedy ids equal the CPU's" if not wrong else f"greedy ids differ from the CPU's: {wrong}")
    differing = differing_choices(check.device, *((20, 500) if check.is_small else (250, 32_000)))
    check.say(f"{differing} choices of tokens differ from the CPU's")
    wrong_fp8 = wrong_8_bit_floats(check.device)
    check.say("8-bit floats are " + ("right" if not wrong_fp8 else f"wrong: {', '.join(wrong_fp8)}"))
    check.report.extra |= {
        "greedy_ids_equal_cpu": not wrong,
        "differing": wrong,
        "differing_choices": differing,
        "wrong_8_bit_floats": wrong_fp8,
    }


def differing_tokens(
    device: torch.device, num_tokens: int = 48, config: DecoderConfig = TINY, cpu_kernels: str = ""
) -> list[str]:
    """Returns the differences between greedy token ids on ``device`` and on the CPU, for a random model in
    float32: prompts of several lengths in one batch, one of them after a prefix that another computed.
    ``config``: of the model. ``cpu_kernels``: the CPU's, instead of its default kernels."""
    torch.backends.cuda.matmul.allow_tf32 = False
    ids = []
    for each, name in ((torch.device("cpu"), cpu_kernels), (device, "")):
        with mock.patch.dict(os.environ, {"AGENTFLOW_KERNELS": name} if name else {}):
            runner = RandomRunner(config, 4_000, torch.float32, each)
        ids.append(_greedy_ids(runner, num_tokens))
    return [
        f"request {request}, token {token}: {ours} instead of {theirs}"
        for request, (cpu, other) in enumerate(zip(*ids, strict=True))
        for token, (theirs, ours) in enumerate(zip(cpu, other, strict=True))
        if ours != theirs
    ][:5]


def differing_choices(device: torch.device, num_rows: int, vocab_size: int) -> int:
    """Returns the number of rows of random logits from which this device and the CPU choose other tokens: for
    peaked and flat rows, with all combinations of filters, and masks."""
    rng, differing, sampler = np.random.default_rng(0), 0, kernels_for(device).sampler
    for spread in (0.0, 0.5, 2.0, 8.0):
        logits = spread * torch.from_numpy(rng.standard_normal((num_rows, vocab_size), dtype=np.float32))
        masked = np.arange(0, num_rows, 3)
        rows = ChoiceRows(
            targets=np.full(num_rows, -1),
            temperatures=rng.choice([0, 0.3, 1, 1.7], num_rows).astype(np.float32),
            top_ks=rng.choice([0, 1, 50, 5_000], num_rows),
            top_ps=rng.choice([1, 0.99, 0.9, 0.3], num_rows).astype(np.float32),
            min_ps=rng.choice([0, 0.05], num_rows).astype(np.float32),
            uniforms=rng.random(num_rows),
            masked_rows=masked,
            mask_words=rng.integers(0, 2**32, (len(masked), -(-vocab_size // 32)), dtype=np.uint32),
        )
        ours = sampler.choose(logits.to(device), sampler.stage(rows, device)).cpu()
        differing += int((ours != TORCH.sampler.choose(logits, rows)).sum())
    return differing


def wrong_8_bit_floats(device: torch.device) -> list[str]:
    """Returns the products and the attention with 8-bit floats that differ from float64 on the values of
    these floats by more than rounding does. Empty if the device has none."""
    kernels, wrong = kernels_for(device), []
    if not kernels.linear.has_fp8(device):
        return []
    from agentflow.kernels.triton_ops.linear import fp8

    def check(name: str, result: Tensor, expected: Tensor, tolerance: float) -> None:
        error = float((result.double() - expected).norm() / expected.norm())
        if not error < tolerance:
            wrong.append(f"{name} by {error:.2g}")

    torch.manual_seed(0)
    is_gpu = device.type == "cuda"
    num_out, num_in = (1_000, 3_072) if is_gpu else (100, 160)
    bias = torch.randn(num_out, device=device).bfloat16()
    matrix = quantised(torch.randn(num_out, num_in), "F8_E4M3")
    weight = kernels.linear.pack_blocks([matrix], bias, device=device)
    assert weight is not None
    known = fp8.dequantised_rows(weight.quantised[0], range(num_out), torch.float32).double()
    for num_rows in (1, 16, 64, 300) if is_gpu else (1, 20, 70):
        x = torch.randn(num_rows, num_in, device=device).bfloat16()
        rows = x.double()
        logits = kernels.linear.multiply_exactly(x, weight)
        check(f"logits of {num_rows} rows", logits, rows @ known.t() + bias, 1e-3)
        if num_rows > fp8.MAX_ROWS and is_gpu:  # rows are rounded too
            codes, scales = fp8.round_rows(x)
            if not fp8._has_scaled_products(x.device):
                wrong.append("torch has no product of 8-bit floats")
                continue
            check("rounded rows", codes.float() * scales, rows, 4e-2)
            rows = codes.double() * scales
        product = kernels.linear.multiply(x, weight)
        check(f"a product of {num_rows} rows", product, rows @ known.t() + bias, 1e-2)
    num, length, num_heads, num_kv_heads, head_dim = 4, 300 if is_gpu else 80, 8, 2, 128
    slots = np.random.default_rng(0).permutation(num * length).astype(np.int32).reshape(num, length)
    kv = 3 * torch.randn(num * length, num_heads + 2 * num_kv_heads, head_dim, device=device).bfloat16()
    ones = torch.ones(len(kv), 1, head_dim, device=device, dtype=torch.bfloat16)
    pool = torch.full((len(kv), 2, num_kv_heads, head_dim), 9.0, device=device).to(torch.float8_e4m3fn)
    kernels.rows.rope_and_write(kv.clone(), ones, 0 * ones, pool, torch.arange(len(kv), device=device))
    stored = kv[:, num_heads:].view(-1, 2, num_kv_heads, head_dim).float().to(pool.dtype)
    if not torch.equal(stored.view(torch.uint8), pool.view(torch.uint8)):
        wrong.append("keys and values that are stored")
    attention, rule = kernels.attention, AttentionRule(head_dim**-0.5)
    for query_len in (1, 40):
        counts = np.full(num, query_len)
        batch = AttentionBatch(slots, np.arange(num), counts, np.full(num, length), None)
        q = torch.randn(num * query_len, num_heads, head_dim, device=device).bfloat16()
        results = [
            attention.attend(q, each, attention.plan(batch, each.dtype, device), rule)
            for each in (pool, pool.bfloat16())
        ]
        check(f"attention of {query_len} rows", results[0], results[1].double(), 1e-2)
    return wrong


PROMPTS = (5, 300, 130, 64)
SHARED = 200
"""Tokens of the second prompt with which the last request begins."""


def _greedy_ids(runner: RandomRunner, num_tokens: int) -> list[list[int]]:
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
            sampled=replace(form.sampled.slice(0, len(requests)), rows=ends),
        )
        for request, token in zip(requests, runner.run(batch).tolist(), strict=True):
            cached[request] = len(tokens[request])
            tokens[request].append(token)

    step([1])
    step([0, 2, 3])
    for _ in range(num_tokens):
        step([0, 1, 2, 3])
    return [made[len(prompt) :] for made, prompt in zip(tokens, prompts, strict=True)]


def measure_steps(check: Check) -> None:
    """Compares steps with this GPU's memory bandwidth and matrix throughput, and with torch's kernels."""
    report, device, config, limits = check.report, check.device, check.config, check.limits
    many, context, rows = (4, 100, 256) if check.is_small else (64, 2_000, 2_048)
    shapes = {
        "decode1": (Shape(1, context), ">= 0.85"),
        "decode16": (Shape(many // 4, context), ""),
        "decode64": (Shape(many, context), ">= 0.75"),
        "decode256": (Shape(4 * many, context // 2), ""),
        "shared64": (Shape(many, 3 * context + context // 10, 1, 3 * context), ""),
        "prefill2048": (Shape(1, 0, rows), ">= 0.6"),
        "prefill2048_after_6000": (Shape(1, 3 * context, rows), ">= 0.6"),
    }
    outside_goals = {"decode1": "< 0.1", "decode64": "< 0.05"}
    took: dict[str, list[float]] = {}
    for kernels in ("", "torch"):
        with mock.patch.dict(os.environ, {"AGENTFLOW_KERNELS": kernels} if kernels else {}):
            runner = RandomRunner(config, check.num_slots, torch.bfloat16, device)
        for name, (shape, goal) in shapes.items():
            if kernels and name in ("decode256", "shared64"):  # torch's pad and gather: minutes, or no memory
                continue
            batch = batch_of(shape, check.num_slots, config.max_context)
            steps = _steps_ms(runner, batch, device, 7)
            if kernels:
                gains = [torch_ms / ms for torch_ms, ms in zip(steps, took[name], strict=True)]
                note = f"torch's kernels: {statistics.median(steps):.2f} ms"
                report.median(f"gpu.{name}_over_torch", gains, "ratio", note=note)
                continue
            took[name], work = steps, work_of(shape, config)
            note = (
                f"{shape}: {statistics.median(steps):.2f} ms, {work.num_bytes / 1e9:.1f} GB and "
                f"{work.flops / 1e12:.2f} TFLOP need {limits.ms(work):.2f}"
            )
            shares = [limits.ms(work) / ms for ms in steps]
            report.median(f"gpu.{name}_of_limit", shares, "ratio", note=note, goal=goal)
            if name in outside_goals and (found := _outside_kernels(runner, batch, device)):
                note, goal = f"{shape}: of a step while the next one is launched", outside_goals[name]
                report.median(f"gpu.{name}_outside_kernels", found, "ratio", note=note, goal=goal)
        check.write()
        del runner
        gc.collect()  # a model and its graphs refer to each other
        if device.type == "cuda":
            torch.cuda.empty_cache()


def measure_quantised(check: Check) -> None:
    """Compares the products of a layer with quantised weights with the bandwidth of the memory, and with
    products in bfloat16; in graphs on a GPU, so that only kernels count."""
    report, device, config, read_bytes_s = check.report, check.device, check.config, check.limits.bytes_s
    kernels = kernels_for(device)
    if not kernels.linear.block_types:
        return
    rng = np.random.default_rng(0)
    hidden, inner = config.hidden_size, config.intermediate_size
    heads = config.num_heads * config.head_dim
    shapes = [
        (heads + 2 * config.num_kv_heads * config.head_dim, hidden),
        (hidden, heads),
        (2 * inner, hidden),
        (hidden, inner),
    ]

    def layer_us(weights: list[Any], linear: Any, num_rows: int) -> list[float]:
        inputs = [torch.randn(num_rows, one.shape[1], device=device).bfloat16() for one in weights]

        def run() -> None:
            for x, weight in zip(inputs, weights, strict=True):
                linear(x, weight)

        [took] = kernels_ms([run], device, 5, 20 if device.type == "cuda" else 1)
        return [1e3 * ms for ms in took]

    dense = [
        kernels.linear.pack(torch.randn(*shape, device=device, dtype=torch.bfloat16), None)
        for shape in shapes
    ]
    few: tuple[int, ...] = 1, 16, 64
    many = (*few, 256, 2_048) if device.type == "cuda" else few
    plain = {num: statistics.median(layer_us(dense, kernels.linear.multiply, num)) for num in many}
    del dense

    def random_matrix(block_type: str, num_out: int, num_in: int) -> BlockMatrix:
        if block_type == "F8_E4M3":
            rows = rng.integers(0, 0x70, (num_out, 4 + num_in), dtype=np.uint8)
            rows[:, :4] = np.array([1e-4], dtype=np.float32).view(np.uint8)
            return BlockMatrix(block_type, rows, (num_out, num_in))
        block_bytes = {"Q8_0": 34, "Q4_1": 20}[block_type]
        blocks = rng.integers(0, 256, (num_out, num_in // 32, block_bytes), dtype=np.uint8)
        blocks[..., :4].view(np.float16)[:] = 1e-2
        if block_type == "Q8_0":
            blocks[..., 2:4] = 1
        return BlockMatrix(block_type, blocks.reshape(num_out, -1), (num_out, num_in))

    kinds = [("int8", "Q8_0", few), ("int4", "Q4_1", few)]
    if kernels.linear.has_fp8(device):
        kinds.append(("fp8", "F8_E4M3", many))
    for name, block_type, counts in kinds:
        weights = []
        for num_out, num_in in shapes:
            matrix = random_matrix(block_type, num_out, num_in)
            packed = kernels.linear.pack_blocks([matrix], None, device=device)
            assert packed is not None
            weights.append(packed)
        num_bytes = sum(weight.nbytes for weight in weights)
        for num in counts:
            took = layer_us(weights, kernels.linear.multiply, num)
            shares = [num_bytes / read_bytes_s * 1e6 / us for us in took]
            note = f"{num} rows, {num_bytes / 1e6:.0f} MB: {statistics.median(took):.0f} us a layer"
            if num in few:
                report.median(f"gpu.{name}_{num}_of_limit", shares, "ratio", note=note)
            gains = [plain[num] / us for us in took]
            note = f"bfloat16: {plain[num]:.0f} us a layer"
            report.median(f"gpu.{name}_{num}_over_bf16", gains, "ratio", note=note)


def measure_choice(check: Check) -> None:
    """Compares the choice of tokens with reading the logits once: in graphs, so that only kernels count."""
    device, read_s = check.device, check.limits.bytes_s
    sampler, vocab_size = kernels_for(device).sampler, 1_000 if check.is_small else 128_256
    for num_rows in (1, 4) if check.is_small else (1, 64, 256):
        logits = 2.5 * torch.randn(num_rows, vocab_size, device=device)
        ones = np.ones(num_rows, dtype=np.float32)
        for name, temperature in (("greedy", 0.0), ("top_p", 1.0)):
            rows = ChoiceRows(
                targets=np.full(num_rows, -1),
                temperatures=temperature * ones,
                top_ks=np.zeros(num_rows, dtype=np.int64),
                top_ps=np.float32(0.9) * ones,
                min_ps=0 * ones,
                uniforms=np.random.default_rng(0).random(num_rows),
            )
            staged = sampler.stage(rows, device)

            def choose(logits: Any = logits, staged: Any = staged) -> None:
                sampler.choose(logits, staged)

            [took] = kernels_ms([choose], device, 5, 10)
            limit_ms = 1e3 * logits.nbytes / read_s
            note = (
                f"{1e3 * statistics.median(took):.1f} us; reading the logits once takes {1e3 * limit_ms:.1f}"
            )
            shares = [limit_ms / ms for ms in took]
            check.report.median(f"gpu.choice_{name}_{num_rows}_of_limit", shares, "ratio", note=note)


def _measure_sharing(check: Check) -> None:
    if check.device.type != "cuda":
        check.say("sharing was not measured: it needs a GPU")
        return
    from benchmarks.step import gpu_attention

    gpu_attention.measure(check.report, check.device, check.config, check.limits.bytes_s)


def _measure_workloads(check: Check) -> None:
    from benchmarks.step import gpu_workloads

    gpu_workloads.measure(
        check.report, check.device, check.config, check.num_slots, check.write, is_small=check.is_small
    )


def _check_grouped(check: Check) -> None:
    """Compares mixtures and adapters with the CPU and float64, then with the limits."""
    from benchmarks.step import gpu_grouped

    if kernels_for(check.device).linear.adapter_table(1, torch.float32, check.device) is None:
        check.say("grouped products were not checked: the kernels of this device have none")
        return
    # torch's kernels need not be compiled first.
    wrong = differing_tokens(check.device, 24, TINY_MIXTURE, cpu_kernels="torch")
    wrong += gpu_grouped.wrong_products(check.device, is_small=check.is_small)
    check.say("grouped products are " + ("right" if not wrong else f"wrong: {', '.join(wrong)}"))
    check.report.extra |= {"wrong_grouped_products": wrong}
    check.write()
    gpu_grouped.measure(check.report, check.device, check.limits, check.write, is_small=check.is_small)


def _compare_flashinfer(check: Check) -> None:
    if check.device.type != "cuda":
        check.say("FlashInfer was not compared: it needs a GPU")
        return
    from benchmarks.step import gpu_flashinfer

    gpu_flashinfer.measure(check.report, check.device, check.config, check.say)


def _read_bytes_s(device: torch.device, is_small: bool) -> float:
    memory = torch.ones((1 << 22) if is_small else (1 << 30), dtype=torch.float32, device=device)
    return memory.nbytes / (min(timed_ms(memory.sum, device, 10)) / 1e3)


def _multiply_flops(device: torch.device, is_small: bool) -> float:
    size = 512 if is_small else 8192
    left, right = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    return 2 * size**3 / (min(timed_ms(lambda: left @ right, device, 10)) / 1e3)


def _steps_ms(runner: RandomRunner, batch: Batch, device: torch.device, runs: int) -> list[float]:
    """Returns the time of each step, after two warm-up steps. On a GPU, the next step is launched before a
    step is collected, and its decoded tokens come from it, as in the engine."""
    if device.type != "cuda":
        return timed_ms(lambda: runner.run(batch), device, runs)
    following = _following(batch)
    took = []
    step = runner.launch(batch)
    began = time.perf_counter()
    for run in range(runs + 2):
        launched = runner.launch(following)
        step.output()
        step = launched
        ended = time.perf_counter()
        if run >= 2:
            took.append(1e3 * (ended - began))
        began = ended
    step.output()
    return took


def _following(batch: Batch) -> Batch:
    """Returns the same batch with the tokens of the batch before it, if it decodes."""
    places = np.arange(batch.num_decode)
    return replace(batch, pending=PendingTokens(places, places)) if batch.num_decode else batch


def _outside_kernels(runner: RandomRunner, batch: Batch, device: torch.device) -> list[float]:
    """Returns the share of some steps' time in which no kernel runs; nothing if the profiler does not see
    the device."""
    if device.type != "cuda":
        return []
    from torch._C._autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    num_steps, shares = 20, []
    for _ in range(3):
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            _steps_ms(runner, batch, device, num_steps)
        spans = sorted(
            (event.time_range.start, event.time_range.end)
            for event in profiled.events()
            if event.device_type == DeviceType.CUDA and not event.name.startswith(("Memcpy", "Memset"))
        )
        if not spans:
            return []
        first, until, busy = spans[0][0], spans[0][0], 0.0
        for begin, end in spans:
            busy += max(0.0, end - max(begin, until))
            until = max(until, end)
        shares.append(1.0 - busy / (until - first))
    return shares


SECTIONS: dict[str, Callable[[Check], object]] = {
    "tokens": _check_tokens,
    "limits": lambda check: check.limits,
    "steps": measure_steps,
    "choice": measure_choice,
    "sharing": _measure_sharing,
    "quantised": measure_quantised,
    "grouped": _check_grouped,
    "workloads": _measure_workloads,
    "flashinfer": _compare_flashinfer,
}
"""The sections in their order. ``tokens`` compares with the CPU, ``grouped`` compares and measures, and the
others measure."""
