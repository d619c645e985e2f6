"""Penalties, biases and forbidden tokens, applied to single logits of a batch and taken back again."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentflow.engine.batch import LogitEdits

Place = tuple[Tensor, Tensor]
"""Rows and tokens, one pair for each logit."""


@contextmanager
def edited(logits: Tensor, edits: LogitEdits) -> Iterator[None]:
    """Inside, ``logits`` [S, vocabulary] are edited; outside, each has its old value again.

    What is edited is little: to keep those values costs less than a copy of all logits.
    """

    def on_device(values: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(values).to(logits.device)

    penalized = (on_device(edits.penalized_rows), on_device(edits.penalized_ids))
    biased = (on_device(edits.biased_rows), on_device(edits.biased_ids))
    forbidden = (on_device(edits.forbidden_rows), on_device(edits.forbidden_ids))
    places = [place for place in (penalized, biased, forbidden) if len(place[0])]
    # All are read before the first is changed: a token may be in several.
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
    """As the docstring of ``SamplingParams`` says it, each step rounded to float32."""
    values = torch.where(values > 0, values / repetitions, values * repetitions)
    values = values - frequencies * counts
    return values - presences * (counts > 0)
