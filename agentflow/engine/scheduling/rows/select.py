"""Select: scores the choices of a request together, as a tree below its prompt (``token_tree``).

A step computes some nodes of each tree (``add_nodes``) and scores the targets that follow them and the
prompt's last token (``scored_nodes``). ``store_scores`` reads the results.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from agentflow.engine.batch import BatchOutput, IntArray, ScoredTokens, TreeAttention
from agentflow.engine.cache.nodes import SlotArray
from agentflow.engine.request import Request, Row


def add_nodes(trees: Sequence[Row], slots: SlotArray) -> tuple[IntArray, IntArray, TreeAttention]:
    """Adds the next nodes of each request's tree to the step. Returns their token ids, their positions, and
    the tokens they attend to. ``slots``: one for each node; the requests own them from now on."""
    token_ids: list[IntArray] = []
    depths: list[IntArray] = []
    paths: list[IntArray] = []
    num_taken = 0
    for row in trees:
        request, first, end = row.request, row.first_node, row.first_node + row.num_nodes
        tree = request.tree
        assert tree is not None
        request.node_slots = np.concatenate(
            (request.node_slots, slots[num_taken : num_taken + row.num_nodes])
        )
        num_taken += row.num_nodes
        token_ids.append(tree.token_ids[first:end])
        depths.append(tree.depths[first:end])
        paths.append(request.node_slots[tree.paths(first, end)].astype(np.int64))
    query_lens = np.array([row.num_nodes for row in trees], dtype=np.int64)
    prefix_lens = np.array([row.request.num_tokens for row in trees], dtype=np.int64)
    all_depths = np.concatenate(depths)
    attention = TreeAttention(
        req_rows=np.array([row.request.req_row for row in trees], dtype=np.int64),
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
    """Rows of a request's tree, numbered as in ``TokenTree.first_targets``. A step computes the logits of the
    rows that have targets."""

    request: Request
    first: int
    end: int

    @property
    def targets(self) -> slice:
        """The tree's targets after these rows."""
        tree = self.request.tree
        assert tree is not None
        return slice(int(tree.first_targets[self.first]), int(tree.first_targets[self.end]))


def scored_nodes(work: Sequence[Row], trees: Sequence[Row]) -> list[ScoredNodes]:
    """The rows of trees in a step, in the order in which their targets are scored: after the last tokens of
    prompts in ``work``, then after the nodes of ``trees``."""
    found = [ScoredNodes(row.request, 0, 1) for row in work if row.targets and row.request.tree is not None]
    for row in trees:
        first = 1 + row.first_node
        found.append(ScoredNodes(row.request, first, first + row.num_nodes))
    return found


def num_scored_nodes(row: Row) -> int:
    """The nodes of a row whose logits are computed."""
    tree = row.request.tree
    assert tree is not None
    return len(tree.scored_between(1 + row.first_node, 1 + row.first_node + row.num_nodes))


def scored_tokens(nodes: Sequence[ScoredNodes], first_rows: Sequence[int]) -> ScoredTokens:
    """The targets of all ``nodes``. ``first_rows``: for each of ``nodes``, the sampled row of its first
    target."""
    rows: list[IntArray] = []
    token_ids: list[IntArray] = []
    for (request, first, end), first_row in zip(nodes, first_rows, strict=True):
        tree = request.tree
        assert tree is not None
        scored = tree.scored_between(first, end)
        num_targets = tree.first_targets[scored + 1] - tree.first_targets[scored]
        rows.append(np.repeat(np.arange(first_row, first_row + len(scored)), num_targets))
        token_ids.append(tree.targets[tree.first_targets[first] : tree.first_targets[end]])
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
