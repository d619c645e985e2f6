"""The kernels in torch operations, for every device: tuned for CPUs, correct on GPUs.

Each kernel uses as few operations as possible: a step of a small model runs thousands of operations that
take a few microseconds each, so their number matters as much as bytes and FLOPs. In order: linear layers,
norms and RoPE, attention by the parts of an ``AttentionPlan``, and the choice of tokens.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentflow.kernels.attention_plan import (
    TILE_ROWS,
    AttentionPlan,
    CausalGroup,
    ContextPart,
    Index,
    ShortGroup,
    SingleGroup,
    rounded_up,
    whole_tiles,
)
from agentflow.kernels.attention_plan import plan_attention as plan_parts
from agentflow.kernels.inputs import (
    AttentionBatch,
    BlockMatrix,
    ChoiceRows,
    DecoderWeights,
    FloatArray,
    IntArray,
    LinearWeight,
    LowRank,
)
from agentflow.kernels.no_choice import NO_TOKEN, NOT_FINITE


@functools.cache
def _packs_float32() -> bool:
    """Whether oneDNN's blocked float32 layout is available (on x86, if torch was built with oneDNN)."""
    return torch._C._has_mkldnn and hasattr(torch.ops.mkldnn, "_linear_pointwise")


@functools.cache
def _multiplies_bfloat16() -> bool:
    """Whether the CPU has bfloat16 matrix products (AVX-512 BF16, AMX). Without them torch falls back to a
    scalar loop, several times slower than float32."""
    return bool(_packs_float32() and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def pack_linear(
    weight: Tensor, bias: Tensor | None, *, exact_output: bool = False, gated: bool = False
) -> LinearWeight:
    shape = (weight.shape[0], weight.shape[1])
    if weight.device.type != "cpu":
        return LinearWeight(weight.t(), None, bias, shape)
    if not _packs_float32():  # these products write the dtype of their operands
        return LinearWeight((weight.float() if exact_output else weight).t(), None, bias, shape)
    if weight.dtype == torch.bfloat16 and _multiplies_bfloat16():
        return LinearWeight(None, _blocked(weight), bias, shape)
    # A product with one row is bound by reading the weight, and the plain weight has half the bytes.
    keeps_plain = weight.dtype != torch.float32 and not exact_output
    return LinearWeight(weight.t() if keeps_plain else None, _blocked(weight.float()), bias, shape)


BLOCK_TYPES = ()


def pack_blocks(parts: Sequence[BlockMatrix], bias: Tensor | None, *, gated: bool = False) -> None:
    return None


def pack_embedding(weight: Tensor, head: LinearWeight | None) -> LinearWeight:
    return LinearWeight(weight.t(), None, None, (weight.shape[0], weight.shape[1]))


def embed(token_ids: Tensor, weight: LinearWeight, dtype: torch.dtype) -> Tensor:
    assert weight.transposed is not None
    return torch.nn.functional.embedding(token_ids, weight.transposed.t()).to(dtype)


def _blocked(weight: Tensor) -> Tensor:
    # The number of rows is only a hint: the layout was measured to serve every number equally well.
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, 16)
    return packed


def linear(x: Tensor, weight: LinearWeight, added: Tensor | None = None) -> Tensor:
    product = _linear(x, weight)
    return product if added is None else product.add_(added)


def low_rank(x: Tensor, num_out: int, changes: Sequence[tuple[LowRank, IntArray]]) -> Tensor:
    added = x.new_zeros(len(x), num_out)
    for change, numbers in changes:
        rows = torch.from_numpy(numbers).to(x.device)
        inner = _linear(x.index_select(0, rows), change.down)
        ranks = [part.up.shape[1] for part in change.parts]
        for part, own in zip(change.parts, torch.split(inner, ranks, dim=1), strict=True):
            outputs = slice(part.first_output, part.first_output + part.up.shape[0])
            added[:, outputs].index_copy_(0, rows, _linear(own.contiguous(), part.up))
    return added


def _linear(x: Tensor, weight: LinearWeight) -> Tensor:
    if weight.packed is None or (x.shape[0] == 1 and weight.transposed is not None):
        return _plain_linear(x, weight)
    if weight.packed.dtype == x.dtype:
        product: Tensor = _linear_pointwise(_padded(x), weight.packed, weight.bias, "none", [], "")
        return product[: x.shape[0]]
    return exact_linear(x, weight).to(x.dtype)


