"""The attention of one layer on a GPU: over prefixes that requests share, against the same kernels that read
them for each request, and over requests that share nothing."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentflow.engine.models.config import DecoderConfig
from agentflow.kernels.attention.backend import AttentionRule
from agentflow.kernels.inputs import AttentionBatch, SharedPrefix
from agentflow.kernels.platforms import triton_kernels
from benchmarks.report import Report
from benchmarks.step.device_time import kernels_ms, timed_ms

Levels = tuple[tuple[int, int], ...]
"""Lengths of runs of keys, and the number of requests that share each."""
NUM_REQUESTS = 64
NUM_SLOTS = 400_000
LAYOUTS: dict[str, Levels] = {
    "shared64": ((6_000, 64), (200, 1)),
    "tree": ((2_000, 64), (2_000, 16), (400, 1)),
    "tree6200": ((3_000, 64), (3_000, 16), (200, 1)),
}
UNSHARED: Levels = ((2_000, 1),)
NEVER = 1 << 40
"""No run of keys saves this number of reads."""
RUNS, REPEATS = 7, 20


def slot_table(levels: Levels, num_requests: int, num_slots: int) -> NDArray[np.int32]:
    """Returns the slots of requests, scattered over a pool: [requests, keys]."""
    length = sum(length for length, _ in levels)
    slots = np.random.default_rng(0).permutation(num_slots)[: num_requests * length]
    table = slots.astype(np.int32).reshape(num_requests, length)
    start = 0
    for run, num_sharing in levels:
        for first in range(0, num_requests, num_sharing):
            table[first : first + num_sharing, start : start + run] = table[first, start : start + run]
        start += run
    return table


def shared_prefixes(levels: Levels, num_requests: int) -> list[SharedPrefix]:
    """Returns the nodes of the requests' tree of prefixes."""
    ends = np.cumsum([length for length, _ in levels]).tolist()
    return [
        (end, np.arange(first, first + num_sharing))
        for end, (_, num_sharing) in zip(ends, levels, strict=True)
        for first in range(0, num_requests, num_sharing)
        if num_sharing > 1
    ]


@dataclass(frozen=True)
class Case:
    """Requests that decode one token each, in one layer."""

    levels: Levels
    table: NDArray[np.int32]
    q: Tensor  # [requests, heads, head_dim]
    kv_layer: Tensor  # [slots, 2, kv_heads, head_dim]
    scale: float
    device_table: Tensor  # ``table`` on the device

    @classmethod
    def of(
        cls,
        levels: Levels,
        config: DecoderConfig,
        device: torch.device,
        num_requests: int = NUM_REQUESTS,
        num_slots: int = NUM_SLOTS,
    ) -> Case:
        """Returns a case with random queries, keys and values."""
        table = slot_table(levels, num_requests, num_slots)
        kv_layer = torch.randn(num_slots, 2, config.num_kv_heads, config.head_dim, device=device).bfloat16()
        q = torch.randn(num_requests, config.num_heads, config.head_dim, device=device).bfloat16()
        return cls(*(levels, table, q, kv_layer, config.head_dim**-0.5), torch.from_numpy(table).to(device))

    @property
    def num_bytes(self) -> int:
        """The bytes of the keys and values, each read once."""
        return len(np.unique(self.table)) * self.kv_layer[0].nbytes

    def ours(self, *, shares: bool = True) -> Callable[[], Tensor]:
        """Returns attention with a plan that is already made. ``shares``: it reads shared runs once."""
        with sharing(shares):
            plan = self.plan()
        attention, rule = triton_kernels().attention, AttentionRule(self.scale)
        return lambda: attention.attend(self.q, self.kv_layer, plan, rule)

    def plan(self) -> Any:
        """Makes a plan, complete and on the device."""
        num = len(self.table)
        lens, ones = np.full(num, self.table.shape[1]), np.ones(num, dtype=int)
        batch = AttentionBatch(
            *(self.table, np.arange(num), ones, lens, None),
            shared=shared_prefixes(self.levels, num),
            device_table=self.device_table,
        )
        plan: Any = triton_kernels().attention.plan(batch, self.q.dtype, self.q.device)
        plan.units(self.q.shape[1], self.kv_layer.shape[2])
        return plan


