"""What one forward pass computes, and what it returns: the interface between scheduler and model.

A batch is a set of numpy arrays over *scheduled tokens*: the tokens whose keys and values this step computes.
The tokens of one request are adjacent. Requests that decode (one token each) come before those that prefill;
the nodes of token trees come last. Read ``Batch`` first, then ``SampledRows``: the rows of logits that the
pass computes, and how a token is chosen from each.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float32]


@dataclass(slots=True, frozen=True)
class Batch:
    """One forward pass over T scheduled tokens of R requests.

    ``token_ids``, ``positions``, ``write_slots`` [T]: each token, its position in its sequence, and the slot
    of the KV pool that its key and value go to. ``req_to_token`` [any, max_context] int32: the scheduler's
    table of slots, shared and not copied. ``req_rows`` [R]: the row of each request in it, so that
    ``req_to_token[req_rows[r], :kv_lens[r]]`` are the slots of request r by position, those written in this
    step included. ``query_lens`` [R]: scheduled tokens of each request. ``num_decode``: how many requests at
    the front have exactly one. ``trees``: describes tokens after those of the R requests, if there are any.
    ``sampled``: which logits are needed. ``adapters``: None if no token uses one. ``pending``: tokens that
    the batch before this one samples; None if all are known, as always if no other batch is in flight.
    ``media``: None if no request has any.
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
    adapters: BatchAdapters | None = None
    pending: PendingTokens | None = None
    media: BatchMedia | None = None


@dataclass(slots=True, frozen=True)
class PendingTokens:
    """Tokens of a batch that are sampled by the batch launched before it: ``token_ids[places[i]]`` is the
    token of row ``outputs[i]`` of that batch's ``BatchOutput``. Until then ``token_ids`` has any number
    there."""

    places: IntArray
    outputs: IntArray


@dataclass(slots=True, frozen=True)
class BatchMedia:
    """The media of a batch in which a request has any (see ``media_run``).

    ``rope_positions`` [A, T]: the rotary positions of all scheduled tokens; ``Batch.positions`` are their
    places in their sequences. ``identities``: of the media that the batch computes. ``of_tokens`` [T]: the
    index of each token's medium, -1 for text. ``places`` [T]: the token's index in its medium, 0 for text.
    """

    rope_positions: IntArray
    identities: tuple[str, ...]
    of_tokens: IntArray
    places: IntArray


@dataclass(slots=True, frozen=True)
class BatchAdapters:
    """The adapters (LoRA) of a batch, by their identities. ``of_tokens`` [T]: the index of each scheduled
    token's adapter, -1 for none."""

    identities: tuple[str, ...]
    of_tokens: IntArray


@dataclass(slots=True, frozen=True)
class TreeAttention:
    """The last B tokens of a batch, if they are nodes of G token trees below prefixes (tree attention). Each
    attends to its tree's whole prefix, then to the nodes above it, then to itself.

    ``req_rows``, ``prefix_lens``, ``query_lens`` [G]: the row of each tree's request in ``req_to_token``, the
    length of the prefix there (this batch included), and its number of nodes in this batch. ``paths``
    [B, any]: for each node the slots of the nodes above it and its own; the first ``path_lens[b]`` count, and
    the others repeat its own.
    """

    req_rows: IntArray
    prefix_lens: IntArray
    query_lens: IntArray
    paths: IntArray
    path_lens: IntArray


