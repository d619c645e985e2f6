"""Chooses one token for each row of logits, for all rows of a batch together.

A row's choice depends on its logits, its parameters and one number derived from (seed, position), and not on
other rows or earlier draws: a run that is resumed, replayed or batched differently generates the same tokens.
Penalties, biases and forbidden tokens are applied in place to single logits, which are restored afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentflow.engine.batch import BatchOutput, FloatArray, IntArray, LogitEdits, SampledRows, ScoredTokens
from agentflow.kernels.inputs import ChoiceRows
from agentflow.kernels.no_choice import NOT_FINITE
from agentflow.kernels.ops import Kernels
from agentflow.kernels.torch_ops import chosen_rows, to_host
from agentflow.protocol.sampling import MAX_TOP_LOGPROBS

Place = tuple[Tensor, Tensor]
"""The places of logits: their rows and their tokens."""


@contextmanager
def edited(logits: Tensor, edits: LogitEdits) -> Iterator[None]:
    """Applies the edits to ``logits`` [S, vocabulary] inside the context, and restores the old values
    afterwards. Few logits are edited, so keeping their values costs less than a copy."""

    def on_device(values: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(values).to(logits.device)

    penalized = (on_device(edits.penalized_rows), on_device(edits.penalized_ids))
    biased = (on_device(edits.biased_rows), on_device(edits.biased_ids))
    forbidden = (on_device(edits.forbidden_rows), on_device(edits.forbidden_ids))
    places = [place for place in (penalized, biased, forbidden) if len(place[0])]
    # Read all values before changing any: a token may be in several places.
    before = [logits[place] for place in places]
    if len(edits.penalized_rows):
        logits[penalized] = _penalized(
            logits[penalized],
            on_device(edits.penalized_counts),
            on_device(edits.repetitions),
            on_device(edits.frequencies),
            on_device(edits.presences),
        )
    if len(edits.biased_rows):
        logits[biased] += on_device(edits.biases)
    if len(edits.forbidden_rows):
        logits[forbidden] = -math.inf
    try:
        yield
    finally:
        for place, values in zip(places, before, strict=True):
            logits[place] = values


def _penalized(
    values: Tensor, counts: Tensor, repetitions: Tensor, frequencies: Tensor, presences: Tensor
) -> Tensor:
    """Applies the penalties as defined in ``SamplingParams``, each step rounded to float32."""
    values = torch.where(values > 0, values / repetitions, values * repetitions)
    values = values - frequencies * counts
    return values - presences * (counts > 0)


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST_MULTIPLIER = np.uint64(0xBF58476D1CE4E5B9)
_SECOND_MULTIPLIER = np.uint64(0x94D049BB133111EB)


def wants_only_tokens(sampled: SampledRows) -> bool:
    """Whether there are rows, and all of them need only ``Kernels.choose`` on unedited logits."""
    return len(sampled.rows) > 0 and sampled.edits is None and not sampled.needs_logprobs


def choose_tokens(logits: Tensor, sampled: SampledRows, kernels: Kernels) -> BatchOutput:
    """Returns the token of each row; with its log-probability and the likeliest tokens if any row needs them.

    ``logits`` [S, vocabulary] float32: modified and restored. ``sampled.edits`` and then ``sampled.masks``
    are applied before ``Kernels.choose``. A row that is not finite gets ``NOT_FINITE``, even if it has a
    target.
    """
    rows = choice_rows(sampled)
    if sampled.edits is None:
        tokens = kernels.choose(logits, rows)
    else:
        with edited(logits, sampled.edits):
            tokens = kernels.choose(logits, rows)
    if not sampled.needs_logprobs:
        return BatchOutput(tokens, None)
    totals = torch.cat([part.logsumexp(dim=-1) for part in torch.split(logits, _ROWS_AT_ONCE)])
    tokens = np.where(np.isfinite(to_host(totals)), tokens, NOT_FINITE)
    there = torch.from_numpy(tokens.clip(min=0)).to(logits.device)
    own = logits.gather(1, there.unsqueeze(1))
    logprobs = to_host(own.squeeze(1) - totals)
    ranks = _ranks(logits, own) if (sampled.target_ids >= 0).any() else None
    scored = None if sampled.scored is None else _scored(logits, totals, sampled.scored)
    if sampled.top_counts is None:
        return BatchOutput(tokens, logprobs, scored_logprobs=scored, ranks=ranks)
    return BatchOutput(tokens, logprobs, *_top(logits, totals, sampled.top_counts > 0), scored, ranks=ranks)


def embedded(sampled: SampledRows, embeddings: FloatArray) -> BatchOutput:
    """Returns the output of a model that makes embeddings. Rows that are not finite get ``NOT_FINITE``."""
    is_finite = np.isfinite(embeddings).all(axis=1)
    return BatchOutput(np.where(is_finite, sampled.target_ids, NOT_FINITE), None, embeddings=embeddings)


def choice_rows(sampled: SampledRows) -> ChoiceRows:
    """Returns the parameters of the rows, in the form for the kernels."""
    masks = sampled.masks
    is_random = bool((sampled.temperatures > 0).any())
    return ChoiceRows(
        sampled.target_ids,
        sampled.temperatures,
        sampled.top_ks,
        sampled.top_ps,
        sampled.min_ps,
        uniforms(sampled.seeds, sampled.positions) if is_random else np.zeros(len(sampled.rows)),
        None if masks is None else masks.rows,
        None if masks is None else masks.words,
    )


def _scored(logits: Tensor, totals: Tensor, scored: ScoredTokens) -> FloatArray:
    rows = torch.from_numpy(scored.rows).to(logits.device)
    token_ids = torch.from_numpy(scored.token_ids).to(logits.device)
    return to_host(logits[rows, token_ids] - totals[rows])


# The rows of intermediate results that are as large as the logits, or twice as large: torch counts flags in 8
# bytes.
_ROWS_AT_ONCE = 16


def _ranks(logits: Tensor, own: Tensor) -> IntArray:
    """Counts the logits of each row that are at least ``own`` [S, 1]."""
    parts = zip(torch.split(logits, _ROWS_AT_ONCE), torch.split(own, _ROWS_AT_ONCE), strict=True)
    counts: IntArray = torch.cat([(part >= least).sum(dim=1) for part, least in parts]).cpu().numpy()
    return counts


def _top(logits: Tensor, totals: Tensor, chosen: NDArray[np.bool_]) -> tuple[IntArray, FloatArray]:
    """Returns the likeliest tokens of the chosen rows and their log-probabilities; -1 and 0 in the other
    rows. The number of tokens is constant, so that ties do not depend on the requests of other rows."""
    count = min(MAX_TOP_LOGPROBS, logits.shape[1])
    found = chosen_rows(logits, chosen).topk(count, dim=-1)
    ids = np.full((len(chosen), count), -1, dtype=np.int64)
    logprobs = np.zeros((len(chosen), count), dtype=np.float32)
    ids[chosen] = found.indices.cpu().numpy()
    logprobs[chosen] = to_host(found.values - chosen_rows(totals, chosen).unsqueeze(1))
    return ids, logprobs


def uniforms(seeds: NDArray[np.uint64], positions: IntArray) -> NDArray[np.float64]:
    """Returns one number in [0, 1) for each pair of seed and position.

    Two rounds of the mixing function of splitmix64 (Steele, Lea and Flood, OOPSLA 2014), with the seed in the
    first and the position in the second; the number is the upper 53 bits.
    """
    state = _mix(_mix(seeds + _GOLDEN) + positions.astype(np.uint64) * _GOLDEN)
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * _FIRST_MULTIPLIER
    x = (x ^ (x >> np.uint64(27))) * _SECOND_MULTIPLIER
    return x ^ (x >> np.uint64(31))