def exact_linear(x: Tensor, weight: LinearWeight) -> Tensor:
    if weight.packed is None:
        return _exact_plain_linear(x, weight)
    if weight.packed.dtype == torch.bfloat16:
        return _two_term_linear(x, weight)
    bias = None if weight.bias is None else weight.bias.float()
    product: Tensor = _linear_pointwise(_padded(x.float()), weight.packed, bias, "none", [], "")
    return product[: x.shape[0]]


def _padded(x: Tensor) -> Tensor:
    """Pads with rows of zeros, so that few sizes occur."""
    num_rows = x.shape[0]
    return x if num_rows <= TILE_ROWS else _with_rows(x, rounded_up(num_rows))


def _with_rows(x: Tensor, num_rows: int) -> Tensor:
    num_missing = num_rows - x.shape[-2]
    return torch.nn.functional.pad(x, (0, 0, 0, num_missing)) if num_missing else x


def _two_term_linear(x: Tensor, weight: LinearWeight) -> Tensor:
    """Computes a product of about 16 bits with kernels that write only bfloat16: the rounded product, plus
    its rounding error. The second pass subtracts the first result from its float32 sums before it rounds
    them. For the default model's head this takes two thirds of the time of a float32 product."""
    padded = _padded(x)
    rounded = _linear_pointwise(padded, weight.packed, weight.bias, "none", [], "")
    lost = _linear_pointwise_binary(padded, rounded, weight.packed, weight.bias, "sub")
    product: Tensor = rounded.float().add_(lost)
    return product[: x.shape[0]]


def _plain_linear(x: Tensor, weight: LinearWeight) -> Tensor:
    assert weight.transposed is not None
    if weight.bias is None:
        return torch.mm(x, weight.transposed)
    return torch.addmm(weight.bias, x, weight.transposed)


def _exact_plain_linear(x: Tensor, weight: LinearWeight) -> Tensor:
    """GPUs accumulate in float32 anyway, and can write the sums unrounded."""
    assert weight.transposed is not None
    if x.is_cuda and x.dtype != torch.float32:
        product = torch.mm(x, weight.transposed, out_dtype=torch.float32)
    else:
        product = torch.mm(x.float(), weight.transposed.float())
    return product if weight.bias is None else product.add_(weight.bias)


@functools.cache
def _eps_tensor(eps: float, device: torch.device) -> Tensor:
    return torch.tensor(eps, dtype=torch.float32, device=device)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    scale = torch.addcmul(_eps_tensor(eps, x.device), norm, norm, value=1 / x.shape[-1]).rsqrt_()
    if x.dtype == torch.float32:
        return torch.mul(wide, scale).mul_(weight)
    return wide.mul_(scale).to(x.dtype).mul_(weight)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = residual.add_(x)
    return rms_norm(total, weight, eps), total


def gated_linear(x: Tensor, weight: LinearWeight, added: Tensor | None = None) -> Tensor:
    gate, up = linear(x, weight, added).chunk(2, dim=-1)
    return torch.nn.functional.silu(gate).mul_(up)


