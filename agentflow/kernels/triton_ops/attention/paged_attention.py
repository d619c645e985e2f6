"""Attention over a paged KV pool by the units of a plan, and the merging of partial results.

A program computes one unit for one KV head. The query heads that share it are adjacent in the tile (GQA), so
that keys and values are read once for all of them. The softmax is computed in blocks of keys with a running
maximum (FlashAttention-2, arXiv 2307.08691, algorithm 1), in powers of two. Keys and values in 8-bit floats
are converted to the queries' type in registers.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from agentflow.kernels.triton_ops.attention.device_plan import DeviceUnits
from agentflow.kernels.triton_ops.attention.units import UNIT_COLUMNS, block_rows
from agentflow.kernels.triton_ops.device_limits import shared_bytes
from agentflow.kernels.triton_ops.early_start import early_start, take_turn
from agentflow.kernels.triton_ops.interpreted import dot, from_fp8, rounded

FP8 = torch.float8_e4m3fn
_COLUMNS = tl.constexpr(UNIT_COLUMNS)


@triton.jit
def _attend_block(
    q, best, total, out, kv, slot, ends, first_end, at, low, start, end, kv_stride, value_offset, scale, cap,
    IS_MASKED: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, IS_FP8: tl.constexpr,
    BLOCK_KEYS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    keys = start + tl.arange(0, BLOCK_KEYS)
    dims = tl.arange(0, BLOCK_DIM)
    is_key = keys < end
    place = kv + slot.to(tl.int64)[:, None] * kv_stride + dims[None, :]
    if IS_MASKED or HEAD_DIM != BLOCK_DIM:
        is_read = is_key[:, None] & (dims < HEAD_DIM)[None, :]
        k = tl.load(place, mask=is_read, other=0)
        v = tl.load(place + value_offset, mask=is_read, other=0)
    else:
        k = tl.load(place)
        v = tl.load(place + value_offset)
    if IS_FP8:
        k = from_fp8(k, q.dtype)
        v = from_fp8(v, q.dtype)
    scores = dot(q, tl.trans(k))
    factor = scale
    if HAS_CAP:
        scores = cap * (1.0 - 2.0 / (tl.exp2(scores * scale) + 1.0))
        factor = 1.0
    if IS_MASKED:
        # In a unit of text (first_end < 0), no key has an end.
        has_end = keys < tl.where(first_end >= 0, end, 0)
        key_end = tl.load(ends + first_end + keys, mask=has_end, other=2147483647)
        is_seen = is_key[None, :] & (keys[None, :] <= at[:, None]) & (at[:, None] < key_end[None, :])
        if HAS_WINDOW:
            is_seen &= keys[None, :] > low[:, None]
        scores = tl.where(is_seen, scores, float("-inf"))
    new_best = tl.maximum(best, tl.max(scores, 1) * factor)
    base = tl.where(new_best == float("-inf"), 0.0, new_best)  # a row may attend to no key of a block
    weights = tl.exp2(scores * factor - base[:, None])
    kept = tl.exp2(best - base)
    out = out * kept[:, None] + dot(rounded(weights, v.dtype), v)
    return new_best, total * kept + tl.sum(weights, 1), out


@triton.jit
def _slots_from(slots, start, end, BLOCK_KEYS: tl.constexpr):
    """Loads the slots of a block of keys. Slots from ``end`` on are 0."""
    keys = start + tl.arange(0, BLOCK_KEYS)
    return tl.load(slots + keys, mask=keys < end, other=0)


@triton.jit
def _attend_units(
    units, rows, at, lows, partial, table, nodes, ends, q, kv, sinks, out, partial_out, partial_lse,
    table_stride, q_row_stride, q_head_stride, kv_stride, value_offset, num_heads, scale, cap,
    HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, HAS_SINKS: tl.constexpr, IS_FP8: tl.constexpr,
    QUERIES_PER_KV: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    take_turn(IS_EARLY)
    unit = units + tl.program_id(0) * _COLUMNS
    kv_head = tl.program_id(1)
    first_entry = tl.load(unit)
    num_rows = tl.load(unit + 1)
    if num_rows == 0:  # an unused unit of a captured graph
        return
    first_column = tl.load(unit + 2)
    begin = tl.load(unit + 3)
    end = tl.load(unit + 4)
    full_end = tl.load(unit + 5)
    first_end = tl.load(unit + 6)
    full_begin = tl.load(unit + 7)

    pairs = tl.arange(0, BLOCK_ROWS)
    entries = first_entry + pairs // QUERIES_PER_KV
    heads = kv_head * QUERIES_PER_KV + pairs % QUERIES_PER_KV
    is_pair = pairs < num_rows * QUERIES_PER_KV
    row = tl.load(rows + entries, mask=is_pair, other=0).to(tl.int64)
    place = tl.load(at + entries, mask=is_pair, other=2147483646)
    low = place
    if HAS_WINDOW:
        low = tl.load(lows + entries, mask=is_pair, other=2147483646)
    part = tl.load(partial + entries, mask=is_pair, other=-1).to(tl.int64)
    dims = tl.arange(0, BLOCK_DIM)
    is_dim = dims < HEAD_DIM
    tile = tl.load(
        q + row[:, None] * q_row_stride + heads[:, None] * q_head_stride + dims[None, :],
        mask=is_pair[:, None] & is_dim[None, :], other=0.0,
    )  # fmt: skip

    kv_of_head = kv + kv_head * HEAD_DIM
    own_slots = table + tl.load(unit + 8).to(tl.int64) * table_stride + first_column
    if first_end >= 0:  # the nodes of a tree are not in the table
        own_slots = nodes + first_end
    best = tl.full([BLOCK_ROWS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_ROWS], dtype=tl.float32)
    attended = tl.zeros([BLOCK_ROWS, BLOCK_DIM], dtype=tl.float32)
    if HAS_WINDOW:
        for start in range(begin, full_begin, BLOCK_KEYS):
            best, total, attended = _attend_block(
                tile, best, total, attended, kv_of_head,
                _slots_from(own_slots, start, full_begin, BLOCK_KEYS), ends, first_end, place, low, start,
                full_begin, kv_stride, value_offset, scale, cap, True, True, HAS_CAP, IS_FP8,
                BLOCK_KEYS, HEAD_DIM, BLOCK_DIM,
            )  # fmt: skip
    # The slots of a block are loaded during the block before it. Otherwise Triton's pipeline, which then has
    # loads that depend on loads, would start to load a block only when the block before it is done.
    slot = _slots_from(own_slots, full_begin, full_end, BLOCK_KEYS)
    for start in range(full_begin, full_end, BLOCK_KEYS):
        next_slot = _slots_from(own_slots, start + BLOCK_KEYS, full_end, BLOCK_KEYS)
        best, total, attended = _attend_block(
            tile, best, total, attended, kv_of_head, slot, ends, first_end, place, low, start, full_end,
            kv_stride, value_offset, scale, cap, False, HAS_WINDOW, HAS_CAP, IS_FP8,
            BLOCK_KEYS, HEAD_DIM, BLOCK_DIM,
        )  # fmt: skip
        slot = next_slot
    for start in range(full_end, end, BLOCK_KEYS):
        best, total, attended = _attend_block(
            tile, best, total, attended, kv_of_head, _slots_from(own_slots, start, end, BLOCK_KEYS), ends,
            first_end, place, low, start, end, kv_stride, value_offset, scale, cap,
            True, HAS_WINDOW, HAS_CAP, IS_FP8, BLOCK_KEYS, HEAD_DIM, BLOCK_DIM,
        )  # fmt: skip

    attended = attended / tl.where(total > 0, total, 1.0)[:, None]
    is_whole = is_pair & (part < 0)
    target = (row * num_heads + heads)[:, None] * HEAD_DIM + dims[None, :]
    whole = attended
    if HAS_SINKS:
        sink = tl.load(sinks + heads, mask=is_whole, other=0.0).to(tl.float32) * 1.4426950408889634
        whole *= (total / (total + tl.exp2(sink - best)))[:, None]
    tl.store(out + target, rounded(whole, out.dtype.element_ty), mask=is_whole[:, None] & is_dim[None, :])
    is_part = is_pair & (part >= 0)
    number = part * num_heads + heads
    tl.store(
        partial_out + number[:, None] * HEAD_DIM + dims[None, :], attended,
        mask=is_part[:, None] & is_dim[None, :],
    )  # fmt: skip
    tl.store(partial_lse + number, best + tl.log2(tl.where(total > 0, total, 1.0)), mask=is_part)


@triton.jit
def _merge(
    merged_rows, bounds, partial_out, partial_lse, sinks, out, num_heads,
    HAS_SINKS: tl.constexpr, BLOCK_PARTS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
    IS_EARLY: tl.constexpr,
):  # fmt: skip
    take_turn(IS_EARLY)
    number = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.load(merged_rows + number).to(tl.int64)
    first = tl.load(bounds + number)
    end = tl.load(bounds + number + 1)
    if first == end:  # an unused row of a captured graph
        return
    dims = tl.arange(0, BLOCK_DIM)
    is_dim = dims < HEAD_DIM
    best = float("-inf")
    total = 0.0
    merged = tl.zeros([BLOCK_DIM], dtype=tl.float32)
    for start in range(first, end, BLOCK_PARTS):
        parts = start + tl.arange(0, BLOCK_PARTS)
        is_part = parts < end
        places = parts.to(tl.int64) * num_heads + head
        lse = tl.load(partial_lse + places, mask=is_part, other=float("-inf"))
        value = tl.load(
            partial_out + places[:, None] * HEAD_DIM + dims[None, :],
            mask=is_part[:, None] & is_dim[None, :], other=0.0,
        )  # fmt: skip
        new_best = tl.maximum(best, tl.max(lse, 0))
        base = tl.where(new_best == float("-inf"), 0.0, new_best)
        weights = tl.exp2(lse - base)
        kept = tl.exp2(best - base)
        merged = merged * kept + tl.sum(weights[:, None] * value, 0)
        total = total * kept + tl.sum(weights, 0)
        best = new_best
    if HAS_SINKS:
        total += tl.exp2(tl.load(sinks + head).to(tl.float32) * 1.4426950408889634 - best)
    place = out + (row * num_heads + head) * HEAD_DIM + dims
    tl.store(place, rounded(merged / total, out.dtype.element_ty), mask=is_dim)


def attend(
    q: Tensor,
    kv_layer: Tensor,
    units: DeviceUnits,
    scale: float,
    cap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Computes the attention of all rows.

    Args:
        q: [T, heads, head_dim].
        kv_layer: [slots, 2, kv_heads, head_dim], in the dtype of ``q`` or as 8-bit floats.
        units: the units for the layer's window.
        scale: the factor of the scores.
        cap: the cap of the scores; 0: none.
        sinks: the score of each head's sink, [heads]; None: there are none.

    Returns:
        [T, heads * head_dim].
    """
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = kv_layer.shape[2]
    queries_per_kv = num_heads // num_kv_heads
    out = torch.empty((num_rows, num_heads * head_dim), dtype=q.dtype, device=q.device)
    partial_out = torch.empty((units.num_partials, num_heads, head_dim), dtype=torch.float32, device=q.device)
    partial_lse = torch.empty((units.num_partials, num_heads), dtype=torch.float32, device=q.device)
    block_dim = max(16, triton.next_power_of_2(head_dim))
    has_window, has_sinks, is_fp8 = len(units.lows) > 0, sinks is not None, kv_layer.dtype == FP8
    kv_layer = kv_layer.view(torch.uint8) if is_fp8 else kv_layer
    # Launches on two streams must wait for the end of each other's kernels, so they cannot start early.
    has_two_streams = q.is_cuda and len(units.narrow) > 0 and len(units.wide) > 0
    early = {"IS_EARLY": False} if has_two_streams else early_start(q.device, num_rows)
    # The kernels use powers of 2. tanh(x) is 1 - 2 / (exp(2 x) + 1).
    factor = math.log2(math.e) * scale * (2 / cap if cap else 1)

    def launch(tiles: Tensor, size: int) -> None:
        _attend_units[(len(tiles), num_kv_heads)](
            tiles, units.rows, units.at, units.lows, units.partial, units.table, units.nodes, units.ends, q,
            kv_layer, sinks if has_sinks else q, out, partial_out, partial_lse, units.table.stride(0),
            q.stride(0), q.stride(1), kv_layer.stride(0), kv_layer.stride(1), num_heads, factor,
            cap * math.log2(math.e),
            HAS_WINDOW=has_window, HAS_CAP=cap > 0, HAS_SINKS=has_sinks, IS_FP8=is_fp8,
            QUERIES_PER_KV=queries_per_kv, BLOCK_ROWS=size, HEAD_DIM=head_dim, BLOCK_DIM=block_dim,
            **_options(size, block_dim, q.dtype, q.device), **early,
        )  # fmt: skip

    narrow_rows, wide_rows = block_rows(queries_per_kv)
    if has_two_streams:
        # Neither launch keeps the GPU full until its end, so they run concurrently.
        main = torch.cuda.current_stream(q.device)
        side = _side_stream(main)
        side.wait_stream(main)
        launch(units.wide, wide_rows)
        with torch.cuda.stream(side):
            launch(units.narrow, narrow_rows)
        main.wait_stream(side)
    else:
        for tiles, size in ((units.narrow, narrow_rows), (units.wide, wide_rows)):
            if len(tiles):
                launch(tiles, size)
    if units.num_partials:
        _merge[(len(units.merged_rows), num_heads)](
            units.merged_rows, units.merged_bounds, partial_out, partial_lse,
            sinks if has_sinks else q, out, num_heads,
            HAS_SINKS=has_sinks, BLOCK_PARTS=8, HEAD_DIM=head_dim, BLOCK_DIM=block_dim, num_warps=1, **early,
        )  # fmt: skip
    return out


@functools.cache
def _side_stream(main: torch.cuda.Stream) -> Any:
    """Returns a stream for work that runs concurrently with ``main``. Each main stream has a separate one,
    because a graph that one thread captures must not include streams of other threads."""
    return torch.cuda.Stream(main.device)  # type: ignore[no-untyped-call]


def _options(block_rows: int, block_dim: int, dtype: torch.dtype, device: torch.device) -> dict[str, int]:
    """Returns the keys per block, the warps and the pipeline stages of a launch. Shared memory has room for
    as many blocks of keys and values as there are stages."""
    if dtype == torch.float32 or block_dim > 128:
        return {"BLOCK_KEYS": 32, "num_warps": 4, "num_stages": 2}
    if block_rows == 16:  # limited by memory: several programs on a multiprocessor, with small blocks
        return {"BLOCK_KEYS": 32, "num_warps": 4, "num_stages": 3}
    return {"BLOCK_KEYS": 64, "num_warps": 4, "num_stages": 3 if shared_bytes(device) >= 120_000 else 2}
