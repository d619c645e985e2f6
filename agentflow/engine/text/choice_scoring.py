"""How a select compares its choices, given the log-probability of each token of each.

The three methods of SGLang's frontend (Zheng et al., 2024; its ``choices`` module).
"""

from __future__ import annotations

from collections.abc import Sequence


def mean(logprobs: Sequence[float]) -> float:
    """``token_length_normalized``: what a token of the choice has on average."""
    return sum(logprobs) / len(logprobs)


def num_greedy_tokens(ids: Sequence[Sequence[int]], logprobs: Sequence[Sequence[float]]) -> list[int]:
    """``greedy_token_selection``: for how many of its tokens each choice stays in the running, when token by
    token only the choices with the likeliest next token stay. A choice that is over leaves, unless all
    that are left are over."""
    running = list(range(len(ids)))
    counts = [0] * len(ids)
    depth = 0
    while len(running) > 1 and any(len(ids[choice]) > depth for choice in running):
        going_on = [choice for choice in running if len(ids[choice]) > depth]
        likeliest = max(going_on, key=lambda choice: logprobs[choice][depth])
        running = [choice for choice in going_on if ids[choice][depth] == ids[likeliest][depth]]
        depth += 1
        for choice in running:
            counts[choice] = depth
    for choice in running:
        counts[choice] = max(depth, 1)
    return counts


def scores_of(
    method: str,
    ids: Sequence[Sequence[int]],
    logprobs: Sequence[Sequence[float]],
    unconditional: Sequence[Sequence[float]],
) -> list[float]:
    """What the method compares, for each choice; the largest wins, the first of equals. ``unconditional``:
    the same tokens' log-probabilities after nothing, where the method asks for them."""
    if method == "greedy_token_selection":
        counts = num_greedy_tokens(ids, logprobs)
        return [float(count) for count in counts]
    normalised = [mean(values) for values in logprobs]
    if method == "unconditional_likelihood_normalized":
        return [given - mean(alone) for given, alone in zip(normalised, unconditional, strict=True)]
    return normalised
