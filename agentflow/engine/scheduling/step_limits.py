"""How large a step may be: how long steps take, learned from past ones (``StepCost``), and how many tokens of
prompts fit into one that is being planned (``Draft``).

The duration of a step is modelled as a weighted sum: a constant (the weights are read once), scheduled
tokens, rows of logits, tokens of KV that are read, and pairs of query and key within chunks of prompts. The
coefficients are the non-negative least-squares fit to recent steps, in relative terms. Steps with and without
prompts are averaged separately, so that a long stretch of decoding does not erase the cost of prompts.

In relative terms, a step that was stalled hardly counts, but one that seems far too short would count more
than all others: if the host was stalled while two steps were in flight, the first one seems to have taken all
of the time, and the second one none. So a step that is more than ``MOST_FASTER`` times as fast as expected
counts less, the shorter it seems.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from agentflow.engine.batch import Batch
from agentflow.engine.request import Request, Work
from agentflow.engine.scheduling.media_work import MediaWork

logger = logging.getLogger(__name__)

StepFeatures = NDArray[np.float64]

MEMORY_STEPS = 100
"""The weight of a step in the fit halves about every 70 later steps of its kind."""
FIT_EVERY = 8
MOST_FASTER = 4
NUM_FEATURES = 5
RIDGE = np.array([1e-9, 1e-9, 1e-6, 1e-6, 1e-6])
MAX_STRETCH = 2.75
"""Limit on the duration of a step that decodes for latency, relative to the same step without prompts."""
MIN_STEP_S = 0.005
"""A step may always take this long: the short steps of fast devices need no limit."""
PROMPT_STEP_S = 0.09
"""Time that the prompts of a step may take, because a new request waits until the step ends."""
LONE_PROMPT_STEP_S = 0.2
"""The time of a step's prompts if there is only one request, which larger chunks serve faster."""
CHUNKS_PER_STEP = 8
MIN_CHUNK = 16
"""A chunk is an eighth of the tokens that prompts have in a step, but at least this many."""


def batch_features(batch: Batch) -> StepFeatures:
    """The five amounts that the coefficients multiply, in the module's order."""
    chunks, ends = batch.query_lens[batch.num_decode :], batch.kv_lens[batch.num_decode :]
    pairs = float((chunks * (ends - chunks / 2)).sum()) if len(chunks) else 0.0
    return np.array([1.0, len(batch.token_ids), len(batch.sampled.rows), float(batch.kv_lens.sum()), pairs])


class StepCost:
    """Durations of steps in seconds. All are zero until a step was observed.

    Observed steps are added to the fit later: when a duration is asked for, or by ``settle``, which an engine
    calls while the next step runs.
    """

    def __init__(self) -> None:
        self._observed: list[tuple[Callable[[], StepFeatures], float]] = []  # not yet added to the fit
        self._base_s = self._token_s = self._logits_s = self._read_s = self._pair_s = 0.0
        self._found = np.zeros(NUM_FEATURES)  # the same
        # Normal equations of steps without and with chunks.
        self._matrices = [np.zeros((NUM_FEATURES, NUM_FEATURES)) for _ in range(2)]
        self._targets = [np.zeros(NUM_FEATURES) for _ in range(2)]
        self._scale = np.zeros(NUM_FEATURES)
        self._num_observed = self._num_failed = 0
        self.is_known = False
        """Whether any step was observed."""

    def decode_s(self, num_tokens: int, num_sampled: int, num_read: int) -> float:
        """A step without chunks: scheduled tokens, rows of logits, and tokens of KV that are read."""
        self.settle()
        return (
            self._base_s + self._token_s * num_tokens + self._logits_s * num_sampled + self._read_s * num_read
        )

    def row_s(self, num_read: int) -> float:
        """Seconds that one more request adds to a step that decodes."""
        self.settle()
        return self._token_s + self._logits_s + self._read_s * num_read

    def chunk_s(self, num_tokens: int, context: int, *, is_first: bool) -> float:
        """Seconds that a chunk of a prompt adds to a step, after ``context`` earlier tokens. ``is_first``:
        the step's first chunk of this request, which also reads its context."""
        self.settle()
        pairs = num_tokens * (context + num_tokens / 2)
        read_s = self._read_s * context if is_first else 0.0
        return self._token_s * num_tokens + self._pair_s * pairs + read_s

    def tokens_within(self, seconds: float, context: int, *, is_first: bool) -> int:
        """The largest chunk that takes at most ``seconds``, by ``chunk_s``; 2**31 if unlimited."""
        if seconds == math.inf:
            return 2**31
        self.settle()
        seconds -= self._read_s * context if is_first else 0.0
        if seconds <= 0:
            return 0
        linear, quadratic = self._token_s + self._pair_s * context, self._pair_s / 2
        # The positive root of quadratic * n**2 + linear * n = seconds, in the form without cancellation.
        divisor = linear + math.sqrt(linear * linear + 4 * quadratic * seconds)
        return int(min(2 * seconds / divisor, 2**31)) if divisor > 0 else 2**31

    def observe(self, features: Callable[[], StepFeatures], took_s: float) -> None:
        """Learns from a step with these features and duration."""
        self._observed.append((features, took_s))
        self.is_known = True
        if len(self._observed) >= FIT_EVERY:
            self.settle()

    def settle(self) -> None:
        """Adds the observed steps to the fit."""
        observed, self._observed = self._observed, []
        for features, took_s in observed:
            try:
                self._add(features(), took_s)
            except Exception:  # a step that teaches nothing is no fault of its requests
                self._num_failed += 1
                if self._num_failed.bit_count() == 1:  # log at 1, 2, 4, …: it may happen in every step
                    logger.exception("cannot learn from the time of a step (%d so far)", self._num_failed)

    def _add(self, features: StepFeatures, took_s: float) -> None:
        kind = 1 if features[4] > 0 else 0
        expected_s = float(features @ self._found)
        part = 1.0 if expected_s <= MOST_FASTER * took_s else (MOST_FASTER * took_s / expected_s) ** 1.5
        relative = features / took_s * part
        keep = 1 - 1 / MEMORY_STEPS
        matrix, target = self._matrices[kind], self._targets[kind]
        matrix *= keep
        matrix += relative[:, None] * relative
        target *= keep
        target += relative * part
        np.maximum(self._scale, relative, out=self._scale)
        self._num_observed += 1
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
        self._found = found


