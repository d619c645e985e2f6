"""The input of one forward pass and its output: the interface between scheduler and model.

A batch is a set of numpy arrays over *scheduled tokens*: the tokens whose keys and values this step computes.
The tokens of one request are adjacent. Requests that decode (one token each) come before requests that
prefill; the nodes of token trees come last. Read ``Batch`` first, then ``SampledRows``: the rows of logits
that the pass computes, and how a token is chosen from each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from agentflow.engine.cache.prefix_readers import SharedPrefix

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float32]


@dataclass(slots=True, frozen=True)
class Batch:
    """One forward pass over T scheduled tokens of R requests.

    ``req_to_token[req_rows[r], :kv_lens[r]]`` are the slots of request r by position, including the slots
    written in this step.
    """

    token_ids: IntArray  # [T]
    positions: IntArray  # [T] of each token in its sequence
    write_slots: IntArray  # [T] the slots of the KV pool for their keys and values
    req_to_token: NDArray[np.int32]  # [any, any] the scheduler's table of slots, shared, not copied
    req_rows: IntArray  # [R] the row of each request in the table
    query_lens: IntArray  # [R] scheduled tokens of each request
    kv_lens: IntArray  # [R] tokens of each request with KV, including this step's
    num_decode: int  # requests at the front that have exactly one scheduled token
    sampled: SampledRows  # which logits are needed
    trees: TreeAttention | None = None  # of tree nodes, the last tokens; None if there are none
    adapters: BatchAdapters | None = None  # None if no token uses one
    pending: PendingTokens | None = None  # tokens that the previous batch samples; None if all are known
    media: BatchMedia | None = None  # None if no request has any
    # The prefixes that rows of the table share: columns from 0, and rows. Other rows may be among them.
    shared: Sequence[SharedPrefix] = ()
    changes: SlotChanges | None = None  # of the table since the previous batch; None if they are unknown


NO_CHANGES = -1
"""``SlotChanges.before`` of a table's first changes."""


@dataclass(slots=True, frozen=True)
class SlotChanges:
    """The places of ``req_to_token`` written since the previous batch, including this batch's tokens. A place
    may occur twice, with the same slot."""

    number: int  # unique, also among the changes of other tables
    before: int  # the number of the changes before these; ``NO_CHANGES`` if there are none
    rows: IntArray  # [C]
    columns: IntArray  # [C]
    slots: NDArray[np.int32]  # [C]


@dataclass(slots=True, frozen=True)
class PendingTokens:
    """Tokens of a batch that are sampled by the previous batch."""

    inputs: IntArray  # their indices in ``Batch.token_ids``, whose values there are placeholders
    outputs: IntArray  # their rows in the earlier batch's ``BatchOutput``


@dataclass(slots=True, frozen=True)
class BatchMedia:
    """The media of a batch in which a request has any (see ``media_run``)."""

    rope_positions: IntArray  # [A, T] of all scheduled tokens; ``Batch.positions`` count tokens of sequences
    identities: tuple[str, ...]  # of the media that the batch computes
    of_tokens: IntArray  # [T] the index of each token's medium; -1 for text
    feature_rows: IntArray  # [T] the row of the token in its medium's features; 0 for text
    # [K, 2]: for each run whose tokens attend to each other, its first scheduled token and the one after its
    # last
    both_ways: IntArray | None = None


@dataclass(slots=True, frozen=True)
class BatchAdapters:
    """The adapters (LoRA) of a batch."""

    identities: tuple[str, ...]
    of_tokens: IntArray  # [T] the index of each scheduled token's adapter; -1 for none


@dataclass(slots=True, frozen=True)
class TreeAttention:
    """The last B tokens of a batch, if they are nodes of G token trees below prefixes (tree attention). Each
    attends to its tree's whole prefix, then to the nodes above it, then to itself."""

    req_rows: IntArray  # [G] the row of each tree's request in ``req_to_token``
    prefix_lens: IntArray  # [G] the length of the prefix there, including this batch
    query_lens: IntArray  # [G] each tree's nodes in this batch
    paths: IntArray  # [B, any] for each node the slots of the nodes above it, then its slot, repeated
    path_lens: IntArray  # [B] how many of these count, without repetitions


@dataclass(slots=True, frozen=True)
class SampledRows:
    """S rows of logits, and how a token is chosen from each."""

    rows: IntArray  # [S] the index of the scheduled token that each row of logits follows
    target_ids: IntArray  # [S] -1: sample; otherwise only the log-probability of this token is wanted
    temperatures: FloatArray  # [S]
    top_ps: FloatArray  # [S]
    top_ks: IntArray  # [S]
    min_ps: FloatArray  # [S]
    seeds: NDArray[np.uint64]  # [S]
    positions: IntArray  # [S] the position of the chosen token; with the seed it determines the random number
    needs_logprobs: bool  # whether any row wants the log-probability of its token
    # None if no row has any, as in most batches:
    edits: LogitEdits | None = None
    masks: TokenMasks | None = None
    top_counts: IntArray | None = None  # [S] how many of the likeliest tokens each row wants
    scored: ScoredTokens | None = None  # further tokens to score

    def fill_masks(self) -> None:
        """Computes the masks, if there are any."""
        if self.masks is not None:
            self.masks.fill()

    def slice(self, first: int, end: int) -> SampledRows:
        """Rows ``first`` to ``end`` (exclusive)."""
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
            edits=None if self.edits is None else self.edits.slice(first, end),
            masks=None if self.masks is None else self.masks.slice(first, end),
            top_counts=None if self.top_counts is None else self.top_counts[chosen],
            scored=None if self.scored is None else self.scored.slice(first, end),
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

    def slice(self, first: int, end: int) -> LogitEdits:
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


