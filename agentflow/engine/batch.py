"""What one forward pass runs, and what comes out: the seam between the scheduler and the model.

Everything is a numpy array over *rows*. A row is one token that is computed in this step. Requests
stand one after the other; those that decode (one row each) come before those that prefill.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float32]


@dataclass(slots=True, frozen=True)
class LogitEdits:
    """What is done to single logits before the temperature, in this order. ``rows`` are indices into the
    sampled rows, and no token stands twice for one row in one of the three lists.

    *Penalties*: token ``penalized_ids[i]`` of row ``penalized_rows[i]`` was generated
    ``penalized_counts[i]`` times (0: it is in the prompt only), and ``repetitions[i]``,
    ``frequencies[i]`` and ``presences[i]`` are the penalties of that row. *Biases*: ``biases[i]`` is
    added. *Forbidden*: the token cannot be chosen.
    """

    penalized_rows: IntArray
    penalized_ids: IntArray
    penalized_counts: FloatArray
    repetitions: FloatArray
    frequencies: FloatArray
    presences: FloatArray
    biased_rows: IntArray
    biased_ids: IntArray
    biases: FloatArray
    forbidden_rows: IntArray
    forbidden_ids: IntArray

    def part(self, first: int, end: int) -> LogitEdits:
        """Those of the rows from ``first`` up to ``end``, counted from ``first``."""
        penalized = (self.penalized_rows >= first) & (self.penalized_rows < end)
        biased = (self.biased_rows >= first) & (self.biased_rows < end)
        forbidden = (self.forbidden_rows >= first) & (self.forbidden_rows < end)
        return LogitEdits(
            self.penalized_rows[penalized] - first,
            self.penalized_ids[penalized],
            self.penalized_counts[penalized],
            self.repetitions[penalized],
            self.frequencies[penalized],
            self.presences[penalized],
            self.biased_rows[biased] - first,
            self.biased_ids[biased],
            self.biases[biased],
            self.forbidden_rows[forbidden] - first,
            self.forbidden_ids[forbidden],
        )


@dataclass(slots=True, frozen=True)
class TokenMasks:
    """``words`` [M, any] uint32: of each of the sampled rows ``rows`` [M] the only tokens that may be
    chosen, as bits (see ``grammar.TokenWords``)."""

    rows: IntArray
    words: NDArray[np.uint32]

    def part(self, first: int, end: int) -> TokenMasks | None:
        """Those of the rows from ``first`` up to ``end``, counted from ``first``."""
        chosen = (self.rows >= first) & (self.rows < end)
        return TokenMasks(self.rows[chosen] - first, self.words[chosen]) if chosen.any() else None


@dataclass(slots=True, frozen=True)
class ScoredTokens:
    """Tokens whose log-probabilities are wanted, any number after one row: ``token_ids[i]`` after sampled
    row ``rows[i]``. ``rows`` ascend."""

    rows: IntArray
    token_ids: IntArray

    def part(self, first: int, end: int) -> ScoredTokens:
        """Those of the rows from ``first`` up to ``end``, counted from ``first``."""
        low, high = np.searchsorted(self.rows, (first, end)).tolist()
        return ScoredTokens(self.rows[low:high] - first, self.token_ids[low:high])


@dataclass(slots=True, frozen=True)
class TreeAttention:
    """Rows that stand at the end of a batch and are part of no request's sequence: the tokens of trees below
    a prefix. Each sees the whole prefix, then the nodes above it in its tree, then itself.

    ``req_rows``, ``prefix_lens``, ``query_lens`` [G]: of each tree the page table's row and the length of
    its prefix there, this batch's rows included, and how many rows it has here. ``paths`` [B, any]: for each
    row the slots of the nodes above it and its own, of which the first ``path_lens[b]`` count; the
    others repeat its own.
    """

    req_rows: IntArray
    prefix_lens: IntArray
    query_lens: IntArray
    paths: IntArray
    path_lens: IntArray


@dataclass(slots=True, frozen=True)
class SampledRows:
    """The rows whose logits are needed, and how a token is chosen from each. All arrays have length S.

    ``rows``: index into the batch's rows. ``target_ids``: -1 to sample, otherwise the token whose
    log-probability is asked for (nothing is sampled). ``positions``: the position the chosen token
    will have in its sequence; with ``seeds`` it is the counter of the random number.
    ``needs_logprobs``: whether any row wants the log-probability of its token. ``edits``, ``masks`` and
    ``top_counts`` (how many likeliest tokens each row wants told) are None in the many batches where no
    row has any. ``scored`` (None likewise): tokens to score beside the rows' own.
    """

    rows: IntArray
    target_ids: IntArray
    temperatures: FloatArray
    top_ps: FloatArray
    top_ks: IntArray
    min_ps: FloatArray
    seeds: NDArray[np.uint64]
    positions: IntArray
    needs_logprobs: bool
    edits: LogitEdits | None = None
    masks: TokenMasks | None = None
    top_counts: IntArray | None = None
    scored: ScoredTokens | None = None

    def part(self, first: int, end: int) -> SampledRows:
        """The sampled rows from ``first`` up to ``end``."""
        cut = slice(first, end)
        return replace(
            self,
            rows=self.rows[cut],
            target_ids=self.target_ids[cut],
            temperatures=self.temperatures[cut],
            top_ps=self.top_ps[cut],
            top_ks=self.top_ks[cut],
            min_ps=self.min_ps[cut],
            seeds=self.seeds[cut],
            positions=self.positions[cut],
            edits=None if self.edits is None else self.edits.part(first, end),
            masks=None if self.masks is None else self.masks.part(first, end),
            top_counts=None if self.top_counts is None else self.top_counts[cut],
            scored=None if self.scored is None else self.scored.part(first, end),
        )


@dataclass(slots=True, frozen=True)
class Batch:
    """One forward pass over T rows of R requests.

    ``token_ids``, ``positions``, ``write_slots`` [T]: what each row is, where it stands in its
    sequence, and the slot its key and value go to. ``req_to_token`` [any, max_context] int32 is the
    scheduler's own table, shared and not copied; ``req_rows`` [R] says which of its rows belongs
    to which request: ``req_to_token[req_rows[r], :kv_lens[r]]`` are the slots of request r in order
    of position, those written in this step included. ``query_lens`` [R]: rows of each request.
    ``num_decode``: so many requests at the front have one row each. ``trees``: of the last rows of
    the batch, which are counted in none of these; None where there are none.
    """

    token_ids: IntArray
    positions: IntArray
    write_slots: IntArray
    req_to_token: NDArray[np.int32]
    req_rows: IntArray
    query_lens: IntArray
    kv_lens: IntArray
    num_decode: int
    sampled: SampledRows
    trees: TreeAttention | None = None


@dataclass(slots=True, frozen=True)
class BatchOutput:
    """One token per sampled row: ``token_ids`` [S] (the target where one was asked for), and
    ``logprobs`` [S], its log-probability under the unmodified logits (None where nobody asked).
    ``top_ids`` and ``top_logprobs`` [S, any]: each row's likeliest tokens under the same logits, likeliest
    first, at least as many as its ``top_counts`` (None where nobody asked). ``scored_logprobs``: of
    ``SampledRows.scored``, in that order."""

    token_ids: IntArray
    logprobs: FloatArray | None
    top_ids: IntArray | None = None
    top_logprobs: FloatArray | None = None
    scored_logprobs: FloatArray | None = None

    def top_of(self, row: int, count: int) -> list[tuple[int, float]]:
        """The ``count`` likeliest tokens of one sampled row, or as many as were found."""
        if self.top_ids is None or self.top_logprobs is None:
            return []
        ids, logprobs = self.top_ids[row, :count].tolist(), self.top_logprobs[row, :count].tolist()
        return list(zip(ids, logprobs, strict=True))
