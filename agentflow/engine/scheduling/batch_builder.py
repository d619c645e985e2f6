"""Writes a batch: the rows of each scheduled request, as arrays.

Writes a batch's tree attention: the nodes of token trees that a step computes, and what they are to score.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from agentflow.engine.batch import Batch, BatchOutput, IntArray, SampledRows, ScoredTokens, TreeAttention
from agentflow.engine.cache.radix_cache import SlotArray
from agentflow.engine.request import Request
from agentflow.engine.scheduling.sampling_table import SamplingTable


class TreeRows(NamedTuple):
    """Rows of a request's tree, numbered as ``TokenTree.first_targets`` has it, whose logits a step gives."""

    request: Request
    first: int
    end: int

    @property
    def targets(self) -> slice:
        """Which of the tree's targets come after them."""
        tree = self.request.tree
        assert tree is not None
        return slice(int(tree.first_targets[self.first]), int(tree.first_targets[self.end]))


def tree_rows(work: Sequence[tuple[Request, int]], trees: Sequence[tuple[Request, int]]) -> list[TreeRows]:
    """All of them in a step that computes so many tokens (``work``) and nodes (``trees``) of each
    request, in the order in which their targets are scored."""
    rows = [
        TreeRows(request, 0, 1)
        for request, num_rows in work
        if request.tree is not None and request.num_computed + num_rows == request.num_tokens
    ]
    for request, num_nodes in trees:
        first = 1 + request.num_nodes_computed
        rows.append(TreeRows(request, first, first + num_nodes))
    return rows


class TreePart(NamedTuple):
    """The nodes of a step as rows of its batch."""

    token_ids: IntArray
    positions: IntArray
    rows: TreeAttention


def build_tree_attention(trees: Sequence[tuple[Request, int]], slots: SlotArray) -> TreePart:
    """The next so many nodes of each request's tree. ``slots``: for all of them; the requests hold them from
    now on."""
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
    rows = TreeAttention(
        req_rows=np.array([request.req_row for request, _ in trees], dtype=np.int64),
        prefix_lens=prefix_lens,
        query_lens=query_lens,
        paths=_side_by_side(paths),
        path_lens=all_depths + 1,
    )
    positions = np.repeat(prefix_lens, query_lens) + all_depths
    return TreePart(np.concatenate(token_ids), positions, rows)


def scored_tokens(rows: Sequence[TreeRows], sampled_rows: Sequence[int]) -> ScoredTokens:
    """The targets of all ``rows``. ``sampled_rows``: which of the sampled rows each begins with."""
    scored_rows: list[IntArray] = []
    token_ids: list[IntArray] = []
    for (request, first, end), sampled_row in zip(rows, sampled_rows, strict=True):
        tree = request.tree
        assert tree is not None
        bounds = tree.first_targets[first : end + 1]
        scored_rows.append(np.repeat(np.arange(sampled_row, sampled_row + end - first), np.diff(bounds)))
        token_ids.append(tree.targets[bounds[0] : bounds[-1]])
    return ScoredTokens(np.concatenate(scored_rows), np.concatenate(token_ids))


def take_scored(rows: Sequence[TreeRows], output: BatchOutput) -> None:
    """Gives the requests what was scored after ``rows``. Rows of a tree come in their order, from its first
    row on, perhaps more than once."""
    assert output.scored_logprobs is not None
    scored: list[float] = output.scored_logprobs.tolist()
    num_taken = 0
    for tree_row in rows:
        targets = tree_row.targets
        end = num_taken + targets.stop - targets.start
        tree_row.request.target_logprobs[targets] = scored[num_taken:end]
        num_taken = end


def _side_by_side(paths: Sequence[IntArray]) -> IntArray:
    """The paths of several trees, made equally long by repeating their last columns."""
    if len(paths) == 1:
        return paths[0]
    longest = max([path.shape[1] for path in paths])
    columns = np.arange(longest)
    return np.concatenate([path[:, np.minimum(columns, path.shape[1] - 1)] for path in paths])


Work = tuple[Request, int]
"""A request and how many of its tokens, from the first uncomputed one on, are computed in a step."""


