"""Chooses tokens on a GPU, without a sort and without waiting for the device.

The logits of a row are cut into chunks, one program each, so that a single row occupies the whole GPU. At
most five kernels run, one after another:

1. ``_find_highest`` finds the highest logit of each chunk.
2. ``_count`` counts the tokens of rows with ``top_k`` or ``top_p`` by ranges of weights, 32 for each of the
   highest powers of two, and 4 for each of the other powers.
3. ``_find_ranges`` uses the counts to bound the last weight that is kept to a few ranges.
4. ``_split`` sums the weights above these ranges, and lists the tokens within them.
5. ``_draw`` finds the exact last weight in the list, then the chunk and the token at which the cumulative sum
   passes the drawn point. For greedy rows, it chooses the token with the highest logit.

Weights are the integers of ``token_weights.whole_weights``, and sums are 64-bit integers. They do not depend
on the chunks, and the tokens are equal to the tokens of the CPU's kernels. ``_find_ranges`` and ``_draw``
have one program for each row; ``_draw`` reads the list and one chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from agentflow.kernels.inputs import ChoiceRows
from agentflow.kernels.sampling.no_choice import NO_TOKEN, NOT_FINITE
from agentflow.kernels.sampling.sampler import Sampler
from agentflow.kernels.sampling.token_weights import EXP2, LEAST_EXPONENT, WEIGHT_BITS, scale_factors
from agentflow.kernels.triton_ops.device_limits import num_processors
from agentflow.kernels.uploads import upload

TILE = 2048
"""The logits that a program reads together. Chunks are multiples of this."""
MAX_CHUNKS = 128
PROGRAMS_PER_PROCESSOR = 8
"""The programs for each multiprocessor to aim for when dividing rows into chunks."""
LIST_TILE = 1024
"""The entries of a list that ``_draw`` reads together."""

_MAX_CHUNKS = tl.constexpr(MAX_CHUNKS)
_NO_TOKEN, _NOT_FINITE = tl.constexpr(NO_TOKEN), tl.constexpr(NOT_FINITE)
_BITS = tl.constexpr(WEIGHT_BITS)
_LEAST_EXPONENT = tl.constexpr(LEAST_EXPONENT)
_C5, _C4, _C3, _C2, _C1, _C0 = (tl.constexpr(coefficient) for coefficient in EXP2)
_INFINITY = tl.constexpr(float("inf"))
_NEVER = tl.constexpr(2**31 - 1)
"""Larger than any token id."""

# A *key* is the bit pattern of a weight as float32: keys have the order of the weights. A range of weights is
# all keys with the same upper bits. The highest range has only the highest weight. The ranges below it divide
# ``FINE_POWERS`` powers of two into 32 parts each, and the other ranges divide a power into 4. The lowest is
# 0. A histogram takes a population count for each token and each 32 ranges. Coarse ranges make it cheaper,
# and few tokens that are kept are in a coarse range.
NUM_RANGES = 512
FINE_POWERS = 13
_NUM_RANGES = tl.constexpr(NUM_RANGES)
_FIRST_FINE = tl.constexpr(NUM_RANGES - 1 - 32 * FINE_POWERS)  # the number of the lowest fine range
_FINE_KEY = tl.constexpr((127 + WEIGHT_BITS - FINE_POWERS) << 23)  # its lowest key
_FINE_SHIFT, _COARSE_SHIFT = tl.constexpr(18), tl.constexpr(21)

# For each row: the counts of the ranges, then the entries below.
_LIST_LENGTH = tl.constexpr(NUM_RANGES)  # the length of the row's list
_NUM_ABOVE = tl.constexpr(NUM_RANGES + 1)  # the number of tokens above the listed ranges
_LOW_KEY = tl.constexpr(NUM_RANGES + 2)  # the lowest key of the listed ranges, at least 1
_HIGH_KEY = tl.constexpr(NUM_RANGES + 3)  # the lowest key above the listed ranges
_ROW_INTS = tl.constexpr(NUM_RANGES + 16)
_NUM_PIVOTS = tl.constexpr(8)


@dataclass(frozen=True, slots=True)
class StagedChoice:
    """``ChoiceRows`` on a device."""

    targets: Tensor
    factors: Tensor  # [S] float32: log2(e) / temperature; 0: greedy
    top_ks: Tensor
    top_ps: Tensor
    least_weights: Tensor  # [S] float32: min_p as a weight
    uniforms: Tensor
    mask_places: Tensor  # [S] int32: the row of ``mask_words``; -1: all tokens are allowed
    mask_words: Tensor  # [M, any] int32
    is_random: bool  # whether any row draws
    is_filtered: bool  # whether any row that draws has top_k or top_p


class TritonSampler(Sampler):
    """``Sampler`` of the Triton kernels."""

    def stage(self, rows: ChoiceRows, device: torch.device) -> StagedChoice:
        draws = (rows.targets < 0) & (rows.temperatures > 0)
        factors = np.zeros(len(draws), dtype=np.float32)
        factors[draws] = scale_factors(rows.temperatures[draws])
        places = np.full(len(draws), -1, dtype=np.int32)
        words = np.zeros((1, 1), dtype=np.int32)
        if rows.masked_rows is not None and rows.mask_words is not None:
            places[rows.masked_rows] = np.arange(len(rows.masked_rows))
            words = rows.mask_words.view(np.int32)
        least_weights = rows.min_ps * np.float32(2**WEIGHT_BITS)
        tensors = upload(
            [rows.targets, factors, rows.top_ks, rows.top_ps, least_weights, rows.uniforms, places, words],
            device,
        )
        targets, device_factors, top_ks, top_ps, device_least, uniforms, mask_places, mask_words = tensors
        return StagedChoice(
            targets=targets,
            factors=device_factors,
            top_ks=top_ks,
            top_ps=top_ps,
            least_weights=device_least,
            uniforms=uniforms,
            mask_places=mask_places,
            mask_words=mask_words,
            is_random=bool(draws.any()),
            is_filtered=bool((draws & ((rows.top_ks > 0) | (rows.top_ps < 1))).any()),
        )

    def choose(self, logits: Tensor, staged: StagedChoice) -> Tensor:
        num_rows, vocab_size = logits.shape
        tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
        if not num_rows:
            return tokens
        if logits.stride(1) != 1:
            logits = logits.contiguous()
        chunk = _chunk_size(num_rows, vocab_size, logits.device)
        num_chunks = -(-vocab_size // chunk)
        chunks = num_chunks, num_rows
        highest = logits.new_empty(num_rows, num_chunks)
        highest_ids = torch.empty(num_rows, num_chunks, dtype=torch.int32, device=logits.device)
        ints = listed = highest_ids  # unused
        sums = torch.empty(3, num_rows, num_chunks, dtype=torch.int64, device=logits.device)
        if staged.is_filtered:
            ints = torch.zeros(num_rows, _ROW_INTS.value, dtype=torch.int32, device=logits.device)
            listed = torch.empty(num_rows, 2, vocab_size, dtype=torch.int32, device=logits.device)
        read = (
            logits, logits.stride(0), vocab_size, chunk, num_chunks, staged.mask_words, staged.mask_places,
            staged.mask_words.shape[1],
        )  # fmt: skip
        found = highest, highest_ids
        limits = staged.factors, staged.top_ks, staged.top_ps, staged.least_weights
        # Fused multiply-adds would round differently. With fewer registers, more programs run on a
        # multiprocessor: three of ``_count`` and ``_split``, and two of ``_draw``, instead of one.
        options: dict[str, Any] = {
            "TILE": TILE,
            "num_warps": 8,
            "enable_fp_fusion": False,
        }
        _find_highest[chunks](*read, *found, **options)
        if staged.is_filtered:
            _count[chunks](*read, *found, *limits, ints, sums, maxnreg=80, **options)
            _find_ranges[(num_rows,)](
                vocab_size, num_chunks, highest, *limits[:3], ints, sums, num_warps=8, enable_fp_fusion=False
            )
        if staged.is_random:
            _split[chunks](*read, *found, *limits, ints, sums, listed, maxnreg=80, **options)
        _draw[(num_rows,)](
            *read, *found, *limits, ints, sums, listed, staged.targets, staged.uniforms, tokens,
            LIST_TILE=LIST_TILE, maxnreg=128, **options,
        )  # fmt: skip
        return tokens


def _chunk_size(num_rows: int, vocab_size: int, device: torch.device) -> int:
    wanted = min(max(1, PROGRAMS_PER_PROCESSOR * num_processors(device) // num_rows), MAX_CHUNKS)
    return -(-vocab_size // (wanted * TILE)) * TILE


_COUNTS = ["num_chunks", "num_words"]
"""Arguments that differ between batches: Triton does not compile variants for their values."""


@triton.jit
def _read(logits, row_stride, vocab_size, mask_words, mask_places, num_words, row, ids):
    """Returns the logits of some tokens: minus infinity for tokens that the mask excludes and for ids past
    the vocabulary."""
    is_token = ids < vocab_size
    x = tl.load(logits + row * row_stride + ids, mask=is_token, other=-_INFINITY)
    place = tl.load(mask_places + row).to(tl.int64)
    if place >= 0:
        is_word = is_token & (ids // 32 < num_words)
        word = tl.load(mask_words + place * num_words + ids // 32, mask=is_word, other=0)
        x = tl.where(((word >> (ids % 32)) & 1) != 0, x, -_INFINITY)
    return x


@triton.jit
def _whole_weights(below, factor):
    """Returns the weights of ``token_weights.whole_weights`` as float32."""
    exponent = tl.maximum(below * factor, _LEAST_EXPONENT)
    whole = tl.floor(exponent + 0.5)
    rest = exponent - whole
    power = rest * _C5 + _C4
    power = power * rest + _C3
    power = power * rest + _C2
    power = power * rest + _C1
    power = power * rest + _C0
    bits = power.to(tl.int32, bitcast=True) + ((whole.to(tl.int32) + _BITS) << 23)
    return tl.floor(bits.to(tl.float32, bitcast=True))


@triton.jit
def _highest_logit(highest, row, num_chunks):
    """Returns the highest logit of a row; infinity if a logit is NaN or infinite."""
    chunks = tl.arange(0, _MAX_CHUNKS)
    place = highest + row * num_chunks + chunks
    return tl.max(tl.load(place, mask=chunks < num_chunks, other=-_INFINITY), 0)


@triton.jit
def _is_finite(most):
    return (most > -_INFINITY) & (most < _INFINITY)


@triton.jit
def _is_filtered(row, factors, top_ks, top_ps, vocab_size):
    top_k = tl.load(top_ks + row)
    has_limit = (top_k > 0) & (top_k < vocab_size)
    return (tl.load(factors + row) > 0) & (has_limit | (tl.load(top_ps + row) < 1))


@triton.jit(do_not_specialize=_COUNTS)
def _find_highest(
    logits, row_stride, vocab_size, chunk, num_chunks, mask_words, mask_places, num_words,
    highest, highest_ids, TILE: tl.constexpr,
):  # fmt: skip
    number, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    first = number * chunk
    best = tl.full([TILE], -_INFINITY, tl.float32)
    best_ids = tl.full([TILE], _NEVER, tl.int32)
    is_bad = tl.zeros([TILE], tl.int32)
    for start in range(first, tl.minimum(first + chunk, vocab_size), TILE):
        ids = start + tl.arange(0, TILE)
        x = _read(logits, row_stride, vocab_size, mask_words, mask_places, num_words, row, ids)
        is_bad = tl.where(x < _INFINITY, is_bad, 1)
        is_better = x > best
        best = tl.where(is_better, x, best)
        best_ids = tl.where(is_better, ids, best_ids)
    most = tl.max(best, 0)
    token = tl.min(tl.where(best == most, best_ids, _NEVER), 0)
    place = row * num_chunks + number
    tl.store(highest + place, tl.where(tl.max(is_bad, 0) > 0, _INFINITY, most))
    tl.store(highest_ids + place, token)


@triton.jit
def _find_range(key):
    """Returns the index of a key's range; below 1 for range 0."""
    above = key - _FINE_KEY  # shifts of negative numbers round down
    return _FIRST_FINE + tl.where(above >= 0, above >> _FINE_SHIFT, above >> _COARSE_SHIFT)


