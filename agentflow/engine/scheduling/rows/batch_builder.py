"""Builds a ``Batch`` from rows: some tokens of each request, then some nodes of selects.

The number of numpy calls does not depend on the number of requests; per request only Python lists grow.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from agentflow.engine.batch import (
    Batch,
    BatchAdapters,
    BatchMedia,
    IntArray,
    PendingTokens,
    SampledRows,
    TreeAttention,
)
from agentflow.engine.cache.prefix_readers import SharedPrefix
from agentflow.engine.request import SAMPLED_ONCE, Row
from agentflow.engine.scheduling.kv_memory import SlotTable
from agentflow.engine.scheduling.rows.sampling_table import SamplingTable
from agentflow.engine.scheduling.rows.select import add_nodes, scored_nodes, scored_tokens


def build_batch(
    rows: Sequence[Row],
    slots: NDArray[np.int32],
    table: SlotTable,
    shared: Sequence[SharedPrefix],
    sampling: SamplingTable,
    before: Sequence[Row] = (),
) -> Batch:
    """Builds the batch of ``rows``, which are in the order of ``make_rows``.

    Args:
        rows: The records of the batch.
        slots: [T] for all tokens, then for all nodes, in the order of the rows. They are written to
            ``table``, or for nodes to their requests.
        table: The table of slots.
        shared: The prefixes that running requests share.
        sampling: The parameters of the running requests.
        before: The rows of the batch before this one, if it is in flight.
    """
    work = [row for row in rows if row.num_tokens] if rows and not rows[-1].num_tokens else rows
    trees = [row for row in rows if row.num_nodes]
    num_tokens = [row.num_tokens for row in work]
    num_single = num_tokens.count(1)
    starts = np.array([row.start for row in work], dtype=np.int64)
    req_rows = np.array([row.request.req_row for row in work], dtype=np.int64)
    query_lens = np.array(num_tokens, dtype=np.int64)
    token_ids = _next_tokens(work, num_single)
    positions, rows_of_tokens = starts, req_rows
    if num_single < len(work):
        first_tokens = np.cumsum(query_lens) - query_lens
        positions = np.arange(len(token_ids)) + np.repeat(starts - first_tokens, query_lens)
        rows_of_tokens = np.repeat(req_rows, query_lens)
    kv_lens = starts + query_lens
    changes = table.write_tokens(rows_of_tokens, positions, slots[: len(token_ids)])
    sampled = _sampled_rows(work, req_rows, query_lens, kv_lens, sampling, trees)
    tree_attention: TreeAttention | None = None
    if trees:
        nodes, node_positions, tree_attention = add_nodes(trees, slots[len(token_ids) :])
        token_ids = np.concatenate((token_ids, nodes))
        positions = np.concatenate((positions, node_positions))
    return Batch(
        token_ids=token_ids,
        positions=positions,
        write_slots=slots.astype(np.int64),
        req_to_token=table.slots,
        req_rows=req_rows,
        query_lens=query_lens,
        kv_lens=kv_lens,
        num_decode=num_single,
        sampled=sampled,
        trees=tree_attention,
        adapters=_find_adapters(work, trees) if _are_among(sampling.adapted, rows) else None,
        media=_find_media(work, trees, positions) if _are_among(sampling.with_media, rows) else None,
        pending=_pending_tokens(work[:num_single], before) if before else None,
        shared=shared,
        changes=changes,
    )


def _are_among(req_rows: set[int], rows: Sequence[Row]) -> bool:
    """Whether a request in one of these rows of the table is in the batch."""
    return bool(req_rows) and any(row.request.req_row in req_rows for row in rows)


def _pending_tokens(singles: Sequence[Row], before: Sequence[Row]) -> PendingTokens | None:
    """Which of the single tokens the batch before samples, and where it does."""
    awaited = {row.request: place for place, row in enumerate(singles) if row.start == row.request.num_tokens}
    if not awaited:
        return None
    places: list[int] = []
    outputs: list[int] = []
    num_outputs = 0
    for row in before:
        num_outputs += len(row.targets)
        place = awaited.get(row.request)
        if place is not None and row.num_sampled:
            places.append(place)
            outputs.append(num_outputs - 1)
    return PendingTokens(np.array(places, dtype=np.int64), np.array(outputs, dtype=np.int64))


def _find_adapters(work: Sequence[Row], trees: Sequence[Row]) -> BatchAdapters:
    """The adapters of the scheduled tokens."""
    places: dict[str, int] = {}
    of_requests: list[int] = []
    for row in (*work, *trees):
        adapter = row.request.adapter
        of_requests.append(places.setdefault(adapter, len(places)) if adapter else -1)
    counts = np.array([*(row.num_tokens for row in work), *(row.num_nodes for row in trees)], dtype=np.int64)
    return BatchAdapters(tuple(places), np.repeat(np.array(of_requests, dtype=np.int64), counts))


def _find_media(work: Sequence[Row], trees: Sequence[Row], positions: IntArray) -> BatchMedia:
    """The media of the scheduled tokens, whose places in their sequences are ``positions``."""
    num_axes = max(row.request.rope.shape[0] for row in (*work, *trees) if row.request.rope is not None)
    rope = np.repeat(positions[np.newaxis], num_axes, axis=0)
    of_tokens: IntArray = np.full(len(positions), -1, dtype=np.int64)
    places: IntArray = np.zeros(len(positions), dtype=np.int64)
    identities: dict[str, int] = {}
    both_ways: list[tuple[int, int]] = []
    first = 0
    for row in work:
        request = row.request
        if request.rope is not None:
            rope[:, first : first + row.num_tokens] = request.rope_between(row.start, row.end)
            for run in request.media:
                start, end = max(run.start, row.start), min(run.end, row.end)
                if start < end:
                    here = slice(first + start - row.start, first + end - row.start)
                    of_tokens[here] = identities.setdefault(run.identity, len(identities))
                    places[here] = run.first + np.arange(start - run.start, end - run.start)
                    if run.sees_all:
                        both_ways.append((here.start, here.stop))
        first += row.num_tokens
    for row in trees:
        request = row.request
        if request.rope is not None:  # nodes are text after the prompt
            shift = request.rope[:, -1:] - request.num_prompt
            rope[:, first : first + row.num_nodes] = positions[first : first + row.num_nodes] + shift
        first += row.num_nodes
    spans = np.array(both_ways, dtype=np.int64) if both_ways else None
    return BatchMedia(rope, tuple(identities), of_tokens, places, spans)


def _next_tokens(work: Sequence[Row], num_single: int) -> IntArray:
    """The scheduled tokens in order; the first ``num_single`` rows have one each. The id of a pending token
    is any number."""
    token_ids = np.array([row.request.tokens[row.start] for row in work[:num_single]], dtype=np.int64)
    if num_single == len(work):
        return token_ids
    prefilled = [row.request.tokens[row.start : row.end] for row in work[num_single:]]
    return np.concatenate((token_ids, *prefilled), dtype=np.int64)


def _all_sampled_once(rows: Sequence[Row]) -> bool:
    """Whether each row is one token, after which one is sampled, as in most steps."""
    return [row.targets for row in rows].count(SAMPLED_ONCE) == len(rows)


def _sampled_rows(
    work: Sequence[Row],
    req_rows: IntArray,
    query_lens: IntArray,
    kv_lens: IntArray,
    sampling: SamplingTable,
    trees: Sequence[Row],
) -> SampledRows:
    """The targets of all rows. In most steps each row samples after its last token."""
    rows: IntArray = query_lens.cumsum() - 1
    if not trees and _all_sampled_once(work):
        return sampling.sampled_rows(rows, req_rows, kv_lens)
    if trees or any(len(row.targets) > 1 or (row.targets and row.targets[0][1] >= 0) for row in work):
        return _scored_and_sampled_rows(work, trees, sampling)
    chosen = np.array([index for index, row in enumerate(work) if row.targets], dtype=np.int64)
    rows, req_rows, kv_lens = rows[chosen], req_rows[chosen], kv_lens[chosen]
    return sampling.sampled_rows(rows, req_rows, kv_lens)


def _scored_and_sampled_rows(
    work: Sequence[Row], trees: Sequence[Row], sampling: SamplingTable
) -> SampledRows:
    """The same if some tokens are scored, with the first target of each node that has one."""
    rows: list[int] = []
    targets: list[int] = []
    owners: list[int] = []
    positions: list[int] = []
    first_rows: list[int] = []  # of each of ``scored_nodes``
    has_targets = False  # not if all nodes are inside of heads: a runner then scores nothing
    first_token = 0
    for row in work:
        for index, target in row.targets:
            if row.request.tree is not None:
                first_rows.append(len(rows))
                has_targets = True
            rows.append(first_token + index)
            targets.append(target)
            owners.append(row.request.req_row)
            positions.append(row.start + index + 1)
        first_token += row.num_tokens
    for row in trees:
        tree, first, num_nodes = row.request.tree, row.first_node, row.num_nodes
        assert tree is not None
        scored = tree.scored_between(1 + first, 1 + first + num_nodes)
        nodes = scored - 1
        first_rows.append(len(rows))
        has_targets = has_targets or len(scored) > 0
        rows += (nodes + (first_token - first)).tolist()
        targets += tree.targets[tree.first_targets[scored]].tolist()
        owners += [row.request.req_row] * len(nodes)
        positions += (tree.depths[nodes] + row.request.num_tokens + 1).tolist()
        first_token += num_nodes
    return sampling.sampled_rows(
        np.array(rows, dtype=np.int64),
        np.array(owners, dtype=np.int64),
        np.array(positions, dtype=np.int64),
        np.array(targets, dtype=np.int64),
        scored_tokens(scored_nodes(work, trees), first_rows) if has_targets else None,
    )
