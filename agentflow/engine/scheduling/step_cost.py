"""What a step takes, learned from the steps that ran: how many prompt rows fit into a time.

A step's seconds are modelled as a sum over what it does: a constant (the weights are read once), each row's
products, each row of logits, each token of KV that is read, and each pair of a query and a key within a
prompt's chunk. The coefficients are the non-negative least-squares fit, in relative terms, to recent steps;
steps with and without prompts are remembered apart, so that a long stretch of decoding does not erase what
prompts cost.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from agentflow.engine.batch import Batch

Features: TypeAlias = NDArray[np.float64]

MEMORY_STEPS = 100
"""A step's weight in the fit halves about every 70 later steps of its kind."""
FIT_EVERY = 8
NUM_FEATURES = 5


def batch_features(batch: Batch) -> Features:
    """What the coefficients are multiplied with, of a batch: 1, rows, rows of logits, tokens of KV that are
    read, and pairs of query and key in chunks."""
    chunks, ends = batch.query_lens[batch.num_decode :], batch.kv_lens[batch.num_decode :]
    pairs = float((chunks * (ends - chunks / 2)).sum()) if len(chunks) else 0.0
    return np.array([1.0, len(batch.token_ids), len(batch.sampled.rows), float(batch.kv_lens.sum()), pairs])


def fit_nonnegative(matrix: Features, target: Features) -> Features:
    """The non-negative solution of the normal equations ``matrix @ x = target``, by leaving out what would
    be negative and solving for the rest again."""
    used = list(range(len(target)))
    while True:
        found = np.linalg.solve(matrix[np.ix_(used, used)], target[used])
        if (found >= 0).all() or len(used) == 1:
            break
        del used[int(found.argmin())]
    coefficients = np.zeros(len(target))
    coefficients[used] = np.maximum(found, 0)
    return coefficients


class StepCost:
    """Seconds of a step. All are zero until the first step was observed."""

    def __init__(self) -> None:
        self._base_s = self._row_s = self._logits_s = self._read_s = self._pair_s = 0.0
        # Normal equations of steps that only decode, and of those with chunks.
        self._matrices = [np.zeros((NUM_FEATURES, NUM_FEATURES)) for _ in range(2)]
        self._targets = [np.zeros(NUM_FEATURES) for _ in range(2)]
        self._scale = np.zeros(NUM_FEATURES)
        self._num_observed = 0

    @property
    def is_known(self) -> bool:
        """Whether any step was observed."""
        return self._num_observed > 0

    def observe(self, features: Features, took_s: float) -> None:
        """A step with these features took so long."""
        kind = 1 if features[4] > 0 else 0
        relative = features / took_s
        keep = 1 - 1 / MEMORY_STEPS
        self._matrices[kind] = keep * self._matrices[kind] + np.outer(relative, relative)
        self._targets[kind] = keep * self._targets[kind] + relative
        self._scale = np.maximum(self._scale, relative)
        self._num_observed += 1
        if self._num_observed < 4 * FIT_EVERY or self._num_observed % FIT_EVERY == 0:
            self._fit()

    def _fit(self) -> None:
        # What was never varied is shrunk to zero instead of being undefined.
        ridge = 1e-6 * np.diag(self._scale**2 + 1e-30)
        found = fit_nonnegative(sum(self._matrices) + ridge, self._targets[0] + self._targets[1])
        self._base_s, self._row_s, self._logits_s, self._read_s, self._pair_s = found.tolist()

    def decode_s(self, num_rows: int, num_sampled: int, num_read: int) -> float:
        """A step without chunks: rows, rows of logits, and tokens of KV that they read."""
        return self._base_s + self._row_s * num_rows + self._logits_s * num_sampled + self._read_s * num_read

    def chunk_s(self, num_rows: int, context: int, *, is_first: bool) -> float:
        """What a chunk of a prompt adds to a step, after ``context`` tokens of it. ``is_first``: of its
        request in this step, which has its context read."""
        pairs = num_rows * (context + num_rows / 2)
        return self._row_s * num_rows + self._pair_s * pairs + (self._read_s * context if is_first else 0.0)

    def rows_within(self, seconds: float, context: int, *, is_first: bool) -> int:
        """How many rows of a prompt fit into so much time, after ``context`` tokens of it; 2**31 at most."""
        if seconds == math.inf:
            return 2**31
        seconds -= self._read_s * context if is_first else 0.0
        if seconds <= 0:
            return 0
        linear, quadratic = self._row_s + self._pair_s * context, self._pair_s / 2
        if linear <= 0:
            return 2**31
        # The positive root of quadratic * n**2 + linear * n = seconds, in the form without cancellation.
        root = 2 * seconds / (linear + math.sqrt(linear * linear + 4 * quadratic * seconds))
        return int(min(root, 2**31))