@triton.jit(do_not_specialize=_COUNTS)
def _count(
    logits, row_stride, vocab_size, chunk, num_chunks, mask_words, mask_places, num_words,
    highest, highest_ids, factors, top_ks, top_ps, least_weights, ints, sums, TILE: tl.constexpr,
):  # fmt: skip
    number, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    most = _highest_logit(highest, row, num_chunks)
    if _is_finite(most) & _is_filtered(row, factors, top_ks, top_ps, vocab_size):
        factor = tl.load(factors + row)
        first = number * chunk
        counts = tl.zeros([_NUM_RANGES], tl.int32)
        total = tl.zeros([TILE], tl.int64)
        for start in range(first, tl.minimum(first + chunk, vocab_size), TILE):
            ids = start + tl.arange(0, TILE)
            x = _read(logits, row_stride, vocab_size, mask_words, mask_places, num_words, row, ids)
            weights = _whole_weights(x - most, factor)
            total += weights.to(tl.int64)
            # Range 0 is not counted: it has the rest of the vocabulary.
            place = _find_range(weights.to(tl.int32, bitcast=True))
            counts += tl.histogram(tl.maximum(place, 0), _NUM_RANGES, mask=place > 0)
        tl.store(sums + row * num_chunks + number, tl.sum(total, 0))
        ranges = tl.arange(0, _NUM_RANGES)
        tl.atomic_add(ints + row * _ROW_INTS + ranges, counts, mask=counts > 0)