@dataclass(slots=True, frozen=True)
class SampledRows:
    """S rows of logits, and how a token is chosen from each. All arrays have length S.

    ``rows``: the index of the scheduled token that each row of logits follows. ``target_ids``: -1 to sample;
    otherwise nothing is sampled, and the log-probability of this token is wanted. ``positions``: the position
    that the chosen token will have; with ``seeds`` it determines the random number. ``needs_logprobs``:
    whether any row wants the log-probability of its token. ``top_counts``: how many of the likeliest tokens
    each row wants. ``scored``: further tokens to score. ``edits``, ``masks``, ``top_counts`` and ``scored``
    are None if no row has any, as in most batches.
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
        """The rows from ``first`` up to ``end``."""
        chosen = slice(first, end)
        return replace(
            self,
            rows=self.rows[chosen],
            target_ids=self.target_ids[chosen],
            temperatures=self.temperatures[chosen],
            top_ps=self.top_ps[chosen],
            top_ks=self.top_ks[chosen],
            min_ps=self.min_ps[chosen],
            seeds=self.seeds[chosen],
            positions=self.positions[chosen],
            edits=None if self.edits is None else self.edits.part(first, end),
            masks=None if self.masks is None else self.masks.part(first, end),
            top_counts=None if self.top_counts is None else self.top_counts[chosen],
            scored=None if self.scored is None else self.scored.part(first, end),
        )


@dataclass(slots=True, frozen=True)
class LogitEdits:
    """Changes to single logits before the temperature is applied, in the order below. ``*_rows`` are indices
    into the sampled rows; within one of the three lists no (row, token) pair repeats.

    *Penalties*: row ``penalized_rows[i]`` has generated token ``penalized_ids[i]`` ``penalized_counts[i]``
    times (0: it occurs in the prompt only); ``repetitions[i]``, ``frequencies[i]`` and ``presences[i]`` are
    that row's penalties. *Biases*: ``biases[i]`` is added. *Forbidden*: the token cannot be chosen.
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
        """Rows ``first`` to ``end`` (exclusive), renumbered from 0."""
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
    """Tokens allowed by grammars: for sampled row ``rows[i]`` (of M) those set in the bits ``words[i]``
    ([M, any] uint32, see ``grammar.TokenWords``)."""

    rows: IntArray
    words: NDArray[np.uint32]

    def part(self, first: int, end: int) -> TokenMasks | None:
        """Rows ``first`` to ``end`` (exclusive), renumbered from 0."""
        chosen = (self.rows >= first) & (self.rows < end)
        return TokenMasks(self.rows[chosen] - first, self.words[chosen]) if chosen.any() else None


@dataclass(slots=True, frozen=True)
class ScoredTokens:
    """Tokens to score, any number for one row: ``token_ids[i]`` under the logits of sampled row ``rows[i]``.
    ``rows`` ascend."""

    rows: IntArray
    token_ids: IntArray

    def part(self, first: int, end: int) -> ScoredTokens:
        """Rows ``first`` to ``end`` (exclusive), renumbered from 0."""
        low, high = np.searchsorted(self.rows, (first, end)).tolist()
        return ScoredTokens(self.rows[low:high] - first, self.token_ids[low:high])


@dataclass(slots=True, frozen=True)
class BatchOutput:
    """For each sampled row a token and the values requested with it.

    ``token_ids`` [S]: the sampled token, or the row's target; of a row that has none, a number below 0
    (``kernels.no_choice``). ``logprobs`` [S]: its log-probability under the
    unmodified logits (None if not needed). ``top_ids``, ``top_logprobs`` [S, any]: the likeliest tokens under
    the same logits, likeliest first, at least ``top_counts`` of them (None if not needed).
    ``scored_logprobs``: one for each of ``SampledRows.scored``. ``embeddings`` [S, any]: of a runner that
    makes embeddings, which has nothing else. ``ranks`` [S]: how many tokens are at least as likely as the
    row's token, itself included, under the same logits (None if no row has a target, or not needed).
    """

    token_ids: IntArray
    logprobs: FloatArray | None
    top_ids: IntArray | None = None
    top_logprobs: FloatArray | None = None
    scored_logprobs: FloatArray | None = None
    embeddings: FloatArray | None = None
    ranks: IntArray | None = None

    def top_of(self, row: int, count: int) -> list[tuple[int, float]]:
        """The ``count`` likeliest tokens of one sampled row, or all if there are fewer."""
        if self.top_ids is None or self.top_logprobs is None:
            return []
        ids, logprobs = self.top_ids[row, :count].tolist(), self.top_logprobs[row, :count].tolist()
        return list(zip(ids, logprobs, strict=True))