def build_batch(
    work: Sequence[Work],
    slots: NDArray[np.int32],
    req_to_token: NDArray[np.int32],
    sampling: SamplingTable,
    trees: Sequence[Work] = (),
) -> Batch:
    """The batch of ``work``, in its order: requests with one row come first. Then so many nodes of each of
    ``trees``. ``slots`` [T]: for all rows, in that order; they are written to the page table, and those
    of nodes to their requests.

    Nothing is made for each row, and for each request only what is in Python lists, so that the number
    of arrays is the same however many requests there are.
    """
    num_single = [num_rows for _, num_rows in work].count(1)
    starts = np.array([request.num_computed for request, _ in work], dtype=np.int64)
    req_rows = np.array([request.req_row for request, _ in work], dtype=np.int64)
    query_lens = np.array([num_rows for _, num_rows in work], dtype=np.int64)
    token_ids = _next_tokens(work, num_single)
    positions, rows_of_table = starts, req_rows
    if num_single < len(work):
        first_rows = np.cumsum(query_lens) - query_lens
        positions = np.arange(len(token_ids)) + np.repeat(starts - first_rows, query_lens)
        rows_of_table = np.repeat(req_rows, query_lens)
    kv_lens = starts + query_lens
    req_to_token[rows_of_table, positions] = slots[: len(token_ids)]
    sampled = _sampled_rows(work, req_rows, query_lens, kv_lens, sampling, trees)
    tree_attention: TreeAttention | None = None
    if trees:
        nodes, node_positions, tree_attention = build_tree_attention(trees, slots[len(token_ids) :])
        token_ids = np.concatenate((token_ids, nodes))
        positions = np.concatenate((positions, node_positions))
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
    )


def _next_tokens(work: Sequence[Work], num_single: int) -> IntArray:
    """What is to be computed, in order; the first ``num_single`` requests have one row each."""
    token_ids = np.array([r.tokens[r.num_computed] for r, _ in work[:num_single]], dtype=np.int64)
    if num_single == len(work):
        return token_ids
    prefilled = [r.tokens[r.num_computed : r.num_computed + count] for r, count in work[num_single:]]
    return np.concatenate((token_ids, *prefilled), dtype=np.int64)


def targets_of(request: Request, num_rows: int) -> Sequence[tuple[int, int]]:
    """Which of the request's next ``num_rows`` rows give a token: pairs of row (0 is the first
    uncomputed token) and target (-1 to sample). Of a select's targets after one row this is the first."""
    start, end = request.num_computed, request.num_computed + num_rows
    if request.tree is not None and end == request.num_tokens:
        return ((num_rows - 1, int(request.tree.targets[0])),)
    first_unscored = request.first_unscored
    if first_unscored == request.num_tokens:  # as in most steps
        return ((num_rows - 1, -1),) if request.max_new_tokens and end == request.num_tokens else ()
    scored = range(max(start, first_unscored - 1), min(end, request.num_tokens - 1))
    targets = [(p - start, int(request.tokens[p + 1])) for p in scored]
    if request.max_new_tokens and not request.is_complete and end == request.num_tokens:
        targets.append((num_rows - 1, -1))
    return targets


def _sampled_rows(
    work: Sequence[Work],
    req_rows: IntArray,
    query_lens: IntArray,
    kv_lens: IntArray,
    sampling: SamplingTable,
    trees: Sequence[Work],
) -> SampledRows:
    """``targets_of`` of all requests. In most steps each gives a token, from its last row."""
    if sampling.num_scoring:
        return _scored_and_sampled_rows(work, trees, sampling)
    rows: IntArray = query_lens.cumsum() - 1
    at_end = [request.num_tokens - request.num_computed == num_rows for request, num_rows in work]
    if sampling.num_silent or not all(at_end):
        sampled = [index for index, is_last in enumerate(at_end) if is_last and work[index][0].max_new_tokens]
        chosen = np.array(sampled, dtype=np.int64)
        rows, req_rows, kv_lens = rows[chosen], req_rows[chosen], kv_lens[chosen]
    return sampling.sampled_rows(rows, req_rows, kv_lens)


def _scored_and_sampled_rows(
    work: Sequence[Work], trees: Sequence[Work], sampling: SamplingTable
) -> SampledRows:
    """The same where some are only scored, and of each node's targets the first."""
    rows: list[int] = []
    targets: list[int] = []
    owners: list[int] = []
    positions: list[int] = []
    tree_begins: list[int] = []
    first_row = 0
    for request, num_rows in work:
        for row, target in targets_of(request, num_rows):
            if request.tree is not None:
                tree_begins.append(len(rows))
            rows.append(first_row + row)
            targets.append(target)
            owners.append(request.req_row)
            positions.append(request.num_computed + row + 1)
        first_row += num_rows
    for request, num_nodes in trees:
        tree, first = request.tree, request.num_nodes_computed
        assert tree is not None
        tree_begins.append(len(rows))
        rows += range(first_row, first_row + num_nodes)
        targets += tree.targets[tree.first_targets[1 + first : 1 + first + num_nodes]].tolist()
        owners += [request.req_row] * num_nodes
        positions += (tree.depths[first : first + num_nodes] + request.num_tokens + 1).tolist()
        first_row += num_nodes
    return sampling.sampled_rows(
        np.array(rows, dtype=np.int64),
        np.array(owners, dtype=np.int64),
        np.array(positions, dtype=np.int64),
        np.array(targets, dtype=np.int64),
        scored_tokens(tree_rows(work, trees), tree_begins) if tree_begins else None,
    )