@triton.jit
def _sum_over_chunks(sums, row, first_row, num_chunks):
    chunks = tl.arange(0, _MAX_CHUNKS)
    place = sums + (first_row + row) * num_chunks + chunks
    return tl.sum(tl.load(place, mask=chunks < num_chunks, other=0), 0)


@triton.jit
def _lower_key(number):
    """Returns the lowest key of a range."""
    above = number - _FIRST_FINE
    key = _FINE_KEY + tl.where(above >= 0, above << _FINE_SHIFT, above << _COARSE_SHIFT)
    return tl.where(number > 0, key, 0)


@triton.jit
def _find_weight(key):
    return key.to(tl.float32, bitcast=True).to(tl.int64)


@triton.jit
def _needed(top_p, total):
    """Returns the least sum that reaches the fraction ``top_p`` of a total; at least 1, so that a token is
    kept."""
    wanted = top_p.to(tl.float64) * total.to(tl.float64)
    whole = wanted.to(tl.int64)
    return tl.maximum(whole + (whole.to(tl.float64) < wanted).to(tl.int64), 1)


@triton.jit
def _ranges_to_list(ints, sums, row, vocab_size, num_chunks, top_k, top_p):
    """Finds the ranges that may contain the last weight that is kept. Returns the lowest key of the ranges,
    the lowest key above them, and the number of tokens above them.

    The sum of the weights from a range on is known within bounds: each weight is between the lowest and the
    highest weight of its range.
    """
    ranges = tl.arange(0, _NUM_RANGES)
    counts = tl.load(ints + row * _ROW_INTS + ranges).to(tl.int64)
    counts = tl.where(ranges == 0, vocab_size - tl.sum(counts, 0), counts)
    least, most = _find_weight(_lower_key(ranges)), _find_weight(_lower_key(ranges + 1) - 1)
    num_from = tl.cumsum(counts, 0, reverse=True)
    least_from = tl.cumsum(counts * least, 0, reverse=True)
    most_from = tl.cumsum(counts * most, 0, reverse=True)
    low, high = _NUM_RANGES + 0, -1
    least_total = _sum_over_chunks(sums, row, 0, num_chunks)
    most_total = least_total
    if (top_k > 0) & (top_k < vocab_size):
        low = tl.max(tl.where(num_from >= top_k, ranges, 0), 0)
        high = low
        is_last = ranges == low
        num_in_last = top_k - tl.sum(tl.where(is_last, num_from - counts, 0), 0)
        above = tl.sum(tl.where(is_last, least_from - counts * least, 0), 0)
        least_total = above + num_in_last * tl.sum(tl.where(is_last, least, 0), 0)
        most_total = tl.sum(tl.where(is_last, most_from, 0), 0)
    if top_p < 1:
        fewest, largest = _needed(top_p, least_total), _needed(top_p, most_total)
        low = tl.minimum(low, tl.max(tl.where(least_from >= largest, ranges, 0), 0))
        high = tl.maximum(high, tl.max(tl.where(most_from >= fewest, ranges, 0), 0))
    num_above = tl.sum(tl.where(ranges > high, counts, 0), 0)
    return _lower_key(low), _lower_key(high + 1), num_above


