"""The sampling parameters of the running requests, as arrays indexed by their row in the page table.

A request's parameters are written once, when it begins to run; a step gathers them for the rows that
sample. Most requests are described by one number in each array. Those that edit logits or want the
likeliest tokens told are *special*: what they need besides is made anew for each step, and a step
without any of them does not even look.
"""

from __future__ import annotations

import numpy as np

from agentflow.server.core.batch import FloatArray, IntArray, LogitEdits, SampledRows
from agentflow.server.core.request import Request
from agentflow.server.core.token_counts import TokenCounts

_MASK_64 = 2**64 - 1


class SamplingTable:
    """Parameters of at most ``max_running`` requests, by page row. ``num_scoring`` of them only score;
    ``generates`` says of each row whether its request generates."""

    def __init__(self, max_running: int) -> None:
        self.num_scoring = 0
        self.generates = np.zeros(max_running, dtype=np.bool_)
        self._temperatures = np.zeros(max_running, dtype=np.float32)
        self._top_ps = np.zeros(max_running, dtype=np.float32)
        self._top_ks = np.zeros(max_running, dtype=np.int64)
        self._min_ps = np.zeros(max_running, dtype=np.float32)
        self._seeds = np.zeros(max_running, dtype=np.uint64)
        self._needs_logprobs = np.zeros(max_running, dtype=np.bool_)
        self._special: dict[int, _Special] = {}

    def attach(self, request: Request) -> None:
        """The request runs, in its page row."""
        row, params = request.page_row, request.params
        is_scoring = request.score_from > 0
        self.num_scoring += is_scoring
        self.generates[row] = request.max_new_tokens > 0 and not is_scoring
        self._temperatures[row] = params.temperature
        self._top_ps[row] = params.top_p
        self._top_ks[row] = params.top_k
        self._min_ps[row] = params.min_p
        self._seeds[row] = request.seed & _MASK_64
        self._needs_logprobs[row] = params.wants_logprobs
        if params.has_penalties or params.logit_bias or params.min_tokens or params.top_logprobs:
            self._special[row] = _Special(request)

    def detach(self, request: Request) -> None:
        """It runs no longer, and is about to lose its page row."""
        self.num_scoring -= request.score_from > 0
        self._special.pop(request.page_row, None)

    def sampled_rows(
        self, rows: IntArray, page_rows: IntArray, target_ids: IntArray, positions: IntArray
    ) -> SampledRows:
        """How a token is chosen from each of ``rows``, which belong to ``page_rows``."""
        edits, top_counts = None, None
        if self._special:
            edits, top_counts = self._edits_of(page_rows, target_ids)
        return SampledRows(
            rows=rows,
            target_ids=target_ids,
            temperatures=self._temperatures[page_rows],
            top_ps=self._top_ps[page_rows],
            top_ks=self._top_ks[page_rows],
            min_ps=self._min_ps[page_rows],
            seeds=self._seeds[page_rows],
            positions=positions,
            needs_logprobs=bool(self._needs_logprobs[page_rows].any()) or bool((target_ids >= 0).any()),
            edits=edits,
            top_counts=top_counts,
        )

    def _edits_of(
        self, page_rows: IntArray, target_ids: IntArray
    ) -> tuple[LogitEdits | None, IntArray | None]:
        """The edits of the rows that are sampled, and how many likeliest tokens each wants told."""
        found = [
            (index, self._special[page_row])
            for index, page_row in enumerate(page_rows.tolist())
            if page_row in self._special and target_ids[index] < 0
        ]
        top_counts = np.zeros(len(page_rows), dtype=np.int64)
        for index, special in found:
            top_counts[index] = special.params.top_logprobs
        return _edits(found), top_counts if top_counts.any() else None


class _Special:
    """What a request needs besides the numbers in the table."""

    __slots__ = ("_counts", "_forbidden_ids", "_request", "bias_ids", "biases", "params")

    def __init__(self, request: Request) -> None:
        params = request.params
        self.params = params
        self.bias_ids = np.array([token for token, _ in params.logit_bias], dtype=np.int64)
        self.biases = np.array([bias for _, bias in params.logit_bias], dtype=np.float32)
        self._request = request
        self._forbidden_ids = np.array(request.end_ids, dtype=np.int64)
        self._counts: TokenCounts | None = None
        if params.has_penalties:
            self._counts = TokenCounts(request, with_prompt=params.repetition_penalty != 1)

    def counts(self) -> tuple[IntArray, FloatArray]:
        """The tokens that are penalized now, and how often each was generated."""
        if self._counts is None:
            return _NO_IDS, _NO_NUMBERS
        return self._counts.now()

    def forbidden_ids(self) -> IntArray:
        """What may not be chosen now."""
        request = self._request
        return self._forbidden_ids if request.num_generated < self.params.min_tokens else _NO_IDS


_NO_IDS: IntArray = np.zeros(0, dtype=np.int64)
_NO_NUMBERS: FloatArray = np.zeros(0, dtype=np.float32)


def _edits(found: list[tuple[int, _Special]]) -> LogitEdits | None:
    """All edits of these rows; None where there are none."""
    counted = [special.counts() for _, special in found]
    forbidden = [special.forbidden_ids() for _, special in found]
    num_penalized = [len(ids) for ids, _ in counted]
    num_biased = [len(special.bias_ids) for _, special in found]
    num_forbidden = [len(ids) for ids in forbidden]
    if not any(num_penalized) and not any(num_biased) and not any(num_forbidden):
        return None
    rows = np.array([index for index, _ in found], dtype=np.int64)
    params = [special.params for _, special in found]
    repetitions = np.array([p.repetition_penalty for p in params], dtype=np.float32)
    frequencies = np.array([p.frequency_penalty for p in params], dtype=np.float32)
    presences = np.array([p.presence_penalty for p in params], dtype=np.float32)
    return LogitEdits(
        penalized_rows=np.repeat(rows, num_penalized),
        penalized_ids=np.concatenate([ids for ids, _ in counted]),
        penalized_counts=np.concatenate([counts for _, counts in counted]),
        repetitions=np.repeat(repetitions, num_penalized),
        frequencies=np.repeat(frequencies, num_penalized),
        presences=np.repeat(presences, num_penalized),
        biased_rows=np.repeat(rows, num_biased),
        biased_ids=np.concatenate([special.bias_ids for _, special in found]),
        biases=np.concatenate([special.biases for _, special in found]),
        forbidden_rows=np.repeat(rows, num_forbidden),
        forbidden_ids=np.concatenate(forbidden),
    )
