"""The kernels in torch operations, for every device.

In order: linear layers, norms and RoPE, attention by the groups of an ``AttentionPlan``, and the choice of
tokens.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentflow.kernels.activations import Activation, PlainActivation, activated, gated
from agentflow.kernels.attention_plan import AttentionPlan, Group
from agentflow.kernels.attention_plan import plan_attention as plan_groups
from agentflow.kernels.decoder_weights import DecoderWeights
from agentflow.kernels.inputs import (
    AttentionBatch,
    BlockMatrix,
    ChoiceRows,
    FloatArray,
    IntArray,
    LinearWeight,
    LowRank,
)
from agentflow.kernels.native_library import cpu_flags
from agentflow.kernels.no_choice import NO_TOKEN, NOT_FINITE


@functools.cache
def _multiplies_bfloat16() -> bool:
    """Whether the CPU has bfloat16 products (x86: AVX-512 BF16 or AMX). Without them, torch's products of
    several rows in bfloat16 take up to 10 times as long as in float32."""
    return not cpu_flags().isdisjoint(("avx512_bf16", "amx_bf16", "bf16"))


def pack_linear(
    weight: Tensor, bias: Tensor | None, *, exact_output: bool = False, gated: bool = False
) -> LinearWeight:
    shape = (weight.shape[0], weight.shape[1])
    if exact_output and weight.device.type == "cpu":  # a CPU's products have the dtype of their operands
        weight = weight.float()
    return LinearWeight(weight.t(), None, bias, shape)


BLOCK_TYPES = ()


def has_fp8(device: torch.device) -> bool:
    return False


def pack_blocks(
    parts: Sequence[BlockMatrix],
    bias: Tensor | None,
    *,
    gated: bool = False,
    device: torch.device | None = None,
) -> None:
    return None


def pack_embedding(weight: Tensor, head: LinearWeight | None) -> LinearWeight:
    return LinearWeight(weight.t(), None, None, (weight.shape[0], weight.shape[1]))


def embed(token_ids: Tensor, weight: LinearWeight, dtype: torch.dtype) -> Tensor:
    assert weight.transposed is not None
    return torch.nn.functional.embedding(token_ids, weight.transposed.t()).to(dtype)


def linear(x: Tensor, weight: LinearWeight, added: Tensor | None = None) -> Tensor:
    assert weight.transposed is not None
    if x.device.type == "cpu" and len(x) > 8 and x.dtype == torch.bfloat16 and not _multiplies_bfloat16():
        product = exact_linear(x, weight).to(x.dtype)
    else:
        product = torch.nn.functional.linear(x, weight.transposed.t(), weight.bias)
    return product if added is None else product.add_(added)


def exact_linear(x: Tensor, weight: LinearWeight) -> Tensor:
    assert weight.transposed is not None
    if x.is_cuda and x.dtype != torch.float32:
        product = torch.mm(x, weight.transposed, out_dtype=torch.float32)  # GPUs add in float32 anyway
    else:
        product = torch.mm(x.float(), weight.transposed.float())
    return product if weight.bias is None else product.add_(weight.bias)


def low_rank(x: Tensor, num_out: int, changes: Sequence[tuple[LowRank, Tensor]]) -> Tensor:
    added = x.new_zeros(len(x), num_out)
    for change, rows in changes:
        inner = linear(x.index_select(0, rows), change.down)
        ranks = [part.up.shape[1] for part in change.parts]
        for part, own in zip(change.parts, torch.split(inner, ranks, dim=1), strict=True):
            outputs = slice(part.first_output, part.first_output + part.up.shape[0])
            added[:, outputs].index_copy_(0, rows, linear(own, part.up))
    return added


def add_linear(hidden: Tensor, x: Tensor, weight: LinearWeight) -> None:
    hidden.add_(linear(x, weight))


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return torch.nn.functional.layer_norm(x, weight.shape, weight, bias, eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.nn.functional.rms_norm(x, x.shape[-1:], eps=eps).mul_(weight)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = residual.add_(x)
    return rms_norm(total, weight, eps), total


def gated_linear(
    x: Tensor, weight: LinearWeight, added: Tensor | None = None, activation: Activation = "silu"
) -> Tensor:
    return gated(linear(x, weight, added), activation)


def activated_linear(x: Tensor, weight: LinearWeight, activation: PlainActivation) -> Tensor:
    return activated(linear(x, weight), activation)


def rope_and_write(qkv: Tensor, cos: Tensor, sin: Tensor, kv_layer: Tensor, write_slots: Tensor) -> Tensor:
    _, _, num_kv_heads, head_dim = kv_layer.shape
    num_heads = qkv.shape[1] - 2 * num_kv_heads
    rotated = qkv[:, : num_heads + num_kv_heads]
    swapped = rotated.roll(head_dim // 2, -1).mul_(sin)
    torch.add(rotated * cos, swapped, out=rotated)
    kv_layer.index_copy_(0, write_slots, qkv[:, num_heads:].view(-1, 2, num_kv_heads, head_dim))
    return qkv[:, :num_heads]


def plan_attention(batch: AttentionBatch, dtype: torch.dtype, device: torch.device) -> AttentionPlan:
    return plan_groups(batch, dtype, device)


def static_plans(
    num_rows: Sequence[int],
    num_heads: int,
    num_kv_heads: int,
    device: torch.device,
    windows: Sequence[int] = (0,),
) -> None:
    return None


QUEUES_WORK = False


def whole_forward(weights: DecoderWeights, head: LinearWeight) -> None:
    return None


ruled_attention = None


def attention(q: Tensor, kv_layer: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
    out = q.new_empty(q.shape, dtype=torch.float32)
    lse = out.new_empty(q.shape[:2])
    for group in plan.tails:  # the repeated rows of a group have equal results
        part_out, part_lse = attend_group(q, kv_layer, group, scale, attend)
        out.index_copy_(0, group.rows, part_out)
        lse.index_copy_(0, group.rows, part_lse)
    for group in plan.shared_groups:
        part_out, part_lse = attend_group(q, kv_layer, group, scale, attend)
        own_out, own_lse = out.index_select(0, group.rows), lse.index_select(0, group.rows)
        weight = torch.sigmoid(part_lse - own_lse).unsqueeze(-1)
        out.index_copy_(0, group.rows, own_out.lerp_(part_out, weight))
        lse.index_copy_(0, group.rows, torch.logaddexp(own_lse, part_lse))
    return out.to(q.dtype).flatten(1)


def segment_attention(q: Tensor, kv: Tensor, starts: IntArray, first: int, scale: float) -> Tensor:
    end = first + len(q)
    begins, ends = segments_between(starts, first, end)
    lengths = ends - begins
    if begins[0] == first and ends[-1] == end and (lengths == lengths[0]).all():
        return _equal_segments(q, kv[first:end], len(lengths), scale)
    parts = [
        _equal_segments(q[max(a - first, 0) : min(b, end) - first], kv[a:b], 1, scale)
        for a, b in zip(begins.tolist(), ends.tolist(), strict=True)
    ]
    return torch.cat(parts)


def segments_between(starts: IntArray, first: int, end: int) -> tuple[IntArray, IntArray]:
    """Returns the begins and the ends of the segments with rows from ``first`` up to ``end``."""
    low = int(np.searchsorted(starts, first, side="right")) - 1
    high = int(np.searchsorted(starts, end, side="left"))
    return starts[low:high], starts[low + 1 : high + 1]


def _equal_segments(q: Tensor, kv: Tensor, num: int, scale: float) -> Tensor:
    _, num_heads, head_dim = q.shape
    keys, values = kv.view(num, -1, 2, num_heads, head_dim).permute(2, 0, 3, 1, 4)
    queries = q.reshape(num, -1, num_heads, head_dim).transpose(1, 2)
    out = torch.nn.functional.scaled_dot_product_attention(queries, keys, values, scale=scale)
    return out.transpose(1, 2).reshape(len(q), -1)


Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None, float], tuple[Tensor, Tensor]]


def attend_group(
    q: Tensor, kv_layer: Tensor, group: Group, scale: float, attend: Attend
) -> tuple[Tensor, Tensor]:
    """Attends from each chunk of N to its slots. The L rows of the query heads that share a KV head are the
    queries of one product, so that K and V are read once for them. Returns float32 [N * L, heads, head_dim],
    and the log-sum-exp of the scores, [N * L, heads]."""
    _, _, num_kv_heads, head_dim = kv_layer.shape
    n, num_heads = group.num_chunks, q.shape[1]
    queries_per_head = num_heads // num_kv_heads
    kv = _gathered(kv_layer, group.slots, q.dtype).view(n, -1, 2, num_kv_heads, head_dim)
    queries = q.index_select(0, group.rows).view(n, -1, num_kv_heads, queries_per_head, head_dim)
    queries = queries.permute(0, 2, 3, 1, 4).reshape(n, num_kv_heads, -1, head_dim)
    mask = None if group.mask is None else group.mask.repeat(1, 1, queries_per_head, 1)
    out, lse = attend(queries, kv[:, :, 0].transpose(1, 2), kv[:, :, 1].transpose(1, 2), mask, scale)
    out = out.reshape(n, num_heads, -1, head_dim).transpose(1, 2)
    lse = lse.reshape(n, num_heads, -1).transpose(1, 2)
    return out.reshape(-1, num_heads, head_dim).float(), lse.reshape(-1, num_heads)


def _gathered(kv_layer: Tensor, slots: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the keys and values of some slots, 8-bit floats in ``dtype``."""
    if kv_layer.dtype != torch.float8_e4m3fn:
        return kv_layer.index_select(0, slots)
    codes = kv_layer.view(torch.uint8).index_select(0, slots)
    return codes.view(kv_layer.dtype).to(dtype)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Computes softmax attention, and the log-sum-exp of its scores for merging.

    Args:
        q: [batch, heads, queries, head_dim].
        k: [batch, heads, keys, head_dim].
        v: [batch, heads, keys, head_dim].
        mask: added to the scores, or None.
        scale: multiplies the scores.

    Returns:
        [batch, heads, queries, head_dim] and float32 [batch, heads, queries].
    """
    if q.device.type != "cpu":
        return attend_dense(q, k, v, mask, scale)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, attn_mask=mask, scale=scale
    )
    return out, lse


def attend_dense(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, cap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """``attend`` in plain tensor algebra, with all scores in memory as float32. The arguments and results are
    the same. With a ``cap``, a score is ``cap * tanh(score / cap)``."""
    scores = torch.matmul(q, k.transpose(-1, -2)).float() * scale
    if cap:
        scores = scores.div_(cap).tanh_().mul_(cap)
    if mask is not None:
        scores += mask
    lse = scores.logsumexp(dim=-1)
    weights = scores.sub_(lse.unsqueeze(-1)).exp_()
    return torch.matmul(weights.to(v.dtype), v), lse


# The number of likeliest tokens that are sorted first; a nucleus is rarely larger.
_HEAD_SIZE = 1024


def choose(logits: Tensor, rows: ChoiceRows) -> IntArray:
    logits = _masked(logits, rows)
    tokens = rows.targets.copy()
    is_open = tokens < 0
    is_random = is_open & (rows.temperatures > 0)
    is_greedy = is_open & ~is_random
    if is_greedy.any():
        greedy = chosen_rows(logits, is_greedy)
        likeliest = greedy.argmax(dim=-1, keepdim=True)
        tokens[is_greedy] = _checked(likeliest, greedy.gather(1, likeliest)).cpu().numpy()
    if is_random.any():
        tokens[is_random] = sample(
            chosen_rows(logits, is_random),
            temperatures=rows.temperatures[is_random],
            top_ks=rows.top_ks[is_random],
            top_ps=rows.top_ps[is_random],
            min_ps=rows.min_ps[is_random],
            uniforms=rows.uniforms[is_random],
        )
    return tokens


def stage_choice(rows: ChoiceRows, device: torch.device) -> ChoiceRows:
    return rows


def choose_tensor(logits: Tensor, staged: ChoiceRows) -> Tensor:
    return torch.from_numpy(choose(logits, staged)).to(logits.device)


def _checked(tokens: Tensor, highest: Tensor) -> Tensor:
    """Replaces the tokens of rows without a valid choice. ``tokens`` [S, 1], and ``highest`` [S, 1]: the
    highest logit of each row, NaN if one is. Returns [S]."""
    tokens = torch.where(highest == -math.inf, NO_TOKEN, tokens)
    return torch.where(highest < math.inf, tokens, NOT_FINITE).squeeze(1)


def _masked(logits: Tensor, rows: ChoiceRows) -> Tensor:
    """Returns the logits with -inf for tokens that a mask excludes; a copy if there is a mask."""
    if rows.masked_rows is None or rows.mask_words is None:
        return logits
    bits = np.unpackbits(rows.mask_words.view(np.uint8), axis=1, count=logits.shape[1], bitorder="little")
    allowed = torch.from_numpy(bits.view(np.bool_)).to(logits.device)
    if len(rows.masked_rows) == len(logits):
        return torch.where(allowed, logits, -torch.inf)
    places = torch.from_numpy(rows.masked_rows).to(logits.device)
    return logits.index_copy(0, places, torch.where(allowed, logits.index_select(0, places), -torch.inf))


def sample(
    logits: Tensor,
    *,
    temperatures: FloatArray,
    top_ks: IntArray,
    top_ps: FloatArray,
    min_ps: FloatArray,
    uniforms: NDArray[np.float64],
) -> IntArray:
    """Draws one token per row, with the filters of ``Kernels.choose`` in the same order.

    Args:
        logits: [S, vocabulary].
        temperatures: [S], above 0.
        top_ks: [S]; 0 keeps all tokens.
        top_ps: [S].
        min_ps: [S].
        uniforms: [S], random numbers in [0, 1).
    """
    device = logits.device
    # Relative to the largest logit, so that even the smallest temperature does not overflow.
    highest = logits.amax(dim=-1, keepdim=True)
    weights = whole_weights(logits - highest, _column(scale_factors(temperatures), device))
    filtered = (top_ks > 0) & (top_ks < logits.shape[1]) | (top_ps < 1) | (min_ps > 0)
    if filtered.any():
        least = np.zeros(len(filtered), dtype=np.float32)
        least[filtered] = _least_weights(
            chosen_rows(weights, filtered), top_ks[filtered], top_ps[filtered], min_ps[filtered]
        )
        weights = torch.where(weights >= _column(least, device), weights, 0.0)
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)  # exact
    total = cumulative[:, -1:]
    # Rounding must not move the drawn point to the total, which is past the last token.
    below_total = torch.nextafter(total, torch.zeros_like(total))
    drawn = torch.minimum(_column(uniforms, device) * total, below_total)
    tokens: IntArray = _checked(torch.searchsorted(cumulative, drawn, right=True), highest).cpu().numpy()
    return tokens


WEIGHT_BITS = 35
"""The likeliest token has the weight 2 to this power."""
EXP2 = (1.3264726e-3, 9.671513e-3, 5.5507336e-2, 2.4022242e-1, 6.93147e-1, 1.0)
"""The coefficients of a polynomial for 2^x on [-1/2, 1/2], highest power first, as float32. Its relative
error is below 2e-7."""
LOG2_E = 1.4426950408889634
LEAST_EXPONENT = -64.0
"""Weights below 2 to this power, relative to the likeliest token, are 0."""


def scale_factors(temperatures: FloatArray) -> FloatArray:
    """Returns log2(e) / temperature, at most the largest float32."""
    factors = np.minimum(LOG2_E / temperatures.astype(np.float64), np.finfo(np.float32).max)
    return factors.astype(np.float32)


def whole_weights(logits: Tensor, factors: Tensor) -> Tensor:
    """Returns the weights of tokens as ``Kernels.choose`` defines them: integers, as float32.

    Sums of at most 2^18 of them are exact in float64 and in int64, in any order, and each operation here is
    rounded separately. So all implementations compute the same weights, and choose the same tokens.

    Args:
        logits: [S, vocabulary], relative to the highest of the row; overwritten.
        factors: [S, 1], from ``scale_factors``.
    """
    exponents = logits.mul_(factors).clamp_(min=LEAST_EXPONENT)
    whole = (exponents + 0.5).floor_()
    rest = exponents.sub_(whole)
    power = torch.full_like(rest, EXP2[0])
    for coefficient in EXP2[1:]:
        power.mul_(rest).add_(coefficient)
    power.view(torch.int32).add_((whole.int() + WEIGHT_BITS) << 23)  # times 2^(whole + WEIGHT_BITS)
    return power.floor_()


def _least_weights(weights: Tensor, top_ks: IntArray, top_ps: FloatArray, min_ps: FloatArray) -> FloatArray:
    """Returns the smallest weight to keep, per row. ``weights``: from ``whole_weights``."""
    vocab_size = weights.shape[1]
    top_ks = np.where(top_ks > 0, np.minimum(top_ks, vocab_size), vocab_size)
    limited = top_ks < vocab_size
    head_size = min(vocab_size, max(_HEAD_SIZE, int(top_ks[limited].max(initial=0))))
    least = torch.from_numpy(min_ps * np.float32(2**WEIGHT_BITS)).to(weights.device)
    if not limited.any() and not (top_ps < 1).any():
        return to_host(least)
    head = weights.topk(head_size, dim=-1).values
    if limited.any():
        kth = head.gather(1, _column(np.minimum(top_ks, head_size) - 1, weights.device)).squeeze(1)
        kth = torch.where(torch.from_numpy(limited).to(weights.device), kth, 0.0)
        least = torch.maximum(least, kth)
        weights = torch.where(weights >= kth.unsqueeze(1), weights, 0.0)
    if (top_ps < 1).any():
        least = torch.maximum(least, _least_of_nucleus(weights, head, _column(top_ps, weights.device)))
    return to_host(least)


def _least_of_nucleus(weights: Tensor, head: Tensor, top_ps: Tensor) -> Tensor:
    """Returns per row the least weight in the smallest set of likeliest tokens that reaches ``top_ps``; 0
    where that is 1. Rows that need more weights than ``head`` has sort again.

    Args:
        weights: of all tokens, [S, vocabulary].
        head: the largest of them, descending.
        top_ps: [S, 1].
    """
    wanted = top_ps.double() * weights.sum(dim=-1, keepdim=True, dtype=torch.float64)
    cumulative = head.cumsum(dim=-1, dtype=torch.float64)
    num_before = (cumulative < wanted).sum(dim=-1, keepdim=True)
    least = head.gather(1, num_before.clamp(max=head.shape[1] - 1))
    least = torch.where(top_ps < 1, least, 0.0).squeeze(1)
    short = ((num_before == head.shape[1]) & (top_ps < 1)).squeeze(1)
    if head.shape[1] < weights.shape[1] and bool(short.any()):
        rest = weights[short]
        longer = rest.topk(min(weights.shape[1], 8 * head.shape[1]), dim=-1).values
        least[short] = _least_of_nucleus(rest, longer, top_ps[short])
    return least


def chosen_rows(x: Tensor, chosen: NDArray[np.bool_]) -> Tensor:
    """Returns the marked rows of a tensor, or the tensor itself if all are marked."""
    return x if chosen.all() else x[torch.from_numpy(chosen).to(x.device)]


def _column(values: NDArray[np.generic], device: torch.device) -> Tensor:
    return torch.from_numpy(values).to(device).unsqueeze(1)


def to_host(x: Tensor) -> FloatArray:
    """Copies a tensor to an array."""
    values: FloatArray = x.cpu().numpy()
    return values