@triton.jit(do_not_specialize=_COUNTS)
def _find_ranges(vocab_size, num_chunks, highest, factors, top_ks, top_ps, ints, sums):
    row = tl.program_id(0).to(tl.int64)
    most = _highest_logit(highest, row, num_chunks)
    if _is_finite(most) & _is_filtered(row, factors, top_ks, top_ps, vocab_size):
        low_key, high_key, num_above = _ranges_to_list(
            ints, sums, row, vocab_size, num_chunks, tl.load(top_ks + row), tl.load(top_ps + row)
        )
        own = ints + row * _ROW_INTS
        tl.store(own + _NUM_ABOVE, num_above.to(tl.int32))
        tl.store(own + _LOW_KEY, tl.maximum(low_key, 1))
        tl.store(own + _HIGH_KEY, high_key)


@triton.jit(do_not_specialize=_COUNTS)
def _split(
    logits, row_stride, vocab_size, chunk, num_chunks, mask_words, mask_places, num_words,
    highest, highest_ids, factors, top_ks, top_ps, least_weights, ints, sums, listed, TILE: tl.constexpr,
):  # fmt: skip
    number, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    num_rows = tl.num_programs(1)
    factor, most = tl.load(factors + row), _highest_logit(highest, row, num_chunks)
    if (factor > 0) & _is_finite(most):
        least_weight = tl.load(least_weights + row)
        low_key, high_key = 1, 1  # no range: all weights except 0 are above
        has_list = _is_filtered(row, factors, top_ks, top_ps, vocab_size)
        if has_list:
            low_key = tl.load(ints + row * _ROW_INTS + _LOW_KEY)
            high_key = tl.load(ints + row * _ROW_INTS + _HIGH_KEY)
        first = number * chunk
        above = tl.zeros([TILE], tl.int64)
        kept = tl.zeros([TILE], tl.int64)
        for start in range(first, tl.minimum(first + chunk, vocab_size), TILE):
            ids = start + tl.arange(0, TILE)
            x = _read(logits, row_stride, vocab_size, mask_words, mask_places, num_words, row, ids)
            weights = _whole_weights(x - most, factor)
            keys = weights.to(tl.int32, bitcast=True)
            amounts = tl.where(keys >= high_key, weights, 0.0).to(tl.int64)
            above += amounts
            kept += tl.where(weights >= least_weight, amounts, 0)
            if has_list:
                is_listed = (keys >= low_key) & (keys < high_key)
                num_listed = tl.sum(is_listed.to(tl.int32), 0)
                if num_listed > 0:
                    begin = tl.atomic_add(ints + row * _ROW_INTS + _LIST_LENGTH, num_listed)
                    place = begin + tl.cumsum(is_listed.to(tl.int32), 0) - 1
                    own = listed + row * 2 * vocab_size
                    tl.store(own + place, keys, mask=is_listed)
                    tl.store(own + vocab_size + place, ids, mask=is_listed)
        place = row * num_chunks + number
        tl.store(sums + num_rows * num_chunks + place, tl.sum(above, 0))
        tl.store(sums + 2 * num_rows * num_chunks + place, tl.sum(kept, 0))


