"""The record of one request in a batch: made when the batch is scheduled, read when it completes."""

from __future__ import annotations

from collections.abc import Sequence

from agentflow.engine.cache.radix_cache import SlotArray
from agentflow.engine.request import Request
from agentflow.engine.submit import TopTokens

Work = tuple[Request, int]
"""A request, and how many of its tokens and nodes a step computes, from the first uncomputed one on."""
Targets = Sequence[tuple[int, int]]
"""The tokens of a row whose logits are needed, in order: index in the row, and target (-1: sample)."""

SAMPLED_ONCE: Targets = ((0, -1),)
"""The targets of a decode step."""


class Row:
    """One request in one batch."""

    # Class attributes are the defaults: most rows set few of these, and a step makes a row for each request.
    first_node: int = 0  # of a select's tree: the first node that the row computes
    num_nodes: int = 0  # nodes that it computes
    # Set when the batch has run:
    token_ids: Sequence[int] = ()  # the sampled tokens
    logprobs: Sequence[float] = ()  # of scored and sampled tokens, in order; empty if none is wanted
    tops: Sequence[TopTokens] = ()  # for each of these, as many of the likeliest tokens as were asked for
    ranks: Sequence[int] = ()  # of scored tokens
    embedding: bytes = b""  # float32
    error: Exception | None = None  # the fault of this row, which affects no other row
    # Not None if the request left the batch while it was in flight. The row's results do not count then, and
    # these slots become free when the batch completes.
    withdrawn_slots: SlotArray | None = None

    def __init__(self, request: Request, start: int, num_tokens: int, targets: Targets) -> None:
        self.request = request
        self.start = start  # index of the first token that the row computes
        self.num_tokens = num_tokens  # tokens that it computes
        self.targets = targets  # where its tokens need logits
        self.end = start + num_tokens  # index of the first token after the row's tokens
        self.num_sampled = 1 if targets is SAMPLED_ONCE else sum([target < 0 for _, target in targets])

    @property
    def is_last(self) -> bool:
        """Whether nothing of the request is left to compute after this row."""
        return self.request.num_left_after(self.end, self.first_node + self.num_nodes) == 0


def make_rows(work: Sequence[Work]) -> list[Row]:
    """Makes the records of the requests' next tokens and nodes. Rows with one token come first, then rows
    with more, then rows with nodes only."""
    singles: list[Row] = []
    chunks: list[Row] = []
    nodes: list[Row] = []
    for request, count in work:
        start = request.num_computed
        num_left = request.num_tokens + request.num_pending - start
        if num_left == 1 and count == 1 and _is_plain(request):
            singles.append(Row(request, start, 1, SAMPLED_ONCE))
            continue
        num_tokens = count if count < num_left else num_left
        if num_tokens:
            row = Row(request, start, num_tokens, _targets(request, num_tokens))
            (singles if num_tokens == 1 else chunks).append(row)
        else:
            row = Row(request, start, 0, ())
            nodes.append(row)
        if num_tokens < count:
            row.first_node, row.num_nodes = request.num_nodes_computed, count - num_tokens
    return singles + chunks + nodes


def _is_plain(request: Request) -> bool:
    """Whether its last token has no other target than the next one, which is sampled."""
    if request.wants_scores or request.embeds or request.tree is not None:
        return False
    return request.max_new_tokens > 0


def _targets(request: Request, num_tokens: int) -> Targets:
    """The targets of the request's next ``num_tokens`` tokens. If several targets of a select follow one
    token, the first of them. An embedding has the target 0 after its last token."""
    start, end = request.num_computed, request.num_computed + num_tokens
    if request.embeds:
        return ((num_tokens - 1, 0),) if end == request.num_tokens else ()
    if request.tree is not None and end == request.num_tokens:
        has_target = request.tree.first_targets[1] > 0  # not if all choices follow heads
        return ((num_tokens - 1, int(request.tree.targets[0])),) if has_target else ()
    first_unscored = request.first_unscored
    if first_unscored == request.num_tokens:  # as in most steps
        if not request.max_new_tokens or end < request.num_tokens + request.num_pending:
            return ()
        return SAMPLED_ONCE if num_tokens == 1 else ((num_tokens - 1, -1),)
    scored = range(max(start, first_unscored - 1), min(end, request.num_tokens - 1))
    targets = [(p - start, int(request.tokens[p + 1])) for p in scored]
    is_last = end == request.num_tokens + request.num_pending
    if request.max_new_tokens and not request.is_complete and is_last:
        targets.append((num_tokens - 1, -1))
    return targets
