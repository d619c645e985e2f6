"""Chooses tokens in torch operations, on any device; waits for the device."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentflow.kernels.inputs import ChoiceRows, FloatArray, IntArray
from agentflow.kernels.sampling.no_choice import NO_TOKEN, NOT_FINITE
from agentflow.kernels.sampling.sampler import Sampler
from agentflow.kernels.sampling.token_weights import WEIGHT_BITS, scale_factors, whole_weights

_HEAD_SIZE = 1024
"""The number of likeliest tokens that are sorted first; a nucleus is rarely larger."""


class TorchSampler(Sampler):
    """``Sampler`` in torch operations."""

    def choose(self, logits: Tensor, staged: ChoiceRows) -> Tensor:
        rows, logits = staged, _masked(logits, staged)
        tokens = rows.targets.copy()
        is_open = tokens < 0
        is_random = is_open & (rows.temperatures > 0)
        is_greedy = is_open & ~is_random
        if is_greedy.any():
            greedy = _chosen_rows(logits, is_greedy)
            likeliest = greedy.argmax(dim=-1, keepdim=True)
            tokens[is_greedy] = _checked(likeliest, greedy.gather(1, likeliest)).cpu().numpy()
        if is_random.any():
            tokens[is_random] = sample(
                _chosen_rows(logits, is_random),
                temperatures=rows.temperatures[is_random],
                top_ks=rows.top_ks[is_random],
                top_ps=rows.top_ps[is_random],
                min_ps=rows.min_ps[is_random],
                uniforms=rows.uniforms[is_random],
            )
        return torch.from_numpy(tokens).to(logits.device)


def _checked(tokens: Tensor, highest: Tensor) -> Tensor:
    """Replaces the tokens [S, 1] of rows without a valid token. ``highest`` [S, 1]: the highest logit of each
    row, NaN if a logit is NaN. Returns [S]."""
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
    """Draws one token for each row, as ``Sampler.choose`` defines it.

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
            _chosen_rows(weights, filtered), top_ks[filtered], top_ps[filtered], min_ps[filtered]
        )
        weights = torch.where(weights >= _column(least, device), weights, 0.0)
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)  # exact
    total = cumulative[:, -1:]
    # Rounding must not move the drawn point to the total, which is past the last token.
    below_total = torch.nextafter(total, torch.zeros_like(total))
    drawn = torch.minimum(_column(uniforms, device) * total, below_total)
    tokens: IntArray = _checked(torch.searchsorted(cumulative, drawn, right=True), highest).cpu().numpy()
    return tokens


def _least_weights(weights: Tensor, top_ks: IntArray, top_ps: FloatArray, min_ps: FloatArray) -> FloatArray:
    """Returns the smallest weight to keep in each row. ``weights``: from ``whole_weights``."""
    vocab_size = weights.shape[1]
    top_ks = np.where(top_ks > 0, np.minimum(top_ks, vocab_size), vocab_size)
    limited = top_ks < vocab_size
    head_size = min(vocab_size, max(_HEAD_SIZE, int(top_ks[limited].max(initial=0))))
    least = torch.from_numpy(min_ps * np.float32(2**WEIGHT_BITS)).to(weights.device)
    if not limited.any() and not (top_ps < 1).any():
        return _to_host(least)
    head = weights.topk(head_size, dim=-1).values
    if limited.any():
        kth = head.gather(1, _column(np.minimum(top_ks, head_size) - 1, weights.device)).squeeze(1)
        kth = torch.where(torch.from_numpy(limited).to(weights.device), kth, 0.0)
        least = torch.maximum(least, kth)
        weights = torch.where(weights >= kth.unsqueeze(1), weights, 0.0)
    if (top_ps < 1).any():
        least = torch.maximum(least, _least_of_nucleus(weights, head, _column(top_ps, weights.device)))
    return _to_host(least)


def _least_of_nucleus(weights: Tensor, head: Tensor, top_ps: Tensor) -> Tensor:
    """Returns for each row the least weight in the smallest set of likeliest tokens that reaches its top_p; 0
    if that is 1. Rows that need more weights than ``head`` has are sorted again.

    Args:
        weights: the weights of all tokens, [S, vocabulary].
        head: the largest weights, in descending order.
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


def _chosen_rows(x: Tensor, chosen: NDArray[np.bool_]) -> Tensor:
    """Returns the marked rows of a tensor, or the tensor itself if all are marked."""
    return x if chosen.all() else x[torch.from_numpy(chosen).to(x.device)]


def _column(values: NDArray[np.generic], device: torch.device) -> Tensor:
    return torch.from_numpy(values).to(device).unsqueeze(1)


def _to_host(x: Tensor) -> FloatArray:
    """Copies a tensor to an array."""
    values: FloatArray = x.cpu().numpy()
    return values