def rope_and_write(qkv: Tensor, cos: Tensor, sin: Tensor, kv_layer: Tensor, write_slots: Tensor) -> Tensor:
    _, _, num_kv_heads, head_dim = kv_layer.shape
    num_heads = qkv.shape[1] - 2 * num_kv_heads
    rotated = qkv[:, : num_heads + num_kv_heads]
    swapped = rotated.roll(head_dim // 2, -1).mul_(sin)
    torch.add(rotated * cos, swapped, out=rotated)
    kv_layer.index_copy_(0, write_slots, qkv[:, num_heads:].view(-1, 2, num_kv_heads, head_dim))
    return qkv[:, :num_heads]


def plan_attention(batch: AttentionBatch, dtype: torch.dtype, device: torch.device) -> AttentionPlan:
    return plan_parts(
        batch.req_to_token,
        batch.req_rows,
        batch.query_lens,
        batch.kv_lens,
        dtype=dtype,
        device=device,
        trees=batch.trees,
    )


def static_plans(
    num_rows: Sequence[int], num_slots: int, num_heads: int, num_kv_heads: int, device: torch.device
) -> None:
    return None


def whole_forward(weights: DecoderWeights, head: LinearWeight) -> None:
    return None


def attention(q: Tensor, kv_layer: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
    parts = [_attend_singles(q, kv_layer, group, scale) for group in plan.singles]
    parts += [_attend_short_chunks(q, kv_layer, group, scale) for group in plan.shorts]
    parts += [_attend_chunks(q, kv_layer, group, scale) for group in plan.causals]
    out = _in_order([part_out for part_out, _ in parts], plan.order)
    if plan.contexts:
        lse = _in_order([part_lse for _, part_lse in parts], plan.order)
        out = out.float()
        for context in plan.contexts:
            _merge_context(out, lse, q, kv_layer, context, scale)
    return out.to(q.dtype).reshape(q.shape[0], -1)


def _in_order(parts: list[Tensor], order: Tensor | None) -> Tensor:
    joined = parts[0] if len(parts) == 1 else torch.cat(parts)
    return joined if order is None else joined.index_select(0, order)


def _take(x: Tensor, index: Index) -> Tensor:
    return x[index] if isinstance(index, slice) else x.index_select(0, index)


def _attend_singles(q: Tensor, kv_layer: Tensor, group: SingleGroup, scale: float) -> tuple[Tensor, Tensor]:
    """Attends from each row to the slots of that row. The query heads that share a KV head take the place of
    flash attention's queries, so that K and V are read once for them. Returns [n, heads, head_dim] and the
    log-sum-exp [n, heads] of the scores."""
    _, _, num_kv_heads, head_dim = kv_layer.shape
    n, queries_per_head = group.num_rows, q.shape[1] // num_kv_heads
    kv = _take(kv_layer, group.slots).view(n, group.num_slots, 2, num_kv_heads, head_dim)
    queries = _take(q, group.rows).view(n, num_kv_heads, queries_per_head, head_dim)
    keys, values = kv[:, :, 0].transpose(1, 2), kv[:, :, 1].transpose(1, 2)
    out, lse = attend(queries, keys, values, group.mask, False, scale)
    return out.reshape(n, -1, head_dim), lse.reshape(n, -1)


def _attend_short_chunks(
    q: Tensor, kv_layer: Tensor, group: ShortGroup, scale: float
) -> tuple[Tensor, Tensor]:
    """Attends from each chunk to the slots of that chunk, under the mask. Flash attention's queries are the
    rows of all heads that share a KV head, head after head. Returns [chunks * rows, heads, head_dim] and the
    log-sum-exp [chunks * rows, heads]."""
    _, _, num_kv_heads, head_dim = kv_layer.shape
    n, length, queries_per_head = group.num_chunks, group.num_rows, q.shape[1] // num_kv_heads
    kv = _take(kv_layer, group.slots).view(n, group.num_slots, 2, num_kv_heads, head_dim)
    queries = _take(q, group.rows).view(n, length, num_kv_heads, queries_per_head, head_dim)
    queries = queries.permute(0, 2, 3, 1, 4).reshape(n, num_kv_heads, -1, head_dim)
    keys, values = kv[:, :, 0].transpose(1, 2), kv[:, :, 1].transpose(1, 2)
    out, lse = attend(queries, keys, values, group.mask_for(queries_per_head), False, scale)
    out = out.reshape(n, -1, length, head_dim).transpose(1, 2)
    lse = lse.reshape(n, -1, length).transpose(1, 2)
    return out.reshape(n * length, -1, head_dim), lse.reshape(n * length, -1)


def _attend_chunks(q: Tensor, kv_layer: Tensor, group: CausalGroup, scale: float) -> tuple[Tensor, Tensor]:
    """Attends from each chunk to the rows of that chunk, causally. Flash attention's batch is the KV heads,
    and its heads are the query heads that share one, with K and V repeated by a stride of 0. Returns [chunks
    * rows, heads, head_dim] and the log-sum-exp [chunks * rows, heads]."""
    _, _, num_kv_heads, head_dim = kv_layer.shape
    n, length = group.num_chunks, group.num_rows
    queries_per_head = q.shape[1] // num_kv_heads
    kv = _take(kv_layer, group.slots).view(n, length, 2, num_kv_heads, head_dim)
    queries = _take(q, group.rows).view(n, length, num_kv_heads, queries_per_head, head_dim)
    queries = queries.permute(0, 2, 3, 1, 4).reshape(-1, queries_per_head, length, head_dim)
    shape = (n * num_kv_heads, queries_per_head, length, head_dim)
    keys = kv[:, :, 0].transpose(1, 2).reshape(-1, 1, length, head_dim).expand(shape)
    values = kv[:, :, 1].transpose(1, 2).reshape(-1, 1, length, head_dim).expand(shape)
    out, lse = attend(queries, keys, values, None, True, scale)
    out = out.view(n, -1, length, head_dim).transpose(1, 2)
    lse = lse.reshape(n, -1, length).transpose(1, 2)
    return out.reshape(n * length, -1, head_dim), lse.reshape(n * length, -1)


def _merge_context(
    out: Tensor, lse: Tensor, q: Tensor, kv_layer: Tensor, part: ContextPart, scale: float
) -> None:
    """Attends to a context part, which its rows see completely, and merges the result into ``out`` and
    ``lse``."""
    _, _, num_kv_heads, head_dim = kv_layer.shape
    n, queries_per_head = part.num_rows, q.shape[1] // num_kv_heads
    num_queries = n * queries_per_head
    kv = _take(kv_layer, part.slots)
    queries = _take(q, part.rows).view(n, num_kv_heads, queries_per_head, head_dim).transpose(0, 1)
    queries = queries.reshape(1, num_kv_heads, num_queries, head_dim)
    queries = _with_rows(queries, whole_tiles(num_queries))
    keys, values = kv[:, 0].transpose(0, 1).unsqueeze(0), kv[:, 1].transpose(0, 1).unsqueeze(0)
    part_out, part_lse = attend(queries, keys, values, part.mask, False, scale)
    part_out, part_lse = part_out[0, :, :num_queries], part_lse[0, :, :num_queries]
    part_out = part_out.reshape(num_kv_heads, n, queries_per_head, head_dim).transpose(0, 1)
    part_out = part_out.reshape(n, -1, head_dim)
    part_lse = part_lse.reshape(num_kv_heads, n, queries_per_head).transpose(0, 1).reshape(n, -1)
    merged_out, merged_lse = _take(out, part.rows), _take(lse, part.rows)
    weight = torch.sigmoid(part_lse - merged_lse).unsqueeze(-1)
    merged_out.lerp_(part_out.float(), weight)
    torch.logaddexp(merged_lse, part_lse, out=merged_lse)
    if not isinstance(part.rows, slice):
        out.index_copy_(0, part.rows, merged_out)
        lse.index_copy_(0, part.rows, merged_lse)


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Computes softmax attention, and the log-sum-exp of its scores for merging.

    Args:
        q: [batch, heads, queries, head_dim].
        k: [batch, heads, keys, head_dim].
        v: [batch, heads, keys, head_dim].
        mask: added to the scores, or None.
        is_causal: query i sees keys 0 to i.
        scale: multiplies the scores.

    Returns:
        [batch, heads, queries, head_dim] and float32 [batch, heads, queries].
    """
    if q.device.type != "cpu":
        return attend_dense(q, k, v, mask, is_causal, scale)
    out, lse = _flash(q, k, v, 0.0, is_causal, attn_mask=mask, scale=scale)
    return out, lse


def attend_dense(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """``attend`` in plain tensor algebra, with all scores in memory as float32. The arguments and results are
    the same."""
    scores = torch.matmul(q, k.transpose(-1, -2)).float() * scale
    if mask is not None:
        scores += mask
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu_(1)
        scores.masked_fill_(hidden, -math.inf)
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
    weights = logits - highest
    weights = weights.div_(_column(temperatures, device)).exp_()
    filtered = (top_ks > 0) & (top_ks < logits.shape[1]) | (top_ps < 1) | (min_ps > 0)
    if filtered.any():
        least = np.zeros(len(filtered), dtype=np.float32)
        least[filtered] = _least_weights(
            chosen_rows(weights, filtered), top_ks[filtered], top_ps[filtered], min_ps[filtered]
        )
        weights = torch.where(weights >= _column(least, device), weights, 0.0)
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    # Rounding must not move the drawn point to the total, which is past the last token.
    below_total = torch.nextafter(total, torch.zeros_like(total))
    drawn = torch.minimum(_column(uniforms, device) * total, below_total)
    tokens: IntArray = _checked(torch.searchsorted(cumulative, drawn, right=True), highest).cpu().numpy()
    return tokens


def _least_weights(weights: Tensor, top_ks: IntArray, top_ps: FloatArray, min_ps: FloatArray) -> FloatArray:
    """Returns the smallest weight to keep, per row. ``weights``: relative to the weight of the likeliest
    token."""
    vocab_size = weights.shape[1]
    top_ks = np.where(top_ks > 0, np.minimum(top_ks, vocab_size), vocab_size)
    limited = top_ks < vocab_size
    head_size = min(vocab_size, max(_HEAD_SIZE, int(top_ks[limited].max(initial=0))))
    least = torch.from_numpy(min_ps).to(weights.device)
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


# Explicit overloads: torch takes longer to choose one by its arguments than some of the kernels run.
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_linear_pointwise: Any = torch.ops.mkldnn._linear_pointwise.default if _packs_float32() else None
_linear_pointwise_binary: Any = torch.ops.mkldnn._linear_pointwise.binary if _packs_float32() else None
