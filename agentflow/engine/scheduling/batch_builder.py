"""Builds a ``Batch`` from the scheduled rows: some tokens of each request, then some nodes of selects.

The number of numpy calls does not depend on the number of requests; per request only Python lists grow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from agentflow.engine.batch import (
    Batch,
    BatchAdapters,
    BatchOutput,
    IntArray,
    SampledRows,
    ScoredTokens,
    TreeAttention,
)
from agentflow.engine.cache.radix_cache import SlotArray
from agentflow.engine.request import Request
from agentflow.engine.scheduling.sampling_table import SamplingTable

Work = tuple[Request, int]
"""A request, and how many of its tokens (or of its tree's nodes) a step computes, from the first uncomputed
one on."""

Targets = Sequence[tuple[int, int]]
"""The tokens of a row whose logits are needed, in order: index in the row, and target (-1: sample)."""
_ONE_SAMPLED: Targets = ((0, -1),)


Row = tuple[Request, int, Targets]
"""One request's tokens in a batch: the request, how many of its tokens, and their targets. The record is made
when the row is scheduled and read when the batch completes, so both agree on the targets."""


def scheduled_rows(work: Sequence[Work]) -> list[Row]:
    """The rows of the requests' next tokens."""
    return [(request, num_tokens, _targets(request, num_tokens)) for request, num_tokens in work]


def all_sampled_once(rows: Sequence[Row]) -> bool:
    """Whether each row is one token, after which one is sampled, as in most steps."""
    return [targets for _, _, targets in rows].count(_ONE_SAMPLED) == len(rows)


def build_batch(
    work: Sequence[Row],
    slots: NDArray[np.int32],
    req_to_token: NDArray[np.int32],
    sampling: SamplingTable,
    trees: Sequence[Work] = (),
) -> Batch:
    """The batch of ``work``, in its order (requests with one token come first), then of the nodes of
    ``trees``. ``slots`` [T]: for all of these in that order. Writes them to ``req_to_token``, or for nodes to
    their requests."""
    num_tokens = [count for _, count, _ in work]
    num_single = num_tokens.count(1)
    starts = np.array([request.num_computed for request, _, _ in work], dtype=np.int64)
    req_rows = np.array([request.req_row for request, _, _ in work], dtype=np.int64)
    query_lens = np.array(num_tokens, dtype=np.int64)
    token_ids = _next_tokens(work, num_single)
    positions, rows_of_tokens = starts, req_rows
    if num_single < len(work):
        first_tokens = np.cumsum(query_lens) - query_lens
        positions = np.arange(len(token_ids)) + np.repeat(starts - first_tokens, query_lens)
        rows_of_tokens = np.repeat(req_rows, query_lens)
    kv_lens = starts + query_lens
    req_to_token[rows_of_tokens, positions] = slots[: len(token_ids)]
    sampled = _sampled_rows(work, req_rows, query_lens, kv_lens, sampling, trees)
    tree_attention: TreeAttention | None = None
    if trees:
        nodes, node_positions, tree_attention = _tree_part(trees, slots[len(token_ids) :])
        token_ids = np.concatenate((token_ids, nodes))
        positions = np.concatenate((positions, node_positions))
    adapters = _adapters_of(work, trees) if sampling.num_adapted else None
    return Batch(
        token_ids=token_ids,
        positions=positions,
        write_slots=slots.astype(np.int64),
        req_to_token=req_to_token,
        req_rows=req_rows,
        query_lens=query_lens,
        kv_lens=kv_lens,
        num_decode=num_single,
        sampled=sampled,
        trees=tree_attention,
        adapters=adapters,
    )


def _adapters_of(work: Sequence[Row], trees: Sequence[Work]) -> BatchAdapters | None:
    """The adapters of the scheduled tokens; None if none has one."""
    places: dict[str, int] = {}
    of_requests: list[int] = []
    counted = [*((request, num_tokens) for request, num_tokens, _ in work), *trees]
    for request, _ in counted:
        of_requests.append(places.setdefault(request.adapter, len(places)) if request.adapter else -1)
    if not places:
        return None
    counts = np.array([count for _, count in counted], dtype=np.int64)
    return BatchAdapters(tuple(places), np.repeat(np.array(of_requests, dtype=np.int64), counts))


def _next_tokens(work: Sequence[Row], num_single: int) -> IntArray:
    """The scheduled tokens in order; the first ``num_single`` requests have one each."""
    token_ids = np.array([r.tokens[r.num_computed] for r, _, _ in work[:num_single]], dtype=np.int64)
    if num_single == len(work):
        return token_ids
    prefilled = [r.tokens[r.num_computed : r.num_computed + count] for r, count, _ in work[num_single:]]
    return np.concatenate((token_ids, *prefilled), dtype=np.int64)


def _targets(request: Request, num_tokens: int) -> Targets:
    """The targets of the request's next ``num_tokens`` tokens. If several targets of a select follow one
    token, the first of them. An embedding has the target 0 after its last token."""
    start, end = request.num_computed, request.num_computed + num_tokens
    if request.embeds:
        return ((num_tokens - 1, 0),) if end == request.num_tokens else ()
    if request.tree is not None and end == request.num_tokens:
        return ((num_tokens - 1, int(request.tree.targets[0])),)
    first_unscored = request.first_unscored
    if first_unscored == request.num_tokens:  # as in most steps
        if not request.max_new_tokens or end < request.num_tokens:
            return ()
        return _ONE_SAMPLED if num_tokens == 1 else ((num_tokens - 1, -1),)
    scored = range(max(start, first_unscored - 1), min(end, request.num_tokens - 1))
    targets = [(p - start, int(request.tokens[p + 1])) for p in scored]
    if request.max_new_tokens and not request.is_complete and end == request.num_tokens:
        targets.append((num_tokens - 1, -1))
    return targets


def _sampled_rows(
    work: Sequence[Row],
    req_rows: IntArray,
    query_lens: IntArray,
    kv_lens: IntArray,
    sampling: SamplingTable,
    trees: Sequence[Work],
) -> SampledRows:
    """The targets of all rows. In most steps each row samples after its last token."""
    rows: IntArray = query_lens.cumsum() - 1
    if not trees and all_sampled_once(work):
        return sampling.sampled_rows(rows, req_rows, kv_lens)
    if trees or any(len(targets) > 1 or (targets and targets[0][1] >= 0) for _, _, targets in work):
        return _scored_and_sampled_rows(work, trees, sampling)
    chosen = np.array([index for index, (_, _, targets) in enumerate(work) if targets], dtype=np.int64)
    rows, req_rows, kv_lens = rows[chosen], req_rows[chosen], kv_lens[chosen]
    return sampling.sampled_rows(rows, req_rows, kv_lens)


def _scored_and_sampled_rows(
    work: Sequence[Row], trees: Sequence[Work], sampling: SamplingTable
) -> SampledRows:
    """The same if some tokens are scored, with the first target of each node."""
    rows: list[int] = []
    targets: list[int] = []
    owners: list[int] = []
    positions: list[int] = []
    first_rows: list[int] = []  # of each of ``scored_nodes``
    first_token = 0
    for request, num_tokens, row_targets in work:
        for index, target in row_targets:
            if request.tree is not None:
                first_rows.append(len(rows))
            rows.append(first_token + index)
            targets.append(target)
            owners.append(request.req_row)
            positions.append(request.num_computed + index + 1)
        first_token += num_tokens
    for request, num_nodes in trees:
        tree, first = request.tree, request.num_nodes_computed
        assert tree is not None
        first_rows.append(len(rows))
        rows += range(first_token, first_token + num_nodes)
        targets += tree.targets[tree.first_targets[1 + first : 1 + first + num_nodes]].tolist()
        owners += [request.req_row] * num_nodes
        positions += (tree.depths[first : first + num_nodes] + request.num_tokens + 1).tolist()
        first_token += num_nodes
    return sampling.sampled_rows(
        np.array(rows, dtype=np.int64),
        np.array(owners, dtype=np.int64),
        np.array(positions, dtype=np.int64),
        np.array(targets, dtype=np.int64),
        _scored_tokens(scored_nodes(work, trees), first_rows) if first_rows else None,
    )


def _tree_part(trees: Sequence[Work], slots: SlotArray) -> tuple[IntArray, IntArray, TreeAttention]:
    """Token ids and positions of the next nodes of each request's tree, and what they attend to. ``slots``:
    one for each node; their requests own them from now on."""
    token_ids: list[IntArray] = []
    depths: list[IntArray] = []
    paths: list[IntArray] = []
    num_taken = 0
    for request, num_nodes in trees:
        tree, first = request.tree, request.num_nodes_computed
        assert tree is not None
        end = first + num_nodes
        request.node_slots = np.concatenate((request.node_slots, slots[num_taken : num_taken + num_nodes]))
        num_taken += num_nodes
        token_ids.append(tree.token_ids[first:end])
        depths.append(tree.depths[first:end])
        paths.append(request.node_slots[tree.paths(first, end)].astype(np.int64))
    query_lens = np.array([num_nodes for _, num_nodes in trees], dtype=np.int64)
    prefix_lens = np.array([request.num_tokens for request, _ in trees], dtype=np.int64)
    all_depths = np.concatenate(depths)
    attention = TreeAttention(
        req_rows=np.array([request.req_row for request, _ in trees], dtype=np.int64),
        prefix_lens=prefix_lens,
        query_lens=query_lens,
        paths=_side_by_side(paths),
        path_lens=all_depths + 1,
    )
    return np.concatenate(token_ids), np.repeat(prefix_lens, query_lens) + all_depths, attention


def _side_by_side(paths: Sequence[IntArray]) -> IntArray:
    """The paths of several trees, padded to one length by repeating their last column."""
    if len(paths) == 1:
        return paths[0]
    longest = max(path.shape[1] for path in paths)
    columns = np.arange(longest)
    return np.concatenate([path[:, np.minimum(columns, path.shape[1] - 1)] for path in paths])


class ScoredNodes(NamedTuple):
    """Rows of a request's tree, numbered as in ``TokenTree.first_targets``, whose logits a step computes."""

    request: Request
    first: int
    end: int

    @property
    def targets(self) -> slice:
        """The tree's targets after these rows."""
        tree = self.request.tree
        assert tree is not None
        return slice(int(tree.first_targets[self.first]), int(tree.first_targets[self.end]))


def scored_nodes(work: Sequence[Row], trees: Sequence[Work]) -> list[ScoredNodes]:
    """The rows of trees in a step, in the order in which their targets are scored."""
    if not trees and all_sampled_once(work):
        return []
    rows = [
        ScoredNodes(request, 0, 1) for request, _, targets in work if request.tree is not None and targets
    ]
    for request, num_nodes in trees:
        first = 1 + request.num_nodes_computed
        rows.append(ScoredNodes(request, first, first + num_nodes))
    return rows


def _scored_tokens(nodes: Sequence[ScoredNodes], first_rows: Sequence[int]) -> ScoredTokens:
    """The targets of all ``nodes``. ``first_rows``: the sampled row that each of these begins with."""
    rows: list[IntArray] = []
    token_ids: list[IntArray] = []
    for (request, first, end), first_row in zip(nodes, first_rows, strict=True):
        tree = request.tree
        assert tree is not None
        bounds = tree.first_targets[first : end + 1]
        rows.append(np.repeat(np.arange(first_row, first_row + end - first), np.diff(bounds)))
        token_ids.append(tree.targets[bounds[0] : bounds[-1]])
    return ScoredTokens(np.concatenate(rows), np.concatenate(token_ids))


def store_scores(nodes: Sequence[ScoredNodes], output: BatchOutput) -> None:
    """Stores the scores of the targets of ``nodes`` in their requests. A tree's rows come in order from its
    first row on, some perhaps more than once."""
    assert output.scored_logprobs is not None
    scores: list[float] = output.scored_logprobs.tolist()
    num_taken = 0
    for node in nodes:
        targets = node.targets
        end = num_taken + targets.stop - targets.start
        node.request.target_logprobs[targets] = scores[num_taken:end]
        num_taken = end
