"""Choosing tokens with torch, on any device: all rows of a batch in one pass."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentflow.kernels.inputs import ChoiceRows, FloatArray, IntArray

_HEAD_SIZE = 1024
"""So many of the likeliest tokens are sorted at first: a nucleus is rarely larger."""


def choose(logits: Tensor, rows: ChoiceRows) -> IntArray:
    logits = _masked(logits, rows)
    tokens = rows.targets.copy()
    is_open = tokens < 0
    is_random = is_open & (rows.temperatures > 0)
    is_greedy = is_open & ~is_random
    if is_greedy.any():
        tokens[is_greedy] = chosen_rows(logits, is_greedy).argmax(dim=-1).cpu().numpy()
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


def _masked(logits: Tensor, rows: ChoiceRows) -> Tensor:
    """The logits, with -inf for what a mask does not allow: a copy where there is one."""
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
    """One token per row of ``logits`` [S, vocabulary], all temperatures above 0.

    In this order: divide by the temperature; keep the ``top_k`` likeliest (0: all); of these the
    fewest likeliest that together reach ``top_p``; of these the ones at least ``min_p`` times as
    likely as the likeliest. Tokens as likely as the last one kept are kept too. Then the inverse of
    the cumulative distribution, in order of token ids, at ``uniforms``.
    """
    device = logits.device
    # Relative to the likeliest first: no temperature, however small, can then overflow.
    weights = logits - logits.amax(dim=-1, keepdim=True)
    weights = weights.div_(_column(temperatures, device)).exp_()
    cuts = (top_ks > 0) & (top_ks < logits.shape[1]) | (top_ps < 1) | (min_ps > 0)
    if cuts.any():
        least = np.zeros(len(cuts), dtype=np.float32)
        least[cuts] = _least_weights(chosen_rows(weights, cuts), top_ks[cuts], top_ps[cuts], min_ps[cuts])
        weights = torch.where(weights >= _column(least, device), weights, 0.0)
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    # Rounding must not carry the drawn point up to the total, behind the last token.
    below_total = torch.nextafter(total, torch.zeros_like(total))
    drawn = torch.minimum(_column(uniforms, device) * total, below_total)
    # A model that gives NaN must not give a token that does not exist: only its own request is lost.
    found = torch.searchsorted(cumulative, drawn, right=True).clamp_(max=logits.shape[1] - 1)
    tokens: IntArray = found.squeeze(1).cpu().numpy()
    return tokens


def _least_weights(weights: Tensor, top_ks: IntArray, top_ps: FloatArray, min_ps: FloatArray) -> FloatArray:
    """The least weight that is kept, per row. ``weights`` are relative to the likeliest token's."""
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
    """The least weight in the smallest set of likeliest tokens that reaches ``top_ps`` [S, 1], per row;
    0 where that is 1. ``head``: the largest weights, descending; rows for which it does not suffice
    sort more."""
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
    """The rows of a tensor that are marked; the tensor itself where all are."""
    return x if chosen.all() else x[torch.from_numpy(chosen).to(x.device)]


def _column(values: NDArray[np.generic], device: torch.device) -> Tensor:
    return torch.from_numpy(values).to(device).unsqueeze(1)


def to_host(x: Tensor) -> FloatArray:
    """A tensor as an array."""
    values: FloatArray = x.cpu().numpy()
    return values
