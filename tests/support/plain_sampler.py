"""The reference model of the sampler: one token at a time, each step as ``SamplingParams`` describes it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from agentflow.protocol.sampling import SamplingParams

MASK = 2**64 - 1


def plain_uniform(seed: int, position: int) -> float:
    def mix(x: int) -> int:
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
        return x ^ (x >> 31)

    golden = 0x9E3779B97F4A7C15
    return (mix((mix((seed + golden) & MASK) + position * golden) & MASK) >> 11) / 2**53


def plain_choice(
    logits: list[float],
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int,
    position: int,
) -> int:
    """One row, one token, as the docstring of ``sample`` defines it."""
    highest = max(logits)
    if temperature == 0:
        return logits.index(highest)
    weights = [math.exp((logit - highest) / temperature) for logit in logits]
    if 0 < top_k < len(weights):
        kth = sorted(weights, reverse=True)[top_k - 1]
        weights = [w if w >= kth else 0.0 for w in weights]
    if top_p < 1:
        wanted, reached = top_p * sum(weights), 0.0
        for last in sorted(weights, reverse=True):
            reached += last
            if reached >= wanted:
                break
        weights = [w if w >= last else 0.0 for w in weights]
    weights = [w if w >= min_p else 0.0 for w in weights]
    drawn, reached = plain_uniform(seed, position) * sum(weights), 0.0
    for token, weight in enumerate(weights):
        reached += weight
        if reached > drawn:
            return token
    raise AssertionError("the drawn point lies behind the last token")


def plain_edits(
    logits: NDArray[np.float32],
    params: SamplingParams,
    prompt: Sequence[int],
    generated: Sequence[int],
    forbidden: Collection[int],
) -> NDArray[np.float32]:
    """Penalties, biases and forbidden tokens, one token after the other, in float32."""
    edited = logits.copy()
    biases, counts = dict(params.logit_bias), Counter(generated)
    repetition = np.float32(params.repetition_penalty)
    for token in {*prompt, *generated, *biases}:
        logit, count = edited[token], counts[token]
        if token in prompt or count:
            logit = logit / repetition if logit > 0 else logit * repetition
        logit -= np.float32(params.frequency_penalty) * np.float32(count)
        if count:
            logit -= np.float32(params.presence_penalty)
        if token in biases:
            logit += np.float32(biases[token])
        edited[token] = logit
    edited[[token for token in forbidden if token < len(edited)]] = -np.inf
    return edited


def plain_token_of(
    logits: NDArray[np.float32],
    params: SamplingParams,
    prompt: Sequence[int],
    generated: Sequence[int],
    *,
    forbidden: Collection[int] = (),
    seed: int = 0,
    num_redrawn: int = 0,
) -> int:
    """The whole pipeline: the token that follows prompt and output. ``num_redrawn``: how often a grammar
    replaced sampled tokens of the output."""
    return plain_choice(
        plain_edits(logits, params, prompt, generated, forbidden).astype(float).tolist(),
        float(np.float32(params.temperature)),
        params.top_k,
        float(np.float32(params.top_p)),
        float(np.float32(params.min_p)),
        (seed + num_redrawn * 0x9FB21C651E98DF25) & MASK,
        len(prompt) + len(generated),
    )