@triton.jit
def _list_bounds(keys, num, LIST_TILE: tl.constexpr):
    """Returns the lowest and the highest key of a list, and the sum of its weights."""
    low = tl.full([LIST_TILE], _NEVER, tl.int32)
    high = tl.zeros([LIST_TILE], tl.int32)
    total = tl.zeros([LIST_TILE], tl.int64)
    for first in range(0, num, LIST_TILE):
        entries = first + tl.arange(0, LIST_TILE)
        own = tl.load(keys + entries, mask=entries < num, other=0)
        low = tl.where(entries < num, tl.minimum(low, own), low)
        high = tl.maximum(high, own)
        total += _find_weight(own)
    return tl.min(low, 0), tl.max(high, 0), tl.sum(total, 0)


@triton.jit
def _amounts_from(keys, num, pivots, IS_COUNT: tl.constexpr, LIST_TILE: tl.constexpr):
    """Returns the number or the sum of the listed weights from each pivot key on."""
    amounts = tl.zeros([LIST_TILE, _NUM_PIVOTS], tl.int64)
    for first in range(0, num, LIST_TILE):
        entries = first + tl.arange(0, LIST_TILE)
        own = tl.load(keys + entries, mask=entries < num, other=0)
        value = (own > 0).to(tl.int64) if IS_COUNT else _find_weight(own)
        amounts += tl.where(own[:, None] >= pivots[None, :], value[:, None], 0)
    return tl.sum(amounts, 0)


