"""Batches for a bare model runner, and the bytes and operations of each, for comparison with the time of its
step."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from agentflow.engine.batch import Batch, SampledRows
from agentflow.engine.models.config import DecoderConfig

STRIDE = 1009
"""Tokens between the first slots of two requests, so that no prefix is shared and all slots are used."""


@dataclass(frozen=True)
class Shape:
    """The shape of a batch."""

    num_requests: int
    context: int  # cached tokens of each request
    num_rows: int = 1  # of each request, after the context
    shared: int = 0  # the first tokens of the context that all requests have in the same slots

    def __str__(self) -> str:
        what = "decode" if self.num_rows == 1 else f"prefill of {self.num_rows:,}"
        shared = f", {self.shared:,} shared" if self.shared else ""
        return f"{what}, {self.num_requests} x {self.context:,}{shared}"


def batch_of(shape: Shape, num_slots: int, max_context: int) -> Batch:
    """Returns a greedy batch. The pool may be smaller than all contexts together: then several requests read
    the same slots, at different positions and far apart in time."""
    num, length = shape.num_requests, shape.context + shape.num_rows
    table = np.zeros((num, max_context), dtype=np.int32)
    own = np.arange(length - shape.shared)
    for request in range(num):
        first = shape.shared + request * max(STRIDE, min(length, (num_slots - shape.shared) // num))
        table[request, : shape.shared] = np.arange(shape.shared)
        table[request, shape.shared : length] = shape.shared + (first + own) % (num_slots - shape.shared)
    positions = np.tile(np.arange(shape.context, length), num)
    query_lens = np.full(num, shape.num_rows, dtype=np.int64)
    rng = np.random.default_rng(0)
    return Batch(
        token_ids=rng.integers(10, 1_000, len(positions)),
        positions=positions,
        write_slots=table[:, shape.context : length].ravel().astype(np.int64),
        req_to_token=table,
        req_rows=np.arange(num),
        query_lens=query_lens,
        kv_lens=np.full(num, length, dtype=np.int64),
        num_decode=num if shape.num_rows == 1 else 0,
        sampled=_greedy(np.cumsum(query_lens) - 1, length),
        shared=[(shape.shared, np.arange(num))] if shape.shared else [],
    )


def _greedy(rows: np.ndarray[tuple[int], np.dtype[np.int64]], position: int) -> SampledRows:
    num = len(rows)
    zeros, ones = np.zeros(num, dtype=np.float32), np.ones(num, dtype=np.float32)
    return SampledRows(
        rows=rows,
        target_ids=np.full(num, -1),
        temperatures=zeros,
        top_ps=ones,
        top_ks=np.zeros(num, dtype=np.int64),
        min_ps=zeros,
        seeds=np.zeros(num, dtype=np.uint64),
        positions=np.full(num, position),
        needs_logprobs=False,
    )


def median_ms(run: Callable[[Batch], object], batch: Batch, runs: int) -> float:
    """Returns the median milliseconds of the batch's step."""
    took = []
    for _ in range(runs):
        began = time.perf_counter()
        run(batch)
        took.append(1e3 * (time.perf_counter() - began))
    return statistics.median(took)


@dataclass(frozen=True)
class Work:
    """The minimum work of a step or a part."""

    num_bytes: float  # read from memory
    flops: float  # floating-point operations

    def __add__(self, other: Work) -> Work:
        return Work(self.num_bytes + other.num_bytes, self.flops + other.flops)


def work_of_parts(shape: Shape, config: DecoderConfig) -> dict[str, Work]:
    """Returns the work of each part of a step, by its name in ``team.PARTS``: weights once, KV of each
    distinct slot once, two operations per weight and row, and for attention two products over the keys of
    each row. Values are bfloat16; activations between parts stay in a cache."""
    rows = shape.num_requests * shape.num_rows
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_heads * dim, config.num_kv_heads * dim

    def product(num_weights: float, num_rows: int) -> Work:
        return Work(2.0 * num_weights, 2.0 * num_weights * num_rows)

    seen = rows * (shape.context + (shape.num_rows + 1) / 2)
    tokens = shape.shared + shape.num_requests * (shape.context - shape.shared + shape.num_rows)
    return {
        "qkv": product(config.num_layers * hidden * (queries + 2 * keys), rows),
        "attention": Work(
            2.0 * config.num_layers * 2 * keys * tokens, 4.0 * config.num_layers * queries * seen
        ),
        "output": product(config.num_layers * hidden * queries, rows),
        "gate_up": product(config.num_layers * 2 * hidden * inner, rows),
        "down": product(config.num_layers * hidden * inner, rows),
        "head": product(config.vocab_size * hidden, shape.num_requests),
    }


def work_of(shape: Shape, config: DecoderConfig) -> Work:
    """Returns the work of the whole step."""
    return sum(work_of_parts(shape, config).values(), Work(0, 0))
