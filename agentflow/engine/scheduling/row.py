"""The record of one request's part of a batch: made when the batch is scheduled, read when it completes."""

from __future__ import annotations

from collections.abc import Sequence

from agentflow.engine.cache.radix_cache import SlotArray
from agentflow.engine.request import Request
from agentflow.engine.submit import TopTokens

Targets = Sequence[tuple[int, int]]
"""The tokens of a row whose logits are needed, in order: index in the row, and target (-1: sample)."""

SAMPLED_ONCE: Targets = ((0, -1),)
"""The targets of a decode step."""


class Row:
    """One request in one batch.

    When the batch is scheduled: the row computes ``num_tokens`` tokens of the request from ``start`` on, and
    of a select's tree ``num_nodes`` nodes from ``first_node`` on. ``targets``: where its tokens need logits;
    ``num_sampled`` of these are sampled. ``end``: index of the first token after the row's tokens.

    When the batch has run: ``token_ids`` are the sampled tokens, ``logprobs`` the log-probabilities of its
    scored and sampled tokens in order (empty if no request of the batch wants any), ``tops`` for each of
    these the likeliest tokens in its place (as many as the request asked for), ``ranks`` those of scored
    tokens, and ``embedding`` is float32. ``error``: the fault of this row, which affects no other row.

    ``withdrawn_slots``: not None if the request left the batch while it was in flight. The row's results do
    not count then, and these slots become free when the batch completes.
    """

    # Class attributes are the defaults: most rows set few of these, and a step makes a row for each request.
    first_node: int = 0
    num_nodes: int = 0
    token_ids: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    tops: Sequence[TopTokens] = ()
    ranks: Sequence[int] = ()
    embedding: bytes = b""
    error: Exception | None = None
    withdrawn_slots: SlotArray | None = None

    def __init__(self, request: Request, start: int, num_tokens: int, targets: Targets) -> None:
        self.request = request
        self.start = start
        self.num_tokens = num_tokens
        self.targets = targets
        self.end = start + num_tokens
        self.num_sampled = 1 if targets is SAMPLED_ONCE else sum([target < 0 for _, target in targets])

    @property
    def is_last(self) -> bool:
        """Whether nothing of the request is left to compute after this row."""
        return self.request.num_left_after(self.end, self.first_node + self.num_nodes) == 0