@triton.jit
def _last_key(keys, num, low, high, above, needed, IS_COUNT: tl.constexpr, LIST_TILE: tl.constexpr):
    """Returns the largest key from ``low`` to ``high`` (exclusive) from which on the listed weights, plus
    ``above``, reach the number or sum ``needed``; ``low`` if there is no such key."""
    while high - low > 1:
        step = (high - low + _NUM_PIVOTS) // (_NUM_PIVOTS + 1)
        pivots = low + step * (1 + tl.arange(0, _NUM_PIVOTS))
        reach = above + _amounts_from(keys, num, pivots, IS_COUNT, LIST_TILE) >= needed
        new_low = tl.max(tl.where(reach, pivots, low), 0)
        high = tl.minimum(high, tl.min(tl.where(reach, high, pivots), 0))
        low = new_low
    return low


@triton.jit
def _last_key_kept(
    ints, sums, listed, row, num_rows, vocab_size, num_chunks, top_k, top_p, LIST_TILE: tl.constexpr
):
    """Returns the key of the last token that ``top_k`` and ``top_p`` keep, or a lower key with no tokens in
    between."""
    keys = listed + row * 2 * vocab_size
    num = tl.load(ints + row * _ROW_INTS + _LIST_LENGTH)
    num_above = tl.load(ints + row * _ROW_INTS + _NUM_ABOVE).to(tl.int64)
    above = _sum_over_chunks(sums, row, num_rows, num_chunks)
    low, high, in_list = _list_bounds(keys, num, LIST_TILE)
    high += 1
    last = low * 0
    total = above + in_list
    if (top_k > 0) & (top_k < vocab_size):
        if num_above + num >= top_k:  # otherwise the last token that top_k keeps has a weight of 0
            last = _last_key(keys, num, low, high, num_above, top_k, True, LIST_TILE)
            pivots = last + tl.zeros([_NUM_PIVOTS], tl.int32)
            total = above + tl.max(_amounts_from(keys, num, pivots, False, LIST_TILE), 0)
    else:
        total = _sum_over_chunks(sums, row, 0, num_chunks)
    if top_p < 1:
        needed = _needed(top_p, total)
        if above + in_list >= needed:
            last = tl.maximum(last, _last_key(keys, num, low, high, above, needed, False, LIST_TILE))
    return last


@triton.jit
def _sum_before(
    sums, listed, row, num_rows, vocab_size, chunk, num_chunks, num, last, least_weight, pivots,
    LIST_TILE: tl.constexpr,
):  # fmt: skip
    """Returns the sum of the kept weights before each chunk in ``pivots``."""
    chunks = tl.arange(0, _MAX_CHUNKS)
    place = sums + (2 * num_rows + row) * num_chunks + chunks
    own = tl.load(place, mask=chunks < num_chunks, other=0)
    before = tl.sum(tl.where(chunks[:, None] < pivots[None, :], own[:, None], 0), 0)
    amounts = tl.zeros([LIST_TILE, _NUM_PIVOTS], tl.int64)
    keys = listed + row * 2 * vocab_size
    for first in range(0, num, LIST_TILE):
        entries = first + tl.arange(0, LIST_TILE)
        key = tl.load(keys + entries, mask=entries < num, other=0)
        ids = tl.load(keys + vocab_size + entries, mask=entries < num, other=0)
        is_kept = (key >= last) & (key.to(tl.float32, bitcast=True) >= least_weight)
        value = tl.where(is_kept, _find_weight(key), 0)
        amounts += tl.where(ids[:, None] < (pivots * chunk)[None, :], value[:, None], 0)
    return before + tl.sum(amounts, 0)