MaskWords = NDArray[np.uint32]
"""[M, any] allowed tokens as bits, a row for each mask (``grammar.TokenWords``)."""


class TokenMasks:
    """Tokens allowed by grammars, for M of the sampled rows.

    The forward pass does not need them, so they are computed when ``words`` is first read, and only once.

    Args:
        rows: [M] indices into the sampled rows.
        words: The masks, or a function that computes them and does not fail.
    """

    __slots__ = ("_words", "rows")

    def __init__(self, rows: IntArray, words: MaskWords | Callable[[], MaskWords]) -> None:
        self.rows = rows
        self._words = words

    @property
    def words(self) -> MaskWords:
        """The masks, in the order of ``rows``."""
        return self.fill()

    def fill(self) -> MaskWords:
        """Computes the masks, unless they are computed already. Returns them."""
        words = self._words if isinstance(self._words, np.ndarray) else self._words()
        self._words = words
        return words

    def slice(self, first: int, end: int) -> TokenMasks | None:
        """Rows ``first`` to ``end`` (exclusive), renumbered from 0. Computes nothing."""
        chosen = (self.rows >= first) & (self.rows < end)
        return TokenMasks(self.rows[chosen] - first, lambda: self.words[chosen]) if chosen.any() else None


@dataclass(slots=True, frozen=True)
class ScoredTokens:
    """Tokens to score, any number for one row: ``token_ids[i]`` under the logits of sampled row ``rows[i]``.
    ``rows`` ascend."""

    rows: IntArray
    token_ids: IntArray

    def slice(self, first: int, end: int) -> ScoredTokens:
        """Rows ``first`` to ``end`` (exclusive), renumbered from 0."""
        low, high = np.searchsorted(self.rows, (first, end)).tolist()
        return ScoredTokens(self.rows[low:high] - first, self.token_ids[low:high])


@dataclass(slots=True, frozen=True)
class BatchOutput:
    """A token for each sampled row, and further results if they are needed. Log-probabilities and ranks are
    of the unmodified logits."""

    token_ids: IntArray  # [S] the sampled token or the target; below 0: none (``kernels.sampling.no_choice``)
    logprobs: FloatArray | None  # [S] its log-probability
    top_ids: IntArray | None = None  # [S, any] the likeliest tokens, likeliest first, at least ``top_counts``
    top_logprobs: FloatArray | None = None  # [S, any] their log-probabilities
    scored_logprobs: FloatArray | None = None  # one for each of ``SampledRows.scored``
    embeddings: FloatArray | None = None  # [S, any] of a runner that makes embeddings and nothing else
    ranks: IntArray | None = None  # [S] how many tokens are at least as likely as the row's, itself included

    def list_logprobs(self, first: int, end: int) -> list[float]:
        """The log-probabilities of rows ``first`` to ``end`` (exclusive); empty if no row wants any."""
        return [] if self.logprobs is None else self.logprobs[first:end].tolist()

    def list_tops(self, first: int, end: int, count: int) -> list[list[tuple[int, float]]]:
        """The ``count`` likeliest tokens of rows ``first`` to ``end`` (exclusive) with their
        log-probabilities, or all if there are fewer."""
        if self.top_ids is None or self.top_logprobs is None:
            return [[] for _ in range(first, end)]
        top_ids, logprobs = self.top_ids[first:end, :count], self.top_logprobs[first:end, :count]
        return [list(zip(*row, strict=True)) for row in zip(top_ids.tolist(), logprobs.tolist(), strict=True)]


def joined(outputs: Sequence[BatchOutput]) -> BatchOutput:
    """Concatenates the outputs of a batch's parts (at least one), which have no embeddings."""
    if len(outputs) == 1:
        return outputs[0]
    logprobs = [output.logprobs for output in outputs if output.logprobs is not None]
    top_ids = [output.top_ids for output in outputs if output.top_ids is not None]
    top_logprobs = [output.top_logprobs for output in outputs if output.top_logprobs is not None]
    scored = [output.scored_logprobs for output in outputs if output.scored_logprobs is not None]
    # A part without targets has no ranks.
    ranks = [np.zeros(len(one.token_ids), np.int64) if one.ranks is None else one.ranks for one in outputs]
    return BatchOutput(
        np.concatenate([output.token_ids for output in outputs]),
        np.concatenate(logprobs) if logprobs else None,
        np.concatenate(top_ids) if top_ids else None,
        np.concatenate(top_logprobs) if top_logprobs else None,
        np.concatenate(scored) if scored else None,
        ranks=np.concatenate(ranks) if any(output.ranks is not None for output in outputs) else None,
    )
