"""How large a step may be, learned from past steps: how many prompt tokens fit into a given time
(``StepCost``), and how many tokens into memory (``PassSize``).

The duration of a step is modelled as a weighted sum: a constant (the weights are read once), scheduled
tokens, rows of logits, tokens of KV that are read, and pairs of query and key within chunks of prompts. The
coefficients are the non-negative least-squares fit to recent steps, in relative terms. Steps with and without
prompts are averaged separately, so that a long stretch of decoding does not erase the cost of prompts.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from agentflow.engine.batch import Batch

Features = NDArray[np.float64]

MEMORY_STEPS = 100
"""The weight of a step in the fit halves about every 70 later steps of its kind."""
FIT_EVERY = 8
NUM_FEATURES = 5
RIDGE = np.array([1e-9, 1e-9, 1e-6, 1e-6, 1e-6])
RECOVERY_PASSES = 100
"""After this many passes without a failure, larger ones are tried again: memory may be free by then."""


def batch_features(batch: Batch) -> Features:
    """The five amounts that the coefficients multiply, in the module's order."""
    chunks, ends = batch.query_lens[batch.num_decode :], batch.kv_lens[batch.num_decode :]
    pairs = float((chunks * (ends - chunks / 2)).sum()) if len(chunks) else 0.0
    return np.array([1.0, len(batch.token_ids), len(batch.sampled.rows), float(batch.kv_lens.sum()), pairs])


class StepCost:
    """Durations of steps in seconds. All are zero until a step was observed."""

    def __init__(self) -> None:
        self._base_s = self._token_s = self._logits_s = self._read_s = self._pair_s = 0.0
        # Normal equations of steps without and with chunks.
        self._matrices = [np.zeros((NUM_FEATURES, NUM_FEATURES)) for _ in range(2)]
        self._targets = [np.zeros(NUM_FEATURES) for _ in range(2)]
        self._scale = np.zeros(NUM_FEATURES)
        self._num_observed = 0
        self.is_known = False
        """Whether any step was observed."""

    def decode_s(self, num_tokens: int, num_sampled: int, num_read: int) -> float:
        """A step without chunks: scheduled tokens, rows of logits, and tokens of KV that are read."""
        return (
            self._base_s + self._token_s * num_tokens + self._logits_s * num_sampled + self._read_s * num_read
        )

    def row_s(self, num_read: int) -> float:
        """Seconds that one more request adds to a step that decodes."""
        return self._token_s + self._logits_s + self._read_s * num_read

    def chunk_s(self, num_tokens: int, context: int, *, is_first: bool) -> float:
        """Seconds that a chunk of a prompt adds to a step, after ``context`` earlier tokens. ``is_first``:
        the step's first chunk of this request, which also reads its context."""
        pairs = num_tokens * (context + num_tokens / 2)
        read_s = self._read_s * context if is_first else 0.0
        return self._token_s * num_tokens + self._pair_s * pairs + read_s

    def tokens_within(self, seconds: float, context: int, *, is_first: bool) -> int:
        """The largest chunk that takes at most ``seconds``, by ``chunk_s``; 2**31 if unlimited."""
        if seconds == math.inf:
            return 2**31
        seconds -= self._read_s * context if is_first else 0.0
        if seconds <= 0:
            return 0
        linear, quadratic = self._token_s + self._pair_s * context, self._pair_s / 2
        # The positive root of quadratic * n**2 + linear * n = seconds, in the form without cancellation.
        divisor = linear + math.sqrt(linear * linear + 4 * quadratic * seconds)
        return int(min(2 * seconds / divisor, 2**31)) if divisor > 0 else 2**31

    def observe(self, features: Features, took_s: float) -> None:
        """Learns from a step with these features and duration."""
        kind = 1 if features[4] > 0 else 0
        relative = features / took_s
        keep = 1 - 1 / MEMORY_STEPS
        matrix, target = self._matrices[kind], self._targets[kind]
        matrix *= keep
        matrix += relative[:, None] * relative
        target *= keep
        target += relative
        np.maximum(self._scale, relative, out=self._scale)
        self._num_observed += 1
        self.is_known = True
        if self._num_observed < 4 * FIT_EVERY or self._num_observed % FIT_EVERY == 0:
            self._fit()

    def _fit(self) -> None:
        # The ridge shrinks the coefficient of a feature that never varied to zero, rows before the constant:
        # if all steps had one row, a second one must not seem to cost another step. The constant and tokens
        # share equally: if all steps were full, tokens must not seem to be free. Both errors would last,
        # because steps that disprove them would not be planned.
        ridge = np.diag(RIDGE * (self._scale**2 + 1e-30))
        found = _fit_nonnegative(sum(self._matrices) + ridge, self._targets[0] + self._targets[1])
        self._base_s, self._token_s, self._logits_s, self._read_s, self._pair_s = found.tolist()


def _fit_nonnegative(matrix: Features, target: Features) -> Features:
    """A non-negative solution of the normal equations ``matrix @ x = target``: drops the most negative
    coefficient and solves for the rest again."""
    used = list(range(len(target)))
    found = np.linalg.solve(matrix, target)
    while len(used) > 1 and found.min() < 0:
        del used[int(found.argmin())]
        found = np.linalg.solve(matrix[np.ix_(used, used)], target[used])
    coefficients = np.zeros(len(target))
    coefficients[used] = np.maximum(found, 0)
    return coefficients


class PassSize:
    """How many tokens one forward pass may have.

    A pass that ran out of memory is divided until its parts fit. Later passes are as small, so that they do
    not fail first. A request that does not fit alone says nothing about the others.
    """

    def __init__(self) -> None:
        self.limit: float = math.inf
        self.is_dividing = False
        """Whether parts of a failed batch are left to run."""
        self._limit_before: float = math.inf  # that batch failed
        self._most_failed = 0  # tokens of a pass
        self._num_passes = 0  # since the last failure

    def divide(self, num_tokens: int) -> int:
        """A pass of ``num_tokens`` tokens ran out of memory. Returns the size of its parts."""
        if not self.is_dividing:
            self.is_dividing, self._limit_before = True, self.limit
        self._most_failed = max(self._most_failed, num_tokens)
        self._num_passes = 0
        part = (num_tokens + 1) // 2
        self.limit = part
        return part

    def does_not_fit(self) -> None:
        """A request did not fit alone, however small its part was."""
        if self.is_dividing:
            self.limit, self.is_dividing = self._limit_before, False

    def planned(self) -> None:
        """All parts of the last batch that failed have run."""
        self.is_dividing = False

    def fits(self) -> None:
        """A pass has run while there is a limit."""
        self._num_passes += 1
        if self._num_passes >= RECOVERY_PASSES:
            self._num_passes = 0
            self.limit *= 2
            if self.limit >= self._most_failed:
                self.limit = math.inf