@triton.jit(do_not_specialize=_COUNTS)
def _draw(
    logits, row_stride, vocab_size, chunk, num_chunks, mask_words, mask_places, num_words,
    highest, highest_ids, factors, top_ks, top_ps, least_weights, ints, sums, listed,
    targets, uniforms, tokens,
    LIST_TILE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row, num_rows = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    target = tl.load(targets + row)
    most = _highest_logit(highest, row, num_chunks)
    chunks = tl.arange(0, _MAX_CHUNKS)
    place, is_chunk = row * num_chunks + chunks, chunks < num_chunks
    of_chunks = tl.load(highest + place, mask=is_chunk, other=-_INFINITY)
    ids_of_chunks = tl.load(highest_ids + place, mask=is_chunk, other=_NEVER)
    token = tl.min(tl.where(of_chunks == most, ids_of_chunks, _NEVER), 0)
    token = tl.where(most == -_INFINITY, _NO_TOKEN, tl.where(most < _INFINITY, token, _NOT_FINITE))
    factor = tl.load(factors + row)
    if (factor > 0) & (token >= 0):
        least_weight = tl.load(least_weights + row)
        num, last = 0, 1
        if _is_filtered(row, factors, top_ks, top_ps, vocab_size):
            num = tl.load(ints + row * _ROW_INTS + _LIST_LENGTH)
            last = _last_key_kept(
                ints, sums, listed, row, num_rows, vocab_size, num_chunks,
                tl.load(top_ks + row), tl.load(top_ps + row), LIST_TILE,
            )  # fmt: skip
        # The sum before a chunk that does not exist is the total.
        end = num_chunks + tl.zeros([_NUM_PIVOTS], tl.int32)
        total = tl.max(
            _sum_before(
                sums, listed, row, num_rows, vocab_size, chunk, num_chunks, num, last, least_weight, end,
                LIST_TILE,
            ), 0,
        )  # fmt: skip
        point = (tl.load(uniforms + row) * total.to(tl.float64)).to(tl.int64)
        point = tl.minimum(point, total - 1)
        before = point * 0
        low, high = 0, num_chunks
        while high - low > 1:
            step = (high - low + _NUM_PIVOTS) // (_NUM_PIVOTS + 1)
            pivots = low + step * (1 + tl.arange(0, _NUM_PIVOTS))
            reached = _sum_before(
                sums, listed, row, num_rows, vocab_size, chunk, num_chunks, num, last, least_weight,
                pivots, LIST_TILE,
            )  # fmt: skip
            is_before = (reached <= point) & (pivots < num_chunks)
            new_low = tl.max(tl.where(is_before, pivots, low), 0)
            before = tl.maximum(before, tl.max(tl.where(is_before, reached, 0), 0))
            high = tl.minimum(high, tl.min(tl.where(is_before, high, pivots), 0))
            low = new_low
        start, token = low * chunk, token * 0 + _NEVER
        while (token == _NEVER) & (start < vocab_size):
            ids = start + tl.arange(0, TILE)
            x = _read(logits, row_stride, vocab_size, mask_words, mask_places, num_words, row, ids)
            weights = _whole_weights(x - most, factor)
            is_kept = (weights.to(tl.int32, bitcast=True) >= last) & (weights >= least_weight)
            amounts = tl.where(is_kept, weights, 0.0).to(tl.int64)
            of_tile = tl.sum(amounts, 0)
            if before + of_tile > point:
                reached_by = before + tl.cumsum(amounts, 0)
                token = tl.min(tl.where(reached_by > point, ids, _NEVER), 0)
            before += of_tile
            start += TILE
    tl.store(tokens + row, tl.where(target >= 0, target, token.to(tl.int64)))
