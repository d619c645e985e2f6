"""The parts that the attention of a batch is computed in.

A request's keys are cut into runs that it shares with other requests and a tail of its own.

* A *context part* is a run of slots that all of its query rows see whole: the prefix that requests
  share, or what a long prefill chunk finds in the cache. It is read once for all of its rows and
  merged with the rest by log-sum-exp (the idea of Hydragen, arXiv 2402.05099, and of the cascade
  attention of FlashInfer).
* A *single group* holds rows that stand alone, one per decoding request: their tails are gathered
  side by side and padded to the longest.
* A *short group* holds chunks of a few rows, such as tokens that a grammar has forced: the whole tail of
  each is gathered once for all of its rows, and a mask shows to each row what comes before it.
  *Branch rows*, the nodes of trees below a prefix (``branches``), are such a chunk, too: the mask shows to
  each the nodes above it. A long prefix is a context part for all of them.
* A *causal group* holds prefill chunks: row i of a chunk sees its rows 0 to i.

Every row is in exactly one single, short or causal group, and in any number of context parts. What has many
queries has one of few sizes (``few_sizes``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from agentflow.kernels.inputs import AttentionBatch

Index = slice | Tensor
"""Positions along a dimension: a slice where they are consecutive, which costs no copy."""


@dataclass(slots=True, frozen=True)
class ContextPart:
    """``num_rows`` query rows that all see ``num_slots`` slots. Where those are fewer than a size that occurs
    (``few_sizes``), the last is repeated, and ``mask`` [1, 1, 1, num_slots], 0 or -inf, hides that."""

    rows: Index
    num_rows: int
    slots: Index
    num_slots: int
    mask: Tensor | None


@dataclass(slots=True, frozen=True)
class SingleGroup:
    """``num_rows`` rows with ``num_slots`` slots each: ``slots`` is flat, row after row.

    A row with fewer keys repeats its own last slot, so that no foreign (perhaps never written)
    slot is read, and ``mask`` [num_rows, 1, 1, num_slots], 0 or -inf, hides the repetition.
    """

    rows: Index
    num_rows: int
    slots: Index
    num_slots: int
    mask: Tensor | None


@dataclass(slots=True, frozen=True)
class ShortGroup:
    """``num_chunks`` chunks of ``num_rows`` rows each, with ``num_slots`` slots each: ``rows`` and ``slots``
    are flat, chunk after chunk. A chunk with fewer rows repeats its last one, one with fewer keys its last
    slot.
    ``mask`` [num_chunks, 1, num_rows, num_slots], 0 or -inf."""

    rows: Index
    slots: Index
    num_chunks: int
    num_rows: int
    num_slots: int
    mask: Tensor
    repeated: dict[int, Tensor] = field(default_factory=dict)

    def mask_for(self, times: int) -> Tensor:
        """The mask for so many copies of each chunk's rows, end to end. Made in the first layer."""
        found = self.repeated.get(times)
        if found is None:
            found = self.repeated[times] = self.mask.repeat(1, 1, times, 1)
        return found


@dataclass(slots=True, frozen=True)
class CausalGroup:
    """``num_chunks`` chunks of ``num_rows`` rows each: ``rows`` and ``slots`` are flat, chunk after
    chunk. A chunk with fewer rows repeats its last one; the causal mask hides that from its other rows."""

    rows: Index
    slots: Index
    num_chunks: int
    num_rows: int


@dataclass(slots=True, frozen=True)
class AttentionPlan(AttentionBatch):
    """A batch with its parts.

    ``order`` [T]: where each row of the batch stands in the groups' rows laid end to end, singles
    first, then shorts; None where that is the batch's own order.
    """

    singles: Sequence[SingleGroup]
    shorts: Sequence[ShortGroup]
    causals: Sequence[CausalGroup]
    contexts: Sequence[ContextPart]
    order: Tensor | None
