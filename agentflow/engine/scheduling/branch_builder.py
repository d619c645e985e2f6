"""Writes a batch's branch rows: the nodes of token trees that a step computes, and what they are to score."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from agentflow.engine.batch import BatchOutput, BranchRows, IntArray, ScoredTokens
from agentflow.engine.cache.radix_node import SlotArray
from agentflow.engine.request import Request


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


def tree_rows(work: Sequence[tuple[Request, int]], branches: Sequence[tuple[Request, int]]) -> list[TreeRows]:
    """All of them in a step that computes so many tokens (``work``) and nodes (``branches``) of each
    request, in the order in which their targets are scored."""
    rows = [
        TreeRows(request, 0, 1)
        for request, num_rows in work
        if request.tree is not None and request.num_computed + num_rows == request.num_tokens
    ]
    for request, num_nodes in branches:
        first = 1 + request.num_nodes_computed
        rows.append(TreeRows(request, first, first + num_nodes))
    return rows


class Branches(NamedTuple):
    """The nodes of a step as rows of its batch."""

    token_ids: IntArray
    positions: IntArray
    rows: BranchRows


def build_branches(branches: Sequence[tuple[Request, int]], slots: SlotArray) -> Branches:
    """The next so many nodes of each request's tree. ``slots``: for all of them; the requests hold them from
    now on."""
    token_ids: list[IntArray] = []
    depths: list[IntArray] = []
    paths: list[IntArray] = []
    num_taken = 0
    for request, num_nodes in branches:
        tree, first = request.tree, request.num_nodes_computed
        assert tree is not None
        end = first + num_nodes
        request.node_slots = np.concatenate((request.node_slots, slots[num_taken : num_taken + num_nodes]))
        num_taken += num_nodes
        token_ids.append(tree.token_ids[first:end])
        depths.append(tree.depths[first:end])
        paths.append(request.node_slots[tree.paths(first, end)].astype(np.int64))
    query_lens = np.array([num_nodes for _, num_nodes in branches], dtype=np.int64)
    prefix_lens = np.array([request.num_tokens for request, _ in branches], dtype=np.int64)
    all_depths = np.concatenate(depths)
    rows = BranchRows(
        page_rows=np.array([request.page_row for request, _ in branches], dtype=np.int64),
        prefix_lens=prefix_lens,
        query_lens=query_lens,
        paths=_side_by_side(paths),
        path_lens=all_depths + 1,
    )
    positions = np.repeat(prefix_lens, query_lens) + all_depths
    return Branches(np.concatenate(token_ids), positions, rows)


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