@contextmanager
def sharing(shares: bool) -> Iterator[None]:
    """Makes plans that share reads, as always, or plans that do not."""
    from agentflow.kernels.triton_ops.attention import units

    with patch.object(units, "LEAST_SAVING", units.LEAST_SAVING if shares else NEVER):
        yield


def measure(report: Report, device: torch.device, config: DecoderConfig, read_bytes_s: float) -> None:
    """Measures sharing over all layouts, and its cost where nothing is shared."""
    for name, levels in LAYOUTS.items():
        case = Case.of(levels, config, device)
        once, each = kernels_ms([case.ours(), case.ours(shares=False)], device, RUNS, REPEATS)
        limit_ms = 1e3 * case.num_bytes / read_bytes_s
        note = (
            f"{levels}: {1e3 * statistics.median(once):.0f} us instead of "
            f"{1e3 * statistics.median(each):.0f}; reading each key once takes {1e3 * limit_ms:.0f} us, "
            f"so the most is {statistics.median(each) / limit_ms:.1f}"
        )
        gains = [more / less for more, less in zip(each, once, strict=True)]
        report.median(f"gpu.{name}_attention_gain", gains, "ratio", note=note, goal=">= 4.0")
    _measure_unshared(report, device, config)
    _measure_8_bit_keys(report, device, config)


def _measure_unshared(report: Report, device: torch.device, config: DecoderConfig) -> None:
    """Compares plans that look for shared runs with plans that do not, where there are none."""
    case = Case.of(UNSHARED, config, device)
    on, off = kernels_ms([case.ours(), case.ours(shares=False)], device, RUNS, REPEATS)
    with sharing(True):
        plan_on = timed_ms(case.plan, device, RUNS)
    with sharing(False):
        plan_off = timed_ms(case.plan, device, RUNS)
    note = f"{NUM_REQUESTS} x {UNSHARED[0][0]:,}: {1e3 * statistics.median(on):.0f} us with sharing on"
    gains = [without / with_it for with_it, without in zip(on, off, strict=True)]
    report.median("gpu.unshared_attention_gain", gains, "ratio", note=note, goal=">= 0.98")
    layers = config.num_layers
    gains = [
        (planned_off + layers * without) / (planned_on + layers * with_it)
        for planned_on, with_it, planned_off, without in zip(plan_on, on, plan_off, off, strict=True)
    ]
    note = (
        f"a plan and {layers} layers; the plan takes {statistics.median(plan_on):.2f} ms, and "
        f"{statistics.median(plan_off):.2f} ms without sharing"
    )
    report.median("gpu.unshared_attention_gain_with_plan", gains, "ratio", note=note)


def _measure_8_bit_keys(report: Report, device: torch.device, config: DecoderConfig) -> None:
    """Compares keys and values in 8-bit floats with bfloat16."""
    if not triton_kernels().linear.has_fp8(device):
        return
    wide = Case.of(UNSHARED, config, device)
    narrow = replace(wide, kv_layer=wide.kv_layer.to(torch.float8_e4m3fn))
    took = kernels_ms([wide.ours(), narrow.ours()], device, RUNS, REPEATS)
    gains = [more / less for more, less in zip(*took, strict=True)]
    us = [1e3 * statistics.median(each) for each in took]
    note = f"{NUM_REQUESTS} x {UNSHARED[0][0]:,}: {us[1]:.0f} us instead of {us[0]:.0f} in bfloat16"
    report.median("gpu.fp8_kv_attention_gain", gains, "ratio", note=note)