def _fit_nonnegative(matrix: StepFeatures, target: StepFeatures) -> StepFeatures:
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


@dataclass(slots=True)
class Draft:
    """A step being planned."""

    limit: int  # the most tokens of all requests together
    tokens: dict[Request, int] = field(default_factory=dict)  # scheduled tokens and nodes, by request
    num_tokens: int = 0  # scheduled tokens of all requests
    num_decode: int = 0  # the part of them that ``_decode`` scheduled
    spare_s: float = math.inf  # seconds that prompts may still add
    bound_s: float = math.inf  # the longest time of the step that requests allow

    @classmethod
    def of(cls, work: Sequence[Work]) -> Draft:
        """A step with this work only."""
        draft = cls(limit=0)
        for request, num_tokens in work:
            draft.add(request, num_tokens)
        return draft

    @property
    def num_free(self) -> int:
        """Tokens that still fit."""
        return self.limit - self.num_tokens

    def add(self, request: Request, num_tokens: int) -> None:
        """Schedules ``num_tokens`` more tokens of the request."""
        self.tokens[request] = self.tokens.get(request, 0) + num_tokens
        self.num_tokens += num_tokens

    def chunk_size(
        self, request: Request, most: int, available: int, cost: StepCost, media: MediaWork | None
    ) -> int:
        """How many tokens of the request's prompt the step has room, slots and time for. Subtracts their time
        from ``spare_s``. A step always gets some tokens of one prompt, however short the time.

        Args:
            request: The request.
            most: The most tokens.
            available: The slots that are left.
            cost: The durations of steps.
            media: The encodings of images, if there are any.
        """
        num_tokens = min(most, self.num_free, available)
        given = self.tokens.get(request, 0)
        context, is_first = request.num_computed + given, not given
        if request.media.runs:
            num_tokens = self._whole_runs(request, context, num_tokens, media)
            if num_tokens > available:
                return 0
        needed_s = cost.chunk_s(num_tokens, context, is_first=is_first)
        if needed_s > self.spare_s:
            affordable = cost.tokens_within(self.spare_s, context, is_first=is_first)
            has_others = self.num_tokens > self.num_decode or (media is not None and media.planned)
            least = 0 if has_others else min(num_tokens, MIN_CHUNK)
            num_tokens = min(affordable, num_tokens) if affordable >= MIN_CHUNK else least
            if request.media.runs:
                num_tokens = self._whole_runs(request, context, num_tokens, media)
                num_tokens = num_tokens if num_tokens <= available else 0
            needed_s = cost.chunk_s(num_tokens, context, is_first=is_first)
        self.spare_s -= needed_s
        return num_tokens

    def count_slices(self, identity: str, media: MediaWork) -> int:
        """How many slices of an encoding that has begun the step has time for, at most for about the time of
        a chunk. Subtracts their time from ``spare_s``. A step that only decodes always gets
        one."""
        num_left, slice_s = media.num_left(identity), media.slice_s(identity)
        least = 0 if self.num_tokens > self.num_decode or media.planned else 1
        if slice_s is None:  # the first slice shows its duration
            return min(num_left, least)
        spare_s = PROMPT_STEP_S if self.spare_s == math.inf else self.spare_s
        num_now = int(spare_s / CHUNKS_PER_STEP / slice_s) or int(spare_s >= slice_s)
        count = min(num_left, max(least, num_now))
        self.spare_s = spare_s - count * slice_s
        return count

    def _whole_runs(self, request: Request, start: int, num_tokens: int, media: MediaWork | None) -> int:
        """A number of tokens near ``num_tokens`` with which no run that attends both ways is divided, and no
        run without features begins. The step's first chunk may be a whole run that is longer; others wait for
        a step in which there is room."""
        if not num_tokens or start >= request.num_prompt:
            return num_tokens
        run = None if media is None else media.first_missing(request, start)
        if run is not None:
            num_tokens = min(num_tokens, run.start - start)
        num_whole = request.media.whole_end(start, start + num_tokens) - start
        if num_whole > max(num_tokens, self.num_free) and self.num_tokens > self.num_decode:
            return 0
        return num_whole
